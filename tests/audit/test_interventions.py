"""Interventions: distances, directions and what they leave alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.audit import commutant, spectra
from plga_jax.audit.interventions import DIRECTIONS, mix_operators, operators_from_metric, project_rows
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig

G = np.random.default_rng(0).normal(size=(3, 2, 8, 8))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_direction_goes_equally_far(direction, layout):
    expected = 0.7 * np.linalg.norm(G - commutant.projection(G, layout=layout), axis=(-2, -1))
    moved = mix_operators(G, 0.7, direction=direction, layout=layout)
    np.testing.assert_allclose(np.linalg.norm(moved - G, axis=(-2, -1)), expected, rtol=1e-12)
    np.testing.assert_array_equal(mix_operators(G, 0.0, direction=direction, layout=layout), G)


def test_the_commutant_takes_the_residual_away_and_the_complement_leaves_the_commutant_part():
    np.testing.assert_allclose(commutant.residual(mix_operators(G, 1.0)), 0, atol=1e-15)
    half = mix_operators(G, 0.5)
    assert (commutant.residual(half) < commutant.residual(G)).all()
    control = mix_operators(G, 1.0, direction="complement")
    np.testing.assert_allclose(commutant.projection(control), commutant.projection(G), atol=1e-14)
    free = mix_operators(G, 1.0, direction="random")
    assert np.abs(commutant.projection(free) - commutant.projection(G)).max() > 0.1


def test_seeds_decide_random_directions():
    first, again, other = (mix_operators(G, 1.0, direction="random", seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


def test_rows_become_their_mean_but_for_the_farthest():
    A = np.random.default_rng(1).normal(size=(4, 6, 5))
    found = project_rows(A)
    np.testing.assert_allclose(found, np.broadcast_to(A.mean(1, keepdims=True), A.shape))
    assert spectra.rank_one_ratio(found).max() < 1e-15
    kept = project_rows(A, keep=2)
    stays = (kept == A).all(-1)
    assert (stays.sum(-1) == 2).all()
    distance = np.linalg.norm(A - A.mean(1, keepdims=True), axis=-1)
    assert (np.where(stays, distance, np.inf).min(-1) >= np.where(stays, 0, distance).max(-1)).all()
    np.testing.assert_array_equal(project_rows(A, keep=6), A)


def test_operators_of_a_models_own_metric_are_its_own():
    model = PLDR(PLDRConfig(vocab_size=23, num_layers=2, num_heads=2, head_width=4, residual_units=1), rngs=nnx.Rngs(0))
    _, out = jax.jit(lambda m, x: m(x, collect=("A", "G_LM")))(model, jnp.arange(1, 13).reshape(2, 6))
    np.testing.assert_allclose(operators_from_metric(model, out.A), out.G_LM, rtol=1e-5, atol=1e-6)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="'up'"):
        mix_operators(G, 1.0, direction="up")
    with pytest.raises(ValueError, match="strength=nan"):
        mix_operators(G, np.nan)
    with pytest.raises(ValueError, match="keep=9"):
        project_rows(G, keep=9)
    with pytest.raises(ValueError, match="not finite"):
        project_rows(np.full((2, 2), np.inf))
