"""A measured quantity with everything needed to read it later: its name, its label, its instances and their axes."""

import dataclasses
import json
import math
import os
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Literal, Self, get_args

import numpy as np

Label = Literal["measured", "bound", "proxy"]
LABELS = get_args(Label)


def label_of(function: Callable) -> Label:
    """What the numbers of an audit function are, as the first word of its docstring says.

    Args:
        function: of this package; its docstring begins with *Measured*, *Bound* or *Proxy*.

    Returns:
        The label.

    Raises:
        ValueError: if the docstring does not say.
    """
    word = (function.__doc__ or "").partition(":")[0].strip().strip("*").lower()
    if word not in LABELS:
        raise ValueError(f"{function.__name__} does not say what it is: begin its docstring with *Measured*, …")
    return word


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantity:
    """One quantity, on every instance it was taken on; or why it was not taken."""

    name: str
    """Such as "A.rank_one_ratio": tensor or subject, then what was computed."""
    label: Label
    values: np.ndarray | None
    """float64 or int64, one axis per entry of `axes`; None when the model or the prompts do not allow it."""
    axes: tuple[str, ...] = ()
    """Names of the axes: "layer", "prompt", "head", …"""
    note: str = ""
    """What a reader must know; with `values` None, the reason."""

    def __post_init__(self):
        if self.label not in LABELS:
            raise ValueError(f"{self.name}: label={self.label!r} is unknown; choose one of {', '.join(LABELS)}")
        if self.values is None:
            if not self.note:
                raise ValueError(f"{self.name} was not taken and must say why in its note")
            return
        object.__setattr__(self, "values", np.asarray(self.values))
        if self.values.ndim != len(self.axes):
            raise ValueError(f"{self.name}: values {self.values.shape} do not have the axes {self.axes}")

    @classmethod
    def of(cls, name: str, function: Callable, values, axes: tuple[str, ...] = (), note: str = "") -> Self:
        """A quantity labelled by the function that computed it.

        Args:
            name: see the attribute.
            function: whose docstring gives the label.
            values: see the attribute.
            axes: see the attribute.
            note: see the attribute.

        Returns:
            The quantity.
        """
        return cls(name=name, label=label_of(function), values=values, axes=axes, note=note)

    @classmethod
    def omitted(cls, name: str, function: Callable, reason: str) -> Self:
        """A quantity that could not be taken: named in the report with the reason, never left out silently."""
        return cls(name=name, label=label_of(function), values=None, note=reason)

    @property
    def summary(self) -> dict[str, float | int] | None:
        """Number of instances, min, median, max; None when not taken. Infinite and undefined values are counted."""
        if self.values is None:
            return None
        values = np.asarray(self.values, np.float64).ravel()
        numbers = values[~np.isnan(values)]
        if not numbers.size:
            return {"instances": values.size, "undefined": values.size}
        found = {"instances": values.size, "min": float(numbers.min()), "median": _middle(numbers)}
        found["max"] = float(numbers.max())
        if undefined := values.size - numbers.size:
            found["undefined"] = undefined
        return found

    @property
    def per_layer(self) -> list[float] | None:
        """Medians over all other axes, when there is a layer axis among others."""
        if self.values is None or "layer" not in self.axes or len(self.axes) < 2:
            return None
        rows = np.moveaxis(np.asarray(self.values, np.float64), self.axes.index("layer"), 0)
        rows = rows.reshape(len(rows), -1)
        numbers = [row[~np.isnan(row)] for row in rows]
        return [_middle(row) if row.size else math.nan for row in numbers]

    def as_dict(self) -> dict:
        """For JSON: everything but the instances; infinite and undefined numbers as text."""
        found = {"name": self.name, "label": self.label, "axes": list(self.axes), "note": self.note}
        if self.values is not None:
            found |= {"shape": list(self.values.shape), "summary": self.summary, "median_by_layer": self.per_layer}
        return _plain(found)


def store(path: str | os.PathLike, key: str, quantities: Sequence[Quantity]) -> None:
    """Writes quantities with all their instances to one .npz, whole or not at all.

    Args:
        path: of the file; its folder must exist.
        key: names everything that the numbers depend on; `load` asks for the same.
        quantities: of different names.

    Raises:
        ValueError: if two have one name.
    """
    if len({quantity.name for quantity in quantities}) != len(quantities):
        raise ValueError(f"names must differ: {', '.join(quantity.name for quantity in quantities)}")
    described = [dataclasses.asdict(dataclasses.replace(q, values=None, note=q.note or "-")) for q in quantities]
    for record, quantity in zip(described, quantities):
        record["note"], record["values"] = quantity.note, quantity.values is not None
    arrays = {quantity.name: quantity.values for quantity in quantities if quantity.values is not None}
    path = pathlib.Path(path)
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        np.savez(file, **{_DESCRIPTION: np.array(json.dumps({"key": key, "quantities": described}))}, **arrays)
    partial.replace(path)


def load(path: str | os.PathLike, key: str) -> list[Quantity] | None:
    """Reads what `store` wrote.

    Args:
        path: of the file.
        key: that it must have been stored under.

    Returns:
        The quantities; None if there is no such file, it is damaged or belongs to another key.
    """
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            described = json.loads(str(file[_DESCRIPTION]))
            if described["key"] != key:
                return None
            return [
                Quantity(
                    name=record["name"],
                    label=record["label"],
                    values=file[record["name"]] if record["values"] else None,
                    axes=tuple(record["axes"]),
                    note=record["note"],
                )
                for record in described["quantities"]
            ]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


_DESCRIPTION = "description"


def _middle(values: np.ndarray) -> float:
    """The median; of infinities an infinity, where the mean of the middle two would be undefined."""
    return float(np.quantile(values, 0.5, method="linear" if np.isfinite(values).all() else "higher"))


def _plain(value):
    """A JSON value; what JSON cannot hold as text."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
