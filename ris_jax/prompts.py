"""What the model is told: rules, documents, then questions, such that the documents can be read before any question.

The system turn holds the rules, every document in a tag with its name (`documents.py`), and a reminder. With the
tokenizer's chat template it becomes ids whose beginning is the same whatever is asked: the *document part*, which is
read once and kept. A turn is what is added to ask something. A tokenizer without a template gets a plain layout.

What surrounds documents and questions is learnt from the template by writing two different ones into it and seeing
which ids stay. Documents never pass through it: their ids are put between, so what looks like a control token in them
stays text, and where a file begins is exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

SYSTEM = (
    "You answer questions about the documents given below. Answer briefly and exactly, in whole sentences and in the "
    "language of the question. Quote names, numbers and dates as the documents have them."
)
REMINDER = (
    "Use only what the documents say. If they do not contain the answer, say that it is not in the documents instead "
    "of guessing."
)


class ChatTokenizer(Protocol):
    """What is asked of a tokenizer; `chat` may be missing, or refuse with ValueError when it has no template."""

    eos_id: int

    def encode(self, text: str) -> list[int]: ...

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False) -> list[int]: ...


def system_text(system: str = SYSTEM) -> tuple[str, str]:
    """The system turn around the documents.

    Args:
        system: the rules.

    Returns:
        The text before them, rules first, and the text after them, with the reminder.
    """
    return f"{system.strip()}\n\n<documents>\n", f"</documents>\n\n{REMINDER}"


class ChatLayout:
    """Token ids of the document part and of turns, by the tokenizer's chat template."""

    stop_strings: tuple[str, ...] = ()

    def __init__(self, tokenizer: ChatTokenizer):
        """Learns from the template what surrounds a question.

        Args:
            tokenizer: with `chat`.

        Raises:
            ValueError: no template, or one whose beginning depends on the question.
        """
        self._tokenizer = tokenizer
        self._first = len(self._until_question("x"))
        if not self._first:
            raise ValueError("The chat template writes the question before the documents; they cannot be read ahead.")

    def frame(self, system: str = SYSTEM) -> tuple[list[int], list[int]]:
        """What surrounds the ids of the documents in the document part.

        Args:
            system: the rules.

        Returns:
            Ids before the documents, and after them up to where the first question begins.
        """
        before, after = system_text(system)
        one, other = (self._until_question(f"{before}{documents}{after}") for documents in ("A", "7"))
        return one[: _common(one, other)], one[len(one) - _common(one[::-1], other[::-1]) :]

    def turn(self, question: str, *, first: bool) -> list[int]:
        """What is added to the cache to ask something.

        Args:
            question: the user's text.
            first: whether it follows the document part; otherwise it follows an answer, whose end token is not in the
                cache and therefore is the first of these.

        Returns:
            Token ids, up to where the answer begins.

        Raises:
            ValueError: an empty question, or one that changes the ids before it.
        """
        question = _checked(question)
        if first:
            before, ids = self._chat("x", "A")[: self._first], self._chat("x", question)
            if ids[: self._first] != before:
                raise ValueError(f"The tokenizer joins {question[:20]!r} with what precedes it; begin with a word.")
            return ids[self._first :]
        one, other = (self._chat("x", "A", answer, question) for answer in ("yes", "7"))
        return one[len(one) - _common(one[::-1], other[::-1]) :]

    def _until_question(self, system: str) -> list[int]:
        one, other = (self._chat(system, question) for question in ("A", "7"))
        return one[: _common(one, other)]

    def _chat(self, system: str, *turns: str) -> list[int]:
        roles = ["system", *("assistant" if index % 2 else "user" for index in range(len(turns)))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, (system, *turns))]
        return list(self._tokenizer.chat(messages, add_generation_prompt=True))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two sequences begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


class PlainLayout:
    """Token ids of a conversation for a tokenizer without a chat template."""

    stop_strings = ("\n[Question]",)

    def __init__(self, tokenizer: Any):
        """Keeps the tokenizer.

        Args:
            tokenizer: with `encode`; its `bos_id`, where it has one, begins the document part.
        """
        self._tokenizer = tokenizer

    def frame(self, system: str = SYSTEM) -> tuple[list[int], list[int]]:
        """See `ChatLayout.frame`."""
        begin = getattr(self._tokenizer, "bos_id", None)
        before, after = system_text(system)
        head = self._tokenizer.encode(f"[Task]\n{before}")
        return [*([] if begin is None else [begin]), *head], self._tokenizer.encode(f"{after}\n")

    def turn(self, question: str, *, first: bool) -> list[int]:
        """See `ChatLayout.turn`."""
        space = "" if first else "\n"
        return self._tokenizer.encode(f"{space}\n[Question]\n{_checked(question)}\n\n[Answer]\n")


def layout(tokenizer: Any) -> ChatLayout | PlainLayout:
    """The layout for a tokenizer: its own template where it has one.

    Args:
        tokenizer: with `encode`, and `chat` or not.

    Returns:
        A layout.
    """
    if getattr(tokenizer, "has_chat_template", hasattr(tokenizer, "chat")):
        return ChatLayout(tokenizer)
    return PlainLayout(tokenizer)


def _checked(question: str) -> str:
    question = question.strip()
    if not question:
        raise ValueError("The question is empty; ask something.")
    return question
