"""Questions to a model about documents: read once, asked often.

    session = Session(model, tokenizer, SessionConfig(geometry=lambda window: DenseGeometry(length=window)))
    print(session.open(["report.txt"]).text())
    for piece in session.ask("Who signed it?"):
        print(piece, end="")

`ask` answers from the documents alone, whatever was asked before. `chat` goes on with the conversation. Both leave the
cache where the last whole turn ended, however they end: with an answer, Ctrl-C, an error, or because nobody wanted the
rest of it.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from plga_jax.audit.report import environment
from plga_jax.models.decoder import Decoder
from ris_jax.cost import prefill_cost
from ris_jax.density import expected_union
from ris_jax.documents import Documents, read_documents
from ris_jax.geometry import Geometry, PublishedGeometry
from ris_jax.graph import RecallStar, recall_star
from ris_jax.plan import Plan
from ris_jax.prompts import layout
from ris_jax.reader import Mark, Reader
from ris_jax.session_config import AnswerConfig, SessionConfig
from ris_jax.stop import StopStrings, TopicStop, filter_all, flush_all
from ris_jax.store import Miss, PrefillKey, PrefillStore, weights_fingerprint

_GRAIN = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How the documents came into the cache.

    Attributes:
        source: "computed", "store", or "memory" if they were there.
        num_tokens: of the document part.
        seconds: that it took.
        real_share: pairs read over the causal ones, counted; None where the cache does not count.
    """

    source: str
    num_tokens: int
    seconds: float
    real_share: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """A question and its answer.

    Attributes:
        question: the user's text.
        answer: what was shown.
        ended: why: "end token", "length", a stop string, or what `TopicStop` said.
        question_tokens: template included.
        answer_tokens: drawn.
        seconds: until the first token, and from there to the end.
        tokens_per_s: from the second token on, whose making compiles the program; None for fewer than three.
        fresh: whether it began at the documents, without a conversation before it.
        config: how it was answered.
    """

    question: str
    answer: str
    ended: str
    question_tokens: int
    answer_tokens: int
    seconds: tuple[float, float]
    tokens_per_s: float | None
    fresh: bool
    config: AnswerConfig


