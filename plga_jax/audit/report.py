"""What a report is made of: claims with criteria, tables, the machine, files written whole."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Iterable, Sequence

import numpy as np

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "plga-jax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement about a model, judged by a criterion that is fixed in the code."""

    statement: str
    """What is claimed."""
    criterion: str
    """The test in words, with its threshold."""
    measured: str
    """The numbers that went into the test."""
    holds: bool
    """Its outcome."""

    @property
    def verdict(self) -> str:
        """ "holds" or "does not hold"."""
        return "holds" if self.holds else "does not hold"


def claims_table(claims: Iterable[Claim]) -> str:
    """The claims as a Markdown table, one row each.

    Args:
        claims: in the order in which to list them.

    Returns:
        Markdown, ending with a newline.
    """
    rows = [(c.statement, c.criterion, c.measured, f"**{c.verdict}**") for c in claims]
    return markdown_table(("claim", "criterion", "measured", "verdict"), rows)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence]) -> str:
    """A Markdown table that also reads well as plain text: its columns are aligned.

    Args:
        header: column titles.
        rows: cells; floats are shown with four significant digits, everything else by `str`.

    Returns:
        Markdown, ending with a newline.

    Raises:
        ValueError: if a row has another number of cells than the header.
    """
    cells = [[show(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    if any(len(row) != len(header) for row in cells):
        raise ValueError(f"every row needs the header's {len(header)} cells; pad short rows with ''")
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [" | ".join(cell.ljust(w) for cell, w in zip(row, widths)) for row in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "".join(f"| {line} |\n" for line in lines)


def show(value) -> str:
    """A cell: floats with four significant digits, sequences joined by commas, else `str`."""
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    if isinstance(value, list | tuple | np.ndarray):
        return ", ".join(show(item) for item in value)
    return str(value)


def environment() -> dict[str, str | int]:
    """Where the numbers were made: processor, usable cores, Python and library versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": f"{_processor()}, {platform.system()} {platform.machine()}",
        "cores": cores or 1,
        "python": platform.python_version(),
    } | {name: _version(name) for name in LIBRARIES}


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file under a temporary name and renames it, so that a reader never sees half of it.

    Args:
        path: where; its folder must exist.
        text: the whole contents.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: str | os.PathLike, value) -> None:
    """Writes a value as JSON, whole or not at all.

    Args:
        path: where; its folder must exist.
        value: of dicts, lists, strings and finite numbers, NumPy's included.

    Raises:
        ValueError: if a number is not finite, which JSON cannot hold.
        TypeError: if a value has no JSON form.
    """
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False, default=_plain)
    write_text(path, text + "\n")


def _plain(value):
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form; convert it first")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"
