"""The five operators that make a power-law graph attention operator G from rotated queries, and its use.

    D̂    = density_operator(q̂)               Gram of the rotated queries
    A    = row_map(D̂, …)                      one residual map φ on every row, shared by rows and heads
    A_LM = positive_tensor(A, W, b_W)         iSwiGLU(W·A + b_W) + 1e-9 > 0
    A_P  = hadamard_power(A_LM, P)            entrywise
    G    = superposition(A_P, a, b_a)         a·A_P + b_a
    score(t, s) = q̂_tᵀ G k̂_s / √H             `fold_operator` turns it into an ordinary dot product

Every function takes any leading axes before [N, H, H] and computes in float32 or better: A_LM spans 1e-9…1e4 and the
power stage turns a relative error of 1e-7 near the floor into 1e-4 of G.

Source: "Power law graph attention: exact generalization of SDPA, empirical collapse at inference", section 2; the
published PLDR-LLM v510 programs fix every convention (left multiplications, missing normalisation of the Gram, the
floor).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from plga_jax.array_types import Array, align, statistics_dtype
from plga_jax.ops.gated import GatedWeights, gated_linear
from plga_jax.ops.norms import layer_norm

FLOOR = 1e-9
"""ε_A, added to A_LM. Representable in bfloat16, not in float16: the chain must never run there."""


class RowMapUnits(NamedTuple):
    """Residual units of a row map, stacked: U units of J gated blocks each."""

    blocks: GatedWeights  # leading axes [U, J]
    norm_scale: Array  # [U, H]
    norm_bias: Array  # [U, H]


def density_operator(q: Array, valid: Array | None = None, *, axis_name: str | None = None) -> Array:
    """The Gram D̂ = Σ_t q̂_t q̂_tᵀ of the rotated queries: the one step of the layer that is not causal.

    Args:
        q: rotated queries, [B, T, N, H].
        valid: bool [B, T], True where a row takes part. None: every row does, padding included, as in the published
            programs.
        axis_name: mapped axis over which the sequence is split; the sum then runs over all its shards.

    Returns:
        [B, N, H, H], symmetric and positive semidefinite, rank ≤ min(T, H). Neither centred nor divided by T.
    """
    q = q.astype(statistics_dtype(q.dtype))
    if valid is not None:
        # where, not a product: a padded row may hold NaN.
        q = jnp.where(valid[:, :, None, None], q, 0)
    gram = jnp.einsum("BTNH,BTNJ->BNHJ", q, q)
    return gram if axis_name is None else jax.lax.psum(gram, axis_name)


def row_map(rows: Array, units: RowMapUnits, *, epsilon: float = 1e-6) -> Array:
    """The residual map φ: r ← LN_u(GLU_{u,J}(…GLU_{u,1}(r)…) + r) for every unit u, on each row alike.

    Args:
        rows: [..., H], LayerNorm of the Gram's rows.
        units: stacked weights. Inside a unit the gated blocks are chained without a skip; the skip goes round the unit.
        epsilon: of the unit's LayerNorm.

    Returns:
        A, [..., H].
    """

    # Recomputed in the backward pass: hidden values of all blocks would be a quarter of a training step's memory
    # (0.5 GB at 110M with 512 tokens), and cost more to write and read back than to make again.
    gated = jax.checkpoint(gated_linear, prevent_cse=False)

    def unit(rows, weights: RowMapUnits):
        inner, _ = jax.lax.scan(lambda r, block: (gated(r, block), None), rows, weights.blocks)
        return layer_norm(inner + rows, weights.norm_scale, weights.norm_bias, epsilon=epsilon), None

    return jax.lax.scan(unit, rows, units)[0]


def iswiglu(z: Array) -> Array:
    """z·silu(z) = z²·sigmoid(z): nonnegative, zero only at zero.

    Args:
        z: any shape.

    Returns:
        The same shape.
    """
    return z * jax.nn.silu(z)


def positive_tensor(A: Array, W: Array, b_W: Array) -> Array:
    """A_LM = iSwiGLU(W·A + b_W) + 1e-9, entrywise positive, so its Perron root is simple.

    Args:
        A: [..., N, H, H].
        W: per head, [N, H, H]; multiplies from the left, so it mixes the *rows* of A.
        b_W: [N, H, H].

    Returns:
        [..., N, H, H], every entry ≥ 1e-9.
    """
    return iswiglu(jnp.einsum("NIH,...NHJ->...NIJ", W, A) + align(b_W, A.ndim)) + FLOOR


def hadamard_power(A_LM: Array, P: Array) -> Array:
    """A_P = A_LM^P entrywise, with A_LM > 0 and exponents of either sign.

    Args:
        A_LM: [..., N, H, H], positive.
        P: [N, H, H], no batch axis.

    Returns:
        [..., N, H, H], positive.
    """
    # exp(P log A) instead of a power: same value for A > 0, and its gradients need no case at A = 0.
    return jnp.exp(align(P, A_LM.ndim) * jnp.log(A_LM))


def superposition(A_P: Array, a: Array, b_a: Array) -> Array:
    """G = a·A_P + b_a.

    Args:
        A_P: [..., N, H, H].
        a: [N, H, H]; multiplies from the left.
        b_a: [N, H, H].

    Returns:
        The operator G, [..., N, H, H]: rows meet the query, columns the key.
    """
    return jnp.einsum("NIH,...NHJ->...NIJ", a, A_P) + align(b_a, A_P.ndim)


def fold_operator(q: Array, G: Array, segment_ids: Array | None = None) -> Array:
    """Folds the bilinear form into the query, so that every attention kernel serves PLGA unchanged: q̂G · k̂ = q̂ᵀGk̂.

    Args:
        q: rotated queries, [B, T, N, H].
        G: [N, H, J], the same for all rows; [B, N, H, J], one per sequence; or [B, X, N, H, J], one per segment.
        segment_ids: int [B, T], needed with the last form: 1…X names a row's operator, 0 is padding.

    Returns:
        [B, T, N, J] in the dtype of `q`. A row whose segment is above X becomes NaN: its operator was never made, and a
        silent one would be wrong.

    Raises:
        ValueError: operators per segment without segment ids.
    """
    G = G.astype(q.dtype)
    if G.ndim == 3:
        return jnp.einsum("BTNH,NHJ->BTNJ", q, G)
    if G.ndim == 4:
        return jnp.einsum("BTNH,BNHJ->BTNJ", q, G)
    if segment_ids is None:
        raise ValueError(f"Operators of shape {G.shape} are per segment: pass segment_ids as well.")
    X = G.shape[1]
    member = segment_ids[:, :, None] == jnp.arange(1, X + 1, dtype=segment_ids.dtype)[None, None, :]
    per_segment = jnp.einsum("BTNH,BXNHJ->BXTNJ", q, G)
    folded = jnp.sum(jnp.where(member.swapaxes(1, 2)[..., None, None], per_segment, 0), axis=1)
    return jnp.where((segment_ids > X)[:, :, None, None], jnp.nan, folded)
