"""Published PLDR-LLM checkpoints: the Hugging Face family against its goldens, round trips, and what is refused."""

import dataclasses
import json
import pickle
import re
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from plga_jax.interop.pldr import load_hf, load_operators, load_pth, save_hf
from plga_jax.interop.pldr_tensors import config_from_tensors, model_from_tensors, tensors_from_model
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.models.pldr_transforms import constant_operator_model, convert_rope_layout

# Keys and values as the port writes them for the goldens' model.
CONFIG = {
    "architectures": ["PldrllmForCausalLM"],
    "model_type": "pldrllm",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 170,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-06,
    "num_reslayerA": 3,
    "num_denseA": 2,
    "A_dff": 24,
    "attention_bias": True,
    "glu_bias": True,
    "final_bias": True,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "reference_rope": True,
    "custom_G_type": None,
    "cache_first_G": False,
    "output_pldr_attentions": False,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "initializer_range": 0.02,
    "dtype": "float32",
    "transformers_version": "4.56.1",
}
DEDUCED = ("A", "A_LM", "G_LM", "E")

# Measured against the float32 goldens: 6.4e-5 in logits and 3.4e-4 in G (half-split, layer 1), where a power near its
# floor amplifies rounding; the goldens' own distance to float64 is 1.7e-4.
F32 = {"logits": 5e-4, "A": 5e-5, "A_LM": 5e-5, "G_LM": 2e-3, "E": 5e-4}
# In the port softmax stays float32 even in float64: measured 2.6e-6 in logits, 3.4e-6 in G.
F64 = {"logits": 1e-5, "A": 1e-5, "A_LM": 1e-5, "G_LM": 1e-5, "E": 1e-5}
# So do the angles of the half-split family.
F64_HALF = dict.fromkeys(F64, 2e-4)


@pytest.fixture
def weights(golden):
    return golden("weights_small")


