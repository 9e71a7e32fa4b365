"""Scaled rotary positions: the published tables, both styles of configs, stretching, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.ops.rope import frequencies, rope
from plga_jax.ops.rope_scaling import KINDS, RopeConfig

EXAMPLES = {
    "default": RopeConfig(context=2048),
    "linear": RopeConfig(kind="linear", factor=4.0, context=8192),
    "dynamic": RopeConfig(kind="dynamic", factor=2.0, context=2048),
    "yarn": RopeConfig(kind="yarn", factor=4.0, original_context=2048, context=8192, base=1e6),
    "llama3": RopeConfig(
        kind="llama3", factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0, base=5e5
    ),
    "longrope": RopeConfig(
        kind="longrope", original_context=64, context=128, short_factor=(1.0, 2.0), long_factor=(3.0, 5.0)
    ),
}


def _published(case):
    """A config as a file would hold it: today's style, with the tokens in use beside it."""
    config = {"max_position_embeddings": case["max_position_embeddings"], "rope_parameters": case["rope_parameters"]}
    length = case.get("seq_len")
    if length is None and case["rope_parameters"]["rope_type"] == "longrope":
        # Their table before the first call is the one for short inputs.
        length = case["rope_parameters"]["original_max_position_embeddings"]
    return RopeConfig.from_hf(config), length


def test_the_published_tables(golden):
    data = golden("ris/rope")
    cases, start = json.loads(str(data["cases"])), 0
    assert len(cases) == 560 and {case["rope_parameters"]["rope_type"] for case in cases} == set(KINDS)
    for case in cases:
        config, length = _published(case)
        width = case["head_dim"]
        theta, factor = config.frequencies(width, length=length)
        part = slice(start, start := start + width // 2)
        assert theta.dtype == np.float64
        # Their own tables are float32 throughout: 5e-7 is what their order of operations costs.
        np.testing.assert_allclose(theta, data["inv_freq"][part], rtol=6e-7, err_msg=case["name"])
        np.testing.assert_allclose(factor, case["attention_factor"], rtol=1e-14, err_msg=case["name"])
        if not np.isnan(data["inv_freq64"][part]).any():
            np.testing.assert_allclose(theta, data["inv_freq64"][part], rtol=2e-14, err_msg=case["name"])
    assert start == len(data["inv_freq"])


@pytest.mark.parametrize("name", ["default_D128_th1e+06", "yarn_D128_th1e+06_F2_O32768", "linear_D128_th1e+06_F2"])
def test_the_published_cosines(golden, name):
    data = golden("ris/rope")
    case = next(case for case in json.loads(str(data["cases"])) if case["name"] == name)
    theta, factor = _published(case)[0].frequencies(128)
    positions = jnp.asarray(data["cos_sin_positions"], jnp.int32)[None]
    first = jnp.zeros((1, positions.shape[1], 1, 128)).at[..., :64].set(1)
    turned = rope(first, positions, layout="half", frequencies=theta, scale=factor)[0, :, 0]
    expected = np.concatenate([data[f"{name}/cos"][:, :64], data[f"{name}/sin"][:, 64:]], axis=1)
    # Two float32 tables, each within 1.2e-7 of the frequency, and angles rounded at half an ulp: 65535·3·2^-24.
    bound = 2e-7 + np.asarray(positions)[0][:, None] * 3 * 2.0**-24
    assert (np.abs(turned - expected) <= bound).all()
    if factor != 1:
        np.testing.assert_allclose(turned[0, 0], factor, rtol=1e-7)


class TestRope:
    @pytest.mark.parametrize("position", [1, 255, 4095, 131_071])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_angles_are_float32(self, position, dtype):
        theta, factor = EXAMPLES["yarn"].frequencies(64)
        x = jnp.ones((1, 1, 1, 64), dtype)
        got = rope(x, jnp.full((1, 1), position), layout="half", frequencies=theta, scale=factor)
        assert got.dtype == dtype
        cos, sin = np.cos(position * theta), np.sin(position * theta)
        exact = factor * np.concatenate([cos - sin, cos + sin])
        # The angle is off by the rounding of the table and of the product, 2^-24 each and relative.
        bound = 3e-7 + position * 2.0**-22 + (2.0**-7 if dtype == jnp.bfloat16 else 0)
        np.testing.assert_allclose(np.asarray(got[0, 0, 0], np.float64), exact, atol=bound)

    @pytest.mark.parametrize("layout", ["half", "interleaved"])
    def test_scores_grow_by_the_square_of_the_factor(self, layout):
        with jax.enable_x64(True):
            q, k = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)))
            theta, _ = RopeConfig().frequencies(8)

            def score(scale):
                turn = lambda x, n: rope(  # noqa: E731
                    x, jnp.full((1, 1), n), layout=layout, frequencies=theta, scale=scale
                )
                return jnp.sum(turn(q, 17) * turn(k, 5))

            np.testing.assert_allclose(score(1.3), 1.69 * score(1.0), rtol=1e-12)

    def test_given_frequencies_are_the_ones_of_the_base(self):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 2, 8)), jnp.float32)
        positions = jnp.arange(5)[None]
        for theta in (frequencies(8, base=500.0), jnp.asarray(frequencies(8, base=500.0), jnp.float32)):
            np.testing.assert_array_equal(rope(x, positions, frequencies=theta), rope(x, positions, base=500.0))

    def test_may_be_traced(self):
        x, positions = jnp.ones((1, 2, 1, 4)), jnp.arange(2)[None]
        theta = jnp.asarray(frequencies(4), jnp.float32)
        turned = jax.jit(lambda theta, scale: rope(x, positions, frequencies=theta, scale=scale))(theta, 1.5)
        np.testing.assert_allclose(turned, rope(x, positions, scale=1.5), rtol=1e-6)

    @pytest.mark.parametrize(("width", "planes"), [(8, 8), (8, 3), (7, 3)])
    def test_refuses_other_numbers_of_planes(self, width, planes):
        with pytest.raises(ValueError, match=r"\[H/2\]"):
            rope(jnp.ones((1, 1, 1, width)), jnp.zeros((1, 1), jnp.int32), frequencies=np.ones(planes))


