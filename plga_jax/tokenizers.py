"""Text to token ids and back: raw bytes, a SentencePiece model, or those of `tokenizers_hf`, behind one protocol.

Ids are laid out as in the published vocabulary: 0 [PAD], 1 [UNK], 2 [START], 3 [END], 4 [SEP], 5 [CLS], then the 256
bytes. `encode` adds no special ids; whoever makes documents appends `eos_id` to each.
"""

import codecs
import hashlib
import os
import pathlib
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import sentencepiece

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[START]", "[END]", "[SEP]", "[CLS]")


class StreamDecoder(Protocol):
    """Decodes ids as they come; the pieces joined are what `decode` gives for all ids at once."""

    def push(self, token: int) -> str:
        """Text that this token completes, possibly none: half a UTF-8 character is held back."""
        ...

    def flush(self) -> str:
        """What is still held back, as replacement characters; the decoder may then be used anew."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """What training, generation and checkpoints need to know of a tokenizer.

    Attributes:
        name: the kind, by which `tokenizer_from_config` finds the class.
        vocab_size: ids are below it.
        pad_id: the id of padding.
        eos_id: the id that ends a document.
        fingerprint: equal for two tokenizers that give equal ids; a checkpoint keeps it.
    """

    name: ClassVar[str]
    vocab_size: int
    pad_id: int
    eos_id: int
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def stream(self) -> StreamDecoder: ...

    def to_config(self) -> dict[str, Any]: ...


def _check_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    ids = [int(token) for token in ids]
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside [0, {vocab_size}); these ids were made by another tokenizer")
    return ids


def _check_fingerprint(tokenizer: Tokenizer, config: dict[str, Any]):
    if config.get("fingerprint", tokenizer.fingerprint) != tokenizer.fingerprint:
        raise ValueError(
            f"the tokenizer's fingerprint is {tokenizer.fingerprint}, but {config['fingerprint']} was recorded; "
            "its ids would mean other text: give the tokenizer that the model was trained with"
        )


class ByteTokenizer:
    """UTF-8 bytes: byte b is id 6 + b, 262 ids in all. Needs no file and loses nothing."""

    name = "byte"
    offset = len(SPECIAL_TOKENS)
    vocab_size = offset + 256
    pad_id = 0
    eos_id = 3
    fingerprint = f"utf8-bytes-from-{offset}"

    def encode(self, text: str) -> list[int]:
        """Ids of the UTF-8 bytes of a text."""
        return [self.offset + byte for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special ids give nothing, broken UTF-8 gives replacement characters.

        Raises:
            ValueError: when an id is outside the vocabulary.
        """
        return self._bytes(ids).decode(errors="replace")

    def _bytes(self, ids: Iterable[int]) -> bytes:
        ids = _check_ids(ids, self.vocab_size)
        return bytes(token - self.offset for token in ids if token >= self.offset)

    def stream(self) -> "_ByteStream":
        """A `StreamDecoder`."""
        return _ByteStream(self)

    def to_config(self) -> dict[str, Any]:
        """A JSON-able description."""
        return {"name": self.name, "fingerprint": self.fingerprint}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The inverse of `to_config`."""
        tokenizer = cls()
        _check_fingerprint(tokenizer, config)
        return tokenizer


class _ByteStream:
    def __init__(self, tokenizer: ByteTokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer._bytes([token]))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class SentencePieceTokenizer:
    """A SentencePiece model file with a pad and an end id, such as the published unigram vocabulary of 32,000.

    Its normaliser decides what survives: the published one collapses white space, newlines included, and keeps case.

    Args:
        path: the `.model` file.

    Raises:
        ValueError: when the file is missing, is no SentencePiece model, or lacks a pad or an end id.
    """

    name = "sentencepiece"

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        try:
            model = self.path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"cannot read the tokenizer model {self.path} ({error.strerror}); give the path of a .model file"
            ) from error
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(
                f"{self.path} ({len(model)} bytes) is no SentencePiece model, or is damaged; fetch it again"
            ) from error
        self.vocab_size = self._processor.vocab_size()
        self.pad_id = self._processor.pad_id()
        self.eos_id = self._processor.eos_id()
        for what, token in (("pad", self.pad_id), ("eos", self.eos_id)):
            if token < 0:
                raise ValueError(
                    f"{self.path} defines no {what} id, which packing and stopping need; "
                    f"train it with {what}_id={0 if what == 'pad' else 3}"
                )
        self.fingerprint = hashlib.sha256(model).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a normalised text, without special ids."""
        return self._processor.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; pad, start and end give nothing.

        Raises:
            ValueError: when an id is outside the vocabulary.
        """
        return self._processor.decode(_check_ids(ids, self.vocab_size))

    def stream(self) -> "_PieceStream":
        """A `StreamDecoder`."""
        return _PieceStream(self)

    def to_config(self) -> dict[str, Any]:
        """A JSON-able description: where the model file is, and its SHA-256."""
        return {"name": self.name, "path": str(self.path), "fingerprint": self.fingerprint}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The inverse of `to_config`; a file that has changed since is refused."""
        tokenizer = cls(config["path"])
        _check_fingerprint(tokenizer, config)
        return tokenizer


class _PieceStream:
    """Decodes the last settled tokens together with the new ones and emits what is added.

    A piece's text depends on what stands before it (the first piece of a text loses its leading space; byte pieces join
    to characters), but no further back than to the last tokens that gave whole text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._settled: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        self._pending.append(token)
        added = self._added()
        if not added or added.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._settled, self._pending = self._pending, []
        return added

    def flush(self) -> str:
        added = self._added()
        self._settled, self._pending = [], []
        return added

    def _added(self) -> str:
        before = self._tokenizer.decode(self._settled)
        return self._tokenizer.decode(self._settled + self._pending)[len(before) :]


def tokenizer_from_config(config: dict[str, Any], path: str | os.PathLike[str] | None = None) -> Tokenizer:
    """The tokenizer that a checkpoint was made with.

    Args:
        config: what `to_config` gave.
        path: where the model file is now, when it has moved; None looks where it was.

    Raises:
        ValueError: when the kind is unknown, the file is missing, or it is not the recorded one.
    """
    # Imported here: it builds on this module.
    from plga_jax.tokenizers_hf import HFTokenizer

    kinds = {kind.name: kind for kind in (ByteTokenizer, SentencePieceTokenizer, HFTokenizer)}
    kind = kinds.get(config.get("name"))
    if kind is None:
        raise ValueError(f"unknown tokenizer {config.get('name')!r}; known are {sorted(kinds)}")
    return kind.from_config(config if path is None else config | {"path": os.fspath(path)})