class Session:
    """A model, its tokenizer, documents, and a conversation about them."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any,
        config: SessionConfig,
        *,
        name: str = "",
        store: PrefillStore | None = None,
        notify: Callable[[str], Any] = print,
        progress: bool = False,
    ):
        """Nothing is read yet.

        Args:
            model: stacked.
            tokenizer: the model's.
            config: how documents are read.
            name: of the model, for logs.
            store: keeps what was read; None keeps nothing.
            notify: told what the user should know, a sentence each time.
            progress: show a progress bar while reading.
        """
        self.config, self.name, self.store = config, name, store
        self._native, self._model, self._tokenizer = model, model, tokenizer
        self._layout = layout(tokenizer)
        self._notify, self._progress = notify, progress
        self.plan: Plan | None = None
        self.reading: Reading | None = None
        self.turns: list[Turn] = []
        """Every finished turn, undone ones included, in order."""
        self.notices: list[str] = []
        self._conversation: list[tuple[Mark, Turn, list[int]]] = []
        self._start: Mark | None = None
        self._running: Iterator[str] | None = None

    def open(self, paths: Sequence[str | os.PathLike], questions: Sequence[str] = ()) -> Plan:
        """Takes documents, cuts what does not fit, and says what reading them will take.

        Args:
            paths: text files, or folders of them.
            questions: that will be asked, to keep room for the longest.

        Returns:
            The plan.

        Raises:
            ValueError: nothing to read, a window that cannot be had, or a question that is empty.
        """
        self.cancel()
        head, tail = self._layout.frame(self.config.system)
        documents = read_documents(paths, self._tokenizer)
        longest = max((len(self._layout.turn(question, first=True)) for question in questions), default=0)
        question_room = max(self.config.question_room, longest)
        room = question_room + self.config.max_new_tokens
        frame = len(head) + len(tail)
        window = self._window(frame + len(documents.ids) + room)
        if window - room - frame < 1:
            raise ValueError(
                f"A window of {window} tokens has no room for documents: {frame} tokens of rules, "
                f"{question_room} for the question and {self.config.max_new_tokens} for the answer "
                f"leave {window - room - frame}; widen it, or ask for fewer new tokens."
            )
        documents = documents.cut(window - room - frame)
        self._model = _stretched(self._native, window, self.config.rope)
        geometry = self.config.geometry(window)
        self._ids = np.concatenate([head, documents.ids, tail]).astype(np.int32)
        self._reader = Reader(
            self._model, geometry, capacity=window, chunk=self.config.chunk, kv_dtype=self.config.kv_dtype
        )
        self._start, self.reading, self._conversation = None, None, []
        self.plan = self._planned(documents, geometry, window)
        if self.plan.lost:
            self._tell(f"{self.plan.lost} tokens of the documents do not fit and are not read.")
        return self.plan

    def read(self) -> Reading:
        """Reads the documents, or takes them from the store. `ask` and `chat` do it by themselves.

        After Ctrl-C, a second call goes on where the first one stopped.

        Returns:
            How they came into the cache.

        Raises:
            ValueError: nothing was opened.
        """
        if self.plan is None:
            raise ValueError("No documents are opened; call open first.")
        self._recover()
        if self._start is not None:
            return dataclasses.replace(self.reading, source="memory", seconds=0.0)
        begun, source = time.perf_counter(), "store"
        if self._reader.length or not self._loaded():
            source = "computed"
            self._compute()
        seconds = time.perf_counter() - begun
        self._start = self._reader.mark()
        self.reading = Reading(
            source=source, num_tokens=len(self._ids), seconds=seconds, real_share=self._reader.real_share()
        )
        if source == "computed":
            self._keep()
        return self.reading

    def recall_star(self) -> RecallStar:
        """The last token of the documents and the far tokens that it may read, as a graph.

        Raises:
            ValueError: nothing was opened, or a geometry whose samples depend on the queries, or that has none.
        """
        if self.plan is None:
            raise ValueError("No documents are opened; call open first.")
        if not isinstance(self._reader.geometry, PublishedGeometry):
            raise ValueError(
                f"A {self._reader.geometry.kind} geometry draws no samples of its own for a token; take stochastic or "
                "structural for a graph of them."
            )
        return recall_star(self._reader.geometry, [self._tokenizer.decode([token]) for token in self._ids.tolist()])

    def ask(self, question: str, config: AnswerConfig | None = None) -> Iterator[str]:
        """Answers from the documents alone; a conversation, if there is one, is ended.

        Args:
            question: not empty.
            config: how; None takes the defaults.

        Returns:
            Pieces of text as they are made. `turns[-1]` tells the rest when the last has come.

        Raises:
            ValueError: nothing was opened, or a question that is empty or longer than the room for it.
        """
        self.reset()
        return self._begin(question, config or AnswerConfig(), keep=False)

    def chat(self, question: str, config: AnswerConfig | None = None) -> Iterator[str]:
        """Goes on with the conversation.

        When the window is full, the conversation is forgotten, the documents are not; `notify` is told.

        Args:
            question: not empty.
            config: how; None takes the defaults.

        Returns:
            Pieces of text as they are made. If the last is not asked for, this turn has not been.

        Raises:
            ValueError: as for `ask`.
        """
        self.cancel()
        return self._begin(question, config or AnswerConfig(), keep=True)

    def cancel(self) -> None:
        """Ends an answer that is being made, as if it had not been asked for."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def reset(self) -> None:
        """Forgets the conversation; the documents stay."""
        self.cancel()
        if self._conversation and not self._reader.lost:
            self._reader.rewind(self._start)
        self._conversation = []

    def undo(self) -> Turn | None:
        """Forgets the last turn of the conversation.

        Returns:
            That turn; None if there is none.
        """
        self.cancel()
        if not self._conversation:
            return None
        mark, turn, _ = self._conversation.pop()
        if not self._reader.lost:
            self._reader.rewind(mark)
        return turn

    @property
    def history(self) -> list[Turn]:
        """The turns that the model remembers."""
        return [turn for _, turn, _ in self._conversation]

    def manifest(self) -> dict[str, Any]:
        """Everything that a result depends on, and what came of it, as JSON values."""
        reading = self.reading and dataclasses.asdict(self.reading)
        return {
            "model": {"name": self.name, **dataclasses.asdict(self._model.config)},
            "geometry": self.plan and self._reader.geometry.to_config(),
            "geometry_sha256": self.plan and self._reader.geometry.fingerprint(),
            "expected_density": self.plan and self.plan.cost.share,
            "real_density": self.reading and self.reading.real_share,
            "kv_dtype": self.plan and self._reader.kv_dtype.name,
            "anchors": {"policy": self.config.anchors, "refresh": self.config.refresh},
            "plan": self.plan and self.plan.to_json(),
            "reading": reading,
            "turns": [dataclasses.asdict(turn) for turn in self.turns],
            "notices": self.notices,
            "environment": environment(),
        }

    def _window(self, wanted: int) -> int:
        native, given = self._native.config.context, self.config.window
        window = -(-wanted // _GRAIN) * _GRAIN if given is None else given
        if window <= native or self.config.rope != "none":
            return window
        if given is None:
            return native
        raise ValueError(
            f"A window of {given} tokens exceeds the {native} that the model was trained for; choose a rope to stretch "
            "its positions, or a smaller window."
        )

    def _planned(self, documents: Documents, geometry: Geometry, window: int) -> Plan:
        config = self._model.config
        itemsize = self._reader.kv_dtype.itemsize
        cost = {"sizes": config, "length": len(self._ids), "cache_itemsize": itemsize}
        ranking = geometry.ranking_share(config.num_layers, config.num_kv_heads) if geometry.kind == "probe" else 0.0
        return Plan(
            files=documents.files,
            num_tokens=len(self._ids),
            window=window,
            native_context=self._native.config.context,
            rope=config.rope.kind,
            geometry=geometry.to_config(),
            cost=prefill_cost(**cost, share=_share(geometry, len(self._ids)), ranking_share=ranking),
            dense=prefill_cost(**cost),
            cache_bytes=prefill_cost(config, window, cache_itemsize=itemsize).cache_bytes,
            weights_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(self._native, nnx.Param))),
        )

    def _compute(self) -> None:
        rest = self._ids[self._reader.length :]
        shown = {"desc": "reading", "unit": "token", "unit_scale": True, "disable": not self._progress}
        with tqdm(total=len(self._ids), initial=self._reader.length, **shown) as bar:
            if rest.size:
                self._reader.read(rest, progress=bar.update)

    def _recover(self) -> None:
        if self._reader.lost:
            self._reader.clear()
            self._start, self._conversation = None, []
            self._tell("The cache was lost when an earlier step failed: the documents are read again.")

    def _key(self) -> PrefillKey:
        if not hasattr(self, "_weights"):
            self._weights = weights_fingerprint(self._native)
        fields = {
            "weights": self._weights,
            "model": dataclasses.asdict(self._model.config),
            "geometry": self._reader.geometry.to_config(),
            "capacity": self._reader.capacity,
            "chunk": self._reader.chunk,
            "kv_dtype": self._reader.kv_dtype.name,
            "backend": jax.default_backend(),
        }
        return PrefillKey(tokens=self._ids, fields=fields)

    def _loaded(self) -> bool:
        if self.store is None:
            return False
        found = self.store.load(self._key())
        try:
            if not isinstance(found, Miss):
                self._reader.restore(found, len(self._ids))
                return True
        except ValueError as error:
            found = Miss(reason="damaged", detail=str(error))
        if found.reason != "absent":
            self._tell(f"{found.detail} The documents are read again.")
        return False

    def _keep(self) -> None:
        if self.store is None:
            return
        try:
            self.store.save(self._key(), self._reader.save())
        except OSError as error:
            self._tell(f"What was read cannot be kept in {self.store.folder}: {error.strerror or error}.")

    def _begin(self, question: str, config: AnswerConfig, *, keep: bool) -> Iterator[str]:
        if self.plan is None:
            raise ValueError("No documents are opened; call open first.")
        self._recover()
        ids = self._layout.turn(question, first=not self._conversation)
        if self._conversation and len(ids) + self.config.max_new_tokens > self._reader.room:
            self.reset()
            self._tell("The window is full: the conversation is forgotten, the documents are not.")
            ids = self._layout.turn(question, first=True)
        room = self._reader.room if self._conversation else self._reader.capacity - len(self._ids)
        if len(ids) + self.config.max_new_tokens > room:
            raise ValueError(
                f"The question has {len(ids)} tokens and the answer up to {self.config.max_new_tokens}, but the window "
                f"of {self._reader.capacity} has room for {room} beside the documents; shorten the question, ask for "
                "fewer new tokens, or widen the window."
            )
        self.read()
        self._running = self._turn(question, ids, config, keep)
        return self._running

    def _turn(self, question: str, ids: list[int], config: AnswerConfig, keep: bool) -> Iterator[str]:
        mark, begun, drawn, shown = self._reader.mark(), time.perf_counter(), [], ""
        strings = StopStrings((*self._layout.stop_strings, *config.stop_strings))
        filters = [strings]
        if config.topic_threshold is not None:
            filters.append(TopicStop(question, threshold=config.topic_threshold))
        stop_ids = {*self._model.config.eos_ids, self._tokenizer.eos_id}
        kept = False
        try:
            decoder, ended, times = self._tokenizer.stream(), "length", []
            tokens = self._tokens(ids, config, stop_ids)
            try:
                for token in tokens:
                    times.append(time.perf_counter())
                    if token in stop_ids:
                        ended = "end token"
                        break
                    drawn.append(token)
                    if piece := filter_all(filters, decoder.push(token)):
                        shown += piece
                        yield piece
                    if any(each.stopped for each in filters):
                        break
            finally:
                tokens.close()
            piece = filter_all(filters, decoder.flush()) + flush_all(filters)
            ended = next((each.stopped for each in filters if each.stopped), ended)
            if piece:
                shown += piece
                yield piece
            turn = Turn(
                question=question,
                answer=shown,
                ended=ended,
                question_tokens=len(ids),
                answer_tokens=len(drawn),
                seconds=(times[0] - begun, time.perf_counter() - times[0]),
                tokens_per_s=(len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None,
                fresh=not self._conversation,
                config=config,
            )
            self.turns.append(turn)
            if keep:
                self._conversation.append((mark, turn, [*ids, *drawn]))
            kept = keep
        finally:
            if not kept and not self._reader.lost:
                self._reader.rewind(mark)

    def _tokens(self, ids: list[int], config: AnswerConfig, stop_ids: set[int]) -> Iterator[int]:
        seen = np.zeros(self._model.config.vocab_size, bool)
        seen[ids] = True
        if config.penalty_scope == "everything":
            seen[self._ids] = True
            for _, _, earlier in self._conversation:
                seen[earlier] = True
        logits = self._reader.read(np.asarray(ids, np.int32), logits=True)
        yield from self._reader.draw(
            logits,
            sampling=config.sampling,
            key=jax.random.fold_in(jax.random.key(config.seed), len(self._conversation)),
            seen=seen,
            max_new_tokens=self.config.max_new_tokens,
            stop_ids=stop_ids,
            policy=self.config.anchors,
            every=self.config.refresh,
        )

    def _tell(self, notice: str) -> None:
        self.notices.append(notice)
        self._notify(notice)


def _share(geometry: Geometry, length: int) -> float:
    """Real density of the first tokens of a window; they have more of their pairs than the whole."""
    if not isinstance(geometry, PublishedGeometry):
        return geometry.replace(length=length).share()
    fixed = {"local": geometry.local + 1, "anchors": geometry.anchors}
    return expected_union(length, **fixed, probability=geometry.expected().probability).share


def _stretched(model: Decoder, window: int, kind: str) -> Decoder:
    """The model for a window that may exceed its context; it shares its weights with the given one."""
    if window <= model.config.context:
        return model
    rope = model.config.rope.stretched(window, kind=kind)
    return model.with_config(dataclasses.replace(model.config, rope=rope, context=window))
