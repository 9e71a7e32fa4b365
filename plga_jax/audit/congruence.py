"""Carrying operators from one model to another: the law is a congruence, not a similarity.

If the second model's rotated queries and keys are those of the first in another basis, q₂ = S q₁ and k₂ = S k₁, then
q₂ᵀG₂k₂ = q₁ᵀG₁k₁ for all of them exactly when G₂ = S⁻ᵀ G₁ S⁻¹. Such a change of basis keeps the rank of G and the
signature of its symmetric part, and not its eigenvalues. A similarity S G₁ S⁻¹ keeps eigenvalues and not the scores:
it is the wrong control.
"""

import dataclasses

import numpy as np

from plga_jax.audit import spectra


@dataclasses.dataclass(frozen=True, kw_only=True)
class Basis:
    """S of one head, fitted on aligned rows."""

    S: np.ndarray
    """[H, H] float64: x₂ = S x₁."""
    residual: float
    """‖X₂ − X₁Sᵀ‖ / ‖X₂‖ of the rows it was fitted on: 0 if one is the other in another basis, up to 1 if they have
    nothing in common."""
    condition: float
    """σ_max(S) / σ_min(S)."""


def fit_basis(first, second) -> Basis:
    """*Measured*: the least-squares S with x₂ = S x₁ over aligned rows, queries and keys together.

    Args:
        first: rotated queries and keys of the first model, [R, H], R ≥ H.
        second: those of the second for the same tokens, [R, H].

    Returns:
        A `Basis`.

    Raises:
        ValueError: shapes that do not match, fewer rows than H, an entry that is not finite, or rows that do not span.
    """
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.ndim != 2 or first.shape != second.shape or len(first) < first.shape[1]:
        raise ValueError(f"rows {first.shape} and {second.shape} must both be [R, H] with R ≥ H: align more tokens")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("an entry is not finite; audit the last finite checkpoint")
    solution, _, rank, _ = np.linalg.lstsq(first, second, rcond=None)
    if rank < first.shape[1]:
        raise ValueError(f"the first rows span {rank} of {first.shape[1]} dimensions: align more varied tokens")
    values = np.linalg.svd(solution, compute_uv=False)
    if values[-1] <= values[0] * first.shape[1] * np.finfo(np.float64).eps:
        raise ValueError("the fitted S is singular: the second rows do not span, so nothing can be carried over")
    size = np.linalg.norm(second)
    return Basis(
        S=solution.T,
        residual=float(np.linalg.norm(second - first @ solution) / size) if size else 0.0,
        condition=float(values[0] / values[-1]),
    )


def congruent(G, S) -> np.ndarray:
    """*Measured*: S⁻ᵀ G S⁻¹, the operator that gives the same scores in the new basis.

    Args:
        G: [H, H].
        S: [H, H], invertible.

    Returns:
        [H, H] float64.
    """
    G, S = np.asarray(G, np.float64), np.asarray(S, np.float64)
    # Solved on both sides, which loses less than an inverse.
    return np.linalg.solve(S.T, np.linalg.solve(S.T, G.T).T)


def similar(G, S) -> np.ndarray:
    """*Measured*: S G S⁻¹, the wrong law, as a control.

    Args:
        G: [H, H].
        S: [H, H], invertible.

    Returns:
        [H, H] float64.
    """
    G, S = np.asarray(G, np.float64), np.asarray(S, np.float64)
    return np.linalg.solve(S.T, (S @ G).T).T


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """How well each law gives the second model's scores; relative RMS over all pairs of queries and keys."""

    congruence: float
    similarity: float
    untouched: float
    """G₁ as it is."""
    same_rank: bool
    """Whether the congruent operator has the numerical rank of G₁."""
    same_signature: bool
    """Whether its symmetric part has the signature of G₁'s."""


def compare_laws(G, basis: Basis, queries, keys, scores) -> Transfer:
    """*Measured*: the scores that carried operators give, against those that are wanted.

    Args:
        G: G₁, [H, H].
        basis: S.
        queries: the second model's rotated queries, [T, H].
        keys: its keys, [U, H].
        scores: wanted, [T, U], such as q₁ᵀG₁k₁ of the same tokens in the first model.

    Returns:
        A `Transfer`.

    Raises:
        ValueError: shapes that do not match.
    """
    q, k, wanted = (np.asarray(x, np.float64) for x in (queries, keys, scores))
    if wanted.shape != (len(q), len(k)):
        raise ValueError(f"scores {wanted.shape} must be of {len(q)} queries and {len(k)} keys")

    def error(operator) -> float:
        return float(np.linalg.norm(q @ operator @ k.T - wanted) / np.linalg.norm(wanted))

    carried = congruent(G, basis.S)
    return Transfer(
        congruence=error(carried),
        similarity=error(similar(G, basis.S)),
        untouched=error(np.asarray(G, np.float64)),
        same_rank=bool(spectra.numerical_rank(carried) == spectra.numerical_rank(G)),
        same_signature=all(a == b for a, b in zip(spectra.signature(carried), spectra.signature(G))),
    )
