"""Three order parameters of the collapse, which are different statistics and are never mixed.

Each asks how far the deductive tensors of two inputs (or two runs) differ: of order 1 while the
operator depends on its input, near 0 once it has collapsed. `relative_rms` is the robust one and is
what this project plots. The two others divide by a *signed* mean, so they are inflated by anything
that makes the mean small, and exist to be compared with published figures.
"""

import numpy as np


def relative_rms(first, second, axis=None) -> np.ndarray:
    """*Measured*: m = RMS(X1 − X2) / ½(RMS X1 + RMS X2); 0 when X1 = X2, both zero included.

    Args:
        first: X1, the tensors of the first input.
        second: X2, of the same shape.
        axis: axes over which the means run, None for all of them; the others are kept.

    Returns:
        float64 in [0, 2], of the shape that is left.

    Raises:
        ValueError: if the shapes differ or an entry is not finite.
    """
    first, second = _pair(first, second)
    return quotient(rms(first - second, axis), 0.5 * (rms(first, axis) + rms(second, axis)))


def symmetrised_signed(first, second, axis=None) -> np.ndarray:
    """*Measured*: RMS(X1 − X2) / ½(|mean X1| + |mean X2|); 0 when X1 = X2, +inf at zero means.

    Args:
        first: X1, the tensors of the first input.
        second: X2, of the same shape.
        axis: axes over which the means run, None for all of them; the others are kept.

    Returns:
        float64 in [0, inf], of the shape that is left.

    Raises:
        ValueError: if the shapes differ or an entry is not finite.
    """
    first, second = _pair(first, second)
    means = 0.5 * (np.abs(first.mean(axis=axis)) + np.abs(second.mean(axis=axis)))
    return quotient(rms(first - second, axis), means)


def source_form(first, second, axis=None) -> np.ndarray:
    """*Measured*: RMSE(X1, X2) / |mean X1|, the form of the PLDR-LLM criticality paper.

    Not symmetric in its arguments. In the paper the means run over all samples, layers and heads
    together, which is `axis=None`.

    Args:
        first: X1, the tensors of the reference run, whose mean is divided by.
        second: X2, of the same shape.
        axis: axes over which the means run, None for all of them; the others are kept.

    Returns:
        float64 in [0, inf], of the shape that is left: 0 when X1 = X2 and +inf when only the mean
        of X1 vanishes.

    Raises:
        ValueError: if the shapes differ or an entry is not finite.
    """
    first, second = _pair(first, second)
    return quotient(rms(first - second, axis), np.abs(first.mean(axis=axis)))


def rms(x, axis=None) -> np.ndarray:
    """*Measured*: the root mean square.

    Args:
        x: numbers.
        axis: axes over which the mean runs, None for all of them.

    Returns:
        float64, of the shape that is left.
    """
    return np.sqrt(np.mean(np.asarray(x, np.float64) ** 2, axis=axis))


def quotient(distance, scale) -> np.ndarray:
    """*Measured*: distance / scale; equal tensors are at 0 whatever the scale, others from 0 at +inf.

    Args:
        distance: nonnegative numbers.
        scale: nonnegative numbers of the same shape.

    Returns:
        float64 in [0, inf].
    """
    safe = np.where(scale == 0, 1.0, scale)
    return np.where(distance == 0, 0.0, np.where(scale == 0, np.inf, distance / safe))


def _pair(first, second) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.shape != second.shape:
        raise ValueError(
            f"the two tensors have shapes {first.shape} and {second.shape}; "
            "compare the same layers and heads of inputs of one length"
        )
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("an entry is not finite; audit the last finite checkpoint")
    return first, second
