"""Products in bfloat16 against the same products of the rounded operands in float32."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.ops.gated import linear
from plga_jax.ops.narrow import narrow_product


def _operands(rows: int, kernel_dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, 48)).astype(jnp.bfloat16)
    kernel = jax.random.normal(keys[1], (48, 40)).astype(kernel_dtype)
    return x, kernel, jax.random.normal(keys[2], (rows, 40))


def _rounded(x):
    return np.asarray(x.astype(jnp.bfloat16), np.float64)


@pytest.mark.parametrize("rows", [1, 3, 9, 64])
@pytest.mark.parametrize("kernel_dtype", [jnp.float32, jnp.bfloat16])
def test_value_is_the_float32_sum(rows, kernel_dtype):
    x, kernel, _ = _operands(rows, kernel_dtype)
    got = jax.jit(narrow_product)(x, kernel)
    assert got.dtype == jnp.float32
    # Few rows are multiplied with the kernel as it is stored: that is off by its rounding, 2**-9 relative to each term.
    terms = np.abs(_rounded(x)) @ np.abs(_rounded(kernel))
    slack = 2.0**-8 if rows <= 8 and kernel_dtype == jnp.float32 else 1e-6
    assert np.all(np.abs(got - _rounded(x) @ _rounded(kernel)) <= slack * terms)


@pytest.mark.parametrize("rows", [3, 64])
def test_gradients_are_those_of_the_rounded_operands(rows):
    x, kernel, cotangent = _operands(rows)
    _, vjp = jax.vjp(narrow_product, x, kernel)
    d_x, d_kernel = jax.jit(vjp)(cotangent)
    assert (d_x.dtype, d_kernel.dtype) == (jnp.bfloat16, jnp.float32)
    wanted_x, wanted_kernel = _rounded(cotangent) @ _rounded(kernel).T, _rounded(x).T @ _rounded(cotangent)
    # d_x is stored in bfloat16 (half an ulp, 2**-9); d_kernel keeps the float32 sum (48..64 terms, 1e-6 of their size).
    chex.assert_trees_all_close(np.asarray(d_x, np.float64), wanted_x, rtol=2.0**-8, atol=1e-5)
    chex.assert_trees_all_close(np.asarray(d_kernel, np.float64), wanted_kernel, rtol=0, atol=1e-4)


def test_linear_keeps_leading_axes_and_dtype():
    x, kernel, _ = _operands(12)
    bias = jnp.arange(40.0)
    whole = linear(x, kernel, bias)
    split = linear(x.reshape(2, 3, 2, 48), kernel, bias)
    assert whole.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(split.reshape(12, 40), whole)
    wide = linear(x.astype(jnp.float32), kernel, bias)
    chex.assert_trees_all_close(whole.astype(jnp.float32), wide, rtol=2.0**-7, atol=0.25)


def test_training_product_keeps_its_operands_in_bfloat16():
    x, kernel, cotangent = _operands(64)

    def gradients(x, kernel, cotangent):
        return jax.vjp(narrow_product, x, kernel)[1](cotangent)

    text = jax.jit(gradients).lower(x, kernel, cotangent).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 2
    assert all(line.count("xbf16>") >= 2 and "xf32>" in line for line in products)
