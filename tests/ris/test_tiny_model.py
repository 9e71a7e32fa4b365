"""A small Qwen2 end to end against the published program: prefill whole and in chunks, decoding, a question."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.interop import hf_files
from plga_jax.interop.hf import load_decoder
from ris_jax.anchor import far_keys, respond
from ris_jax.attend import open_cache
from ris_jax.geometry import PublishedGeometry
from ris_jax.patterns import DenseGeometry

# Logits reach 1.2; ours and theirs, both in float32, are up to 5.4e-7 apart (measured).
CLOSE = {"rtol": 0, "atol": 2e-6}

extend = jax.jit(lambda model, tokens, cache: model.extend(tokens, cache))


@pytest.fixture(scope="module")
def data(golden):
    return golden("ris/tiny_qwen2")


@pytest.fixture(scope="module")
def model(data, tmp_path_factory):
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


@pytest.fixture(params=["sto", "str"])
def case(request, data):
    """The name of a run, and its geometry."""
    fields = json.loads(str(data["config_json"]))[request.param]
    return request.param, PublishedGeometry(
        mode=fields.get("ris_mode", "stochastic"),
        length=fields["seq_len"],
        seeds=fields["n_seeds"],
        density=fields["density"],
        local=fields["local_window"],
        anchors=fields["global_window"],
        base_seed=fields["seed"],
        block_max=fields.get("b_max"),
    )


def read(model, cache, tokens, chunk):
    """Logits of tokens read in chunks, and the cache."""
    found, start = [], int(cache.length[0])
    for first in range(0, tokens.shape[1], chunk):
        piece = jnp.asarray(tokens[:, first : first + chunk])
        cache = cache.ready(start + first, start + first + piece.shape[1])
        logits, cache = extend(model, piece, cache)
        found.append(logits)
    return np.concatenate(found, axis=1), cache


def test_dense(model, data):
    cache = open_cache(DenseGeometry(length=130), model.config, capacity=130)
    np.testing.assert_allclose(read(model, cache, data["ids"][:, :120], 50)[0], data["dense/logits"], **CLOSE)


@pytest.mark.parametrize(("chunk", "name"), [(120, "full"), (50, "chunk50")])
def test_prefill(model, data, case, chunk, name):
    run, geometry = case
    cache = open_cache(geometry, model.config, capacity=130)
    logits, _ = read(model, cache, data["ids"][:, :120], chunk)
    np.testing.assert_allclose(logits, data[f"{run}/prefill_{name}_logits"], **CLOSE)
    assert np.abs(logits - data["dense/logits"]).max() > 0.1


def test_decoding_past_the_window(model, data, case):
    run, geometry = case
    _, cache = read(model, open_cache(geometry, model.config, capacity=130), data["ids"][:, :120], 120)
    np.testing.assert_array_equal(far_keys(geometry, [120])[120], data[f"{run}/anchor"])
    cache, found = respond(cache, room=10), []
    for token in range(120, 130):
        logits, cache = extend(model, jnp.asarray(data["ids"][:, token : token + 1]), cache)
        found.append(logits[:, 0])
    assert geometry.length == 128 and not cache.overflowed.any()
    np.testing.assert_allclose(np.stack(found, axis=1), data[f"{run}/decode_logits"], **CLOSE)


def test_question(model, data, case):
    run, geometry = case
    _, cache = read(model, open_cache(geometry, model.config, capacity=130), data["ids"][:, :100], 50)
    mark = cache.mark()
    for _ in range(2):  # the second time after rewinding, as for a second question
        logits, cache = read(model, cache.rewind(mark), data["ids"][:, 105:118], 13)
        np.testing.assert_allclose(logits[0, -1], data[f"{run}/question_logits"], **CLOSE)
