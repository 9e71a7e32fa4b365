"""Hugging Face model folders as files: JSON and safetensors. What is inside them is the business of others."""

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """Reads `config.json`.

    Args:
        folder: of the model.

    Returns:
        Its fields.

    Raises:
        ValueError: no such file, or not a JSON object.
    """
    path = pathlib.Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no {CONFIG}; name a Hugging Face model folder.")
    return read_object(path)


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Args:
        path: of the file.

    Returns:
        Its fields.

    Raises:
        ValueError: not readable, not JSON, or not an object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a JSON {type(found).__name__}, not an object.")
    return found


def read_tensors(folder: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

    Args:
        folder: of the model. The single file wins when both are there, as in the published loaders.

    Returns:
        Names -> read-only arrays in the dtype of the file, bfloat16 included. They are views of the mapped files: pages
        are read when they are used, and may be dropped again.

    Raises:
        ValueError: a file is missing or damaged, or the index names a file outside of the folder or lacks a tensor.
    """
    folder = pathlib.Path(folder)
    if (folder / WEIGHTS).is_file():
        return _read_safetensors(folder / WEIGHTS)
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(f"{folder} holds neither {WEIGHTS} nor {INDEX}; other formats of weights are not read.")
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ValueError(f"{index} has no weight_map from tensor names to file names; download it again.")
    tensors = {}
    for shard in sorted(set(shards.values())):
        if pathlib.PurePath(shard).name != shard:
            raise ValueError(f"{index} names {shard!r}, which is not a file of this folder.")
        if not (folder / shard).is_file():
            raise ValueError(f"{folder} lacks {shard}, which {INDEX} lists; download it.")
        tensors |= _read_safetensors(folder / shard)
    if absent := sorted(set(shards) - set(tensors)):
        raise ValueError(f"{INDEX} lists {absent[0]!r}, but no shard of {folder} holds it; download the folder again.")
    return tensors


def write_folder(folder: str | os.PathLike, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes `config.json` and `model.safetensors`, each to a temporary name first.

    Args:
        folder: made if needed.
        config: JSON fields.
        tensors: names -> arrays, contiguous.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # "format" tells the PyTorch loaders that the layouts are theirs.
    _replace(folder / WEIGHTS, lambda path: save_file(dict(tensors), path, metadata={"format": "pt"}))
    text = json.dumps(config, indent=2) + "\n"
    _replace(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def _replace(path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        # Checks the header, and that the offsets fill the file exactly. Its own arrays would be copies.
        with safe_open(path, framework="np"):
            pass
        mapped = np.asarray(np.memmap(path, mode="r"))
        start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
        header = json.loads(mapped[8:start].tobytes())
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise ValueError(f"{name} is of the unknown dtype {entry['dtype']}")
            begin, end = (start + offset for offset in entry["data_offsets"])
            tensors[name] = mapped[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return tensors
    except (SafetensorError, OSError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({error}).") from None
