"""Documents as token ids: reading files into a budget, saying what was cut, and finding a passage again."""

import bisect
import dataclasses
import html
import os
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from plga_jax.audit.report import markdown_table
from plga_jax.tokenizers import Tokenizer
from plga_jax.train.data import TEXT_SUFFIXES, Corpus, load_corpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """Where one file's tokens are, its tags included.

    Attributes:
        name: of the file, as its tag names it.
        start: first token.
        end: after the last token that was kept.
        lost: tokens that were cut off its end.
    """

    name: str
    start: int
    end: int
    lost: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Files one after the other.

    Attributes:
        ids: int32 [C].
        files: in order.
    """

    ids: np.ndarray
    files: tuple[File, ...]

    @property
    def lost(self) -> int:
        """Tokens that were cut, of all files."""
        return sum(file.lost for file in self.files)

    def cut(self, budget: int) -> "Documents":
        """Keeps the first tokens, as the published program does: the tail is lost, whole files of it perhaps.

        Args:
            budget: most tokens to keep, 1 or more.

        Returns:
            The documents, with what was lost counted.

        Raises:
            ValueError: if the budget is below 1.
        """
        if budget < 1:
            raise ValueError(f"the budget for documents is {budget} tokens; it must be 1 or more: widen the window")
        files = tuple(
            dataclasses.replace(
                file,
                start=min(file.start, budget),
                end=min(file.end, budget),
                lost=file.lost + max(0, file.end - max(file.start, budget)),
            )
            for file in self.files
        )
        return Documents(ids=self.ids[:budget], files=files)

    def report(self) -> str:
        """What became of each file, as a Markdown table."""
        rows = [(file.name, file.end - file.start, file.lost) for file in self.files]
        return markdown_table(("file", "tokens kept", "tokens cut"), [*rows, ("all", len(self.ids), self.lost)])


def read_documents(paths: Sequence[str | os.PathLike], tokenizer: Tokenizer, budget: int | None = None) -> Documents:
    """Reads text files, each between tags that name it.

    Args:
        paths: files, or folders, of which every .txt and .md file at any depth is taken in the order of their paths.
        tokenizer: makes the ids; every file is encoded by itself, so that where it begins is exact.
        budget: most tokens to keep; None keeps all.

    Returns:
        The documents; `report` says what was cut.

    Raises:
        ValueError: if no path is given, a path is missing, blank or not UTF-8 text, or the budget is below 1.
    """
    files = [file for path in paths for file in _files(pathlib.Path(path))]
    if not files:
        raise ValueError("no document is given; name one text file at least, or a folder of them")
    pieces = []
    for file in files:
        (text,) = load_corpus(file).documents
        name = html.escape(file.name)
        pieces.append(np.array(tokenizer.encode(f'<document name="{name}">\n{text}\n</document>\n'), np.int32))
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    documents = Documents(
        ids=np.concatenate(pieces),
        files=tuple(
            File(name=file.name, start=end - len(piece), end=end, lost=0)
            for file, piece, end in zip(files, pieces, ends, strict=True)
        ),
    )
    return documents if budget is None else documents.cut(budget)


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    if not path.is_dir():
        return [path]
    found = sorted(f for f in path.rglob("*") if f.suffix.lower() in TEXT_SUFFIXES and f.is_file())
    if not found:
        raise ValueError(f"the folder {path} holds no {' or '.join(TEXT_SUFFIXES)} file; name the files themselves")
    return found


def long_text(
    tokenizer: Tokenizer, length: int, seed: int, *, skip: int = 0, corpus: Corpus | None = None
) -> np.ndarray:
    """Ids of long texts, one after the other in random order.

    Args:
        tokenizer: makes the ids.
        length: tokens wanted.
        seed: of the order.
        skip: tokens to leave out at the beginning: with `skip` = the length of an earlier call with this seed, the text
            that follows it.
        corpus: the texts; None takes the one that `load_corpus` finds by itself.

    Returns:
        int32 [length].

    Raises:
        ValueError: if the corpus is shorter, or `length` or `skip` makes no sense.
    """
    if length < 1 or skip < 0:
        raise ValueError(f"length is {length} and skip {skip}; need length ≥ 1 and skip ≥ 0")
    corpus = load_corpus() if corpus is None else corpus
    ids: list[int] = []
    for place in np.random.default_rng(seed).permutation(len(corpus.documents)):
        ids += tokenizer.encode(corpus.documents[place].strip() + "\n\n")
        if len(ids) >= skip + length:
            return np.array(ids[skip : skip + length], np.int32)
    raise ValueError(
        f"{corpus.name} has {len(ids)} tokens, {skip + length} are wanted: ask for fewer or give more text"
    )


class Passages:
    """The text of token ids, in which passages are found as spans of tokens."""

    def __init__(self, ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer):
        """Decodes them, one by one.

        Args:
            ids: [C].
            tokenizer: that made them.
        """
        stream, pieces, ends, length = tokenizer.stream(), [], [], 0
        for token in np.asarray(ids).tolist():
            piece = stream.push(token)
            pieces.append(piece)
            length += len(piece)
            ends.append(length)
        self._text, self._ends = "".join(pieces), ends

    def find(self, passage: str) -> tuple[int, int] | None:
        """Looks for a passage, whatever its case and white space.

        Args:
            passage: a few words at least, of the text.

        Returns:
            The first token of its first occurrence and the one after its last, or None.

        Raises:
            ValueError: if the passage is blank.
        """
        words = passage.split()
        if not words:
            raise ValueError("a blank passage is everywhere: give the words that hold the evidence")
        found = re.search(r"\s+".join(map(re.escape, words)), self._text, re.IGNORECASE)
        if found is None:
            return None
        return self._start(found.start()), bisect.bisect_left(self._ends, found.end()) + 1

    def _start(self, position: int) -> int:
        # A token may give no text yet (half a character); it belongs to what follows.
        first = bisect.bisect_left(self._ends, position)
        return first + 1 if position and self._ends[first] == position else first
