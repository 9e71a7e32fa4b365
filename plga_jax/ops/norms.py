"""Normalisation over the last axis, with statistics in float32 or better."""

import jax
import jax.numpy as jnp

from plga_jax.array_types import Array, align, statistics_dtype


def layer_norm(x: Array, scale: Array, bias: Array, *, epsilon: float = 1e-6) -> Array:
    """Layer normalisation with biased variance.

    Args:
        x: [..., D].
        scale: γ, [D].
        bias: β, [D].
        epsilon: added to the variance. Scaling `x` changes the result through this term only.

    Returns:
        [..., D] in the dtype of `x`.

    Source: Ba et al. 2016; PLDR-LLM uses ε = 1e-6 in every LayerNorm.
    """
    dtype = statistics_dtype(x.dtype)
    centred = x.astype(dtype) - jnp.mean(x, axis=-1, keepdims=True, dtype=dtype)
    # The variance of the centred values, not E[x²] − E[x]²: Gram rows have means far above their spread.
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + epsilon)
    out = normed * align(scale.astype(dtype), x.ndim) + align(bias.astype(dtype), x.ndim)
    return out.astype(x.dtype)


def rms_norm(x: Array, scale: Array, *, epsilon: float = 1e-6) -> Array:
    """Root-mean-square normalisation.

    Args:
        x: [..., D].
        scale: γ, [D].
        epsilon: added to the mean square.

    Returns:
        [..., D] in the dtype of `x`.

    Source: Zhang and Sennrich 2019, eq. 4, with ε inside the root as in Llama.
    """
    dtype = statistics_dtype(x.dtype)
    wide = x.astype(dtype)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (normed * align(scale.astype(dtype), x.ndim)).astype(x.dtype)
