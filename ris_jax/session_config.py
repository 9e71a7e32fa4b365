"""How a session reads and answers."""

import dataclasses
from collections.abc import Callable

from plga_jax.ops.sampling import SamplingConfig
from ris_jax.anchor import POLICIES
from ris_jax.geometry import Geometry
from ris_jax.prompts import SYSTEM
from ris_jax.stop import StopStrings, TopicStop

DEFAULT_SAMPLING = SamplingConfig(temperature=0.2, top_k=50, top_p=0.9, repetition_penalty=1.1)
"""As published."""

ROPES = ("yarn", "linear", "dynamic", "llama3", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """How documents are read.

    Attributes:
        geometry: made for a window of tokens.
        window: tokens of documents, questions and answers; None fits them, up to a multiple of 1024.
        rope: how positions are stretched when the window exceeds the model's context; "none" never stretches: then
            documents are cut instead.
        chunk: tokens read at once.
        kv_dtype: of keys and values; None takes the compute dtype.
        anchors: when an answer chooses its far keys: "frozen" once, "refresh" every `refresh` tokens, "own" for each;
            None as the geometry would have it, see `Reader.draw`.
        refresh: tokens; None is the geometry's strides, or 64.
        question_room: tokens kept free for a question, or for a conversation.
        max_new_tokens: tokens kept free for an answer.
        system: the rules that the model is given.
    """

    geometry: Callable[[int], Geometry]
    window: int | None = None
    rope: str = "yarn"
    chunk: int = 1024
    kv_dtype: str | None = None
    anchors: str | None = None
    refresh: int | None = None
    question_room: int = 512
    max_new_tokens: int = 512
    system: str = SYSTEM

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ValueError: a field out of range.
        """
        if self.rope not in ROPES:
            raise ValueError(f"rope = {self.rope!r} is unknown; choose one of {', '.join(ROPES)}.")
        if self.anchors not in (None, *POLICIES):
            raise ValueError(f"anchors = {self.anchors!r} is unknown; choose one of {', '.join(POLICIES)}.")
        for name in ("window", "chunk", "refresh", "question_room", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} must be at least 1 token.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """How answers are drawn, and where they end.

    Attributes:
        sampling: how tokens are drawn.
        seed: of the draws; each turn has draws of its own.
        penalty_scope: what a repetition penalty applies to beside the answer's own tokens: "turn" is the question,
            template included, as published; "everything" also the documents and the conversation.
        stop_strings: an answer ends before the first of them.
        topic_threshold: see `TopicStop`; None switches it off.
    """

    sampling: SamplingConfig = DEFAULT_SAMPLING
    seed: int = 0
    penalty_scope: str = "turn"
    stop_strings: tuple[str, ...] = ()
    topic_threshold: float | None = None

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ValueError: a field out of range.
        """
        if self.penalty_scope not in ("turn", "everything"):
            raise ValueError(f"penalty_scope = {self.penalty_scope!r} must be 'turn' or 'everything'.")
        StopStrings(self.stop_strings)
        if self.topic_threshold is not None:
            TopicStop("", threshold=self.topic_threshold)
