"""The files of one checkpoint: which are there, whether they are whole, what they hold.

Orbax commits a step by a rename; a list of sizes and CRC-32s is added after it. Compressed array
files carry no checksum of their own: without the list a flipped bit would load as another number.
"""

import itertools
import json
import os
import pathlib
import zlib
from typing import Any

import jax
from absl import logging
from orbax.checkpoint import v1 as ocp

CHECKSUMS = "checksums.json"


class BrokenCheckpoint(ValueError):
    """A checkpoint whose files are damaged or incomplete."""

    def __init__(self, path: pathlib.Path, reason: str):
        older = [s for s in saved_steps(path.parent) if s < int(path.name)]
        remedy = f"restore step {older[-1]} instead" if older else "there is no earlier step"
        super().__init__(
            f"the checkpoint of step {path.name} in {path.parent} is damaged ({reason}); {remedy} "
            "(allow_fallback does it by itself). Nothing was deleted"
        )


def saved_steps(directory: str | os.PathLike) -> tuple[int, ...]:
    """The steps saved in a directory, in order; empty when it does not exist."""
    path = pathlib.Path(directory)
    names = (entry.name for entry in path.iterdir()) if path.is_dir() else ()
    return tuple(sorted(int(name) for name in names if name.isdigit()))


def verify(directory: str | os.PathLike, step: int) -> None:
    """Compares every file of a step with the checksums written when it was saved.

    Args:
        directory: of the checkpoints.
        step: which. Without checksums (the run died between saving and summing, or another
            program wrote the step) nothing can be compared and nothing is raised.

    Raises:
        BrokenCheckpoint: a file is missing, or is not what was written.
    """
    path = pathlib.Path(directory).absolute() / str(step)
    sums = path / CHECKSUMS
    if not sums.exists():
        return
    try:
        recorded = json.loads(sums.read_text())
    except ValueError:
        raise BrokenCheckpoint(path, f"{CHECKSUMS} is not JSON") from None
    for name, (size, crc) in recorded.items():
        file = path / name
        if not file.exists():
            raise BrokenCheckpoint(path, f"{name} is missing")
        if file.stat().st_size != size:
            reason = f"{name} has {file.stat().st_size} bytes, {size} were written"
            raise BrokenCheckpoint(path, reason)
        if _crc(file) != crc:
            raise BrokenCheckpoint(path, f"the content of {name} has changed since it was written")


def is_whole(directory: str | os.PathLike, step: int) -> bool:
    """Whether `verify` finds nothing wrong."""
    try:
        verify(directory, step)
    except BrokenCheckpoint:
        return False
    return True


def _crc(file: pathlib.Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def write_checksums(path: pathlib.Path) -> None:
    """Writes the list that `verify` compares with: path of one step, all its files at rest."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    sums = {str(file.relative_to(path)): (file.stat().st_size, _crc(file)) for file in files}
    temporary = path / f"{CHECKSUMS}.tmp"
    temporary.write_text(json.dumps(sums, indent=1))
    temporary.replace(path / CHECKSUMS)


def set_aside(directory: pathlib.Path, step: int) -> None:
    """Renames a broken step to broken_<step>, where nothing counts it and nobody loses it."""
    names = itertools.chain([f"broken_{step}"], (f"broken_{step}_{i}" for i in itertools.count(2)))
    aside = next(directory / name for name in names if not (directory / name).exists())
    logging.warning("the broken checkpoint of step %d is set aside as %s", step, aside)
    (directory / str(step)).rename(aside)


def missing(directory: pathlib.Path, step: int | None) -> str:
    """The sentence that says a step, or any step, is not there."""
    steps = saved_steps(directory)
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    there = f"the steps there are {', '.join(map(str, steps))}" if steps else "it holds none"
    return f"{what} in {directory}: {there}"


def read_config(path: str | os.PathLike) -> dict[str, Any]:
    """The JSON that was saved with one step.

    Args:
        path: of the step: <directory>/<step>.

    Returns:
        What `Checkpoints.save` got as `config`.

    Raises:
        BrokenCheckpoint: the file that holds it cannot be read.
    """
    path = pathlib.Path(path).absolute()
    try:
        metadata = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        return metadata["custom_metadata"]["config"]
    except (OSError, ValueError, KeyError) as error:
        raise BrokenCheckpoint(path, _first_line(error)) from error


def _names(tree: Any) -> dict[str, Any]:
    """Leaves by path; the path of an `nnx.Variable` ends at its own name."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    keyed = ((jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in leaves)
    return {name.removesuffix("/value"): leaf for name, leaf in keyed}


def load_parts(path: pathlib.Path, wanted: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads parts of one step.

    Args:
        path: of the step.
        wanted: "model" and optionally "train": trees of `ShapeDtypeStruct`s with shardings.

    Returns:
        The saved JSON, and the parts.

    Raises:
        BrokenCheckpoint: something cannot be read.
        ValueError: the saved model has other shapes than the wanted one.
    """
    try:
        found = ocp.checkpointables_metadata(path)
        saved = {part: _names(found.metadata[part]) for part in wanted}
        if unread := [part for part, names in saved.items() if not names]:
            raise OSError(f"nothing is known of {' and '.join(unread)}")  # Orbax only warns.
    except Exception as error:  # Orbax, TensorStore and JSON raise many kinds.
        raise _unreadable(path, error) from error
    for part, tree in wanted.items():
        _check_shapes(path, _names(tree), saved[part])
    try:
        parts = ocp.load_checkpointables(path, wanted)
    except Exception as error:
        raise _unreadable(path, error) from error
    return dict(found.custom_metadata or {}), parts


def _unreadable(path: pathlib.Path, error: Exception) -> ValueError:
    if not (path / CHECKSUMS).exists():
        return BrokenCheckpoint(path, _first_line(error))
    return ValueError(
        f"the checkpoint {path} cannot be read although its files are as they were written: "
        f"{_first_line(error)}. Look for a cause outside it (memory, another Orbax version)"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"


def _check_shapes(path: pathlib.Path, expected: dict[str, Any], found: dict[str, Any]) -> None:
    def describe(leaves, name):
        return tuple(leaves[name].shape) if name in leaves else "nothing"

    differences = [
        f"{name} (expected {describe(expected, name)}, found {describe(found, name)})"
        for name in dict.fromkeys((*expected, *found))
        if not _is_key(expected.get(name)) and describe(expected, name) != describe(found, name)
    ]
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ValueError(
            f"the checkpoint {path} is of another model or optimizer: {'; '.join(differences[:3])}{more}. "
            "Use the configuration it was trained with, or another directory"
        )


def _is_key(leaf: Any) -> bool:
    """Typed keys are stored as their words, under a shape of their own."""
    return leaf is not None and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
