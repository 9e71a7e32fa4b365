"""The letters that name array axes everywhere in this project, and the types that go with them.

    B  batch                   T  query length            S  key length
    N  query heads             K  key/value heads         H  head width
    D  model width             F  hidden width            L  layers
    V  vocabulary              E  expanded width          M  recurrent state width
    W  convolution width       X  experts or segments     U  residual units of a metric learner

Arrays are laid out BTNH. Einsum strings and docstrings use the same letters; a letter used twice in one shape (the `HH`
of an operator, say) is written `HJ` where the two roles differ: H the query side, J the key side.
"""

from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp

Array: TypeAlias = jax.Array
DType: TypeAlias = jnp.dtype | type
PRNGKey: TypeAlias = jax.Array
"""A typed key, as made by `jax.random.key`."""


class AttentionFn(Protocol):
    """Where the pairs are computed: `(q, k, v, mask, *, scale, return_lse) -> out | (out, lse)`.

    q is [B, T, N, H]; k and v are [B, S, K, H] with N a multiple of K; out is [B, T, N, H] and lse [B, T, N] in float32
    or better.
    """

    def __call__(self, q, k, v, mask=None, *, scale=None, return_lse=False): ...


def statistics_dtype(dtype: DType) -> DType:
    """The dtype in which softmax statistics, norms, angles and the power-law chain of `dtype` arrays are held.

    Args:
        dtype: a floating dtype.

    Returns:
        float64 for float64, else float32: never less.
    """
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def align(x: Array, ndim: int) -> Array:
    """Adds leading axes of size one, so that `x` meets an array of `ndim` axes without implicit rank promotion.

    Args:
        x: an array of at most `ndim` axes.
        ndim: the wanted number of axes.

    Returns:
        The same values with shape `(1,) * (ndim - x.ndim) + x.shape`.
    """
    return jnp.expand_dims(x, range(ndim - x.ndim))