@pytest.fixture
def folder(tmp_path, weights):
    """Writes the goldens' model as a Hugging Face folder, with changes."""

    def write(config=None, tensors=None):
        save_file(weights if tensors is None else tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
        return tmp_path

    return write


class TestGoldens:
    @pytest.mark.parametrize("family", ["v51", "v52"])
    def test_float32(self, golden, folder, family):
        self._check(golden("hf_f32"), golden, folder, family, F32, "float32")

    @pytest.mark.parametrize("family", ["v51", "v52"])
    def test_float64(self, x64, golden, folder, family):
        self._check(golden("hf_f64"), golden, folder, family, F64 if family == "v51" else F64_HALF, "float64")

    def _check(self, wanted, golden, folder, family, tolerance, dtype):
        model = load_hf(
            folder({"reference_rope": family == "v51"}), param_dtype=dtype, compute_dtype=dtype, gram_rows="all"
        )
        prefix, names = ("", DEDUCED) if family == "v51" else ("halfsplit.", DEDUCED[:3])
        run = jax.jit(lambda model, ids: model(ids, collect=names))
        logits, out = run(model, _ids(golden))
        _close(logits, wanted[f"{prefix}logits"], tolerance["logits"])
        for name in names:
            stacked = np.stack([wanted[f"{prefix}L{layer}.{name}"] for layer in (0, 1)])
            _close(getattr(out, name), stacked, tolerance[name])
        if family == "v51":
            padded = _ids(golden, "pad.ids")
            np.testing.assert_array_equal(wanted["pad.attention_mask"], padded != 0)
            _close(run(model, padded)[0], wanted["pad.logits"], tolerance["logits"])

    @pytest.mark.parametrize(("name", "dtype", "tolerance"), [("hf_f32", "float32", F32), ("hf_f64", "float64", F64)])
    def test_cached(self, x64, golden, folder, name, dtype, tolerance):
        wanted, decode = golden(name), golden("decode_f64")
        model = load_hf(folder(), param_dtype=dtype, compute_dtype=dtype)
        # One batch for both goldens. Its rows keep their own operators, as the port does with cache_first_G = false.
        alone = np.concatenate([decode["prompt"], decode["cont"]], axis=1)
        logits, cache = _decode(model, np.concatenate([alone, golden("forward_f64")["full.ids"][:, :16]]), prompt=8)
        _close(logits[:1], wanted["logits_cached"], tolerance["logits"])
        _close(logits[1:, :4], wanted["logits_cached_b2_firstG0"], tolerance["logits"])
        _close(cache.operators[:, :1], wanted["past_G_values"][:, 2], tolerance["G_LM"])

    def test_half_split_is_the_converted_model(self, x64, golden, folder, tmp_path):
        # The goldens of v52 hold float32 angles; the exact conversion is held to the native family in float64 instead.
        wide = {"param_dtype": "float64", "compute_dtype": "float64"}
        save_hf(convert_rope_layout(load_hf(folder(), **wide)), tmp_path / "v52")
        assert json.loads((tmp_path / "v52" / "config.json").read_text())["reference_rope"] is False
        model = load_hf(tmp_path / "v52", **wide)
        assert model.config.rope_layout == "half"
        _close(model(_ids(golden))[0], golden("forward_f64")["full.logits"], 1e-12)


class TestRoundTrips:
    def test_import_export_import_is_bit_equal(self, weights, folder, tmp_path):
        model = load_hf(folder())
        save_hf(model, tmp_path / "again")
        exported = load_file(tmp_path / "again" / "model.safetensors")
        assert exported.keys() == weights.keys()
        for name, array in weights.items():
            assert exported[name].dtype == array.dtype
            np.testing.assert_array_equal(exported[name], array, err_msg=name)
        again = load_hf(tmp_path / "again")
        assert again.config == model.config
        chex.assert_trees_all_equal(nnx.state(again), nnx.state(model))

    def test_config_has_the_published_keys(self, folder, tmp_path):
        save_hf(load_hf(folder()), tmp_path / "again")
        written = json.loads((tmp_path / "again" / "config.json").read_text())
        ours_to_leave = {"output_pldr_attentions", "initializer_range", "transformers_version"}
        assert written == {key: value for key, value in CONFIG.items() if key not in ours_to_leave}

    @pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
    def test_other_dtypes_survive(self, x64, weights, folder, tmp_path, dtype):
        model = load_hf(folder(), param_dtype=dtype)
        save_hf(model, tmp_path / "again")
        chex.assert_trees_all_equal(nnx.state(load_hf(tmp_path / "again", param_dtype=dtype)), nnx.state(model))
        # Without a word about it weights become float32, which holds every bfloat16.
        single = load_hf(tmp_path / "again")
        assert single.embedding[...].dtype == jnp.float32
        np.testing.assert_array_equal(single.embedding[...], model.embedding[...].astype(jnp.float32))

    @pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
    def test_half_precision_files(self, weights, folder, dtype):
        rounded = {name: array.astype(dtype) for name, array in weights.items()}
        model = load_hf(folder(tensors=rounded))
        for name, array in tensors_from_model(model).items():
            np.testing.assert_array_equal(array, rounded[name].astype(np.float32))

    def test_shards(self, weights, folder):
        path = folder()
        whole = load_hf(path)
        names = sorted(weights)
        parts = {"model-1.safetensors": names[:70], "model-2.safetensors": names[70:]}
        for part, held in parts.items():
            save_file({name: weights[name] for name in held}, path / part)
        index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        (path / "model.safetensors").unlink()
        chex.assert_trees_all_equal(nnx.state(load_hf(path)), nnx.state(whole))

    def test_bare_decoder_names(self, weights, folder):
        bare = {name.removeprefix("decoder."): array for name, array in weights.items()}
        whole = load_hf(folder())
        chex.assert_trees_all_equal(nnx.state(load_hf(folder(tensors=bare))), nnx.state(whole))

    @pytest.mark.parametrize("bare", [False, True])
    def test_constant_operators(self, weights, golden, folder, tmp_path, bare):
        G = jnp.asarray(golden("v510G_f32")["G.random"][:, 0])
        model = constant_operator_model(load_hf(folder()), G)
        save_hf(model, tmp_path / "G")
        if bare:
            path = tmp_path / "G" / "model.safetensors"
            save_file({n.removeprefix("decoder."): array for n, array in load_file(path).items()}, path)
        again = load_hf(tmp_path / "G")
        assert again.config == model.config
        chex.assert_trees_all_equal(nnx.state(again), nnx.state(model))
        np.testing.assert_array_equal(again.layers.attention.G[...], G)

    def test_published_constant_operators(self, golden, folder, weights):
        wanted = golden("v510G_f32")
        G = wanted["G.random"]
        values = np.stack([np.zeros_like(G), np.zeros_like(G), G], axis=1)
        tensors = _without_learner(weights) | {
            "decoder.past_G_values": values,
            "decoder.past_G_values_status": np.ones(2, bool),
        }
        model = load_hf(folder({"custom_G_type": "random"}, tensors))
        # The port is bit-identical to v510G; measured 4.2e-6 for logits up to 3.3.
        _close(model(_ids_of(wanted["ids"]))[0], wanted["random.logits"], 5e-5)

    def test_identity_needs_no_operators_in_the_file(self, golden, folder, weights):
        model = load_hf(folder({"custom_G_type": "identity"}, _without_learner(weights)))
        np.testing.assert_array_equal(model.layers.attention.G[...], np.broadcast_to(np.eye(16), (2, 4, 16, 16)))


class TestConfig:
    def test_read_from_shapes_alone(self, weights):
        config = config_from_tensors(weights)
        assert config == PLDRConfig(
            vocab_size=97, num_layers=2, num_heads=4, head_width=16, hidden_width=170, metric_width=24, residual_units=3
        )

    def test_null_fields_come_from_shapes(self, folder):
        free = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim", "A_dff", "pad_token_id"))
        assert load_hf(folder(free)).config == load_hf(folder()).config

    def test_what_shapes_do_not_tell_is_read(self, folder):
        told = {"max_position_embeddings": 48, "layer_norm_eps": 1e-5, "rope_theta": 500000, "pad_token_id": 5}
        config = load_hf(folder(told), attention="dense").config
        assert (config.context, config.norm_epsilon, config.rope_base, config.pad_id) == (48, 1e-5, 500000, 5)
        assert config.attention == "dense"

    def test_base_in_rope_parameters(self, folder):
        newer = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
        assert load_hf(folder(newer)).config.rope_base == 20000.0

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("vocab_size", 98),
            ("hidden_size", 128),
            ("num_hidden_layers", 3),
            ("num_attention_heads", 8),
            ("head_dim", 8),
            ("intermediate_size", 171),
            ("A_dff", 25),
            ("num_reslayerA", 8),
            ("num_denseA", 3),
            ("custom_G_type", "identity"),
        ],
    )
    def test_contradiction_names_the_field(self, folder, field, value):
        with pytest.raises(ValueError, match=rf"{field}.*but the tensors say"):
            load_hf(folder({field: value}))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model_type": "llama"}, "model_type 'llama'"),
            ({"model_type": None}, "model_type None"),
            ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
            ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
            ({"attention_bias": False}, "attention_bias = False"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling = .*yarn.* is not implemented"),
            ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters"),
            ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
            ({"vocab_size": "97"}, "vocab_size = '97' must be a whole number"),
            ({"layer_norm_eps": "small"}, "layer_norm_eps = 'small' must be a number"),
            ({"num_denseA": True}, "num_denseA = True"),
            ({"pad_token_id": 97}, "pad_id = 97 is outside"),
        ],
    )
    def test_options_that_are_not_implemented(self, folder, change, message):
        with pytest.raises(ValueError, match=message):
            load_hf(folder(change))

    def test_external_operators_must_be_there(self, folder, weights):
        with pytest.raises(ValueError, match=r"past_G_values is not among the tensors.*with_operators"):
            load_hf(folder({"custom_G_type": "external"}, _without_learner(weights)))

    def test_learned_config_without_learner(self, folder, weights):
        with pytest.raises(ValueError, match=r"custom_G_type.*'learned', but the tensors say 'constant'"):
            load_hf(folder(tensors=_without_learner(weights)))

    def test_heads_of_a_bare_constant_checkpoint(self, weights):
        tensors = _without_learner(weights)
        with pytest.raises(ValueError, match="pass num_heads"):
            config_from_tensors(tensors)
        assert config_from_tensors(tensors, num_heads=4).head_width == 16
        with pytest.raises(ValueError, match="do not make the embedding's width 64"):
            config_from_tensors(tensors, num_heads=5)