class TestLengths:
    def test_dynamic_grows_with_the_longest_position(self):
        config = EXAMPLES["dynamic"]
        for length in (None, 1, 2048):
            np.testing.assert_array_equal(config.frequencies(64, length=length)[0], frequencies(64))
        longer = [config.frequencies(64, length=length)[0][-1] for length in (2049, 4096, 8192)]
        assert frequencies(64)[-1] > longer[0] > longer[1] > longer[2]
        # F·L/M − (F − 1) = 3 at twice the length.
        np.testing.assert_allclose(longer[1] * 3, frequencies(64)[-1], rtol=1e-12)

    def test_longrope_changes_its_divisors_past_the_original_length(self):
        config = EXAMPLES["longrope"]
        theta = frequencies(4)
        np.testing.assert_array_equal(config.frequencies(4, length=64)[0], theta / [1, 2])
        for length in (65, None):
            np.testing.assert_array_equal(config.frequencies(4, length=length)[0], theta / [3, 5])
        np.testing.assert_allclose(config.frequencies(4)[1], np.sqrt(1 + np.log(2) / np.log(64)), rtol=1e-14)
        with pytest.raises(ValueError, match="2 divisors; heads of width 8 need 4"):
            config.frequencies(8)

    @pytest.mark.parametrize("kind", KINDS)
    def test_no_positions_are_refused(self, kind):
        with pytest.raises(ValueError, match="length = 0"):
            EXAMPLES[kind].frequencies(4, length=0)

    def test_heads_of_one_plane(self):
        for kind in ("default", "linear", "dynamic", "llama3"):
            assert np.isfinite(EXAMPLES[kind].frequencies(2, length=9000)[0]).all()


class TestFromHF:
    @pytest.mark.parametrize("style", ["today", "before", "type"])
    def test_both_styles(self, style):
        scaling = {"factor": 4.0, "original_max_position_embeddings": 2048}
        config = {"max_position_embeddings": 8192}
        if style == "today":
            config["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": 1e6}
        else:
            config |= {
                "rope_theta": 1e6,
                "rope_scaling": scaling | {"rope_type" if style == "before" else "type": "yarn"},
            }
        assert RopeConfig.from_hf(config) == EXAMPLES["yarn"]

    @pytest.mark.parametrize("kind", KINDS)
    def test_round_trip(self, kind):
        config = EXAMPLES[kind]
        published = json.loads(json.dumps(config.to_hf() | {"max_position_embeddings": config.context}))
        assert RopeConfig.from_hf(published) == config

    @pytest.mark.parametrize("scaling", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
    def test_unscaled(self, scaling):
        config = RopeConfig.from_hf({"max_position_embeddings": 32768, "rope_theta": 1e6} | scaling)
        assert config == RopeConfig(base=1e6, context=32768)
        assert RopeConfig.from_hf(scaling) == RopeConfig()

    def test_left_out_numbers(self):
        scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024, "mscale": None}
        config = RopeConfig.from_hf({"max_position_embeddings": 4096, "rope_parameters": scaling})
        given = dataclasses.replace(config, factor=4.0)
        np.testing.assert_array_equal(config.frequencies(32)[0], given.frequencies(32)[0])
        assert config.frequencies(32)[1] == given.frequencies(32)[1] > 1
        del scaling["original_max_position_embeddings"]
        config = RopeConfig.from_hf({"max_position_embeddings": 4096, "rope_parameters": scaling | {"factor": 2.0}})
        assert config.original_context == 4096
        outside = {"max_position_embeddings": 4096, "original_max_position_embeddings": 512, "rope_parameters": scaling}
        assert RopeConfig.from_hf(outside).original_context == 512

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk' is unknown"),
            ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, r"\['mrope_section'\] are not impl"),
            ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "full_attention"),
            ({"rope_scaling": {"type": "linear"}}, "needs factor"),
            ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "needs context"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "needs original_context"),
            ({"rope_scaling": {"type": "llama3", "factor": 2.0}, "max_position_embeddings": 64}, "low_freq_factor"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "no use for beta_fast"),
            ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "two kinds"),
            ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2'"),
            ({"rope_scaling": {"type": "linear", "factor": True}}, "factor = True"),
            ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "at least 1"),
            ({"rope_scaling": {"type": ["linear"]}}, "is unknown"),
            ({"rope_scaling": "linear"}, "must be an object"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
            ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is"),
            ({"rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_type": "default"}}, "differ"),
            ({"rope_theta": "10000"}, "base = '10000'"),
            ({"rope_theta": 1.0}, "base = 1.0 must be above 1"),
            ({"max_position_embeddings": 2048.0}, "whole number"),
        ],
    )
    def test_refusals(self, config, message):
        with pytest.raises(ValueError, match=message):
            RopeConfig.from_hf(config)


