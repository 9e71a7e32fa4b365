"""How far given operators can move the logits, proved around what a prompt visits.

Every hidden state x of the prompt under the operators G⁰ gets a ball: whatever the same row becomes under Gˣ lies
within its radius r. The radii go through the model row by row. What is known is used as it is (scores, weights of the
softmax, gates, standard deviations); what is not is at its worst within the ball:

    scores     |q′Gˣk′ − qG⁰k| ≤ |qΔGk| + δq‖Gˣk‖ + ‖qGˣ‖δk + δq‖Gˣ‖δk, by pairs, δq = ‖W_Q‖r and δk alike
    softmax    the exact range of a weight whose scores each move by as much
    head       Σ Δp‖v − o‖ + Σ p′δv, o the head's output, since weights sum to 1 before and after
    LayerNorm  max|γ| / √((σ − r/√D)² + ε), σ the row's own standard deviation; and never more than 2√D max|γ|
    gates      the range of silu between z − δz and z + δz

The difference ΔG is the actual one, so nothing is asked of how it came about. Proved in exact arithmetic; evaluated in
float32, whose rounding the caller allows for.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plga_jax.array_types import Array
from plga_jax.audit.spectra import singular_values
from plga_jax.models.pldr import PLDR
from plga_jax.models.stacking import over_layers
from plga_jax.ops.masks import Mask
from plga_jax.ops.power_law import fold_operator

_SURE = 40.0  # beyond, e^u times a weight may overflow float32, and a weight may be anything anyway
_LEAST = -1.2784645427610738  # where silu is least
_STEEPEST = 2.3993572805154677  # where its slope is largest, and at minus that most negative


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightNorms:
    """Spectral norms of a model's maps, float32 rounded up. L layers, N heads."""

    query: Array
    """‖W_Q‖₂ of each head, [L, N]; likewise `key` and `value`."""
    key: Array
    value: Array
    out: Array
    """‖W_O‖₂, [L]."""
    out_head: Array
    """‖W_O‖₂ of each head's rows, [L, N]."""
    gate: Array
    """‖W₁‖₂ of the feed-forward, [L]; likewise `up` and `down`."""
    up: Array
    down: Array

    @classmethod
    def of(cls, model: PLDR) -> "WeightNorms":
        """*Measured*: by singular values in float64, which takes a while in a large model.

        Args:
            model: a PLDR.

        Returns:
            The norms.
        """
        heads = model.config.num_heads
        attention, ffn = model.layers.attention, model.layers.ffn

        def norm(linear, split: int | None = None) -> Array:
            kernel = np.asarray(linear.kernel[...], np.float64)
            if split is not None:
                kernel = np.stack(np.split(kernel, heads, axis=split), axis=1)
            largest = singular_values(kernel)[..., 0].astype(np.float32)
            return jnp.asarray(np.nextafter(largest, np.float32(np.inf)))

        return cls(
            **{name: norm(getattr(attention, name), split=-1) for name in ("query", "key", "value")},
            out=norm(attention.out),
            out_head=norm(attention.out, split=-2),
            **{name: norm(getattr(ffn, name)) for name in ("gate", "up", "down")},
        )


