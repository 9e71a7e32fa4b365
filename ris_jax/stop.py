"""Where an answer ends, judged by its text: stop strings, and a filter for answers that wander off.

Both read a text piece by piece and give back what may be shown. What they cut off is never shown first and taken back:
text that could still turn out to belong to it is held until that is decided.
"""

import collections
import math
import re
from collections.abc import Iterable, Sequence
from typing import Protocol


class TextFilter(Protocol):
    """Something that lets a text through up to some point.

    Attributes:
        stopped: why the text has ended; None while it has not.
    """

    stopped: str | None

    def push(self, piece: str) -> str:
        """What may be shown now that `piece` has come; nothing any more once stopped."""
        ...

    def flush(self) -> str:
        """What was held back and may be shown, since no more will come."""
        ...


class StopStrings:
    """Ends a text before the first of some strings."""

    def __init__(self, strings: Iterable[str]):
        """Starts at the beginning of a text.

        Args:
            strings: any number, none empty.

        Raises:
            ValueError: an empty string, before which every text would end.
        """
        self.strings = tuple(strings)
        if not all(self.strings):
            raise ValueError("A stop string is empty; every text would end before it. Leave it out.")
        self.stopped = None
        self._held = ""

    def push(self, piece: str) -> str:
        """See `TextFilter`."""
        if self.stopped is not None:
            return ""
        text = self._held + piece
        found = [(index, string) for string in self.strings if (index := text.find(string)) >= 0]
        if found:
            end, string = min(found)
            self.stopped, self._held = f"stop string {string!r}", ""
            return text[:end]
        held = max((_overlap(text, string) for string in self.strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """See `TextFilter`."""
        held, self._held = self._held, ""
        return held


INSTRUCTIONS = (
    "as an ai language model",
    "as a language model",
    "according to my instructions",
    "the instructions say",
    "you are a helpful assistant",
    "i was instructed to",
    "the system prompt",
    "answer the following question",
    "based on the documents above, write",
    "your task is to",
)
"""Phrases of someone who repeats instructions instead of answering."""

_SENTENCE_END = re.compile(r"[.!?\n]")
_HEADING = re.compile(r"\s*#{1,6}\s")
_WORD = re.compile(r"[^\W\d_]{4,}")


class TopicStop:
    """Ends an answer when it turns to instructions, opens a section, or leaves its subject.

    Text is shown sentence by sentence. A sentence ends the answer before itself if it is a Markdown heading, contains
    one of `INSTRUCTIONS`, or, from the eleventh sentence on, has word counts that correlate with those of the question
    and the first ten sentences by less than a threshold (Pearson, over all words of four letters or more that either
    has, in lower case). Words in common raise it, and it is −1 for two texts without any, each word used once.
    """

    def __init__(self, question: str, *, threshold: float = -0.1, opening: int = 10):
        """Starts at the beginning of an answer.

        Args:
            question: what is being answered.
            threshold: the least correlation, −1 … 1; −1 lets every subject pass.
            opening: sentences that are taken to be on the subject.

        Raises:
            ValueError: a threshold outside of −1 … 1, or a negative number of sentences.
        """
        if not -1 <= threshold <= 1:
            raise ValueError(f"threshold = {threshold} must be within -1 … 1, a correlation; -1 lets all pass.")
        if opening < 0:
            raise ValueError(f"opening = {opening} must be at least 0 sentences.")
        self.stopped = None
        self._threshold, self._opening = threshold, opening
        self._subject = _words(question)
        self._accepted = 0
        self._held = ""

    def push(self, piece: str) -> str:
        """See `TextFilter`."""
        shown = ""
        if self.stopped is None:
            self._held += piece
            while self.stopped is None and (end := _SENTENCE_END.search(self._held)):
                sentence, self._held = self._held[: end.end()], self._held[end.end() :]
                shown += self._accept(sentence)
            if self.stopped is None and (reason := self._objection(self._held)):
                self._stop(reason)
        return shown

    def flush(self) -> str:
        """See `TextFilter`."""
        held, self._held = self._held, ""
        return self._accept(held) if self.stopped is None else ""

    def _accept(self, sentence: str) -> str:
        if reason := self._objection(sentence):
            self._stop(reason)
            return ""
        words = _words(sentence)
        if self._accepted < self._opening:
            self._subject += words
        elif self._threshold > -1 and correlation(self._subject, words) < self._threshold:
            self._stop("the answer left its subject")
            return ""
        self._accepted += bool(sentence.strip(" \t\n.!?"))
        return sentence

    def _stop(self, reason: str) -> None:
        self.stopped, self._held = reason, ""

    def _objection(self, sentence: str) -> str | None:
        """What speaks against a sentence even before it is whole."""
        if _HEADING.match(sentence):
            return "a heading"
        lowered = sentence.lower()
        return next((f"the phrase {phrase!r}" for phrase in INSTRUCTIONS if phrase in lowered), None)


def correlation(a: collections.Counter[str], b: collections.Counter[str]) -> float:
    """Pearson correlation of two word counts over the union of their words.

    Args:
        a: counts of one text.
        b: counts of another.

    Returns:
        Within −1 … 1; 0 where it is not defined, as with a text without words.
    """
    union = sorted(a.keys() | b.keys())
    if not union:
        return 0.0
    centred = []
    for counts in (a, b):
        mean = counts.total() / len(union)
        centred.append([counts[word] - mean for word in union])
    x, y = centred
    norm = math.sqrt(math.fsum(v * v for v in x) * math.fsum(v * v for v in y))
    return math.fsum(v * w for v, w in zip(x, y)) / norm if norm else 0.0


def filter_all(filters: Sequence[TextFilter], piece: str) -> str:
    """Sends a piece through filters one after the other; see `TextFilter.push`."""
    for each in filters:
        piece = each.push(piece)
    return piece


def flush_all(filters: Sequence[TextFilter]) -> str:
    """What filters that follow one another still hold back and may be shown; see `TextFilter.flush`."""
    piece = ""
    for each in filters:
        piece = each.push(piece) + each.flush()
    return piece


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string`, shorter than `string`."""
    longest = min(len(text), len(string) - 1)
    return next(size for size in range(longest, -1, -1) if text.endswith(string[:size]))


def _words(text: str) -> collections.Counter[str]:
    return collections.Counter(_WORD.findall(text.lower()))
