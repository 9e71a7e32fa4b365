"""The three order parameters against the reference audit, and their rules at zero."""

import numpy as np
import pytest

from plga_jax.audit import order

NAMES = ("A", "A_LM", "A_P", "G_LM")


def stack(forward, name):
    return np.stack([forward[f"full.L{layer}.{name}"] for layer in range(2)])


@pytest.mark.parametrize("name", NAMES)
def test_matches_reference(golden, name):
    # Means and square roots of the same float64 numbers: measured difference 0.
    tensor, reference = stack(golden("forward_f64"), name), golden("audit_small_f64")
    first, second, column = tensor[:, 0], tensor[:, 1], NAMES.index(name)
    within_layer = (1, 2, 3)
    wanted = reference["order_pair_rms_signed"][:, column]
    np.testing.assert_allclose(order.relative_rms(first, second, within_layer), wanted[:, 0], rtol=1e-12)
    np.testing.assert_allclose(order.symmetrised_signed(first, second, within_layer), wanted[:, 1], rtol=1e-12)
    np.testing.assert_allclose(
        order.source_form(first, second),
        reference["order_source_rmse_over_absmean1"][column],
        rtol=1e-12,
    )


@pytest.mark.parametrize("form", [order.relative_rms, order.symmetrised_signed, order.source_form])
def test_equal_tensors_are_at_zero_even_when_all_zero(form):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4))
    np.testing.assert_array_equal(form(x, x, axis=1), np.zeros(3))
    assert form(np.zeros(5), np.zeros(5)) == 0
    # Equal, and with a mean of exactly 0: still 0, not 0/0.
    assert form(np.array([1.0, -1.0]), np.array([1.0, -1.0])) == 0


def test_cancelling_means_are_infinite_in_the_signed_forms_only():
    first, second = np.array([1.0, -1.0]), np.array([2.0, -2.0])
    assert order.symmetrised_signed(first, second) == np.inf
    assert order.source_form(first, second) == np.inf
    assert order.relative_rms(first, second) == pytest.approx(1 / 1.5, rel=1e-12)
    # One mean that does not cancel is enough for the symmetric form, not for the other.
    shifted = second + 1
    assert order.symmetrised_signed(first, shifted) == pytest.approx(np.sqrt(2) / 0.5)
    assert order.source_form(first, shifted) == np.inf
    assert order.source_form(shifted, first) == pytest.approx(np.sqrt(2))


def test_relative_rms_is_symmetric_scale_free_and_at_most_two():
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(2, 6, 6))
    m = order.relative_rms(first, second)
    assert order.relative_rms(second, first) == m
    assert order.relative_rms(1e3 * first, 1e3 * second) == pytest.approx(m, rel=1e-12)
    assert order.relative_rms(first, -first) == pytest.approx(2)


def test_one_rank_of_noise_is_seen_in_proportion():
    base = np.random.default_rng(2).normal(size=(8, 8))
    for size in (1e-2, 1e-5):
        moved = base * (1 + size)
        assert order.relative_rms(base, moved) == pytest.approx(size / (1 + size / 2), rel=1e-9)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="one length"):
        order.relative_rms(np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match="not finite"):
        order.source_form(np.array([np.inf]), np.zeros(1))


class TestSpectral:
    def test_is_nothing_once_rows_and_heads_are_one(self):
        row = np.random.default_rng(0).normal(size=8)
        assert order.spectral(np.broadcast_to(row, (3, 2, 8, 8))).max() < 1e-15
        scaled = np.broadcast_to(row, (2, 8, 8)) * np.arange(1, 3)[:, None, None]
        assert order.spectral(scaled) < 1e-15  # one direction, whatever its length
        assert order.spectral(np.zeros((2, 4, 4))) == 0

    def test_needs_heads_to_agree_not_only_rows(self):
        heads = np.random.default_rng(1).normal(size=(4, 1, 8))
        A = np.broadcast_to(heads, (4, 8, 8))  # each head of rank one, along its own row
        assert order.spectral(A) > 0.5

    def test_follows_the_distance_between_inputs(self):
        """Tensors on the way from random ones to one shared row: it falls in step with m."""
        rng = np.random.default_rng(2)
        shared, first, second = np.broadcast_to(rng.normal(size=8), (4, 8, 8)), *rng.normal(size=(2, 4, 8, 8))
        mixes = [10.0**-k for k in range(6)]
        m = [order.relative_rms(shared + e * first, shared + e * second) for e in mixes]
        found = [order.spectral(shared + e * first) for e in mixes]
        np.testing.assert_allclose(np.diff(np.log10(found))[1:], -1, atol=0.1)
        assert all(0.3 < a / b < 3 for a, b in zip(found[1:], m[1:]))

    def test_small_values_keep_their_digits(self):
        A = np.zeros((1, 2, 2))
        A[0, 0, 0], A[0, 1, 1] = 1.0, 1e-12
        assert order.spectral(A) == pytest.approx(1e-12, rel=1e-9)

    def test_bad_input_is_refused(self):
        with pytest.raises(ValueError, match=r"heads.*\(2, 2\)"):
            order.spectral(np.ones((2, 2)))
        with pytest.raises(ValueError, match="not finite"):
            order.spectral(np.full((1, 2, 2), np.nan))
