"""Spectra, ranks and the sameness of rows and heads of stacks of matrices.

Matrices are the last two axes, and the leading axes are kept: the deductive outputs A, A_LM, A_P
and G_LM of one call, [L, B, N, H, H], give [L, B, N].
"""

from typing import Literal, NamedTuple

import numpy as np

FLOAT32_EPSILON = 2.0**-23
"""The published rank tolerance is in float32 roundings, the precision of the audited tensors."""


class Perron(NamedTuple):
    """The Perron root of a positive matrix, and how well it is separated."""

    root: np.ndarray
    """The real positive eigenvalue of largest modulus, [...]."""
    gap_ratio: np.ndarray
    """|λ2| / root in [0, 1], [...]: the gap is 1 less this."""


def singular_values(matrices) -> np.ndarray:
    """*Measured*: singular values, largest first.

    Args:
        matrices: [..., H, J].

    Returns:
        [..., min(H, J)] float64.

    Raises:
        ValueError: if `matrices` has no matrix axes or an entry is not finite.
    """
    return np.linalg.svd(_finite(matrices), compute_uv=False)


def rank_one_ratio(matrices) -> np.ndarray:
    """*Measured*: σ2/σ1; 0 for a rank-one matrix, and for the zero matrix.

    Args:
        matrices: [..., H, J] with min(H, J) ≥ 2.

    Returns:
        [...] float64 in [0, 1].

    Raises:
        ValueError: if the matrices have one row or column, or an entry is not finite.
    """
    values = singular_values(matrices)
    if values.shape[-1] < 2:
        raise ValueError(
            f"σ2/σ1 needs at least 2 rows and columns, got shape {np.shape(matrices)}; "
            "put the matrices on the last two axes"
        )
    return _ratio(values[..., 1], values[..., 0])


def numerical_rank(matrices, epsilon: float = FLOAT32_EPSILON) -> np.ndarray:
    """*Measured*: the number of singular values above H·epsilon·σ1, with H the longer side.

    Args:
        matrices: [..., H, J].
        epsilon: relative size of one rounding; the default is float32's, the precision of the
            audited tensors.

    Returns:
        [...] int64; 0 for the zero matrix.

    Raises:
        ValueError: if an entry is not finite.
    """
    values = singular_values(matrices)
    tolerance = max(np.shape(matrices)[-2:]) * epsilon * values[..., :1]
    return np.sum(values > tolerance, axis=-1)


def entropy_rank(matrices, kind: Literal["nuclear", "energy"] = "nuclear") -> np.ndarray:
    """*Measured*: exp of the entropy of the normalised spectrum.

    Args:
        matrices: [..., H, J].
        kind: "nuclear" weighs by σ/Σσ, "energy" by σ²/Σσ².

    Returns:
        [...] float64 between 1 (rank one) and min(H, J) (all directions equal); 0 for the zero
        matrix.

    Raises:
        ValueError: if `kind` is unknown or an entry is not finite.
    """
    if kind not in ("nuclear", "energy"):
        raise ValueError(f"kind={kind!r} is unknown; use 'nuclear' or 'energy'")
    values = singular_values(matrices)
    # Divide by σ1 first: σ² of a collapsed tensor underflows long before σ does.
    weights = _ratio(values, values[..., :1]) ** (1 if kind == "nuclear" else 2)
    weights = _ratio(weights, weights.sum(axis=-1, keepdims=True))
    entropy = -np.sum(weights * np.log(np.where(weights > 0, weights, 1.0)), axis=-1)
    return np.where(values[..., 0] > 0, np.exp(entropy), 0.0)


def cross_head_rms(matrices) -> np.ndarray:
    """*Measured*: how far each head's matrix is from head 0's, RMS(A_n − A_0) / RMS(A_0).

    Args:
        matrices: [..., N, H, J], heads on the third axis from the end, at least two.

    Returns:
        [..., N-1] float64, for heads 1..N-1; 0 where the two are equal, +inf where only head 0 is
        zero.

    Raises:
        ValueError: if there are fewer than two heads or an entry is not finite.
    """
    matrices = _finite(matrices)
    if matrices.ndim < 3 or matrices.shape[-3] < 2:
        raise ValueError(
            f"heads are compared with head 0 and need an axis of at least 2, got {matrices.shape}; "
            "pass [..., heads, rows, columns]"
        )
    first = matrices[..., :1, :, :]
    return _ratio(_rms(matrices[..., 1:, :, :] - first), _rms(first), otherwise=np.inf)


