"""How nearly LayerNorm forgets the size of a Gram's rows.

The Gram grows with the number S of rows, and the LayerNorm after it removes the size, but for its ε: exactly only at
ε = 0, and not at all for a row without variance. Measured as the difference between LN(r) and LN(r/S).
"""

from typing import NamedTuple

import numpy as np


class ScaleError(NamedTuple):
    """Of each row, [...]."""

    absolute: np.ndarray
    """‖LN(r) − LN(r/S)‖."""
    relative: np.ndarray
    """The same over ‖LN(r/S)‖; +inf where that is 0 and the rows differ."""


def scale_error(rows, length: int, *, scale=1.0, bias=0.0, epsilon: float = 1e-6) -> ScaleError:
    """*Measured*: what dividing rows by S changes after LayerNorm.

    Args:
        rows: r, of a Gram, [..., H].
        length: S ≥ 1.
        scale: γ of the LayerNorm, [H] or a number.
        bias: β, likewise.
        epsilon: ε of the LayerNorm, above 0.

    Returns:
        A `ScaleError` of [...] float64 arrays.

    Raises:
        ValueError: `length` or `epsilon` out of range, or an entry that is not finite.
    """
    rows = _checked(rows, length, epsilon)
    scale, bias = np.asarray(scale, np.float64), np.asarray(bias, np.float64)
    large, small = (_normalised(x, epsilon) * scale + bias for x in (rows, rows / length))
    absolute, size = np.linalg.norm(large - small, axis=-1), np.linalg.norm(small, axis=-1)
    relative = np.where(size == 0, np.inf, absolute / np.where(size == 0, 1.0, size))
    return ScaleError(absolute=absolute, relative=np.where(absolute == 0, 0.0, relative))


def scale_error_proxy(rows, length: int, *, epsilon: float = 1e-6) -> np.ndarray:
    """*Proxy*: ε / (2 var(r/S)), the first-order relative error; it means nothing where it is not small.

    Args:
        rows: r, [..., H].
        length: S ≥ 1.
        epsilon: ε of the LayerNorm, above 0.

    Returns:
        [...] float64; +inf for a row without variance, whose LayerNorm is 0 at either size.

    Raises:
        ValueError: `length` or `epsilon` out of range, or an entry that is not finite.
    """
    variance = (_checked(rows, length, epsilon) / length).var(axis=-1)
    return np.where(variance == 0, np.inf, epsilon / (2 * np.where(variance == 0, 1.0, variance)))


def _normalised(rows: np.ndarray, epsilon: float) -> np.ndarray:
    centred = rows - rows.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(rows.var(axis=-1, keepdims=True) + epsilon)


def _checked(rows, length: int, epsilon: float) -> np.ndarray:
    if length < 1:
        raise ValueError(f"length={length} must be at least 1, the number of rows that the Gram sums")
    if not epsilon > 0:
        raise ValueError(f"epsilon={epsilon} must be above 0; at 0 LayerNorm has no scale error")
    rows = np.asarray(rows, np.float64)
    if not np.isfinite(rows).all():
        raise ValueError(f"{np.sum(~np.isfinite(rows))} of {rows.size} entries are not finite")
    return rows
