"""The scale error of LayerNorm: the published one, and rows for which it is known."""

import numpy as np
import pytest

from plga_jax.audit.layer_norm import scale_error, scale_error_proxy


def test_matches_reference(golden):
    forward, weights = golden("forward_f64"), golden("weights_small")
    for layer in (0, 1):
        rows = forward[f"full.L{layer}.gram"][0].reshape(-1, 16)
        norm = f"decoder.dec_layers.{layer}.mha1.layernorm1"
        found = scale_error(rows, 24, scale=weights[f"{norm}.weight"], bias=weights[f"{norm}.bias"])
        proxy = scale_error_proxy(rows, 24)
        expected = golden("audit_small_f64")["ln_scale.abs_rel_proxy"][layer]
        # A difference of numbers that agree to 1e-5: its own relative rounding is 1e-11.
        np.testing.assert_allclose(np.stack([*found, proxy], -1), expected, rtol=1e-9)


def test_is_nothing_at_length_one_and_the_proxy_for_well_spread_rows():
    rows = np.random.default_rng(0).normal(size=(5, 16))
    np.testing.assert_array_equal(scale_error(rows, 1).absolute, 0)
    found = scale_error(rows, 10, epsilon=1e-9)
    # LN(r) is longer by ε/2 (1/var(r/S) − 1/var(r)): the proxy leaves out the second term, 1 % of the first.
    np.testing.assert_allclose(found.relative, 0.99 * scale_error_proxy(rows, 10, epsilon=1e-9), rtol=1e-5)


def test_rows_without_variance():
    found = scale_error(np.full((1, 4), 3.0), 8)
    assert (found.absolute, found.relative) == (0, 0)
    assert scale_error_proxy(np.full((1, 4), 3.0), 8) == np.inf


def test_bad_input_is_refused():
    for function in (scale_error, scale_error_proxy):
        with pytest.raises(ValueError, match="length=0"):
            function(np.ones((1, 2)), 0)
        with pytest.raises(ValueError, match="epsilon=0"):
            function(np.ones((1, 2)), 1, epsilon=0)
        with pytest.raises(ValueError, match="1 of 2 entries"):
            function(np.array([[1.0, np.nan]]), 1)
