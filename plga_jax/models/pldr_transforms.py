"""PLDR-LLMs made from PLDR-LLMs: exact changes of weights that keep the function, or freeze part of it."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx

from plga_jax.array_types import Array
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_layers import Constant
from plga_jax.ops.rope import commutant_projection, half_split_permutation


def operators_of(model: PLDR, tokens: Array) -> Array:
    """The operators a model makes for one sequence, batch axis dropped.

    Args:
        model: of learned operators.
        tokens: int [T], without padding; the empty prompt is the single end-of-text token.

    Returns:
        G, [L, N, H, H]; of a cumulative Gram those that serve the last token.
    """
    _, out = model(jnp.asarray(tokens)[None], collect=("G_LM",))
    return out.G_LM[:, 0] if model.config.gram_refresh is None else out.G_LM[:, 0, -1]


def constant_operator_model(model: PLDR, operators: Array) -> PLDR:
    """v510G from a v510: the same weights, with constant operators in place of the metric learners.

    Args:
        model: of learned operators.
        operators: G, [L, N, H, H]. v510Gi takes those of the empty prompt: `operators_of(model, [eos])`.

    Returns:
        A model of `operator="constant"`; given operators G it equals `model(…, operators=G)` exactly.
    """
    config = dataclasses.replace(model.config, operator="constant", gram_refresh=None)
    abstract = nnx.eval_shape(lambda: PLDR(config, rngs=nnx.Rngs(0)))
    graphdef, params, constant = nnx.split(abstract, nnx.Param, Constant)
    own = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    shared = [(path, own[path]) for path, _ in nnx.to_flat_state(params)]
    return nnx.merge(graphdef, nnx.from_flat_state(shared), constant).with_operators(operators)


def convert_rope_layout(model: PLDR) -> PLDR:
    """The same function with the other rotary plane layout: interleaved ↔ half-split, exactly.

    Every axis of width H that meets a rotated query or key is permuted by π (or its inverse): the outputs of W_Q and
    W_K, the columns of A and of all that acts on them, both sides of G. Then A → A[π, π], A_LM → A_LM[:, π],
    G → G[π, π].

    Args:
        model: of either layout.

    Returns:
        A model of the other layout; logits agree up to rounding.
    """
    config = model.config
    to_half = config.rope_layout == "interleaved"
    pi = half_split_permutation(config.head_width)
    if not to_half:
        pi = np.argsort(pi)

    def heads(x):
        shape = (*x.shape[:-1], config.num_heads, config.head_width)
        return x.reshape(shape)[..., pi].reshape(x.shape)

    def columns(x):
        return x[..., pi]

    def rows(x):
        return x[..., pi, :]

    attention = ("layers", "attention")
    metric = (*attention, "metric")
    changes: dict[tuple[str, ...], Callable] = {
        (*attention, part, name): heads for part in ("query", "key") for name in ("kernel", "bias")
    }
    changes |= {(*metric, "gram_norm", name): columns for name in ("scale", "bias")}
    changes |= {(*metric, name): columns for name in ("norm_scale", "norm_bias", "down_kernel", "down_bias")}
    changes |= {(*metric, name): rows for name in ("gate_kernel", "up_kernel")}
    # A is permuted on both sides, A_LM and A_P on their columns only: W takes rows of the new A back to the old order.
    changes |= {(*metric, name): columns for name in ("W", "b_W", "P")}
    changes |= {(*metric, "a"): rows, (*metric, "b_a"): lambda x: rows(columns(x))}
    changes |= {(*attention, "G"): lambda x: rows(columns(x))}
    layout = "half" if to_half else "interleaved"
    return _replace(model, changes, dataclasses.replace(config, rope_layout=layout))


def absorb_operators(model: PLDR, *, tolerance: float = 1e-6) -> PLDR:
    """Folds constant operators that commute with the rotary embedding into W_Q: ordinary attention, the same function.

    Rotation and such a G may change places, R(x W_Q + b) G = R((x W_Q + b) G), so the new query map is affine, W_Q G
    and b G.

    Args:
        model: of constant operators.
        tolerance: the largest relative commutant residual ‖G − Π G‖ / ‖G‖ that still counts as commuting.

    Returns:
        A model whose operators are the identity.

    Raises:
        ValueError: learned operators, or a G that does not commute; the largest residual and its place are named.
    """
    config = model.config
    if config.operator != "constant":
        raise ValueError("Only constant operators can be absorbed; make them with constant_operator_model.")
    G = model.layers.attention.G[...]
    off = jnp.linalg.norm(G - commutant_projection(G, layout=config.rope_layout), axis=(-2, -1))
    residual = off / jnp.maximum(jnp.linalg.norm(G, axis=(-2, -1)), jnp.finfo(G.dtype).tiny)
    if (worst := float(residual.max())) > tolerance:
        layer, head = np.unravel_index(int(residual.argmax()), residual.shape)
        raise ValueError(
            f"G of layer {layer}, head {head} does not commute with the rotary embedding: relative residual "
            f"{worst:.3g} exceeds {tolerance:.3g}. Keep the constant-operator model, or project G with "
            "commutant_projection first."
        )

    def fold(x):
        heads = x.reshape(*x.shape[:-1], config.num_heads, config.head_width)
        folded = jnp.einsum("L...NH,LNHJ->L...NJ", heads, G)
        return folded.reshape(x.shape)

    query = ("layers", "attention", "query")
    identity = jnp.broadcast_to(jnp.eye(config.head_width, dtype=G.dtype), G.shape)
    changes = {(*query, name): fold for name in ("kernel", "bias")}
    return _replace(model, changes, config).with_operators(identity)


def _replace(model: PLDR, changes: dict[tuple[str, ...], Callable], config) -> PLDR:
    """A model of `config` with some arrays changed; paths that this model does not have are passed over."""
    abstract = nnx.eval_shape(lambda: PLDR(config, rngs=nnx.Rngs(0)))
    state = [
        (path, variable.replace(changes[path](variable[...])) if path in changes else variable)
        for path, variable in nnx.to_flat_state(nnx.state(model))
    ]
    return nnx.merge(nnx.graphdef(abstract), nnx.from_flat_state(state))