class TestTensors:
    WQ = "decoder.dec_layers.1.mha1.wq.weight"

    def test_missing(self, weights):
        with pytest.raises(ValueError, match=f"{re.escape(self.WQ)} is missing"):
            self._load(weights, lambda tensors: tensors.pop(self.WQ))

    def test_left_over(self, weights):
        with pytest.raises(ValueError, match=r"lm_head\.weight is not part of this model"):
            self._load(weights, lambda tensors: tensors.update({"lm_head.weight": np.zeros(2)}))

    def test_wrong_shape(self, weights):
        with pytest.raises(ValueError, match=rf"{re.escape(self.WQ)} has shape \(64, 63\), expected \(64, 64\)"):
            self._load(weights, lambda tensors: tensors.update({self.WQ: tensors[self.WQ][:, :-1]}))

    def test_quantised(self, weights):
        with pytest.raises(ValueError, match=rf"{re.escape(self.WQ)} has dtype int8"):
            self._load(weights, lambda tensors: tensors.update({self.WQ: tensors[self.WQ].astype(np.int8)}))

    def test_all_problems_are_counted(self, weights):
        def drop(tensors):
            for name in [name for name in tensors if ".1.ffn." in name]:
                del tensors[name]
            tensors["extra"] = np.zeros(2)

        with pytest.raises(ValueError, match="and 2 more"):
            self._load(weights, drop)

    def test_gap_in_the_layers(self, weights):
        moved = {name.replace("dec_layers.1", "dec_layers.7"): array for name, array in weights.items()}
        with pytest.raises(ValueError, match=r"dec_layers\.1\..* is missing"):
            model_from_tensors(moved, config_from_tensors(moved))

    def test_wrong_operators(self, weights):
        tensors = _without_learner(weights) | {"decoder.past_G_values": np.zeros((2, 2, 1, 4, 16, 16), np.float32)}
        with pytest.raises(ValueError, match=r"past_G_values has shape"):
            model_from_tensors(tensors, config_from_tensors(tensors))

    @pytest.mark.parametrize("tensors", [{}, {"model.embed_tokens.weight": np.zeros((4, 2))}])
    def test_another_architecture(self, tensors):
        with pytest.raises(ValueError, match=r"Not a PLDR-LLM checkpoint"):
            config_from_tensors(tensors)

    def test_odd_axes(self, weights):
        with pytest.raises(ValueError, match="expected 2 axes"):
            config_from_tensors({**weights, "decoder.embedding.weight": np.zeros(4)})

    def _load(self, weights, change):
        tensors = dict(weights)
        config = config_from_tensors(tensors)
        change(tensors)
        return model_from_tensors(tensors, config)


