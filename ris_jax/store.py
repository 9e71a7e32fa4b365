"""Prefilled caches on disk: one safetensors file each, found by everything that its content depends on.

The name of a file is the SHA-256 of its key: token ids, and a JSON object in which the caller names weights, dtypes,
positions, geometry and whatever else the numbers follow from. The file repeats the key and holds a SHA-256 of its
arrays; both are compared when it is read. What does not match is a `Miss` with its reason, never an answer.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import jax
import ml_dtypes
import numpy as np
from flax import nnx

FORMAT = "ris_jax prefill"
VERSION = 1
"""Of the layout of the files; part of every key, so that files of another version are not found."""

_SUFFIX = ".safetensors"
_NAME = re.compile(r"[0-9a-f]{64}" + re.escape(_SUFFIX))
_PARTIAL = re.compile(_NAME.pattern + r"\.[0-9]+\.partial")
_STALE_S = 3600.0
"""Age from which an unfinished file is taken for the leftover of a process that was killed."""

_TOKENS = "tokens"
_MAX_HEADER = 100_000_000
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefillKey:
    """What a prefill depends on.

    Attributes:
        tokens: int32 [T], the ids that were read.
        fields: JSON values: everything else. Two keys are the same if their canonical JSON is.
    """

    tokens: np.ndarray
    fields: Mapping[str, Any]

    @property
    def canonical(self) -> str:
        """`fields` and the format as JSON without any freedom of spelling."""
        fields = {"format": FORMAT, "version": VERSION, **self.fields}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def digest(self) -> str:
        """SHA-256 of both, 64 hexadecimal digits."""
        found = hashlib.sha256(self.canonical.encode())
        found.update(b"\0" + np.ascontiguousarray(self.tokens, "<i4").tobytes())
        return found.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Miss:
    """Why there is nothing to load.

    Attributes:
        reason: "absent", "damaged" (unreadable, cut off, or not what was written) or "foreign" (whole, but of another
            key or program).
        detail: a sentence for the user.
    """

    reason: str
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """An array that is fetched one entry of its first axis at a time, so that it never lies in memory twice.

    Attributes:
        shape: of the whole.
        dtype: NumPy's.
        read: index on the first axis -> array of shape `shape[1:]`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of a store.

    Attributes:
        path: of the file.
        size: bytes.
        used: when it was last written or loaded, Unix time.
        saved: when it was written, ISO 8601; None if the file does not tell.
        num_tokens: how many tokens it holds; None if the file does not tell.
        fields: the key's; empty if the file does not tell.
        problem: what is wrong with its header; None when that can be read. Arrays are verified by `load` only.
    """

    path: pathlib.Path
    size: int
    used: float
    saved: str | None = None
    num_tokens: int | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problem: str | None = None


class _Damaged(Exception):
    """A file that is not what was written."""


class PrefillStore:
    """A folder of prefilled caches. Several processes may use it at once."""

    def __init__(self, folder: str | os.PathLike):
        """Opens nothing yet.

        Args:
            folder: made on the first `save`.
        """
        self.folder = pathlib.Path(folder).expanduser()

    def path(self, key: PrefillKey) -> pathlib.Path:
        """Where the prefill of a key lies, or would lie."""
        return self.folder / f"{key.digest}{_SUFFIX}"

    def load(self, key: PrefillKey) -> dict[str, np.ndarray] | Miss:
        """Finds a prefill and verifies it.

        Args:
            key: what it must have been made from.

        Returns:
            The arrays that `save` was given, memory-mapped and read-only; or why there are none.
        """
        path = self.path(key)
        try:
            header, arrays = _open(path)
            if _digest(arrays) != header.get("sha256"):
                return Miss(reason="damaged", detail=f"{path} has changed since it was written.")
        except FileNotFoundError:
            return Miss(reason="absent", detail=f"{self.folder} holds no prefill of this text and these settings.")
        except OSError as error:
            return Miss(reason="damaged", detail=f"{path} cannot be read ({error.strerror or error}).")
        except _Damaged as error:
            return Miss(reason="damaged", detail=f"{path} is damaged: {error}.")
        tokens = arrays.pop(_TOKENS, None)
        if header.get("format") != FORMAT or tokens is None:
            return Miss(reason="foreign", detail=f"{path} was not written by this program.")
        if header.get("key") != key.canonical or not np.array_equal(tokens, key.tokens):
            return Miss(reason="foreign", detail=f"{path} belongs to another text or other settings.")
        _touch(path)
        return arrays

    def save(self, key: PrefillKey, arrays: Mapping[str, np.ndarray | Layers]) -> Entry:
        """Writes a prefill, whole or not at all.

        Args:
            key: what it was made from.
            arrays: names -> arrays; "tokens" is taken.

        Returns:
            The new entry.

        Raises:
            OSError: it cannot be written, for example because the disk is full. Nothing is left behind.
            ValueError: a name or a dtype that cannot be stored.
        """
        if _TOKENS in arrays:
            raise ValueError(f"{_TOKENS!r} names the token ids of the key; call the array something else.")
        arrays = {_TOKENS: np.ascontiguousarray(key.tokens, "<i4"), **arrays}
        path = self.path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        self.folder.mkdir(parents=True, exist_ok=True)
        saved = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            with partial.open("wb") as file:
                _write(file, arrays, {"format": FORMAT, "key": key.canonical, "saved": saved})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return _entry(path)

    def entries(self) -> list[Entry]:
        """The prefills of the folder, the most recently used first; other files are not listed."""
        found = []
        for path in self._files(_NAME):
            try:
                found.append(_entry(path))
            except FileNotFoundError:
                continue  # Pruned by another process since the folder was listed.
        return sorted(found, key=lambda entry: (-entry.used, entry.path.name))

    def prune(self, *, max_bytes: int | None = None, older_than: float | None = None) -> list[Entry]:
        """Deletes prefills that were not used for long, and leftovers of processes that were killed.

        Args:
            max_bytes: the least recently used go until the rest fits; None is no limit.
            older_than: seconds; what was not used for longer goes. None is no limit.

        Returns:
            The entries that were deleted.

        Raises:
            ValueError: a negative limit.
            OSError: a file cannot be deleted.
        """
        for name, limit in (("max_bytes", max_bytes), ("older_than", older_than)):
            if limit is not None and limit < 0:
                raise ValueError(f"{name} = {limit} must be at least 0, or None for no limit.")
        now, kept, deleted = time.time(), 0, []
        for entry in self.entries():
            kept += entry.size
            too_old = older_than is not None and now - entry.used > older_than
            if too_old or (max_bytes is not None and kept > max_bytes):
                entry.path.unlink(missing_ok=True)
                kept -= entry.size
                deleted.append(entry)
        for path in self._files(_PARTIAL):
            if now - _modified(path, default=now) > _STALE_S:
                path.unlink(missing_ok=True)
        return deleted

    def _files(self, pattern: re.Pattern) -> Iterator[pathlib.Path]:
        if self.folder.is_dir():
            yield from (path for path in self.folder.iterdir() if pattern.fullmatch(path.name))


def weights_fingerprint(model: nnx.Module) -> str:
    """SHA-256 of a model's parameters: their names, shapes, dtypes and bytes.

    Args:
        model: stacked or not; the two have different fingerprints.

    Returns:
        64 hexadecimal digits. Takes about 0.3 s for 540 MB.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param))[0]:
        array = np.asarray(leaf)
        digest.update(json.dumps([jax.tree_util.keystr(path), array.dtype.name, array.shape]).encode())
        digest.update(_bytes(array))
    return digest.hexdigest()


