"""Balls around visited states: each range against a search for something outside it, and whole models."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.audit.ball import WeightNorms, logits_ball, silu_change, silu_slope, softmax_change
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig

CONFIG = PLDRConfig(vocab_size=23, num_layers=2, num_heads=2, head_width=4, residual_units=1, context=32)


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_softmax_change_is_the_exact_range():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for _ in range(20):
            scores, moved = 2 * rng.normal(size=4), rng.uniform(0, 2, 4)
            corners = scores + moved * np.array(list(itertools.product([-1, 1], repeat=4)))
            reached = np.abs(softmax(corners) - softmax(scores)).max(axis=0)
            found = softmax_change(jnp.asarray(softmax(scores)), jnp.asarray(moved))
            np.testing.assert_allclose(found, reached, rtol=1e-10)


def test_softmax_change_at_the_ends():
    weights = jnp.array([0.25, 0.75, 0.0])
    np.testing.assert_array_equal(softmax_change(weights, jnp.zeros(3)), jnp.zeros(3))
    # A weight may become anything between 0 and 1, and what is masked stays away.
    np.testing.assert_allclose(softmax_change(weights, jnp.array([1e3, 1e3, 0.0])), [0.75, 0.75, 1.0], atol=1e-6)
    np.testing.assert_array_equal(softmax_change(jnp.zeros(3), jnp.zeros(3)), jnp.zeros(3))
    np.testing.assert_array_equal(softmax_change(jnp.ones(1), jnp.ones(1)), jnp.zeros(1))


@pytest.mark.parametrize("width", [0.0, 1e-3, 0.3, 2.0, 30.0])
def test_silu_ranges_hold_everywhere_and_are_attained(width):
    with jax.enable_x64(True):
        z = jnp.linspace(-8, 8, 321)
        around = z[:, None] + width * jnp.linspace(-1, 1, 2001)[None]
        change, slope = silu_change(z, jnp.full_like(z, width)), silu_slope(z, jnp.full_like(z, width))
        moved = jnp.abs(jax.nn.silu(around) - jax.nn.silu(z[:, None])).max(axis=-1)
        steep = jnp.abs(jax.vmap(jax.vmap(jax.grad(jax.nn.silu)))(around)).max(axis=-1)
        assert (moved <= change).all() and (steep <= slope * (1 + 1e-12)).all()
        np.testing.assert_allclose(moved, change, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(steep, slope, rtol=1e-3, atol=2e-3)


@pytest.fixture(scope="module")
def model():
    return PLDR(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def norms(model):
    return WeightNorms.of(model)


def example(seed, B=3, T=9):
    rng = np.random.default_rng(seed)
    tokens = jnp.asarray(rng.integers(1, 23, (B, T)))
    segments = jnp.asarray(np.arange(T) < np.array([[T], [T - 2], [1]]), jnp.int32)
    frozen, way = (rng.normal(size=(2, B, 2, 4, 4)).astype(np.float32) for _ in range(2))
    return tokens, segments, jnp.asarray(frozen), jnp.asarray(way)


def last_logits(model, tokens, segments, operators):
    logits, _ = model(tokens, segment_ids=segments, num_segments=1, operators=operators, last_only=True)
    return logits[:, 0]


@pytest.mark.parametrize("size", [0.0, 1e-5, 1e-3, 0.1, 10.0])
def test_logits_stay_in_their_ball(model, norms, size):
    run = jax.jit(last_logits)
    for seed in range(4):
        tokens, segments, frozen, way = example(seed)
        logits, bound = logits_ball(model, norms, tokens, segments, frozen, frozen + size * way)
        np.testing.assert_allclose(logits, run(model, tokens, segments, frozen), atol=1e-4)
        moved = np.abs(run(model, tokens, segments, frozen + size * way) - logits).max(axis=-1)
        assert (moved <= bound + 1e-4).all()
        if size == 0:
            np.testing.assert_array_equal(bound, np.zeros(3))
        if size == 1e-5:
            # Near enough, the bound is a fixed multiple: no constant is left over.
            _, tenth = logits_ball(model, norms, tokens, segments, frozen, frozen + size / 10 * way)
            np.testing.assert_allclose(np.asarray(bound[:2]) / tenth[:2], 10, rtol=0.3)
            assert bound[2] == 0  # one token attends to itself, whatever the operator


def test_norms_are_above_every_stretch(model, norms):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, CONFIG.model_width))
    for name in ("gate", "up"):
        kernel = np.asarray(getattr(model.layers.ffn, name).kernel[...], np.float64)
        stretch = np.linalg.norm(np.einsum("ED,LDF->LEF", x, kernel), axis=-1) / np.linalg.norm(x, axis=-1)
        assert (stretch <= np.asarray(getattr(norms, name))[:, None]).all()
    heads = np.asarray(model.layers.attention.query.kernel[...]).reshape(2, -1, 2, 4)
    largest = np.linalg.svd(np.moveaxis(heads, 2, 1), compute_uv=False)[..., 0]
    np.testing.assert_allclose(norms.query, largest, rtol=1e-6)