class TestConfig:
    @pytest.mark.parametrize("kind", KINDS)
    def test_json_round_trip_and_hash(self, kind):
        config = EXAMPLES[kind]
        again = RopeConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
        assert again == config and hash(again) == hash(config)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"kind": "spiral"}, "choose one of default, linear"),
            ({"kind": "yarn", "original_context": 64}, "needs factor, or context"),
            ({"kind": "yarn", "original_context": 64, "factor": 2, "beta_fast": 1, "beta_slow": 2}, "beta_fast = 1"),
            ({"kind": "yarn", "original_context": 64, "factor": 2, "truncate": 1}, "true or false"),
            ({"kind": "yarn", "original_context": 64, "factor": float("nan")}, "finite"),
            ({"kind": "default", "factor": 2.0}, "no use for factor = 2.0"),
            ({"kind": "longrope", "original_context": 4, "context": 8, "short_factor": (1.0,)}, "needs long_factor"),
            ({"kind": "longrope", "original_context": 4, "short_factor": [1.0], "long_factor": [0.0]}, "above 0"),
            ({"kind": "longrope", "original_context": 4, "short_factor": 1.0}, "list of H/2"),
            (
                {"kind": "longrope", "original_context": 4, "short_factor": [1.0], "long_factor": [1.0]},
                "for its scores",
            ),
        ],
    )
    def test_refusals(self, fields, message):
        with pytest.raises(ValueError, match=message):
            RopeConfig(**fields)

    def test_llama3_factors_are_ordered(self):
        with pytest.raises(ValueError, match=r"high_freq_factor = 1\.0 must be above"):
            dataclasses.replace(EXAMPLES["llama3"], high_freq_factor=1.0)


class TestStretched:
    NATIVE = RopeConfig(base=1e6, context=32768)

    def test_the_factor_is_the_window_over_the_trained_length(self):
        yarn = self.NATIVE.stretched(65536)
        assert yarn == RopeConfig(kind="yarn", base=1e6, factor=2.0, original_context=32768, context=65536)
        assert self.NATIVE.stretched(40960, kind="linear").factor == 1.25
        assert self.NATIVE.stretched(40960, factor=3.0).factor == 3.0
        # Stretching again starts from the trained length.
        assert yarn.stretched(131072) == self.NATIVE.stretched(131072)
        assert yarn.stretched(131072).factor == 4.0

    def test_a_window_that_fits_changes_nothing(self):
        assert self.NATIVE.stretched(32768) is self.NATIVE
        assert self.NATIVE.stretched(5, factor=2.0).factor == 2.0

    def test_dynamic_keeps_the_trained_length(self):
        config = self.NATIVE.stretched(65536, kind="dynamic")
        np.testing.assert_array_equal(config.frequencies(64, length=32768)[0], frequencies(64, base=1e6))
        assert config.stretched(131072, kind="dynamic").factor == 4.0

    def test_the_published_oversight(self, golden):
        data = golden("ris/rope")
        cases, start = json.loads(str(data["cases"])), 0
        for case in cases:
            part = slice(start, start := start + case["head_dim"] // 2)
            if case["name"] == "refloader_qwen2_D128_yarn_65536":
                break
        theta, factor = self.NATIVE.stretched(65536, original="reference").frequencies(128)
        np.testing.assert_allclose(theta, data["inv_freq"][part], rtol=6e-7)
        right, same = self.NATIVE.stretched(65536).frequencies(128)
        assert factor == same == pytest.approx(1.0693147)
        off = np.flatnonzero(np.abs(theta / right - 1) > 1e-9)
        assert (off.min(), off.max()) == (24, 42)
        assert np.abs(theta / right - 1).max() == pytest.approx(0.176, abs=5e-3)

    @pytest.mark.parametrize(
        ("config", "arguments", "message"),
        [
            (RopeConfig(), {"window": 10}, "trained length of None"),
            (EXAMPLES["llama3"], {"window": 10**6}, "'llama3'"),
            (NATIVE, {"window": 65536, "kind": "longrope"}, "cannot be made from a window"),
            (NATIVE, {"window": 65536, "original": "other"}, "'native' or 'reference'"),
            (NATIVE, {"window": 0}, "window = 0"),
            (NATIVE, {"window": 65536, "factor": 0.5}, "at least 1"),
        ],
    )
    def test_refusals(self, config, arguments, message):
        with pytest.raises(ValueError, match=message):
            config.stretched(**arguments)