def _write(file: BinaryIO, arrays: Mapping[str, np.ndarray | Layers], metadata: dict[str, str]) -> None:
    """One safetensors file in one pass; the digest, whose length is known, is filled in at the end."""
    # The widest first, so that every array is aligned to its own width.
    arrays = dict(sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    tensors, offset = {}, 0
    for name, array in arrays.items():
        if array.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{name} has dtype {array.dtype}, which safetensors files do not hold; convert it.")
        end = offset + int(np.prod(array.shape, dtype=np.int64)) * array.dtype.itemsize
        tensors[name] = {"dtype": _DTYPE_NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end

    def header(sha256: str) -> bytes:
        text = json.dumps({"__metadata__": {**metadata, "sha256": sha256}, **tensors}).encode()
        text += b" " * (-len(text) % 64)
        return len(text).to_bytes(8, "little") + text

    file.write(header("0" * 64))
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(_label(name, array))
        for part in map(array.read, range(array.shape[0])) if isinstance(array, Layers) else (array,):
            data = _bytes(part)
            digest.update(data)
            file.write(data)
    file.seek(0)
    file.write(header(digest.hexdigest()))


def _open(path: pathlib.Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and memory-mapped arrays of a safetensors file."""
    tensors, start = _read_header(path)
    metadata = tensors.pop("__metadata__", {})
    whole = np.memmap(path, np.uint8, "r")
    arrays, last = {}, start
    try:
        for name, tensor in tensors.items():
            dtype, shape = np.dtype(_DTYPES[tensor["dtype"]]), tuple(tensor["shape"])
            begin, end = (start + offset for offset in tensor["data_offsets"])
            if begin != last or not begin <= end <= whole.size:
                raise _Damaged(f"{name} lies outside of it")
            arrays[name] = whole[begin:end].view(dtype).reshape(shape)
            last = end
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _Damaged(f"its list of arrays cannot be read ({type(error).__name__}: {error})") from None
    if last != whole.size:
        raise _Damaged(f"it has {whole.size} bytes, {last} were written")
    return metadata, arrays


def _read_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
    """The JSON of a safetensors file, and where its arrays begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _MAX_HEADER else b""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _Damaged("it has no readable header") from None
    if not isinstance(found, dict) or not isinstance(found.get("__metadata__", {}), dict):
        raise _Damaged("its header is no safetensors header")
    return found, 8 + length


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(_label(name, array))
        digest.update(_bytes(array))
    return digest.hexdigest()


def _label(name: str, array: np.ndarray | Layers) -> bytes:
    return json.dumps([name, array.dtype.name, list(array.shape)]).encode()


def _bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array; a copy only where it is not contiguous."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _entry(path: pathlib.Path) -> Entry:
    """What the header of a file tells."""
    status = path.stat()
    common = {"path": path, "size": status.st_size, "used": status.st_mtime}
    try:
        header, _ = _read_header(path)
        metadata = header["__metadata__"]
        fields, (num_tokens,) = json.loads(metadata["key"]), header[_TOKENS]["shape"]
        return Entry(**common, saved=metadata["saved"], num_tokens=num_tokens, fields=fields)
    except (_Damaged, OSError, KeyError, TypeError, ValueError) as error:
        return Entry(**common, problem=str(error) if isinstance(error, _Damaged) else "its header cannot be read")


def _touch(path: pathlib.Path) -> None:
    """Marks a file as used just now, where that is allowed."""
    try:
        os.utime(path)
    except OSError:
        return


def _modified(path: pathlib.Path, *, default: float) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return default
