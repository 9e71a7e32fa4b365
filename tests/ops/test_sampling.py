"""Sampling filters against the reference and by hand; the draw against its distribution, row by row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.ops import sampling
from plga_jax.ops.sampling import SamplingConfig, filter_logits, sample

_sample = jax.jit(sample)
_filter = jax.jit(filter_logits)


def _kept(filtered):
    return np.isfinite(np.asarray(filtered))


class TestReference:
    @pytest.mark.parametrize("p", ["0.05", "0.3", "0.6", "0.8", "0.95"])
    def test_native_top_p(self, x64, golden, p):
        logits = jnp.asarray(golden("misc")["sample_logits"])
        got = sampling.top_p(logits, float(p), rule="native")
        np.testing.assert_array_equal(_kept(got), golden("misc")[f"topp_{p}"])

    @pytest.mark.parametrize("k", [1, 5, 40])
    def test_top_k(self, x64, golden, k):
        got = sampling.top_k(jnp.asarray(golden("misc")["sample_logits"]), k)
        np.testing.assert_array_equal(_kept(got), golden("misc")[f"topk_{k}"])

    def test_all_three_in_order(self, x64, golden):
        want = golden("misc")["temp0p7_topp0p8_topk5"]
        config = SamplingConfig(temperature=0.7, top_p=0.8, top_k=5, top_p_rule="native")
        got = filter_logits(jnp.asarray(golden("misc")["sample_logits"]), config)
        kept = want > -1e9  # the reference writes -1e10 where ours is -inf
        np.testing.assert_array_equal(_kept(got), kept)
        np.testing.assert_allclose(got[kept], want[kept], rtol=1e-14)


class TestFilters:
    probabilities = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.25, 0.05]))

    @pytest.mark.parametrize(
        "p, standard, native",
        [
            (0.3, [1], [1]),  # 0.4 alone crosses: the native rule keeps it only since one must stay
            (0.5, [1, 3], [1]),
            (0.7, [1, 2, 3], [1, 3]),
            (0.99, [0, 1, 2, 3, 4], [0, 1, 2, 3]),
            (1.0, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ],
    )
    def test_top_p_rules(self, p, standard, native):
        for rule, want in (("standard", standard), ("native", native)):
            got = sampling.top_p(self.probabilities, p, rule=rule)
            assert np.flatnonzero(_kept(got)).tolist() == want

    def test_ties_stay(self):
        tied = jnp.array([1.0, 3.0, 1.0, 1.0, 0.0])
        assert np.flatnonzero(_kept(sampling.top_k(tied, 2))).tolist() == [0, 1, 2, 3]
        for rule in sampling.TOP_P_RULES:  # two tokens hold 0.84 of the mass
            got = sampling.top_p(tied, 0.85, rule=rule)
            assert np.flatnonzero(_kept(got)).tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("k", [0, 5, 500])
    def test_top_k_of_all(self, k):
        np.testing.assert_array_equal(sampling.top_k(self.probabilities, k), self.probabilities)

    def test_min_p(self):
        kept = np.flatnonzero(_kept(sampling.min_p(self.probabilities, 0.45)))
        assert kept.tolist() == [1, 2, 3]  # at least 0.18
        assert np.flatnonzero(_kept(sampling.min_p(self.probabilities, 1.0))).tolist() == [1]
        assert _kept(sampling.min_p(self.probabilities, 0.0)).all()

    def test_repetition_penalty(self):
        logits = jnp.array([[2.0, -2.0, 2.0, -2.0, 0.0]])
        want = [[1.0, -4.0, 2.0, -2.0, 0.0]]
        for seen in (jnp.array([[True, True, False, False, True]]), jnp.array([[1, 7, 0, 0, 1]])):
            np.testing.assert_array_equal(sampling.repetition_penalty(logits, seen, 2.0), want)

    def test_penalty_comes_before_the_others(self):
        """The likeliest token, once seen, falls under the top-k cut."""
        logits = jnp.array([4.0, 3.0, 2.0])
        seen = jnp.array([True, False, False])
        got = filter_logits(logits, SamplingConfig(repetition_penalty=4.0, top_k=2), seen)
        assert np.flatnonzero(_kept(got)).tolist() == [1, 2]

    def test_temperature_comes_before_top_p(self):
        cold = SamplingConfig(temperature=0.25, top_p=0.9)
        assert np.flatnonzero(_kept(filter_logits(self.probabilities, cold))).tolist() == [1, 3]

    def test_one_token_is_always_kept(self):
        rng = np.random.default_rng(0)
        logits = jnp.asarray(rng.normal(size=(200, 17)) * 10, jnp.float32)
        for rule in sampling.TOP_P_RULES:
            config = SamplingConfig(temperature=0.01, top_p=1e-6, top_p_rule=rule, top_k=1, min_p=1.0)
            kept = _kept(_filter(logits, config))
            np.testing.assert_array_equal(kept.argmax(-1), np.asarray(logits).argmax(-1))
            assert (kept.sum(-1) == 1).all()

    def test_bf16_is_filtered_in_float32(self):
        logits = self.probabilities.astype(jnp.bfloat16)
        config = SamplingConfig(temperature=0.7, top_p=0.8, top_k=3, min_p=0.1)
        got = _filter(logits, config)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, _filter(logits.astype(jnp.float32), config))


class TestSample:
    def test_distribution(self):
        """Frequencies of 20,000 draws lie within four standard deviations of the filtered softmax."""
        logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.25, 0.05]))
        count = 20_000
        keys = jax.random.split(jax.random.key(0), count)
        config = SamplingConfig(temperature=0.5, top_k=3)
        draws = np.asarray(_sample(keys, jnp.tile(logits, (count, 1)), config))
        weights = np.array([0, 0.4, 0.2, 0.25, 0]) ** 2
        want = weights / weights.sum()
        got = np.bincount(draws, minlength=5) / count
        np.testing.assert_array_less(np.abs(got - want), 4 * np.sqrt(want * (1 - want) / count) + 1e-12)

    @pytest.mark.parametrize("shape", [(5,), (2, 3)])
    def test_a_row_does_not_know_its_batch(self, shape):
        rng = np.random.default_rng(1)
        logits = jnp.asarray(rng.normal(size=(*shape, 31)), jnp.float32)
        seen = jnp.asarray(rng.integers(0, 2, size=(*shape, 31)))
        keys = jax.random.split(jax.random.key(2), shape)
        config = SamplingConfig(temperature=1.3, top_p=0.9, repetition_penalty=1.2)
        batch = _sample(keys, logits, config, seen)
        assert batch.dtype == jnp.int32
        for at in np.ndindex(shape):
            assert _sample(keys[at], logits[at], config, seen[at]) == batch[at]
        assert len(np.unique(batch)) > 1

    def test_a_single_key_is_split(self):
        logits = jnp.zeros((64, 31))
        draws = _sample(jax.random.key(0), logits)
        assert len(np.unique(draws)) > 10
        keys = jax.random.split(jax.random.key(0), (64,))
        np.testing.assert_array_equal(draws, _sample(keys, logits))

    def test_greedy(self):
        logits = jnp.array([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]])
        config = SamplingConfig(greedy=True)
        np.testing.assert_array_equal(_sample(None, logits, config), [1, 0])
        penalised = dataclasses.replace(config, repetition_penalty=10.0)
        seen = jnp.array([[False, True, False], [True, False, False]])
        np.testing.assert_array_equal(_sample(None, logits, penalised, seen), [2, 0])
        assert _sample(None, logits, config).dtype == jnp.int32

    def test_top_k_one_is_greedy(self):
        logits = jnp.asarray(np.random.default_rng(3).normal(size=(20, 31)), jnp.float32)
        draws = _sample(jax.random.key(0), logits, SamplingConfig(top_k=1))
        np.testing.assert_array_equal(draws, sampling.greedy(logits))

    def test_missing_or_wrong_arguments(self):
        logits = jnp.zeros((3, 4))
        with pytest.raises(ValueError, match="greedy=True"):
            sample(None, logits)
        with pytest.raises(ValueError, match="one for each row"):
            sample(jax.random.split(jax.random.key(0), 2), logits)
        with pytest.raises(ValueError, match="seen="):
            sample(jax.random.key(0), logits, SamplingConfig(repetition_penalty=1.1))


class TestConfig:
    @pytest.mark.parametrize(
        "setting, value, remedy",
        [
            ("temperature", 0, "greedy=True"),
            ("temperature", -1.0, "greedy=True"),
            ("temperature", float("nan"), "above 0"),
            ("temperature", "hot", "above 0"),
            ("top_k", -1, ">= 0"),
            ("top_k", 2.5, "whole number"),
            ("top_p", 0.0, "greedy=True"),
            ("top_p", 1.2, r"\(0, 1\]"),
            ("top_p_rule", "nucleus", "native"),
            ("min_p", -0.1, r"\[0, 1\]"),
            ("min_p", 1.1, r"\[0, 1\]"),
            ("repetition_penalty", 0.0, "1 switches it off"),
            ("greedy", 1, "True or False"),
        ],
    )
    def test_bad_values(self, setting, value, remedy):
        with pytest.raises(ValueError, match=rf"{setting} is {value!r}; .*{remedy}"):
            SamplingConfig(**{setting: value})

    def test_is_static(self):
        traces = []

        @jax.jit
        def run(logits, config):
            traces.append(config)
            return filter_logits(logits, config)

        for config in (SamplingConfig(top_k=2), SamplingConfig(top_k=2), SamplingConfig(top_k=3)):
            run(jnp.zeros(4), config)
        assert traces == [SamplingConfig(top_k=2), SamplingConfig(top_k=3)]