@jax.jit
def logits_ball(
    model: PLDR, norms: WeightNorms, tokens: Array, segments: Array, frozen: Array, own: Array
) -> tuple[Array, Array]:
    """*Bound*: of every last logit's change between two sets of operators, around the states of the first.

    Args:
        model: a PLDR with one operator per call and head.
        norms: of its weights.
        tokens: int [B, T].
        segments: int [B, T], 1 for tokens and 0 for padding behind them.
        frozen: G⁰, [L, B, N, H, H] or [L, N, H, H].
        own: Gˣ, [L, B, N, H, H].

    Returns:
        The last real row's logits under G⁰ [B, V], and the bound [B], +inf where it overflows.
    """
    frozen = jnp.broadcast_to(frozen if frozen.ndim == own.ndim else frozen[:, None], own.shape)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    meets = Mask(q_positions=positions, k_positions=positions, k_valid=segments > 0).as_array(*[tokens.shape[1]] * 2)

    def step(carry, inputs):
        x, r = carry
        _, layer, norms, G, new = inputs
        attended, moved = _attention(layer, norms, x, r, G, new, positions, meets)
        mixed = layer.attention.out(attended.reshape(x.shape)) + x
        x, r = _layer_norm(layer.attention_norm, mixed, r + moved)
        added, moved = _feed_forward(layer.ffn, norms, x, r)
        return _layer_norm(layer.ffn_norm, added + x, r + moved), None

    x = model.norm(model.embedding[...][tokens] * model.config.model_width**0.5)
    (x, r), _ = over_layers(step, (x, jnp.zeros(tokens.shape)), model.layers, norms, frozen, own)
    last = segments.sum(axis=1, keepdims=True) - 1
    x, r = jnp.take_along_axis(x, last[..., None], axis=1)[:, 0], jnp.take_along_axis(r, last, axis=1)[:, 0]
    bound = r * jnp.linalg.norm(model.head.kernel[...], axis=0).max()
    return model.head(x), jnp.where(jnp.isnan(bound), jnp.inf, bound)


def _attention(layer, norms: WeightNorms, x, r, G, new, positions, meets) -> tuple[Array, Array]:
    """All heads' outputs [B, T, N, H], and how far W_O of them can move, [B, T]."""
    q, k, v = layer.attention.project(x, positions)
    dq, dk, dv = (norm[None, None] * r[..., None] for norm in (norms.query, norms.key, norms.value))  # [B, T, N]
    scale = q.shape[-1] ** -0.5
    reached = jnp.einsum("BNHJ,BSNJ->BSNH", new, k)
    size = jnp.linalg.norm(new, axis=(-2, -1))[:, None]  # Frobenius, [B, 1, N]

    def pairs(left, right):
        return jnp.einsum("BTN...,BSN...->BNTS", left, right, precision=lax.Precision.HIGHEST)

    moved = jnp.abs(pairs(fold_operator(q, new - G), k)) + pairs(dq, jnp.linalg.norm(reached, axis=-1) + size * dk)
    moved = (moved + pairs(jnp.linalg.norm(fold_operator(q, new), axis=-1), dk)) * scale
    scores = pairs(fold_operator(q, G), k) * scale
    weights = jax.nn.softmax(scores, axis=-1, where=meets)
    change = softmax_change(weights, jnp.where(meets, moved, 0))
    attended = jnp.einsum("BNTS,BSNH->BTNH", weights, v, precision=lax.Precision.HIGHEST)

    # ‖v_s − o_t‖ of all pairs, without their differences: [B, N, T, S].
    squares = jnp.sum(jnp.square(v), axis=-1), jnp.sum(jnp.square(attended), axis=-1)
    apart = jnp.moveaxis(squares[1], 1, -1)[..., None] + jnp.moveaxis(squares[0], 1, -1)[..., None, :]
    # The sum of two squares is off by a few roundings, which the root would blow up where v is o.
    apart = jnp.sqrt(jnp.maximum(apart - 2 * pairs(attended, v), 0) + 8 * jnp.finfo(x.dtype).eps * apart)
    dv = jnp.moveaxis(dv, 1, -1)[..., None, :]  # [B, N, 1, S]
    carried = jnp.minimum(jnp.sum((weights + change) * dv, axis=-1), jnp.max(jnp.where(meets, dv, 0), axis=-1))
    head = jnp.moveaxis(jnp.sum(change * apart, axis=-1) + carried, 1, -1)  # [B, T, N]
    return attended, jnp.minimum(norms.out * jnp.linalg.norm(head, axis=-1), head @ norms.out_head)


