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


def spectral(A) -> np.ndarray:
    """*Proxy*: the order parameter of a single forward pass, the share of A's energy off its leading direction.

    The rows of all heads are one matrix; after a collapse it is of rank one, since rows and heads have become one row.
    So it falls with m, which needs two inputs; that a model with this spectrum also ignores its input is what has to
    be measured beside it.

    Args:
        A: metric tensors of one layer or more, [..., N, H, H].

    Returns:
        sqrt(1 − σ1²/Σσ²) of the [N·H, H] matrices, float64 [...] in [0, 1]; 0 for the zero tensor.

    Raises:
        ValueError: if there is no head axis or an entry is not finite.

    Source: Conjecture 8.2 of "Power law graph attention: exact generalization of SDPA, empirical collapse at inference"
    asks for such a criterion; this form is ours.
    """
    A = np.asarray(A, np.float64)
    if A.ndim < 3:
        raise ValueError(f"metric tensors must be [..., heads, rows, columns], got {A.shape}")
    if not np.isfinite(A).all():
        raise ValueError("an entry is not finite; audit the last finite checkpoint")
    values = np.linalg.svd(A.reshape(*A.shape[:-3], -1, A.shape[-1]), compute_uv=False)
    # Relative to σ1, and the rest summed by itself: 1 − σ1²/Σσ² would cancel.
    rest = values[..., 1:] / np.where(values[..., :1] == 0, 1.0, values[..., :1])
    off = np.sum(rest**2, axis=-1)
    return np.sqrt(off / (1 + off))


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