def row_variance_ratio(matrices) -> np.ndarray:
    """*Measured*: the share of a matrix's variance that is between its rows.

    mean (A − Ā)² / mean (A − mean A)², with Ā the mean of the rows.

    Args:
        matrices: [..., H, J].

    Returns:
        [...] float64 in [0, 1]: 0 when all rows are equal, as after collapse; 0 for a constant
        matrix.

    Raises:
        ValueError: if an entry is not finite.
    """
    matrices = _finite(matrices)
    rows = matrices - matrices.mean(axis=-2, keepdims=True)
    entries = matrices - matrices.mean(axis=(-2, -1), keepdims=True)
    return _ratio(np.mean(rows**2, axis=(-2, -1)), np.mean(entries**2, axis=(-2, -1)))


def perron(matrices) -> Perron:
    """*Measured*: the Perron root of positive matrices and |λ2| relative to it.

    A_LM ≥ 1e-9 entrywise, so by the Perron–Frobenius theorem the eigenvalue of largest modulus is
    real, positive and simple.

    Args:
        matrices: [..., H, H], positive.

    Returns:
        `Perron(root, gap_ratio)`, both [...].

    Raises:
        ValueError: if the matrices are not square or an entry is not positive and finite.
    """
    matrices = _finite(matrices)
    if matrices.shape[-1] != matrices.shape[-2] or matrices.shape[-1] < 2:
        raise ValueError(f"a Perron root needs square matrices of width ≥ 2, got {matrices.shape}")
    if matrices.min() <= 0:
        raise ValueError(f"a Perron root needs positive entries, got {matrices.min():g}; pass A_LM")
    moduli = np.sort(np.abs(np.linalg.eigvals(matrices)), axis=-1)
    return Perron(root=moduli[..., -1], gap_ratio=moduli[..., -2] / moduli[..., -1])


class Signature(NamedTuple):
    """How many eigenvalues of the symmetric part are above, below and at zero; int64 [...]."""

    plus: np.ndarray
    minus: np.ndarray
    zero: np.ndarray


def signature(matrices, epsilon: float = FLOAT32_EPSILON) -> Signature:
    """*Measured*: the signature of the symmetric part, which a congruence SᵀGS cannot change.

    Args:
        matrices: [..., H, H].
        epsilon: relative size of one rounding; eigenvalues within H·epsilon·max|λ| count as zero.

    Returns:
        `Signature(plus, minus, zero)`, each [...] and H in all.

    Raises:
        ValueError: if the matrices are not square or an entry is not finite.
    """
    matrices = _square(matrices)
    values = np.linalg.eigvalsh((matrices + matrices.swapaxes(-1, -2)) / 2)
    tolerance = matrices.shape[-1] * epsilon * np.abs(values).max(axis=-1, keepdims=True)
    plus, minus = np.sum(values > tolerance, axis=-1), np.sum(values < -tolerance, axis=-1)
    return Signature(plus, minus, matrices.shape[-1] - plus - minus)


def antisymmetric_share(matrices) -> np.ndarray:
    """*Measured*: ‖(G − Gᵀ)/2‖² / ‖G‖²; about ½ for a random matrix, 0 for a symmetric one and for zero.

    Args:
        matrices: [..., H, H].

    Returns:
        [...] float64 in [0, 1].

    Raises:
        ValueError: if the matrices are not square or an entry is not finite.
    """
    matrices = _square(matrices)
    # Divided by the largest entry first: squares of a collapsed tensor underflow.
    largest = np.abs(matrices).max(axis=(-2, -1), keepdims=True)
    matrices = matrices / np.where(largest == 0, 1.0, largest)
    odd = (matrices - matrices.swapaxes(-1, -2)) / 2
    return _ratio(np.sum(odd**2, axis=(-2, -1)), np.sum(matrices**2, axis=(-2, -1)))


def _square(matrices) -> np.ndarray:
    matrices = _finite(matrices)
    if matrices.shape[-1] != matrices.shape[-2]:
        raise ValueError(f"need square matrices on the last two axes, got {matrices.shape}")
    return matrices


def _finite(matrices) -> np.ndarray:
    matrices = np.asarray(matrices, dtype=np.float64)
    if matrices.ndim < 2:
        raise ValueError(f"matrices must have at least 2 axes, got shape {matrices.shape}")
    if not np.isfinite(matrices).all():
        bad = int(np.sum(~np.isfinite(matrices)))
        raise ValueError(f"{bad} of {matrices.size} entries are not finite; audit the last finite checkpoint")
    return matrices


def _rms(matrices: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(matrices**2, axis=(-2, -1)))


def _ratio(numerator: np.ndarray, denominator: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    """numerator / denominator; 0/0 is 0 and x/0 is `otherwise`."""
    safe = np.where(denominator == 0, 1.0, denominator)
    at_zero = np.where(numerator == 0, 0.0, otherwise)
    return np.where(denominator == 0, at_zero, numerator / safe)
