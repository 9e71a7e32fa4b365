"""The gated linear unit, as a function of its weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from plga_jax.array_types import Array
from plga_jax.ops.narrow import narrow_product


class GatedWeights(NamedTuple):
    """Weights of one gated linear unit, or of a stack of them along shared leading axes."""

    gate_kernel: Array  # [..., D, F]
    gate_bias: Array | None  # [..., F]; None, likewise below: no bias
    up_kernel: Array  # [..., D, F]
    up_bias: Array | None  # [..., F]
    down_kernel: Array  # [..., F, D]
    down_bias: Array | None  # [..., D]


def linear(x: Array, kernel: Array, bias: Array | None = None) -> Array:
    """x·W + b over the last axis, computed in the dtype of `x` with sums in float32 or better.

    Args:
        x: [..., D].
        kernel: W, [D, F], of any floating dtype.
        bias: b, [F], likewise; None is no bias.

    Returns:
        [..., F] in the dtype of `x`.
    """
    # One axis of rows: the gradient of W sums over it, and XLA:CPU copies both operands to sum over more axes than one.
    rows = x.reshape(-1, x.shape[-1])
    narrow = x.dtype == jnp.bfloat16
    product = narrow_product(rows, kernel) if narrow else jnp.matmul(rows, kernel.astype(x.dtype))
    if bias is not None:
        product += bias.astype(product.dtype)[None]
    return product.astype(x.dtype).reshape(*x.shape[:-1], -1)


def gated_linear(x: Array, weights: GatedWeights) -> Array:
    """GLU(x) = W₃(silu(W₁x + b₁) ⊙ (W₂x + b₂)) + b₃.

    Args:
        x: [..., D].
        weights: one unit's weights: W₁ gate, W₂ up, W₃ down.

    Returns:
        [..., D].

    Source: Shazeer 2020 (SwiGLU), with or without biases.
    """
    gate = jax.nn.silu(linear(x, weights.gate_kernel, weights.gate_bias))
    up = linear(x, weights.up_kernel, weights.up_bias)
    return linear(gate * up, weights.down_kernel, weights.down_bias)
