"""Decoding with anchors: the published steps, one softmax over each union, policies, histories, constant cost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.caches import KVCache
from plga_jax.ops.attention import attention
from ris_jax.anchor import AnchorCache, far_keys, respond
from ris_jax.attend import DenseCache, StreamedCache
from ris_jax.geometry import PublishedGeometry
from ris_jax.patterns import DenseGeometry, RandomBlockGeometry, StridedGeometry
from tests.ris import attention_runs as runs

STOCHASTIC = PublishedGeometry(length=70, seeds=3, density=0.03, local=5, anchors=3)
STRUCTURAL = STOCHASTIC.replace(mode="structural", block_max=6)
CAPACITY = 90

step = jax.jit(runs.step, static_argnames=("scale", "window"))


def opened(geometry, k, v, length, capacity=CAPACITY, dtype=jnp.float32, **options):
    """A cache for an answer after `length` tokens."""
    cache = StreamedCache.around(runs.store(k, capacity, dtype), geometry)
    return respond(runs.fill(cache, k, v, length), **{"room": 20} | options)


def answer(cache, q, k, v, start, stop, **options):
    """Outputs of the tokens start … stop-1, [B, steps, N, H], and the cache."""
    found = []
    for t in range(start, stop):
        out, cache = step(cache, *(x[:, t : t + 1] for x in (q, k, v)), scale=0.4, **options)
        found.append(out[:, 0])
    return np.stack(found, axis=1), cache


def allowed(geometry, choices, start, stop, *, slide=False):
    """bool [stop - start, stop]: the published union of each step, given the row whose far keys it has."""
    meet = np.zeros((stop - start, stop), bool)
    for t in range(start, stop):
        row = t if slide else min(t, geometry.length - 1)
        meet[t - start, max(0, row - geometry.local) : t + 1] = True
        meet[t - start, geometry.anchor_row(choices(t))] = True
    return meet


@pytest.mark.parametrize("name", runs.NAMES)
def test_published_schedules(golden, name):
    run = runs.load(golden, name)
    T, scale = run.geometry.length, run.scale
    for schedule, lengths in run.schedules.items():
        begin = lengths[0] - 1
        cache = opened(run.geometry, run.k, run.v, begin, T + 8)
        far = far_keys(run.geometry, [min(begin, T - 1)])
        for length in lengths:
            data, t = f"{schedule}/kv{length}", length - 1
            near = np.arange(max(0, min(t, T - 1) - run.geometry.local), length)
            np.testing.assert_array_equal(np.union1d(near, *far.values()), run.data[f"{data}/idx"])
            out, cache = step(cache, *(x[:, t : t + 1] for x in (run.q, run.k, run.v)), scale=scale)
            np.testing.assert_allclose(out, run.data[f"{data}/out64"], rtol=0, atol=1e-6)
        assert not cache.overflowed.any()


@pytest.mark.parametrize(("name", "dtype"), [("dec_sto", "bfloat16"), ("dec_str", "float16")])
def test_short_floats(golden, name, dtype):
    run = runs.load(golden, name)
    t = run.geometry.length - 2
    q, k, v = (x.astype(dtype) for x in (run.q, run.k, run.v))
    cache = opened(run.geometry, k, v, t, dtype=dtype, capacity=t + 5)
    out, _ = step(cache, *(x[:, t : t + 1] for x in (q, k, v)), scale=run.scale)
    assert out.dtype == jnp.dtype(dtype)
    # Both round float32 results once.
    one = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(np.float32), run.short(f"decode_kv{t + 1}", dtype), rtol=one, atol=1e-6)


class TestPolicies:
    @pytest.mark.parametrize(
        ("geometry", "options", "choices"),
        [
            (STOCHASTIC, {"policy": "frozen"}, lambda t: 58),
            (STRUCTURAL, {"policy": "refresh", "every": 4}, lambda t: 58 + (t - 58) // 4 * 4),
            (STOCHASTIC, {"policy": "own"}, lambda t: t),
            (STRUCTURAL, {"policy": "own", "slide": True}, lambda t: t),
        ],
        ids=["frozen", "refresh", "own", "slide"],
    )
    def test_is_one_softmax_over_the_union_on_past_the_window(self, geometry, options, choices):
        q, k, v = runs.random_inputs(0, 1, 76)
        cache = opened(geometry, k, v, 58, **options)
        out, cache = answer(cache, q, k, v, 58, 76)
        meet = allowed(geometry, choices, 58, 76, slide=options.get("slide", False))
        np.testing.assert_allclose(out, runs.oracle(q[:, 58:], k, v, meet, 0.4), rtol=0, atol=1e-6)
        assert not cache.overflowed.any()
        assert cache.width == geometry.local + 1 + (0 if options.get("slide") else 64)

    @pytest.mark.parametrize(
        "geometry",
        [
            STOCHASTIC,
            STRUCTURAL.replace(local=0, anchors=0),
            STOCHASTIC.replace(anchors=100),
            StridedGeometry(length=70, local=4, anchors=2, stride=7),
            RandomBlockGeometry(length=70, local=4, anchors=2, block=8, blocks=2),
        ],
        ids=lambda g: f"{g.kind}-{g.local}-{g.anchors}",
    )
    def test_own_rows_are_those_of_prefill(self, geometry):
        """From the very first token on."""
        q, k, v = runs.random_inputs(1, 1, 70)
        out, _ = answer(opened(geometry, k, v, 0, capacity=70, policy="own", room=70), q, k, v, 0, 70)
        np.testing.assert_allclose(out, runs.oracle(q, k, v, geometry.mask(), 0.4), rtol=0, atol=1e-6)

    def test_far_keys_are_the_published_ones(self):
        for geometry in (STOCHASTIC, STRUCTURAL, STOCHASTIC.replace(anchors=100)):
            found = far_keys(geometry, [69, 3, 0, 40, 40])
            assert list(found) == [0, 3, 40, 69]
            for row, keys in found.items():
                np.testing.assert_array_equal(keys, geometry.anchor_row(row))

    def test_half_and_half(self):
        q, k, v = runs.random_inputs(2, 1, 61)
        out, _ = answer(opened(STOCHASTIC, k, v, 60, mix="half"), q, k, v, 60, 61)
        near = np.zeros((1, 61), bool)
        near[0, 55:] = True
        far = allowed(STOCHASTIC, lambda t: 60, 60, 61) & ~near
        halves = [runs.oracle(q[:, 60:], k, v, meet, 0.4) for meet in (near, far)]
        np.testing.assert_allclose(out, sum(halves) / 2, rtol=0, atol=1e-6)
        exact = runs.oracle(q[:, 60:], k, v, near | far, 0.4)
        assert np.abs(out - exact).max() > 0.01
        # Without far keys the window alone counts.
        out, _ = answer(opened(STOCHASTIC, k, v, 0, mix="half"), q, k, v, 0, 1)
        np.testing.assert_allclose(out, np.repeat(v[:, :1], 2, axis=2), rtol=0, atol=1e-6)

    def test_a_layers_own_window_narrows_both_parts(self):
        q, k, v = runs.random_inputs(3, 1, 63)
        for window in (3, 30):
            out, _ = answer(opened(STOCHASTIC, k, v, 60), q, k, v, 60, 63, window=window)
            meet = allowed(STOCHASTIC, lambda t: 60, 60, 63)
            meet &= np.arange(63)[None] > np.arange(60, 63)[:, None] - window
            np.testing.assert_allclose(out, runs.oracle(q[:, 60:], k, v, meet, 0.4), rtol=0, atol=1e-6)


class TestBatches:
    def test_rows_of_unequal_lengths_and_stopped_rows_equal_single_ones(self):
        lengths, stops = [64, 20, 1], [72, 23, 9]  # one runs past the window
        q, k, v = runs.random_inputs(4, 3, 76)
        cache = StreamedCache.around(runs.store(k, CAPACITY), STRUCTURAL)
        cache = runs.fill(cache, k, v, np.asarray(lengths)[:, None])
        cache, found = respond(cache, room=8, policy="refresh", every=3), [[], [], []]
        for i in range(8):
            active = np.asarray(lengths) + i < stops
            at = np.minimum(np.asarray(lengths) + i, 75)
            new = (x[np.arange(3), at][:, None] for x in (q, k, v))
            out, cache = step(cache, *new, active[:, None], scale=0.4)
            for row in np.flatnonzero(active):
                found[row].append(np.asarray(out[row, 0]))
        np.testing.assert_array_equal(cache.length, stops)
        for row, (start, stop) in enumerate(zip(lengths, stops)):
            part = [x[row : row + 1] for x in (q, k, v)]
            single, _ = answer(opened(STRUCTURAL, *part[1:], start, policy="refresh", every=3), *part, start, stop)
            np.testing.assert_allclose(np.stack(found[row]), single[0], rtol=0, atol=1e-6)


class TestResponses:
    def test_the_answer_stays_and_its_choices_do_not(self):
        q, k, v = runs.random_inputs(5, 1, 70)
        _, cache = answer(opened(STOCHASTIC, k, v, 40), q, k, v, 40, 45)
        cache = cache.close()
        assert type(cache) is StreamedCache
        out, cache = step(cache.ready(45, 60), q[:, 45:60], k[:, 45:60], v[:, 45:60], scale=0.4)
        expected = runs.oracle(q, k, v, STOCHASTIC.mask(), 0.4)
        np.testing.assert_allclose(out, expected[:, 45:60], rtol=0, atol=2e-6)
        # The first token of any answer has its own row.
        out, _ = answer(respond(cache, room=3), q, k, v, 60, 61)
        np.testing.assert_allclose(out, expected[:, 60:61], rtol=0, atol=1e-6)

    def test_a_dense_cache_is_its_own_response(self):
        cache = DenseCache.init(1, 1, 8, 2, 4, jnp.float32)
        assert respond(cache, room=3) is cache

    def test_other_caches_answer_for_themselves(self):
        class Other:
            def respond(self, **options):
                return options

        assert respond(Other(), room=3, policy="own", every=5) == {"policy": "own", "every": 5}

    def test_more_tokens_than_room_are_flagged(self):
        q, k, v = runs.random_inputs(6, 1, 13)
        _, cache = answer(opened(STOCHASTIC, k, v, 10, room=2), q, k, v, 10, 12)
        assert not cache.overflowed.any()
        assert answer(cache, q, k, v, 12, 13)[1].overflowed.all()
        full = opened(STOCHASTIC, k, v, 10, capacity=10, room=2)
        assert answer(full, q, k, v, 10, 11)[1].overflowed.all()

    def test_what_cannot_be(self):
        cache = StreamedCache.around(KVCache.init(1, 1, 8, 2, 4, jnp.float32), STOCHASTIC)
        for options, message in (
            ({"policy": "thawed"}, "policy = 'thawed' is unknown"),
            ({"mix": "third"}, "mix = 'third' is unknown"),
            ({"every": 0}, "every = 0 must be at least 1"),
            ({"room": 0}, "room = 0 must be at least 1"),
        ):
            with pytest.raises(ValueError, match=message):
                respond(cache, **{"room": 1} | options)
        with pytest.raises(ValueError, match="has no window to decode with"):
            respond(dataclasses.replace(cache, geometry=DenseGeometry(length=8)), room=1)
        q, k, v = runs.random_inputs(7, 1, 2)
        with pytest.raises(ValueError, match="one token at a time, got 2"):
            step(opened(STOCHASTIC, k, v, 0), q, k, v, scale=0.4)


def test_cost_does_not_depend_on_the_length_of_the_document():
    """Compiled, not run: what a donated step needs beside its cache, and how much of memory it touches."""

    def analysed(capacity):
        L, A, shape = 3, 128, jax.ShapeDtypeStruct
        cache = AnchorCache(
            store=KVCache.abstract(L, 1, capacity, 2, 8, jnp.float32),
            keys=shape((L, 1, A, 2, 8), jnp.float32),
            values=shape((L, 1, A, 2, 8), jnp.float32),
            table=shape((4, 1, A), jnp.int32),
            start=shape((1,), jnp.int32),
            every=shape((), jnp.int32),
            room=shape((), jnp.int32),
            geometry=STOCHASTIC.replace(length=2**16),
            width=64,
            slide=False,
            mix="exact",
        )

        def layers(cache, q, k):
            def layer(cache, index):
                valid = jnp.ones((1, 1), bool)
                slots = cache.slots(valid)
                cache = cache.append(index, k, k, slots, valid)
                out, cache = cache.attend(index, q, slots, valid, attention, scale=1.0)
                return cache, out

            return jax.lax.scan(layer, cache, jnp.arange(L))

        q, k = shape((1, 1, 4, 8), jnp.float32), shape((1, 1, 2, 8), jnp.float32)
        compiled = jax.jit(layers, donate_argnums=0).lower(cache, q, k).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = analysed(2**10), analysed(2**16)
    assert 0 < short == long < 2**18
