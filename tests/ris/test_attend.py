"""Streamed masks: the published outputs, any chunks, unequal rows, rewinding, and memory linear in length."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.caches import KVCache
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.ops.attention import attention
from plga_jax.ops.masks import Mask
from ris_jax.attend import DenseCache, StreamedCache, geometry_attention, open_cache
from ris_jax.block_shared import BlockSharedGeometry
from ris_jax.geometry import PublishedGeometry
from ris_jax.patterns import DenseGeometry, RandomBlockGeometry, StridedGeometry, WindowGeometry
from ris_jax.probe import ProbeGeometry
from ris_jax.sparse import SparseCache
from tests.ris import attention_runs as runs

STOCHASTIC = PublishedGeometry(length=70, seeds=3, density=0.02, local=5, anchors=3)
STRUCTURAL = STOCHASTIC.replace(mode="structural", block_max=6)
GEOMETRIES = [
    STOCHASTIC,
    STRUCTURAL,
    STOCHASTIC.replace(local=0, anchors=0),
    STOCHASTIC.replace(anchors=100),
    WindowGeometry(length=70, local=6, anchors=3),
    StridedGeometry(length=70, local=1, anchors=0, stride=7),
    RandomBlockGeometry(length=70, local=6, anchors=3, block=8, blocks=2),
]
each_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"{g.kind}-{GEOMETRIES.index(g)}")

step = jax.jit(runs.step, static_argnames=("scale", "window"))


def read(cache, q, k, v, chunk, *, valid=None, scale=0.4, start=0):
    """Outputs of queries read in chunks, and the cache."""
    found = []
    for first in range(0, q.shape[1], chunk):
        part = slice(first, first + chunk)
        cache = cache.ready(start + first, start + min(first + chunk, q.shape[1]))
        out, cache = step(
            cache, q[:, part], k[:, part], v[:, part], None if valid is None else valid[:, part], scale=scale
        )
        found.append(out)
    return np.concatenate(found, axis=1), cache


@pytest.mark.parametrize("name", runs.NAMES)
class TestGoldens:
    def test_prefill(self, golden, name):
        run = runs.load(golden, name)
        cache = StreamedCache.around(runs.store(run.k, run.k.shape[1]), run.geometry)
        for chunk in (run.geometry.length, 50):
            out, _ = read(cache, *run.whole, chunk, scale=run.scale)
            np.testing.assert_allclose(out[:, :: run.step], run.data["prefill_full64"], rtol=0, atol=1e-6)

    def test_a_chunk(self, golden, name):
        run = runs.load(golden, name)
        a, b = run.chunk
        cache = StreamedCache.around(runs.store(run.k, run.k.shape[1]), run.geometry)
        cache = runs.fill(cache, run.k, run.v, a).ready(a, b)
        out, _ = step(cache, run.q[:, a:b], run.k[:, a:b], run.v[:, a:b], scale=run.scale)
        np.testing.assert_allclose(out[:, :: run.step], run.data["prefill_chunk"], rtol=0, atol=1e-6)

    def test_whole_sequences(self, golden, name):
        run = runs.load(golden, name)
        attend = functools.partial(geometry_attention(run.geometry, chunk=100), scale=run.scale, return_lse=True)
        out, lse = jax.jit(attend)(*run.whole)
        np.testing.assert_allclose(out[:, :: run.step], run.data["prefill_full64"], rtol=0, atol=1e-6)
        lse = lse.swapaxes(1, 2)[:, :, :: run.step]
        np.testing.assert_allclose(lse, run.data["prefill_lse64"], rtol=0, atol=2e-6)


# Theirs is float32 until the end; our products take probabilities in the dtype of the values. Outputs reach 2.3, where
# one unit in the last place is 1.6e-2 in bfloat16 and 2e-3 in float16; half of one was measured.
@pytest.mark.parametrize(("name", "dtype", "atol"), [("dec_sto", "bfloat16", 1e-2), ("dec_str_pad", "float16", 2e-3)])
def test_short_floats(golden, name, dtype, atol):
    run = runs.load(golden, name)
    cache = StreamedCache.around(runs.store(run.k, run.k.shape[1], dtype), run.geometry)
    out, cache = read(cache, *(x.astype(dtype) for x in run.whole), run.geometry.length, scale=run.scale)
    assert out.dtype == cache.store.k.dtype == jnp.dtype(dtype)
    out = out[:, :: run.step].astype(np.float32)
    np.testing.assert_allclose(out, run.short("prefill_full", dtype), rtol=0, atol=atol)


class TestAnyGeometry:
    @each_geometry
    def test_is_its_mask(self, geometry):
        q, k, v = runs.random_inputs(0, 1, 70)
        cache = StreamedCache.around(runs.store(k, 70), geometry)
        expected = runs.oracle(q, k, v, geometry.mask(), 0.4)
        np.testing.assert_allclose(read(cache, q, k, v, 14)[0], expected, rtol=0, atol=2e-6)

    @pytest.mark.parametrize("chunk", [1, 7, 70])
    def test_chunks_of_any_size(self, chunk):
        """Single tokens included: prefill by ones is prefill, not decoding."""
        q, k, v = runs.random_inputs(0, 2, 70)
        cache = StreamedCache.around(runs.store(k, 70), STOCHASTIC)
        expected = runs.oracle(q, k, v, STOCHASTIC.mask(), 0.4)
        np.testing.assert_allclose(read(cache, q, k, v, chunk)[0], expected, rtol=0, atol=2e-6)

    @pytest.mark.parametrize("capacity", [50, 133])
    def test_a_cache_need_not_be_as_long_as_the_geometry(self, capacity):
        q, k, v = runs.random_inputs(0, 1, 50)
        cache = StreamedCache.around(runs.store(k, capacity), STRUCTURAL)
        expected = runs.oracle(q, k, v, STRUCTURAL.mask()[:50, :50], 0.4)
        np.testing.assert_allclose(read(cache, q, k, v, 25)[0], expected, rtol=0, atol=2e-6)

    @pytest.mark.parametrize("geometry", [STRUCTURAL, GEOMETRIES[-1]], ids=lambda g: g.kind)
    def test_gradients_reach_the_keys_of_the_mask_and_no_others(self, geometry):
        q, k, v = runs.random_inputs(1, 1, 70, 1, 1, 2)
        attend = jax.jit(geometry_attention(geometry, chunk=16))
        reached = jax.jit(jax.vmap(jax.grad(lambda v, t: attend(q, k, v)[0, t, 0, 0]), (None, 0)))(v, jnp.arange(70))
        np.testing.assert_array_equal(np.asarray(reached)[:, 0, :, 0, 0] > 0, geometry.mask())

    def test_a_layers_own_window_narrows_it(self):
        q, k, v = runs.random_inputs(2, 1, 70)
        cache = StreamedCache.around(runs.store(k, 70), STOCHASTIC).ready(0, 70)
        near = np.subtract.outer(np.arange(70), np.arange(70)) < 4
        out, _ = step(cache, q, k, v, scale=0.4, window=4)
        np.testing.assert_allclose(out, runs.oracle(q, k, v, STOCHASTIC.mask() & near, 0.4), rtol=0, atol=2e-6)

    def test_a_given_mask_narrows_whole_sequences(self):
        q, k, v = runs.random_inputs(3, 1, 60)
        real = np.arange(60) >= 20
        mask = Mask.padding(jnp.asarray(real)[None])
        out = jax.jit(geometry_attention(STRUCTURAL, chunk=16))(q, k, v, mask)
        expected = runs.oracle(q[:, 20:], k, v, STRUCTURAL.mask()[20:60, :60] & real, 8**-0.5)
        np.testing.assert_allclose(out[:, 20:], expected, rtol=0, atol=2e-6)
        assert not out[:, :20].any()


class TestBatches:
    def test_rows_of_unequal_lengths_with_padding_anywhere_equal_single_ones(self):
        lengths = [70, 41, 1]
        q, k, v = runs.random_inputs(4, 3, 70)
        cache, found, held = StreamedCache.around(runs.store(k, 70), STOCHASTIC), [[], [], []], np.zeros(3, int)
        rng = np.random.default_rng(0)
        while (held < lengths).any():
            counts = np.minimum(rng.integers(0, 12, 3), lengths - held)
            valid = np.zeros((3, 16), bool)
            arrays = [np.full((3, 16, *x.shape[2:]), np.nan, np.float32) for x in (q, k, v)]
            for row, count in enumerate(counts):
                valid[row, rng.permutation(16)[:count]] = True
                for array, x in zip(arrays, (q, k, v)):
                    array[row, valid[row]] = x[row, held[row] : held[row] + count]
            cache = cache.ready(int(held.min()), int((held + counts).max()) or 1)
            out, cache = step(cache, *arrays, valid, scale=0.4)
            for row in range(3):
                found[row].append(np.asarray(out)[row, valid[row]])
            held += counts
        np.testing.assert_array_equal(cache.length, lengths)
        for row, length in enumerate(lengths):
            expected = runs.oracle(
                *(x[row : row + 1, :length] for x in (q, k, v)), STOCHASTIC.mask()[:length, :length], 0.4
            )
            np.testing.assert_allclose(np.concatenate(found[row]), expected[0], rtol=0, atol=2e-6)


class TestReady:
    def test_past_the_geometry(self):
        cache = StreamedCache.around(runs.store(jnp.zeros((1, 1, 1, 2)), 100), STOCHASTIC)
        cache.ready(60, 70)
        for span in ((60, 71), (5, 5), (-1, 3)):
            with pytest.raises(ValueError, match=r"leave the geometry's 0 … 70"):
                cache.ready(*span)

    def test_attending_without_rows(self):
        q, k, v = runs.random_inputs(5, 1, 8)
        cache = StreamedCache.around(runs.store(k, 70), STOCHASTIC)
        with pytest.raises(ValueError, match="call ready"):
            step(cache, q, k, v, scale=0.4)
        out, _ = step(cache.ready(2, 5), q, k, v, scale=0.4)
        np.testing.assert_array_equal(np.isnan(out).any((0, 2, 3)), [1, 1, 0, 0, 0, 1, 1, 1])

    def test_rows_are_the_same_whoever_reads_in_between(self):
        """Streams are shared by all readers of a geometry."""
        mask = np.packbits(STRUCTURAL.mask(), axis=1)
        cache = StreamedCache.around(runs.store(jnp.zeros((1, 1, 1, 2)), 70), STRUCTURAL)
        for start, stop in ((0, 10), (10, 30), (0, 5), (30, 70), (5, 6), (10, 12), (69, 70), (12, 40)):
            STRUCTURAL.rows(3, 20)
            np.testing.assert_array_equal(cache.ready(start, stop).rows[: stop - start], mask[start:stop])

    def test_chunks_share_one_program(self):
        q, k, v = runs.random_inputs(6, 1, 70)
        traced = jax.jit(chex.assert_max_traces(n=1)(runs.step), static_argnames="scale")
        for _ in range(2):
            cache = StreamedCache.around(runs.store(k, 70), STOCHASTIC.replace())
            for start in range(0, 70, 10):
                part = slice(start, start + 10)
                _, cache = traced(cache.ready(start, start + 10), q[:, part], k[:, part], v[:, part], scale=0.4)


@pytest.mark.parametrize("geometry", [STOCHASTIC, DenseGeometry(length=70)])
def test_rewinding_survives_donation(geometry):
    q, k, v = runs.random_inputs(7, 1, 70)
    config = DecoderConfig(
        vocab_size=2, num_layers=1, num_heads=4, num_kv_heads=2, head_width=8, model_width=4, hidden_width=4, context=70
    )
    donating = jax.jit(functools.partial(runs.step, scale=0.4), donate_argnums=0)
    expected = runs.oracle(q, k, v, geometry.mask(), 0.4)

    def read(cache, start, stop, q=q, k=k, v=v):
        part = slice(start, stop)
        return donating(cache.ready(start, stop), q[:, part], k[:, part], v[:, part])

    _, cache = read(open_cache(geometry, config, capacity=70), 0, 30)
    mark = cache.mark()
    _, cache = read(cache, 30, 60, -q, -k, -v)
    for _ in range(2):
        out, cache = read(cache.rewind(mark), 30, 70)
        np.testing.assert_allclose(out, expected[:, 30:], rtol=0, atol=2e-6)
        np.testing.assert_array_equal(mark.length, [30])
    assert not cache.overflowed.any()
    _, cache = read(cache.rewind(mark), 30, 70)
    assert (cache.advance(jnp.ones((1, 1), bool))).overflowed.all()


def test_open_cache():
    config = DecoderConfig(
        vocab_size=2, num_layers=3, num_heads=4, num_kv_heads=2, head_width=8, model_width=4, hidden_width=4, context=70
    )
    dense = open_cache(DenseGeometry(length=70), config, batch=2, capacity=9, dtype=jnp.bfloat16)
    assert type(dense) is DenseCache and dense.close() is dense
    assert dense.k.shape == (3, 2, 9, 2, 8) and dense.k.dtype == jnp.bfloat16
    streamed = open_cache(STOCHASTIC, config, capacity=12)
    assert type(streamed) is StreamedCache and streamed.geometry == STOCHASTIC
    assert streamed.store.v.shape == (3, 1, 12, 2, 8) and streamed.store.v.dtype == jnp.float32
    assert streamed.capacity == 12
    for geometry in (ProbeGeometry(length=70), BlockSharedGeometry(length=70, budget=8, block=8, tile=8)):
        sparse = open_cache(geometry, config, batch=2, capacity=128)
        assert type(sparse) is SparseCache and sparse.geometry == geometry
        assert sparse.length.shape == (2,) and sparse.capacity == 128
    with pytest.raises(ValueError, match="capacity 0"):
        open_cache(STOCHASTIC, config, capacity=0)


def test_memory_is_linear_in_length():
    """Compiled, not run: a chunk of 64 queries against 64k keys, where one bit per pair of the mask is 537 MB."""
    S, chunk, shape = 2**16, 64, jax.ShapeDtypeStruct
    cache = StreamedCache(
        store=KVCache.abstract(1, 1, S, 1, 8, jnp.float32),
        rows=shape((chunk, S // 8), jnp.uint8),
        count=shape((2,), jnp.int32),
        geometry=STOCHASTIC.replace(length=S),
    )

    def run(cache, q, slots, valid):
        return cache.attend(0, q, slots, valid, attention, scale=1.0)[0]

    q, slots, valid = shape((1, chunk, 1, 8), jnp.float32), shape((1, chunk), jnp.int32), shape((1, chunk), bool)
    analysis = jax.jit(run).lower(cache, q, slots, valid).compile().memory_analysis()
    keys, pairs = 2 * S * 8 * 4, chunk * S
    assert pairs < analysis.temp_size_in_bytes < 4 * keys + 6 * pairs < S * S / 8 / 10


def test_whole_sequences_have_a_limit():
    q = jax.ShapeDtypeStruct((1, 2**14 + 1, 1, 2), jnp.float32)
    for geometry, limit in ((STOCHASTIC, 70), (DenseGeometry(length=2**15), 2**14)):
        with pytest.raises(ValueError, match=f"up to {limit} tokens"):
            jax.eval_shape(geometry_attention(geometry), q, q, q)
