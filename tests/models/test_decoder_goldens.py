"""Decoders against the published implementations: whole inputs, padding, decoding, chunks, caches, scaled positions."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.interop import hf_files
from plga_jax.interop.hf import load_decoder

FAMILIES = ("qwen2", "llama_untied", "llama_tied", "qwen3", "mistral_swa", "qwen2_mixed_swa")
VARIANTS = ("default", "linear", "yarn", "yarn_betas_af", "yarn_mscale", "yarn_notrunc", "llama3")

# Their float64 run widens every island of float32; what remains is the order of sums: 2.3e-14 for logits of 40.
SHARP = {"rtol": 0, "atol": 2e-13}

forward = jax.jit(lambda model, tokens, collect: model(tokens, collect=collect), static_argnames="collect")
padded = jax.jit(lambda model, tokens, segments: model(tokens, segment_ids=segments)[0])
extend = jax.jit(lambda model, tokens, cache: model.extend(tokens, cache))


@pytest.fixture(scope="module")
def load(golden, tmp_path_factory):
    """The model of a golden file, read from a folder that is written as it was published."""

    @functools.cache
    def folder(name, variant):
        data = golden(f"decoder/{name}")
        config = data[f"{variant}/config_json" if variant else "disk_config_json"]
        path = tmp_path_factory.mktemp(name)
        weights = {key[2:]: value for key, value in data.items() if key.startswith("w/")}
        hf_files.write_folder(path, json.loads(str(config)), weights)
        return path

    return lambda name, variant=None, **options: load_decoder(folder(name, variant), **options)


def _chunks(model, tokens, splits, dtype=None):
    """Logits of a prompt read piece by piece into one cache, and the cache."""
    cache = model.init_cache(tokens.shape[0], tokens.shape[1], dtype=dtype)
    pieces, start = [], 0
    for size in splits:
        logits, cache = extend(model, tokens[:, start : start + size], cache)
        pieces.append(logits)
        start += size
    assert start == tokens.shape[1]
    return np.concatenate(pieces, axis=1), cache


@pytest.mark.usefixtures("x64")
class TestFloat64:
    @pytest.fixture(params=FAMILIES)
    def case(self, request, golden, load):
        return golden(f"decoder/{request.param}"), load(request.param, compute_dtype="float64")

    def test_whole_inputs(self, case):
        data, model = case
        logits, outputs = forward(model, jnp.asarray(data["ids"]), ("hidden", "final"))
        np.testing.assert_allclose(logits, data["logits_f64"], **SHARP)
        np.testing.assert_allclose(outputs.final, data["final_norm_f64"], **SHARP)
        assert outputs.hidden.shape[0] == model.config.num_layers + 1
        for layer, hidden in enumerate(outputs.hidden):
            np.testing.assert_allclose(hidden, data[f"hidden_{layer}_f64"], **SHARP)

    def test_padding(self, case):
        data, model = case
        real = data["pad_mask"] > 0
        assert real.sum(axis=1).tolist() == [20, 13, 5]
        logits = padded(model, jnp.asarray(data["pad_ids"]), jnp.asarray(data["pad_mask"]))
        np.testing.assert_allclose(logits[real], data["pad_logits_f64"][real], **SHARP)

    def test_decoding_and_the_cache(self, case):
        data, model = case
        prompt = int(data["dec_prompt_len"])
        logits, cache = _chunks(model, jnp.asarray(data["dec_ids"]), [prompt] + [1] * 6)
        np.testing.assert_allclose(logits[:, :prompt], data["dec_prefill_logits_f64"], **SHARP)
        np.testing.assert_allclose(logits[:, prompt:], data["dec_logits_f64"], **SHARP)
        for layer in range(model.config.num_layers):
            for ours, theirs in ((cache.k, "k"), (cache.v, "v")):
                held = data[f"cache_{theirs}_{layer}_f64"]  # a windowed layer keeps window − 1 there
                assert held.shape[2] == (model.config.window - 1 if layer in model.config.windowed_layers else 16)
                np.testing.assert_allclose(ours[layer, :, -held.shape[2] :].swapaxes(1, 2), held, **SHARP)

    @pytest.mark.parametrize("family", ["qwen3", "mistral_swa", "qwen2_mixed_swa"])
    def test_chunks(self, golden, load, family):
        data, model = golden(f"decoder/{family}"), load(family, compute_dtype="float64")
        logits, _ = _chunks(model, jnp.asarray(data["dec_ids"]), data["chunk_splits"].tolist())
        np.testing.assert_allclose(logits, data["chunk_logits_f64"], **SHARP)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "qwen2_mixed_swa"])
def test_float32(golden, load, family):
    data, model = golden(f"decoder/{family}"), load(family)
    logits, _ = forward(model, jnp.asarray(data["ids"]), ())
    assert logits.dtype == jnp.float32
    # Published float32 logits are up to 1.3e-6 of the largest off their own float64 ones; ours 6e-7, measured.
    np.testing.assert_allclose(logits, data["logits_f64"], rtol=0, atol=1.5e-6 * np.abs(data["logits_f64"]).max())


@pytest.mark.parametrize("family", ["llama_tied", "qwen3"])
def test_bfloat16(golden, load, family):
    data = golden(f"decoder/{family}")
    logits, _ = forward(load(family, compute_dtype="bfloat16"), jnp.asarray(data["ids"]), ())
    assert logits.dtype == jnp.float32
    # Eight bits of mantissa through two layers: 2e-3 of the largest on average and 8e-3 at most, measured.
    error = np.abs(np.asarray(logits) - data["logits_f64"]) / np.abs(data["logits_f64"]).max()
    assert 1e-5 < error.mean() < 2e-3 and error.max() < 0.015


class TestScaledPositions:
    @pytest.mark.parametrize(
        ("name", "variant"),
        [("qwen2_rope", variant) for variant in VARIANTS] + [("llama_rope", "default"), ("llama_rope", "llama3")],
    )
    def test_float64(self, golden, load, name, variant):
        data = golden(f"decoder/{name}")
        with jax.enable_x64(True):
            model = load(name, variant, compute_dtype="float64")
            theta, factor = model.config.rope.frequencies(model.config.head_width)
            np.testing.assert_allclose(theta, data[f"{variant}/inv_freq_f64"], rtol=1e-14)
            np.testing.assert_allclose(factor, data[f"{variant}/attention_scaling"], rtol=1e-14)
            logits, _ = forward(model, jnp.asarray(data["ids"]), ())
            np.testing.assert_allclose(logits, data[f"{variant}/logits_f64"], **SHARP)

    @pytest.mark.parametrize(("name", "variant"), [("qwen2_rope", "yarn_betas_af"), ("llama_rope", "llama3")])
    def test_decoding_past_the_trained_length(self, golden, load, name, variant):
        data = golden(f"decoder/{name}")
        prompt = int(data["dec_prompt_len"])
        with jax.enable_x64(True):
            model = load(name, variant, compute_dtype="float64")
            assert prompt < model.config.rope.original_context < prompt + 6
            logits, _ = _chunks(model, jnp.asarray(data["ids"][:, : prompt + 6]), [prompt] + [1] * 6)
            np.testing.assert_allclose(logits[:, prompt:], data[f"{variant}/dec_logits_f64"], **SHARP)

    def test_float32(self, golden, load):
        data, variant = golden("decoder/qwen2_rope"), "yarn_betas_af"
        logits, _ = forward(load("qwen2_rope", variant), jnp.asarray(data["ids"]), ())
        # The factor 1.3 makes scores, and the noise in them, 1.7 times larger: theirs is 8e-6.
        np.testing.assert_allclose(logits, data[f"{variant}/logits_f64"], rtol=0, atol=2e-5)

    def test_variants_differ(self, golden):
        data = golden("decoder/qwen2_rope")
        assert tuple(data["variants"]) == VARIANTS
        for a in VARIANTS:
            for b in VARIANTS[: VARIANTS.index(a)]:
                assert np.abs(data[f"{a}/logits_f64"] - data[f"{b}/logits_f64"]).max() > 0.1


@pytest.fixture(scope="module")
def tiny(golden, tmp_path_factory):
    data = golden("ris/tiny_qwen2")
    sizes = json.loads(str(data["config_json"]))["config"]
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "max_position_embeddings": 130,
        "rms_norm_eps": sizes["rms_norm_eps"],
        "rope_parameters": sizes["rope"],
        "tie_word_embeddings": sizes["tie"],
    }
    path = tmp_path_factory.mktemp("tiny")
    hf_files.write_folder(path, config, {k[2:]: v for k, v in data.items() if k.startswith("w/")})
    return load_decoder(path)


class TestTinyQwen2:
    """The small model of the published program, without its sampling."""

    def test_dense_logits(self, golden, tiny):
        data = golden("ris/tiny_qwen2")
        ids = jnp.asarray(data["ids"])
        np.testing.assert_allclose(forward(tiny, ids[:, :120], ())[0], data["dense/logits"], rtol=0, atol=2e-5)
        chunked, _ = _chunks(tiny, ids[:, :120], [50, 50, 20])
        np.testing.assert_allclose(chunked, data["dense/logits"], rtol=0, atol=2e-5)

    def test_positions(self, golden, tiny):
        theta, factor = tiny.config.rope.frequencies(tiny.config.head_width)
        np.testing.assert_allclose(theta, golden("ris/tiny_qwen2")["inv_freq"], rtol=6e-7)
        assert factor == pytest.approx(1.0693147180559945, rel=1e-14)
