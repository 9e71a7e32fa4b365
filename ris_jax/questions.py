"""Multiple-choice questions: what they are, how they are asked, reading them."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence

LETTERS = "ABCDEFGH"
CUE = "The letter of the right answer:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One question.

    Attributes:
        number: its id.
        stem: the question.
        options: two to eight answers; the last one says that the documents do not tell.
        answer: place of the right one.
        evidence: words of the documents that hold the answer, or None.
        position: token at which the answer is said to be, for the published filter, or None for the measured one.
    """

    number: int
    stem: str
    options: tuple[str, ...]
    answer: int
    evidence: str | None = None
    position: int | None = None

    def __post_init__(self):
        if not 2 <= len(self.options) <= len(LETTERS):
            raise ValueError(f"question {self.number} has {len(self.options)} options; give 2 to {len(LETTERS)}")
        if not 0 <= self.answer < len(self.options):
            raise ValueError(f"question {self.number}: answer {self.answer} is none of {len(self.options)} options")
        if not self.stem.strip() or not all(option.strip() for option in self.options):
            raise ValueError(f"question {self.number} has a blank stem or option")

    def prompt(self, order: Sequence[int]) -> str:
        """What is read after the documents, up to the answer, without a space at its end."""
        letters = LETTERS[: len(order)]
        lines = [f"{letter}) {self.options[place]}" for letter, place in zip(letters, order, strict=True)]
        return "\n".join(
            [
                f"\n\nQuestion: {self.stem}",
                *lines,
                f"Give {letters[-1]} only if the documents do not tell.",
                CUE,
            ]
        )


def read_questions(path: str | os.PathLike) -> list[Question]:
    """Reads questions from a JSON list.

    Args:
        path: of objects with "id" (integer), "question", "options" (a list, or an object from letters to texts),
            "answer" (a letter) and, both optional, "evidence" (words of the documents) and "position" (a token).

    Returns:
        The questions, in order.

    Raises:
        ValueError: if the file is missing, no such list, or has an id twice.
    """
    path = pathlib.Path(path)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}); give a JSON list of questions") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path} holds no list of questions")
    try:
        questions = [_question(entry) for entry in entries]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: a question lacks {error}; each has id, question, options and answer") from error
    if len({question.number for question in questions}) != len(questions):
        raise ValueError(f"{path} has two questions of one id; number them apart")
    return questions


def _question(entry: dict) -> Question:
    options = entry["options"]
    if isinstance(options, dict):
        options = [options[letter] for letter in sorted(options)]
    letter = str(entry["answer"]).strip().upper()
    if len(letter) != 1 or letter not in LETTERS:
        raise ValueError(f"question {entry['id']}: the answer {entry['answer']!r} is no letter of {LETTERS}")
    return Question(
        number=int(entry["id"]),
        stem=entry["question"],
        options=tuple(options),
        answer=LETTERS.index(letter),
        evidence=entry.get("evidence"),
        position=entry.get("position"),
    )
