"""Caches by themselves: what is appended is held, and int8 within half a step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.caches import Int8KVCache, KVCache
from plga_jax.generate import generate
from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.ops.attention import attention

SIZES = (2, 3, 8, 2, 16)  # layers, rows, capacity, heads, width
CONFIG = DecoderConfig(
    vocab_size=61,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=16,
    model_width=32,
    hidden_width=48,
    context=64,
)


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


def filled(cache, T=5, seed=0, dtype=jnp.float32):
    """One layer with T tokens a row, the last row's first being padding; and what was written."""
    rng = np.random.default_rng(seed)
    k, v = (jnp.asarray(rng.standard_normal((3, T, 2, 16)) * [[1.0], [30.0]], dtype) for _ in range(2))
    valid = jnp.ones((3, T), bool).at[2, 0].set(False)
    slots = cache.slots(valid)
    return cache.append(1, k, v, slots, valid).advance(valid), k, v


@pytest.mark.parametrize("kind", [KVCache, Int8KVCache])
class TestEitherCache:
    def make(self, kind):
        return kind.init(*SIZES, jnp.float32 if kind is KVCache else jnp.int8)

    def test_holds_what_was_appended_where_it_was(self, kind):
        cache, k, v = filled(self.make(kind))
        np.testing.assert_array_equal(cache.length, [5, 5, 4])
        for held, new in zip(cache.held(1, jnp.float32), (k, v)):
            half_step = np.abs(np.asarray(new)).max(-1, keepdims=True) / 254 * (1 + 1e-5)
            allowed = half_step if kind is Int8KVCache else 0 * half_step
            assert (np.abs(held[:2, :5] - new[:2]) <= allowed[:2]).all()
            assert (np.abs(held[2, :4] - new[2, 1:]) <= allowed[2, 1:]).all()
            np.testing.assert_array_equal(held[:2, 5:], 0)
        np.testing.assert_array_equal(cache.held(0, jnp.float32)[0], 0)

    def test_a_full_cache_drops_and_says_so(self, kind):
        cache, *_ = filled(self.make(kind))
        before = cache.held(1, jnp.float32)[0]
        more, *_ = filled(cache, seed=1)
        np.testing.assert_array_equal(more.overflowed, [True, True, False])
        np.testing.assert_array_equal(more.held(1, jnp.float32)[0][:, :4], before[:, :4])

    def test_abstract_has_the_same_shapes(self, kind):
        real, abstract = self.make(kind), kind.abstract(*SIZES, self.make(kind).k.dtype)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), real) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)


def test_int8_attends_nearly_as_float32():
    plain, *_ = filled(KVCache.init(*SIZES, jnp.float32))
    rounded, *_ = filled(Int8KVCache.init(*SIZES))
    q = jnp.asarray(np.random.default_rng(2).standard_normal((3, 1, 4, 16)), jnp.float32)
    slots, valid = jnp.array([[4], [4], [3]]), jnp.ones((3, 1), bool)
    outs = [cache.attend(1, q, slots, valid, attention, scale=0.25)[0] for cache in (plain, rounded)]
    assert 0 < np.abs(outs[0] - outs[1]).max() < 0.02 * np.abs(outs[0]).max()


def test_int8_of_zeros_is_zero():
    cache = Int8KVCache.init(*SIZES)
    zeros = jnp.zeros((3, 1, 2, 16))
    cache = cache.append(0, zeros, zeros, cache.slots(jnp.ones((3, 1), bool)), jnp.ones((3, 1), bool))
    for held in cache.held(0, jnp.float32):
        np.testing.assert_array_equal(held, 0)


def test_int8_takes_a_quarter_and_a_half_of_the_memory():
    sizes = (4, 1, 128, 2, 64)

    def size(cache):
        return sum(x.nbytes for x in jax.tree.leaves(dataclasses.replace(cache, length=None)))

    int8 = size(Int8KVCache.init(*sizes))
    assert size(KVCache.init(*sizes, jnp.float32)) / int8 == pytest.approx(256 / 68)
    assert size(KVCache.init(*sizes, jnp.bfloat16)) / int8 == pytest.approx(128 / 68)


def test_a_decoder_extends_an_int8_cache_in_any_pieces(model):
    tokens = jnp.asarray(np.random.default_rng(3).integers(1, 61, (2, 12)))
    whole, _ = model(tokens)
    read = jax.jit(lambda cache, tokens: model.extend(tokens, cache))
    runs = []
    for pieces in ((12,), (5, 7), (7, 1, 4)):
        cache, logits, start = model.init_cache(2, 16, kind="kv_int8"), [], 0
        for size in pieces:
            out, cache = read(cache, tokens[:, start : start + size])
            logits.append(out)
            start += size
        runs.append(jnp.concatenate(logits, axis=1))
    # How a prompt is cut changes nothing beyond float32; the rounding itself shows, and is small.
    for run in runs[1:]:
        np.testing.assert_allclose(run, runs[0], atol=1e-5)
    assert 1e-6 < np.abs(runs[0] - whole).max() < 0.02 * np.abs(whole).max()


def test_generation_by_int8_and_what_is_refused(model):
    prompt = [[5, 9, 14, 3]]
    found, kept = (generate(model, prompt, max_new_tokens=8, cache=cache).tokens for cache in ("kv_int8", "kv"))
    assert len(found[0]) == 8 and found[0][0] == kept[0][0]
    with pytest.raises(ValueError, match="float32"):
        model.init_cache(1, 8, kind="kv_int8", dtype="float32")
    pldr = PLDR(PLDRConfig(vocab_size=23, num_layers=1, num_heads=2, head_width=4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="'kv_int8' is unknown"):
        pldr.init_cache(1, 8, kind="kv_int8")
