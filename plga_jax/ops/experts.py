"""A mixture of experts: gated units of which each token uses the few that `routing` chose for it.

    y = Σ_r weight_r · GLU_{expert_r}(x)  (+ a shared expert)

One contract, four ways to compute it:

    ragged    choices sorted by expert, `lax.ragged_dot` over the groups: k/X of the work of "dense"
    dense     every expert on every token, one expert after another, what was not chosen weighted by 0
    dispatch  one-hot products into places [X, B, C] and back; the places are what devices exchange
    gather    the weights of each choice fetched for it: a few tokens, as in decoding, read the experts they use only

Beyond the letters of `array_types`: R is the rank of a choice, C a place of an expert (as many as its capacity).
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from plga_jax.array_types import Array, statistics_dtype
from plga_jax.ops.gated import GatedWeights, gated_linear
from plga_jax.ops.routing import ExpertsConfig, Routing, check_pieces


class ExpertsFn(Protocol):
    """Where experts are computed: `(x, routing, weights, config) -> y`, all as in `apply_experts`."""

    def __call__(self, x, routing, weights, config): ...


def apply_experts(x: Array, routing: Routing, weights: GatedWeights, config: ExpertsConfig) -> Array:
    """The weighted sum of each token's experts.

    Args:
        x: [B, T, D].
        routing: of these tokens.
        weights: of all experts, stacked: [X, D, F], [X, F, D], biases [X, F] and [X, D] or None.
        config: names the implementation. None takes "gather" for no more choices than there are experts, else "ragged",
            or on CPU "dense": `ragged_dot` does all the work there too, and holds X copies of the rows.

    Returns:
        [B, T, D] in the dtype of `x`; 0 for padding and for tokens that were dropped everywhere.

    Raises:
        ValueError: shapes that do not go together.
    """
    X, D = config.num_experts, x.shape[-1]
    if weights.gate_kernel.shape[:2] != (X, D):
        raise ValueError(f"the experts' kernels are {weights.gate_kernel.shape}, expected [{X}, {D}, F].")
    if x.shape[:2] != routing.valid.shape:
        raise ValueError(f"x is {x.shape}, but the routing is of {routing.valid.shape} tokens.")
    name = config.implementation
    if name is None:
        few = routing.experts.size <= X
        name = "gather" if few else "dense" if jax.default_backend() == "cpu" else "ragged"
    # Padding may hold anything; products with 0 would not make NaN vanish.
    x = jnp.where(routing.valid[..., None], x, 0)
    compute = {"ragged": _ragged, "dense": _dense, "dispatch": _dispatch, "gather": _gather}[name]
    return compute(x, routing, weights, config).astype(x.dtype)


def places(x: Array, routing: Routing, config: ExpertsConfig) -> Array:
    """Every token put into the places it got.

    Args:
        x: [B, T, D], 0 at padding.
        routing: of these tokens.
        config: its capacity says how many places there are; without one, T.

    Returns:
        [X, B, C, D]; 0 in empty places.
    """
    one_hot = jnp.einsum("BTRX,BTRC->BTXC", *_one_hots(routing, config, x.dtype))
    return jnp.einsum("BTXC,BTD->XBCD", one_hot, x, precision=lax.Precision.HIGHEST)


def from_places(y: Array, routing: Routing, config: ExpertsConfig) -> Array:
    """The weighted sum of each token's results, from the places of `places`.

    Args:
        y: [X, B, C, D].
        routing: as given to `places`.
        config: likewise.

    Returns:
        [B, T, D] in float32 or better.
    """
    dtype = statistics_dtype(y.dtype)
    shares = jnp.einsum("BTRX,BTRC,BTR->BTXC", *_one_hots(routing, config, dtype), routing.weights.astype(dtype))
    return jnp.einsum("BTXC,XBCD->BTD", shares, y.astype(dtype), precision=lax.Precision.HIGHEST)


def _one_hots(routing: Routing, config: ExpertsConfig, dtype) -> tuple[Array, Array]:
    """Expert [B, T, R, X] and place [B, T, R, C] of each choice; all 0 for the place of one that was dropped."""
    C = max(config.capacity(routing.valid.shape[1]), 1)
    slots = jnp.where(routing.kept, routing.slots, C)
    return jax.nn.one_hot(routing.experts, config.num_experts, dtype=dtype), jax.nn.one_hot(slots, C, dtype=dtype)


def each_expert(x: Array, weights: GatedWeights) -> Array:
    """Each expert on rows of its own.

    Args:
        x: [X, ..., D].
        weights: stacked along X.

    Returns:
        [X, ..., D].
    """
    return jax.vmap(gated_linear)(x, weights)


def shared_expert(x: Array, weights: GatedWeights, gate_kernel: Array | None = None) -> Array:
    """The expert that every token goes to, scaled by sigmoid(x·w) where there is a gate.

    Args:
        x: [..., D].
        weights: of one gated unit.
        gate_kernel: w, [D, 1]; None is no gate.

    Returns:
        [..., D] in the dtype of `x`.

    Source: Dai et al. 2024 (DeepSeekMoE), section 3.2; the gate is Qwen2-MoE's.
    """
    y = gated_linear(x, weights)
    if gate_kernel is None:
        return y
    dtype = statistics_dtype(x.dtype)
    gate = jax.nn.sigmoid(jnp.matmul(x.astype(dtype), gate_kernel.astype(dtype)))
    return (gate * y.astype(dtype)).astype(y.dtype)


def split_experts(weights: GatedWeights, pieces: int) -> GatedWeights:
    """Cuts each expert along its hidden width into `pieces` experts whose results add up to its own.

    Args:
        weights: [X, D, F], [X, F, D] and biases.
        pieces: divides F.

    Returns:
        pieces·X experts, those of one original side by side; for `ExpertsConfig.fine_grained`.

    Raises:
        ValueError: the width cannot be cut into so many.
    """
    X, D, F = weights.gate_kernel.shape
    check_pieces(pieces, F)

    def columns(kernel):
        return kernel.reshape(X, D, pieces, -1).swapaxes(1, 2).reshape(X * pieces, D, -1)

    def cut(bias):
        return None if bias is None else bias.reshape(X * pieces, -1)

    down_bias = None if weights.down_bias is None else jnp.repeat(weights.down_bias / pieces, pieces, axis=0)
    return GatedWeights(
        gate_kernel=columns(weights.gate_kernel),
        gate_bias=cut(weights.gate_bias),
        up_kernel=columns(weights.up_kernel),
        up_bias=cut(weights.up_bias),
        down_kernel=weights.down_kernel.reshape(X * pieces, -1, D),
        down_bias=down_bias,
    )


def _dense(x, routing, weights, config):
    dtype = statistics_dtype(x.dtype)
    held = jax.nn.one_hot(routing.experts, config.num_experts, dtype=dtype)
    shares = jnp.einsum("BTRX,BTR->XBT", held, routing.weights.astype(dtype))

    # One expert's activations at a time, in the backward pass too.
    @jax.checkpoint
    def step(y, expert):
        share, own = expert
        return y + share[..., None] * gated_linear(x, own).astype(dtype), None

    return lax.scan(step, jnp.zeros_like(x, dtype), (shares, weights))[0]


def _dispatch(x, routing, weights, config):
    return from_places(each_expert(places(x, routing, config), weights), routing, config)


def _gather(x, routing, weights, config):
    experts = routing.experts.reshape(-1)
    own = jax.tree.map(lambda held: held[experts], weights)
    rows = jnp.repeat(x.reshape(-1, x.shape[-1]), config.num_chosen, axis=0)
    return _weighted(jax.vmap(gated_linear)(rows, own), routing)


def _ragged(x, routing, weights, config):
    X, k = config.num_experts, config.num_chosen
    # What was dropped sorts behind the last group, where `ragged_dot` gives 0.
    experts = jnp.where(routing.kept, routing.experts, X).reshape(-1)
    order = jnp.argsort(experts, stable=True)
    experts = experts[order]
    sizes = jnp.zeros(X, jnp.int32).at[experts].add(1, mode="drop")
    rows = x.reshape(-1, x.shape[-1])[order // k]

    def linear(rows, kernel, bias):
        sums = statistics_dtype(x.dtype)
        y = lax.ragged_dot(rows, kernel.astype(rows.dtype), sizes, preferred_element_type=sums)
        return (y if bias is None else y + bias.astype(sums)[experts]).astype(x.dtype)

    gate = jax.nn.silu(linear(rows, weights.gate_kernel, weights.gate_bias))
    up = linear(rows, weights.up_kernel, weights.up_bias)
    y = linear(gate * up, weights.down_kernel, weights.down_bias)
    return _weighted(y[jnp.argsort(order)], routing)


def _weighted(y: Array, routing: Routing) -> Array:
    """Results of all choices [B·T·R, D], token by token, to [B, T, D] in float32 or better."""
    dtype = statistics_dtype(y.dtype)
    y = y.reshape(*routing.weights.shape, -1).astype(dtype)
    return jnp.einsum("BTRD,BTR->BTD", y, routing.weights.astype(dtype))