def softmax_change(weights: Array, moved: Array) -> Array:
    """*Bound*: how far each weight of a softmax can move when each score moves by as much as given; attained.

    A weight is largest when its own score rises and all others fall.

    Args:
        weights: p, [..., S], of sum 1 (or all 0).
        moved: u ≥ 0, [..., S], of each score.

    Returns:
        max |p′ − p|, [..., S].
    """
    up, down = jnp.expm1(jnp.minimum(moved, _SURE)), -jnp.expm1(-moved)

    def others(share):
        # What a sum loses by taking a term out of it again may round below 0.
        return jnp.maximum(jnp.sum(weights * share, axis=-1, keepdims=True) - weights * share, 0)

    rest = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True) - weights, 0)
    rises, falls = rest * up + others(down), rest * down + others(up)
    rises = rises / jnp.maximum(1 + weights * up - others(down), jnp.finfo(weights.dtype).tiny)
    falls = falls / (1 - weights * down + others(up))
    change = weights * jnp.maximum(rises, falls)
    any_value = jnp.maximum(weights, rest)
    unsure = jnp.max(moved, axis=-1, keepdims=True) > _SURE
    return jnp.where(unsure, any_value, jnp.minimum(change, any_value))


def _layer_norm(norm, x: Array, r: Array) -> tuple[Array, Array]:
    """LN(x) and the radius after it."""
    root = x.shape[-1] ** 0.5
    least = jnp.maximum(jnp.std(x, axis=-1) - r / root, 0)
    steepest = jnp.abs(norm.scale[...]).max()
    return norm(x), steepest * jnp.minimum(r / jnp.sqrt(least**2 + norm.epsilon), 2 * root)


def _feed_forward(ffn, norms: WeightNorms, x: Array, r: Array) -> tuple[Array, Array]:
    """GLU(x) and how far it can move, [B, T]."""
    gate, up = ffn.gate(x), ffn.up(x)
    units = {name: jnp.linalg.norm(getattr(ffn, name).kernel[...], axis=0)[None, None] for name in ("gate", "up")}
    d_gate, d_up = units["gate"] * r[..., None], units["up"] * r[..., None]
    opened, range_of_gate = jax.nn.silu(gate), silu_change(gate, d_gate)
    # Unit by unit; or all units at their steepest, which knows that they share one x.
    by_unit = jnp.abs(up) * range_of_gate + d_up * (jnp.abs(opened) + range_of_gate)
    together = (
        jnp.max(jnp.abs(up) * silu_slope(gate, d_gate), axis=-1) * norms.gate
        + jnp.max(jnp.abs(opened) + range_of_gate, axis=-1) * norms.up
    ) * r
    moved = norms.down * jnp.minimum(jnp.linalg.norm(by_unit, axis=-1), together)
    by_output = jnp.linalg.norm(by_unit @ jnp.abs(ffn.down.kernel[...]), axis=-1)
    return ffn(x), jnp.minimum(moved, by_output)


def silu_slope(z: Array, moved: Array) -> Array:
    """*Bound*: the largest |slope| of z·σ(z) within a distance of z; attained.

    Args:
        z: of any shape.
        moved: ≥ 0, of the same shape.

    Returns:
        Of the same shape.
    """
    low, high = z - moved, z + moved

    def slope(z):
        share = jax.nn.sigmoid(z)
        return jnp.abs(share * (1 + z * (1 - share)))

    found = jnp.maximum(slope(low), slope(high))
    for turn in (-_STEEPEST, _STEEPEST):
        inside = (low <= turn) & (turn <= high)
        found = jnp.where(inside, jnp.maximum(found, slope(jnp.asarray(turn, z.dtype))), found)
    return found


def silu_change(z: Array, moved: Array) -> Array:
    """*Bound*: the most that z·σ(z) changes when z moves by at most as much as given; attained but for rounding.

    Args:
        z: of any shape.
        moved: ≥ 0, of the same shape.

    Returns:
        Of the same shape.
    """
    here, low, high = (jax.nn.silu(x) for x in (z, z - moved, z + moved))
    change = jnp.maximum(jnp.abs(low - here), jnp.abs(high - here))
    crossed = jnp.abs(z - _LEAST) <= moved
    change = jnp.where(crossed, jnp.maximum(change, here - jax.nn.silu(jnp.asarray(_LEAST, z.dtype))), change)
    # A difference of nearly equal values is rounding, which the slope has none of.
    rounding = 4 * jnp.finfo(z.dtype).eps * (1 + jnp.abs(z))
    return jnp.minimum(change + rounding, silu_slope(z, moved) * moved)
