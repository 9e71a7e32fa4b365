"""Cliques as tiles in permuted order: exactly the union of the mask, in memory linear in length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.ops.masks import Mask
from ris_jax.geometry import PublishedGeometry
from ris_jax.patterns import WindowGeometry
from ris_jax.structural import CliquePlan, clique_attention, structural_attention
from tests.ris import attention_runs as runs

SMALL = PublishedGeometry(mode="structural", length=70, seeds=4, density=0.03, local=5, anchors=3, block_max=7)
GEOMETRIES = [
    SMALL,
    SMALL.replace(local=0, anchors=0),
    SMALL.replace(anchors=100),
    SMALL.replace(block_max=0),
    SMALL.replace(seeds=1, density=0.0),
    SMALL.replace(seeds=9, density=0.2),
    SMALL.replace(budget="total", block_max=None, length=130, density=0.05),
    SMALL.replace(length=1),
]
each_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=range(len(GEOMETRIES)))

attend = jax.jit(clique_attention, static_argnames="scale")


@pytest.mark.parametrize("name", ["dec_str", "dec_str_pad"])
def test_published_results(golden, name):
    run = runs.load(golden, name)
    attend = functools.partial(structural_attention(run.geometry), scale=run.scale, return_lse=True)
    out, lse = jax.jit(attend)(*run.whole, Mask())
    np.testing.assert_allclose(out[:, :: run.step], run.data["prefill_full64"], rtol=0, atol=1e-6)
    lse = lse.swapaxes(1, 2)[:, :, :: run.step]
    np.testing.assert_allclose(lse, run.data["prefill_lse64"], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("name", "dtype"), [("dec_str", "bfloat16"), ("dec_str_pad", "float16")])
def test_short_floats(golden, name, dtype):
    run = runs.load(golden, name)
    out, _ = attend(*(x.astype(dtype) for x in run.whole), CliquePlan.of(run.geometry), scale=run.scale)
    assert out.dtype == jnp.dtype(dtype)
    out = out[:, :: run.step].astype(np.float32)
    # Both round float32 results once.
    one = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out, run.short("prefill_full", dtype), rtol=one, atol=1e-6)


@each_geometry
def test_is_the_union_of_the_mask_and_every_key_counts_once(geometry):
    q, k, v = runs.random_inputs(0, 1, geometry.length)
    plan = CliquePlan.of(geometry)
    out, _ = attend(q, k, v, plan, scale=0.4)
    np.testing.assert_allclose(out, runs.oracle(q, k, v, geometry.mask(), 0.4), rtol=0, atol=2e-6)
    # With equal scores exp(lse) is the number of a row's pairs.
    _, lse = attend(jnp.zeros_like(q), k, v, plan, scale=0.4)
    np.testing.assert_allclose(np.exp(lse[0, :, 0]), geometry.mask().sum(axis=1), rtol=1e-5)


def test_gradients_reach_the_keys_of_the_mask_and_no_others():
    q, k, v = runs.random_inputs(2, 1, 70, 1, 1, 2)
    plan = CliquePlan.of(SMALL)
    each = jax.vmap(jax.grad(lambda v, t: clique_attention(q, k, v, plan)[0][0, t, 0, 0]), (None, 0))
    reached = jax.jit(each)(v, jnp.arange(70))
    np.testing.assert_array_equal(np.asarray(reached)[:, 0, :, 0, 0] > 0, SMALL.mask())


def test_samples_are_what_nothing_else_gives():
    plan = CliquePlan.of(SMALL)
    for row, samples in enumerate(np.asarray(plan.samples)):
        samples = samples[samples >= 0]
        classes = np.asarray(plan.block_of)
        shared = (classes == classes[:, row : row + 1]).any(axis=0)
        fixed = (np.arange(70) < SMALL.anchors) | (np.arange(70) >= row - SMALL.local)
        expected = np.flatnonzero(SMALL.mask()[row] & ~shared & ~fixed)
        np.testing.assert_array_equal(samples, expected)


def test_a_plan_is_made_once_for_all_programs(monkeypatch):
    q, k, v = runs.random_inputs(3, 1, 45)
    made, of = [], CliquePlan.of
    monkeypatch.setattr(CliquePlan, "of", lambda *args: made.append(args) or of(*args))
    attend = structural_attention(SMALL)
    expected = runs.oracle(q, k, v, SMALL.mask()[:45, :45], 0.4)
    out = jax.jit(lambda *x: attend(*x, scale=0.4))(q, k, v)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    jax.eval_shape(attend, *(jnp.tile(x, (2, 1, 1, 1)) for x in (q, k, v)))
    assert made == [(SMALL, 45)]


def test_memory_is_linear_in_length():
    """Compiled, not run: at 64k one bit per pair of the mask would be 537 MB."""
    T, shape = 2**16, jax.ShapeDtypeStruct
    plan = CliquePlan(
        members=shape((10, 101, 655), jnp.int32),
        block_of=shape((10, T), jnp.int32),
        samples=shape((T, 10), jnp.int32),
        local=1025,
        anchors=256,
    )
    x = shape((1, T, 1, 8), jnp.float32)
    analysis = jax.jit(clique_attention).lower(x, x, x, plan).compile().memory_analysis()
    held = 4 * (3 * T * 8 + 10 * T + T * 10)
    assert analysis.temp_size_in_bytes < 4 * held < T * T / 8 / 10


def test_what_it_cannot_do():
    for geometry in (SMALL.replace(mode="stochastic", block_max=None), WindowGeometry(length=70)):
        with pytest.raises(ValueError, match="structural mode"):
            structural_attention(geometry)
        with pytest.raises(ValueError, match="structural mode"):
            CliquePlan.of(geometry)
    q, k, v = runs.random_inputs(4, 1, 70)
    for mask in (Mask(window=3), Mask(causal=False), Mask.padding(jnp.ones((1, 70), bool))):
        with pytest.raises(ValueError, match="no mask but the causal one"):
            structural_attention(SMALL)(q, k, v, mask)
    with pytest.raises(ValueError, match="length = 71 must be within 1 … 70"):
        CliquePlan.of(SMALL, 71)
    with pytest.raises(ValueError, match="for 30 queries and keys, got 70"):
        clique_attention(q, k, v, CliquePlan.of(SMALL, 30))