class TestPth:
    def test_without_torch(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(ValueError, match=r"needs torch.*plga-jax\[torch\]"):
            load_pth(tmp_path / "model.pth")

    @pytest.mark.parametrize("key", ["model_state_dict", None])
    def test_round_trip(self, weights, tmp_path, key):
        torch = _torch()
        state = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
        saved = {key: state, "loss": 1.5, "accuracy": torch.tensor(0.5)} if key else state
        torch.save(saved, tmp_path / "model.pth")
        model = load_pth(tmp_path / "model.pth", context=64)
        assert model.config == config_from_tensors(weights, context=64)
        for name, array in tensors_from_model(model).items():
            np.testing.assert_array_equal(array, weights[name])

    def test_half_precision(self, weights, tmp_path):
        torch = _torch()
        state = {name: torch.from_numpy(array.copy()).bfloat16() for name, array in weights.items()}
        torch.save(state, tmp_path / "model.pth")
        embedding = load_pth(tmp_path / "model.pth").embedding[...]
        np.testing.assert_array_equal(embedding, state["decoder.embedding.weight"].float().numpy())

    def test_a_pickle_that_runs_code_is_refused(self, weights, tmp_path):
        torch = _torch()
        torch.save({"model_state_dict": _Bomb(tmp_path / "exploded")}, tmp_path / "model.pth")
        (tmp_path / "plain.pth").write_bytes(pickle.dumps(_Bomb(tmp_path / "exploded"), protocol=2))
        for name in ("model.pth", "plain.pth"):
            with pytest.raises(ValueError, match="was not run"):
                load_pth(tmp_path / name)
        assert not (tmp_path / "exploded").exists()

    @pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 torn"])
    def test_damaged(self, tmp_path, content):
        _torch()
        (tmp_path / "model.pth").write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.pth"):
            load_pth(tmp_path / "model.pth")

    def test_not_a_state_dict(self, tmp_path):
        torch = _torch()
        torch.save([torch.ones(2)], tmp_path / "list.pth")
        torch.save({"model_state_dict": {}}, tmp_path / "empty.pth")
        with pytest.raises(ValueError, match="holds a list, not a dict"):
            load_pth(tmp_path / "list.pth")
        with pytest.raises(ValueError, match="Not a PLDR-LLM checkpoint"):
            load_pth(tmp_path / "empty.pth")
        with pytest.raises(ValueError, match="does not exist"):
            load_pth(tmp_path / "absent.pth")


class TestOperators:
    G = np.random.default_rng(0).normal(size=(2, 4, 16, 16)).astype(np.float32)

    @pytest.mark.parametrize(
        "arrays", [{"G_LM": G}, {"anything": G}, {"anything": G[:, None]}, {"residual": G[..., 0], "G_LM": G}]
    )
    def test_read(self, tmp_path, arrays):
        np.savez(tmp_path / "G.npz", **arrays)
        np.testing.assert_array_equal(load_operators(tmp_path / "G.npz"), self.G)

    def test_into_a_model(self, tmp_path, golden, folder):
        np.savez(tmp_path / "G.npz", G_LM=self.G)
        learned, operators = load_hf(folder()), load_operators(tmp_path / "G.npz")
        logits = constant_operator_model(learned, operators)(_ids(golden))[0]
        np.testing.assert_array_equal(logits, learned(_ids(golden), operators=operators)[0])

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({}, "holds nothing"),
            ({"a": G, "b": G}, "holds a, b, not G_LM"),
            ({"G_LM": G[0]}, r"float32\[4, 16, 16\]"),
            ({"G_LM": G[..., :-1]}, "expected floats of shape"),
            ({"G_LM": G.astype(int)}, "int64"),
            ({"G_LM": np.array([object()])}, "allow_pickle"),
        ],
    )
    def test_other_content_is_refused(self, tmp_path, arrays, message):
        np.savez(tmp_path / "G.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            load_operators(tmp_path / "G.npz")

    def test_damaged_or_missing(self, tmp_path):
        np.savez_compressed(tmp_path / "G.npz", G_LM=self.G)
        whole = (tmp_path / "G.npz").read_bytes()
        torn = bytearray(whole)
        torn[len(torn) // 2] ^= 0xFF
        np.save(tmp_path / "single.npy", self.G)
        for content in (b"", b"x", whole[: len(whole) // 2], bytes(torn), pickle.dumps(1)):
            (tmp_path / "bad.npz").write_bytes(content)
            with pytest.raises(ValueError, match=r"bad\.npz is not an \.npz of operators"):
                load_operators(tmp_path / "bad.npz")
        for name in ("single.npy", "absent.npz", "."):
            with pytest.raises(ValueError, match=r"is not an \.npz of operators"):
                load_operators(tmp_path / name)


@dataclasses.dataclass
class _Bomb:
    """Makes a file when unpickled."""

    path: object

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def _torch():
    return pytest.importorskip("torch", reason="torch is an extra")


def _close(actual, wanted, tolerance):
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, rtol=0, atol=tolerance)


def _ids_of(ids):
    return jnp.asarray(ids[:, :24], jnp.int32)


def _ids(golden, key="full.ids"):
    return _ids_of(golden("forward_f64")[key])


def _without_learner(weights):
    learner = ("reslayerAs", "plgatt_layer", "mha1.layernorm1")
    return {name: array for name, array in weights.items() if not any(part in name for part in learner)}


def _decode(model: PLDR, ids, *, prompt: int):
    """Logits of the prompt's last token and of each further one, decoded with a KV+G cache."""
    ids = jnp.asarray(ids, jnp.int32)
    last, cache = jax.jit(PLDR.prefill)(model, ids[:, :prompt], model.init_cache(*ids.shape))
    logits, extend = [last[:, -1:]], jax.jit(PLDR.extend)
    for index in range(prompt, ids.shape[1]):
        step, cache = extend(model, ids[:, index : index + 1], cache)
        logits.append(step)
    return jnp.concatenate(logits, axis=1), cache
