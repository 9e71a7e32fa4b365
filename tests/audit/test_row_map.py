"""Contraction of the row map: the published Jacobians, finite differences, and maps whose answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.audit.row_map import contraction, metric_learner, normalised_rows, pairwise_ratios
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.ops.power_law import row_map


@pytest.fixture(scope="module")
def model():
    config = PLDRConfig(vocab_size=23, num_layers=2, num_heads=2, head_width=4, residual_units=3, context=32)
    return PLDR(config, rngs=nnx.Rngs(0))


def test_matches_reference(published, golden):
    model, forward = published("float32"), golden("forward_f64")
    audit = golden("audit_small_f64")
    for layer in (0, 1):
        learner = metric_learner(model, layer)
        rows = forward[f"full.L{layer}.gram_ln"][0, 0]
        found = contraction(learner, rows)
        np.testing.assert_allclose(found.largest, audit["jac.composite_smax_smin_layer_row"][layer, :, 0], rtol=1e-12)
        # The LayerNorms forget the mean of a row: what is left of σ_min is rounding, there and here.
        assert max(found.smallest.max(), audit["jac.composite_smax_smin_layer_row"][layer, :, 1].max()) < 1e-15
        np.testing.assert_allclose(found.units[0], audit["jac.unit_smax_row0"][layer], rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_rows_are_those_of_the_published_model(published, golden):
    forward, model = golden("forward_f64"), published()
    ids = jnp.asarray(forward["full.ids"])[:, :-1]
    _, out = jax.jit(lambda model, x: model(x, collect=("q",)))(model, ids)
    for layer in (0, 1):
        found = normalised_rows(metric_learner(model, layer), out.q[layer])
        np.testing.assert_allclose(found, forward[f"full.L{layer}.gram_ln"], atol=1e-12)


def test_jacobian_is_the_limit_of_differences_and_pairs_are_bounded_by_it(model):
    learner, rng = metric_learner(model, 1), np.random.default_rng(0)
    row, step = rng.normal(size=4), 1e-6
    found = contraction(learner, row[None])
    with jax.enable_x64(True):
        phi = lambda r: np.asarray(row_map(jnp.asarray(r), learner.units, epsilon=learner.epsilon))  # noqa: E731
        jacobian = np.stack([(phi(row + step * e) - phi(row - step * e)) / (2 * step) for e in np.eye(4)], -1)
    values = np.linalg.svd(jacobian, compute_uv=False)
    # Central differences of a step of 1e-6 are off by 1e-9 or so.
    assert found.largest[0] == pytest.approx(values[0], rel=1e-7)
    assert found.largest[0] <= found.units[0].prod() * (1 + 1e-12)
    near = row + 1e-7 * rng.normal(size=(6, 4))
    within, across = pairwise_ratios(learner, near, [0, 0, 0, 1, 1, 1])
    assert within.shape == (6,) and across.shape == (9,)
    assert max(within.max(), across.max()) <= found.largest[0] * (1 + 1e-5)


def test_a_collapsed_map_is_measured_below_what_float32_can_hold(model):
    learner = metric_learner(model, 0)
    with jax.enable_x64(True):
        learner.norm_scale[...] = learner.norm_scale[...] * 1e-15
    found = contraction(learner, np.random.default_rng(0).normal(size=(3, 4)))
    assert (found.largest > 0).all()
    assert found.largest.max() < 1e-38


def test_equal_rows_make_no_ratio(model):
    learner = metric_learner(model, 0)
    within, across = pairwise_ratios(learner, np.ones((3, 4)), [0, 0, 1])
    assert within.size == across.size == 0


def test_bad_input_is_refused(model):
    learner = metric_learner(model, 0)
    with pytest.raises(ValueError, match=r"layer=2 must be in 0…1"):
        metric_learner(model, 2)
    constant = PLDR(
        PLDRConfig(vocab_size=23, num_layers=1, num_heads=1, head_width=4, operator="constant"), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="no metric learner"):
        metric_learner(constant, 0)
    for function in (contraction, lambda learner, rows: pairwise_ratios(learner, rows, [0])):
        with pytest.raises(ValueError, match="not finite"):
            function(learner, np.full((1, 4), np.nan))
        with pytest.raises(ValueError, match=r"\(4,\)"):
            function(learner, np.ones(4))
    with pytest.raises(ValueError, match="one group for each of 2"):
        pairwise_ratios(learner, np.ones((2, 4)), [0])
