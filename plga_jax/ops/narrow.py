"""Products of bfloat16 matrices that really run on bfloat16 instructions, on CPU too.

XLA:CPU has fast bfloat16 kernels (AVX512-BF16, AMX), but it uses them only for `x·W` with a float32 result, the sum
along the last axis of `x` and more than one row. Any other bfloat16 product is turned into a float32 one, after copies
of both operands: results in bfloat16, gradients of kernels, and the float32 cotangents that automatic differentiation
makes. A product of a single row falls into a scalar loop, 50 times slower than reading the same weights in float32.
Hence the explicit forms below. Sums are float32 in all of them, and the gradient of a float32 kernel is never rounded
to bfloat16.
"""

import jax
import jax.numpy as jnp
from jax import lax

from plga_jax.array_types import Array

_FEW_ROWS = 8
"""Up to so many rows, reading the weights takes longer than multiplying, in any dtype."""


@jax.custom_vjp
def narrow_product(x: Array, kernel: Array) -> Array:
    """x·W in bfloat16, summed in float32.

    Args:
        x: bfloat16 [M, D].
        kernel: W, [D, F], in bfloat16, or wider to be rounded on the way.

    Returns:
        [M, F] in float32. Reverse mode only. The cotangent is rounded to bfloat16 before it is multiplied; that of W
        has the dtype of W. On CPU a few rows meet W as it is stored, unrounded.
    """
    if x.shape[0] > _FEW_ROWS:
        return _contract(x, kernel.astype(x.dtype), 1, 0)
    return lax.platform_dependent(
        x,
        kernel,
        cpu=lambda x, kernel: jnp.matmul(x.astype(jnp.float32), kernel.astype(jnp.float32)),
        default=lambda x, kernel: _contract(x, kernel.astype(x.dtype), 1, 0),
    )


def _forward(x, kernel):
    return narrow_product(x, kernel), (x, kernel)


def _backward(residuals, cotangent):
    x, kernel = residuals
    cotangent = cotangent.astype(x.dtype)
    d_x = _contract(cotangent, kernel.astype(x.dtype), 1, 1).astype(x.dtype)
    d_kernel = lax.platform_dependent(x, cotangent, cpu=_outer_sum_by_rows, default=lambda x, g: _contract(x, g, 0, 0))
    return d_x, d_kernel.astype(kernel.dtype)


narrow_product.defvjp(_forward, _backward)


def _contract(a, b, axis_a: int, axis_b: int):
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)


def _outer_sum_by_rows(x, cotangent):
    """xᵀ·g with a transpose that XLA cannot fold back into the product: it takes the rows of xᵀ one by one."""
    return _contract(x.T[jnp.arange(x.shape[1])], cotangent, 1, 0)
