"""Hugging Face folders of decoders: what is read, how, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from plga_jax.interop import hf_files
from plga_jax.interop.decoder_tensors import decoder_from_tensors, tensors_from_decoder
from plga_jax.interop.hf import config_from_hf, config_to_hf, load_decoder, save_decoder
from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.ops.rope_scaling import RopeConfig

SIZES = {
    "vocab_size": 11,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_width": 4,
    "model_width": 12,
    "hidden_width": 20,
    "context": 32,
    "rope": RopeConfig(context=32),
}
KINDS = {
    "llama": {"tied": False, "bos_id": 1, "eos_ids": (2, 3)},
    "llama_biased": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "qwen2": {"qkv_bias": True, "rope": RopeConfig(context=32).stretched(64), "context": 64},
    "qwen2_windowed": {"qkv_bias": True, "window": 5, "windowed_layers": (1,)},
    "qwen3": {"qk_norm": True, "pad_id": 7},
    "mistral": {"tied": False, "window": 3, "windowed_layers": (0, 1)},
}
DECLARED = {
    "model_type": "qwen2",
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def _model(kind, **fields):
    return Decoder(DecoderConfig(**SIZES | KINDS[kind] | fields), rngs=nnx.Rngs(0))


def _weights(model):
    return dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def _folder(path, *, declare=(), drop=(), tensors=(), kind="llama"):
    """The folder of a tiny model, with some fields and tensors exchanged."""
    save_decoder(_model(kind), path)
    config = hf_files.read_config(path) | dict(declare)
    config = {name: value for name, value in config.items() if name not in drop}
    weights = {name: np.array(array) for name, array in hf_files.read_tensors(path).items()} | dict(tensors)
    hf_files.write_folder(path, config, {name: array for name, array in weights.items() if name not in drop})
    return path


def _shard(path, **index):
    """Parts the single file into two."""
    tensors = {name: np.array(array) for name, array in hf_files.read_tensors(path).items()}
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {name: f"part-{position % 2}.safetensors" for position, name in enumerate(names)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in names if shards[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards | index}))
    return path


class TestRoundTrip:
    @pytest.mark.parametrize("kind", KINDS)
    def test_weights_and_config(self, tmp_path, kind):
        model = _model(kind)
        save_decoder(model, tmp_path)
        assert hf_files.read_config(tmp_path)["model_type"] == kind.partition("_")[0]
        again = load_decoder(tmp_path)
        # The window of a stretched model is written as the scaling, and read back from it.
        assert again.config == model.config
        ours, theirs = _weights(model), _weights(again)
        assert ours.keys() == theirs.keys()
        for path, param in ours.items():
            assert theirs[path][...].dtype == jnp.float32
            np.testing.assert_array_equal(theirs[path][...], param[...])
            assert theirs[path].get_metadata("axes") == param.get_metadata("axes")

    def test_published_layout(self, tmp_path):
        model = _model("llama")
        save_decoder(model, tmp_path)
        tensors = hf_files.read_tensors(tmp_path)
        assert len(tensors) == 3 + 2 * 9
        np.testing.assert_array_equal(
            tensors["model.layers.1.self_attn.k_proj.weight"], model.layers.attention.key.kernel[1].T
        )
        np.testing.assert_array_equal(tensors["lm_head.weight"], model.head.kernel[...].T)

    @pytest.mark.parametrize(
        "fields",
        [
            {"qkv_bias": True, "mlp_bias": True},
            {"qk_norm": True, "mlp_bias": True},
            {"window": 4, "windowed_layers": (0,)},
        ],
    )
    def test_combinations_that_nobody_published(self, fields):
        with pytest.raises(ValueError, match="No published architecture"):
            config_to_hf(DecoderConfig(**SIZES | fields))


class TestFiles:
    def test_shards(self, tmp_path):
        whole = _weights(load_decoder(_folder(tmp_path)))
        for path, param in _weights(load_decoder(_shard(tmp_path))).items():
            np.testing.assert_array_equal(param[...], whole[path][...])

    def test_missing_shard(self, tmp_path):
        (_shard(_folder(tmp_path)) / "part-1.safetensors").unlink()
        with pytest.raises(ValueError, match=r"lacks part-1\.safetensors.*download"):
            load_decoder(tmp_path)

    @pytest.mark.parametrize("cut", [1, 4000])
    def test_damaged_shard(self, tmp_path, cut):
        path = _shard(_folder(tmp_path)) / "part-0.safetensors"
        path.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(ValueError, match=r"part-0\.safetensors is damaged"):
            load_decoder(tmp_path)

    def test_unknown_dtype(self, tmp_path):
        path = _folder(tmp_path) / "model.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"I32"', 1))
        with pytest.raises(ValueError, match="has dtype int32, expected one of float16"):
            load_decoder(tmp_path)
        save_file({"a": np.ones(2, np.uint16)}, path)
        with pytest.raises(ValueError, match="unknown dtype U16"):
            load_decoder(tmp_path)

    def test_files_are_mapped_and_may_be_replaced(self, tmp_path):
        _folder(tmp_path)
        tensors = hf_files.read_tensors(tmp_path)
        array = tensors["model.norm.weight"]
        assert not array.flags.writeable and not array.flags.owndata
        _folder(tmp_path, tensors={"model.norm.weight": np.full(12, 3, np.float32)})
        np.testing.assert_array_equal(array, np.ones(12))
        np.testing.assert_array_equal(load_decoder(tmp_path).norm.scale[...], np.full(12, 3))

    def test_end_ids_of_generation(self, tmp_path):
        _folder(tmp_path)
        assert load_decoder(tmp_path).config.eos_ids == (2, 3)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "pad_token_id": None}))
        assert load_decoder(tmp_path).config.eos_ids == (9,)
        (tmp_path / "generation_config.json").write_text("[]")
        with pytest.raises(ValueError, match=r"generation_config\.json holds a JSON list"):
            load_decoder(tmp_path)


class TestDtypes:
    @pytest.mark.parametrize(
        ("stored", "options", "expected"),
        [
            ("float16", {}, "float32"),
            ("bfloat16", {}, "float32"),
            ("float32", {"compute_dtype": "bfloat16"}, "float32"),
            ("bfloat16", {"compute_dtype": "bfloat16"}, "bfloat16"),
            ("float16", {"compute_dtype": jnp.bfloat16}, "float32"),
            ("float16", {"param_dtype": "bfloat16"}, "bfloat16"),
        ],
    )
    def test_of_weights(self, tmp_path, stored, options, expected):
        save_decoder(_model("qwen2"), tmp_path)
        tensors = {n: a.astype(jnp.dtype(stored)) for n, a in hf_files.read_tensors(tmp_path).items()}
        hf_files.write_folder(tmp_path, hf_files.read_config(tmp_path), tensors)
        model = load_decoder(tmp_path, **options)
        assert model.config.compute_dtype == jnp.dtype(options.get("compute_dtype", "float32")).name
        for param in _weights(model).values():
            assert param[...].dtype == expected
        kernel = tensors["model.layers.0.mlp.up_proj.weight"].astype(expected).T
        np.testing.assert_array_equal(model.layers.mlp.up.kernel[0], kernel)

    def test_bfloat16_is_saved_as_it_is(self, tmp_path):
        save_decoder(_model("qwen3", param_dtype="bfloat16"), tmp_path)
        assert {array.dtype for array in hf_files.read_tensors(tmp_path).values()} == {jnp.dtype("bfloat16")}
        assert hf_files.read_config(tmp_path)["dtype"] == "bfloat16"

    def test_float64(self, tmp_path):
        _folder(tmp_path)
        with jax.enable_x64(True):
            assert load_decoder(tmp_path, compute_dtype="float64").embedding[...].dtype == jnp.float64
        with pytest.raises(ValueError, match="float16 must be"):
            load_decoder(tmp_path, compute_dtype="float16")


class TestTies:
    def test_a_tied_head_may_be_stored(self, tmp_path):
        embedding = np.asarray(_model("qwen3").embedding[...])
        model = load_decoder(_folder(tmp_path, kind="qwen3", tensors={"lm_head.weight": embedding}))
        assert model.config.tied and not hasattr(model, "head")

    def test_a_tied_head_that_differs(self, tmp_path):
        other = np.asarray(_model("qwen3").embedding[...]) + 1
        with pytest.raises(ValueError, match="tie_word_embeddings = false"):
            load_decoder(_folder(tmp_path, kind="qwen3", tensors={"lm_head.weight": other}))

    def test_an_untied_head_that_is_missing(self, tmp_path):
        with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
            load_decoder(_folder(tmp_path, drop=["lm_head.weight"]))

    def test_unsaid_is_untied(self, tmp_path):
        assert not load_decoder(_folder(tmp_path, drop=["tie_word_embeddings"])).config.tied


class TestShapes:
    @pytest.mark.parametrize(
        "name", ["vocab_size", "hidden_size", "num_key_value_heads", "intermediate_size", "head_dim"]
    )
    def test_config_and_tensors_disagree(self, tmp_path, name):
        with pytest.raises(ValueError, match=f"{name} is 5, but the tensors say"):
            load_decoder(_folder(tmp_path, declare={name: 5}))

    def test_layers_disagree(self, tmp_path):
        with pytest.raises(ValueError, match="num_hidden_layers is 3, but the tensors say 2"):
            load_decoder(_folder(tmp_path, declare={"num_hidden_layers": 3}))

    def test_sizes_that_a_config_leaves_out(self, tmp_path):
        left_out = ["vocab_size", "hidden_size", "num_key_value_heads", "intermediate_size", "head_dim"]
        assert load_decoder(_folder(tmp_path, drop=left_out)).config == _model("llama").config

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"drop": ["model.norm.weight"]}, r"model\.norm\.weight is missing"),
            ({"tensors": {"model.norm.bias": np.ones(12)}}, r"model\.norm\.bias is not part of this model"),
            ({"tensors": {"model.norm.weight": np.ones(13)}}, r"shape \(13,\), expected \(12,\)"),
            (
                {"tensors": {"model.layers.1.mlp.down_proj.weight": np.ones((20, 12))}},
                r"layers\.1\.mlp\.down_proj\.weight has shape \(20, 12\), expected \(12, 20\)",
            ),
            ({"tensors": {"model.norm.weight": np.ones(12, np.int8)}}, "has dtype int8"),
            ({"declare": {"attention_bias": True}}, r"self_attn\.\w+_proj\.bias is missing.*and 3 more"),
            ({"drop": ["model.embed_tokens.weight"]}, r"model\.embed_tokens\.weight should be a matrix, found nothing"),
            ({"tensors": {"model.embed_tokens.weight": np.ones(3)}}, r"should be a matrix, found \(3,\)"),
        ],
    )
    def test_wrong_tensors(self, tmp_path, options, message):
        with pytest.raises(ValueError, match=message):
            load_decoder(_folder(tmp_path, **options))

    def test_rotary_tables_of_older_files_are_passed_over(self, tmp_path):
        table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
        assert load_decoder(_folder(tmp_path, tensors=table)).config == _model("llama").config


class TestOptions:
    @pytest.mark.parametrize(
        ("declared", "message"),
        [
            ({"model_type": "gemma2"}, "'gemma2'.*llama, mistral, qwen2, qwen3"),
            ({"model_type": None}, "model_type None"),
            ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
            ({"quantization_config": {"bits": 4}}, "quantization_config"),
            ({"use_mrope": True}, "use_mrope"),
            ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk' is unknown"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 1}}, r"\['twist'\]"),
            ({"layer_types": ["full_attention"]}, "must name 30 layers"),
            ({"layer_types": ["chunked_attention"] * 30}, "other kinds are not implemented"),
            ({"layer_types": [["full_attention"]] * 30}, "other kinds are not implemented"),
            ({"layer_types": ["sliding_attention"] * 30, "sliding_window": 4}, "in use: False"),
            ({"use_sliding_window": True, "max_window_layers": 0}, "sliding_window = None"),
            ({"use_sliding_window": 1.5}, "use_sliding_window = 1.5"),
            ({"num_attention_heads": None}, "lacks num_attention_heads"),
            ({"max_position_embeddings": "32"}, "must be a whole number"),
            ({"rms_norm_eps": 0}, "must be a positive number"),
            ({"eos_token_id": ["</s>"]}, "must be token ids"),
        ],
    )
    def test_refusals(self, declared, message):
        with pytest.raises(ValueError, match=message):
            config_from_hf(DECLARED | declared, {})

    @pytest.mark.parametrize(
        ("kind", "declared", "windowed"),
        [
            ("qwen2", {"sliding_window": 4, "use_sliding_window": False}, ()),
            ("qwen2", {"sliding_window": 4, "use_sliding_window": True}, (28, 29)),
            ("qwen3", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 29}, (29,)),
            ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 40}, ()),
            ("mistral", {"sliding_window": None}, ()),
            ("mistral", {}, tuple(range(30))),
            ("llama", {"sliding_window": 4}, ()),
        ],
    )
    def test_windows(self, kind, declared, windowed):
        known = config_from_hf(DECLARED | {"model_type": kind} | declared, {})
        assert known.get("windowed_layers", ()) == windowed
        if windowed:
            assert known["window"] == declared.get("sliding_window", 4096)

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("qwen2", (True, False, False, False)),
            ("llama", (True, True, True, False)),
            ("qwen3", (True, True, False, True)),
            ("mistral", (False, False, False, False)),
        ],
    )
    def test_biases_and_norms(self, kind, expected):
        known = config_from_hf(DECLARED | {"model_type": kind, "attention_bias": True, "mlp_bias": True}, {})
        assert tuple(known[name] for name in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm")) == expected

    def test_the_context_follows_the_scaling(self):
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        assert config_from_hf(DECLARED | {"rope_scaling": scaling}, {})["context"] == 128
        assert config_from_hf(DECLARED | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {})["context"] == 64
        assert config_from_hf(DECLARED | {"rope_scaling": {"type": "linear", "factor": 2.0}}, {})["context"] == 32

    def test_negative_ids_are_none(self):
        known = config_from_hf(DECLARED | {"pad_token_id": -1, "bos_token_id": -1, "eos_token_id": 5}, {})
        assert (known["pad_id"], known["bos_id"], known["eos_ids"]) == (5, None, (5,))

    def test_overrides_stretch_the_window(self, tmp_path):
        model = load_decoder(
            _folder(tmp_path), rope=RopeConfig(context=32).stretched(64), context=64, attention="blockwise"
        )
        assert model.config.rope.factor == 2.0 and model.config.attention == "blockwise"
        logits, _ = model(jnp.zeros((1, 40), jnp.int32), last_only=True)
        assert np.isfinite(np.asarray(logits)).all()


def test_tensors_are_asked_for_once():
    """So that a mapping may dequantise on demand."""
    model = _model("llama_biased")
    asked = []

    class Lazy(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    decoder_from_tensors(Lazy(tensors_from_decoder(model)), model.config)
    assert len(asked) == len(set(asked)) == 2 + 2 * 16
