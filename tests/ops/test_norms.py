"""Layer normalisation: statistics, invariances, dtypes."""

import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.ops.gated import GatedWeights, gated_linear
from plga_jax.ops.norms import layer_norm


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.usefixtures("x64")
class TestLayerNorm:
    def test_shift_is_exact_and_scale_holds_without_epsilon(self):
        x, one, zero = draw(0, 5, 8), jnp.ones(8), jnp.zeros(8)
        base = layer_norm(x, one, zero)
        np.testing.assert_allclose(layer_norm(x + 3.0, one, zero), base, rtol=1e-10, atol=1e-12)
        without = layer_norm(x, one, zero, epsilon=0.0)
        np.testing.assert_allclose(layer_norm(x * 1e-3, one, zero, epsilon=0.0), without, rtol=1e-9)
        assert jnp.abs(layer_norm(x * 1e-3, one, zero) - base).max() > 0.1

    def test_sum_of_squares(self):
        # Σu² = d·v/(v + ε), with v the biased variance.
        x = draw(0, 5, 8) * 1e-3
        u, v = layer_norm(x, jnp.ones(8), jnp.zeros(8)), jnp.var(x, axis=-1)
        np.testing.assert_allclose(jnp.sum(u**2, axis=-1), 8 * v / (v + 1e-6), rtol=1e-12)

    def test_scale_and_bias(self):
        x, scale, bias = draw(0, 5, 8), draw(1, 8), draw(2, 8)
        plain = layer_norm(x, jnp.ones(8), jnp.zeros(8))
        np.testing.assert_allclose(layer_norm(x, scale, bias), plain * scale[None] + bias[None], rtol=1e-12)


def test_large_means_do_not_cancel_the_variance():
    # Gram rows: mean 1e4, spread 1. In float32 E[x²] − E[x]² would be off by tens of percent.
    x = (draw(0, 3, 64) + 1e4).astype(jnp.float32)
    exact = (np.float64(x) - np.float64(x).mean(-1, keepdims=True)) / np.float64(x).std(-1, keepdims=True)
    # The mean itself, about 1e4, is a float32 with spacing 1e-3: that is the error left, and all of it.
    np.testing.assert_allclose(layer_norm(x, jnp.ones(64), jnp.zeros(64)), exact, atol=2e-3)


def test_bfloat16_has_float32_statistics():
    x = draw(0, 3, 64).astype(jnp.bfloat16)
    out = layer_norm(x, jnp.ones(64), jnp.zeros(64))
    assert out.dtype == jnp.bfloat16
    wide = layer_norm(x.astype(jnp.float32), jnp.ones(64), jnp.zeros(64))
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))


@pytest.mark.usefixtures("x64")
def test_gated_linear_follows_the_definition():
    D, F = 4, 6
    w = GatedWeights(draw(1, D, F), draw(2, F), draw(3, D, F), draw(4, F), draw(5, F, D), draw(6, D))
    x, arrays = np.asarray(draw(0, 5, D)), w
    w = GatedWeights(*map(np.asarray, w))
    gate = x @ w.gate_kernel + w.gate_bias
    hidden = gate / (1 + np.exp(-gate)) * (x @ w.up_kernel + w.up_bias)
    expected = hidden @ w.down_kernel + w.down_bias
    np.testing.assert_allclose(gated_linear(jnp.asarray(x), arrays), expected, rtol=1e-12)
