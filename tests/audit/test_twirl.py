"""The twirl: published constants, a brute-force average over rotations, and queries whose answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.audit import commutant, twirl
from plga_jax.ops.rope import rope


def test_constants_and_multipliers_are_the_published_ones(golden):
    audit = golden("audit_small_f64")
    assert len(twirl.frequencies(16)) == audit["n_freqs"]
    # The same formulas on the same float64 angles: no rounding between them.
    assert twirl.twirl_constant(16) == pytest.approx(audit["C_theta"], rel=1e-14)
    assert twirl.twirl_constant(64) == pytest.approx(audit["C_theta_dk64"], rel=1e-14)
    assert round(twirl.twirl_constant(64), 3) == 44968.277
    assert round(twirl.twirl_constant(64) / 1024, 3) == 43.914
    table = []
    for length in (64, 256, 1024):
        found = twirl.multipliers(64, length)
        table.append([found.max(), np.median(found), np.mean(found < 0.1), np.mean(found < 0.01)])
    np.testing.assert_allclose(table, audit["mult_table_dk64"], rtol=1e-12)
    assert twirl.multipliers(64, 1024)[:32].max() == pytest.approx(0.996895, abs=5e-7)  # in-plane frequencies first


def test_no_multiplier_passes_its_bound_and_one_position_averages_nothing():
    omega = twirl.frequencies(16)
    for length in (2, 7, 300):
        found = twirl.multipliers(16, length)
        assert (found <= np.minimum(1, 1 / (length * np.abs(np.sin(omega / 2)))) + 1e-12).all()
        assert found.max() <= twirl.twirl_constant(16) / length + 1e-12
    np.testing.assert_allclose(twirl.multipliers(16, 1), 1)


@pytest.mark.usefixtures("x64")
def test_measured_on_the_published_model(published, golden):
    ids = jnp.asarray(golden("forward_f64")["full.ids"])[:1, :-1]
    _, out = jax.jit(lambda model, x: model(x, collect=("q",)))(published(), ids)
    found = twirl.measure_twirl(out.q[:, 0].swapaxes(1, 2))
    values = [found.commutant_before, found.commutant_after, found.suppression, found.stationarity]
    expected = golden("audit_small_f64")["twirl.commfrac_unrot_rot_suppression_stationarity"]
    # Rotated and turned back: a few roundings.
    np.testing.assert_allclose(np.stack(values, -1), expected, rtol=1e-11)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.usefixtures("x64")
def test_one_query_repeated_is_twirled_as_the_multipliers_say(layout):
    rng, length = np.random.default_rng(0), 50
    q = np.broadcast_to(rng.normal(size=8), (length, 8))
    turned = rope(jnp.asarray(q)[None, :, None], jnp.arange(length)[None], layout=layout)[0, :, 0]
    found = twirl.measure_twirl(turned, layout=layout)
    assert found.stationarity == pytest.approx(0, abs=1e-12)
    moment = np.outer(q[0], q[0])
    averaged = np.asarray(turned).T @ np.asarray(turned) / length
    # The projection of a symmetric moment keeps what commutes: both measures of it must agree.
    for share, matrix in ((found.commutant_before, moment), (found.commutant_after, averaged)):
        kept = np.sum(commutant.projection(matrix, layout=layout) ** 2) / np.sum(matrix**2)
        assert share == pytest.approx(kept, rel=1e-10)
    # Each entry's energy shrinks by its squared multiplier: the whole lies between the extremes.
    squared = twirl.multipliers(8, length) ** 2
    assert 1 - squared.max() - 1e-9 <= found.suppression <= 1 - squared.min() + 1e-9


def test_pooled_suppression_is_of_summed_energies():
    found = twirl.Twirl(
        commutant_before=np.ones(2),
        commutant_after=np.ones(2),
        off_before=np.array([1.0, 9.0]),
        off_after=np.array([0.0, 9.0]),
        stationarity=np.zeros(2),
    )
    np.testing.assert_array_equal(found.suppression, [1, 0])
    assert found.pooled_suppression() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("queries", "layout", "message"),
    [
        (np.ones((1, 4)), "half", "at least 2 rows"),
        (np.ones((2, 3)), "half", "3"),
        (np.ones((2, 4)), "split", "split"),
        (np.full((2, 4), np.inf), "half", "8 of 8"),
    ],
)
def test_bad_input_is_refused(queries, layout, message):
    with pytest.raises(ValueError, match=message):
        twirl.measure_twirl(queries, layout=layout)
    with pytest.raises(ValueError, match="length=0"):
        twirl.multipliers(4, 0)
