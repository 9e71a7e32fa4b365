"""GGUF files: a synthetic one always, and the default model where it is at hand."""

import dataclasses
import json
import os
import pathlib

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.interop import fetch
from plga_jax.interop.decoder_tensors import decoder_from_tensors, tensors_from_decoder
from plga_jax.interop.gguf import load_gguf
from plga_jax.interop.pretrained import load_any, load_tokenizer
from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.ops.rope_scaling import RopeConfig
from plga_jax.tokenizers import tokenizer_from_config
from tests.conftest import GOLDENS
from tests.tiny_tokenizer import CHATML, CONTROLS, MERGES, vocabulary

CONFIG = DecoderConfig(
    vocab_size=len(vocabulary()),
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    model_width=32,
    hidden_width=64,
    context=128,
    rope=RopeConfig(base=1e5, context=128),
    norm_epsilon=1e-5,
    bos_id=1,
    eos_ids=(2,),
    pad_id=2,
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _interleaved(array, heads):
    """Row 2j + s of a head's H from its row j + s·H/2: entry by entry, as the format's writers do."""
    width = len(array) // heads
    rows = [h * width + (r // 2) + (r % 2) * width // 2 for h in range(heads) for r in range(width)]
    return array[rows]


def _write(path, config=CONFIG, *, metadata=(), drop=(), quantised="F32", architecture="llama"):
    """Writes a random model; returns the weights that it stands for."""
    model = Decoder(config, rngs=nnx.Rngs(0))
    writer = gguf.GGUFWriter(path, architecture)
    fields = {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.context,
        "llama.embedding_length": config.model_width,
        "llama.feed_forward_length": config.hidden_width,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e5,
        "llama.rope.dimension_count": config.head_width,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary(),
        "tokenizer.ggml.token_type": [3] * len(CONTROLS) + [1] * (len(vocabulary()) - len(CONTROLS)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHATML,
    } | dict(metadata)
    for name, value in fields.items():
        if name in drop or value is None:
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        add.get(type(value), writer.add_array)(name, value)
    weights = {}
    for name, array in tensors_from_decoder(model).items():
        kind = gguf.GGMLQuantizationType[quantised if array.ndim == 2 else "F32"]
        codes = gguf.quantize(array, kind)
        weights[name] = gguf.dequantize(codes, kind)
        for part, heads in ((".q_proj", config.num_heads), (".k_proj", config.num_kv_heads)):
            codes = _interleaved(codes, heads) if part in name else codes
        for theirs, short in NAMES.items():
            name = name.replace(theirs, short)
        if name not in drop:
            writer.add_tensor(name, codes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _assert_equal(model, weights):
    expected = dict(nnx.to_flat_state(nnx.state(decoder_from_tensors(weights, model.config), nnx.Param)))
    found = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    assert found.keys() == expected.keys()
    for path, param in found.items():
        np.testing.assert_array_equal(param[...], expected[path][...], err_msg=str(path))


class TestSynthetic:
    @pytest.mark.parametrize("quantised", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
    def test_weights(self, tmp_path, quantised):
        weights = _write(tmp_path / "a.gguf", quantised=quantised)
        model, _ = load_gguf(tmp_path / "a.gguf")
        assert model.config == CONFIG
        _assert_equal(model, weights)

    def test_untied_biased_and_half(self, tmp_path):
        config = dataclasses.replace(CONFIG, tied=False, qkv_bias=True, out_bias=True, mlp_bias=True)
        weights = _write(tmp_path / "a.gguf", config)
        model, _ = load_gguf(tmp_path / "a.gguf", compute_dtype="bfloat16", param_dtype="bfloat16", attention="dense")
        changed = {"compute_dtype": "bfloat16", "param_dtype": "bfloat16", "attention": "dense"}
        assert model.config == dataclasses.replace(config, **changed)
        _assert_equal(model, weights)

    @pytest.mark.parametrize("kind", ["linear", "yarn"])
    def test_scaled_positions(self, tmp_path, kind):
        scaling = {"type": kind, "factor": 4.0} | ({"original_context_length": 32} if kind == "yarn" else {})
        _write(tmp_path / "a.gguf", metadata={f"llama.rope.scaling.{name}": value for name, value in scaling.items()})
        rope = load_gguf(tmp_path / "a.gguf")[0].config.rope
        original = 32 if kind == "yarn" else None
        assert rope == RopeConfig(kind=kind, base=1e5, factor=4.0, context=128, original_context=original)

    def test_tokenizer(self, tmp_path):
        path = tmp_path / "a.gguf"
        _write(path)
        _, tokenizer = load_any(path)
        assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (2, 2, None)
        assert [vocabulary()[token] for token in tokenizer.encode("the 12<|stop|>")][:4] == ["the", "Ġ", "1", "2"]
        assert tokenizer.encode("the<|stop|>", special=True)[-1] == 2 and 2 not in tokenizer.encode("the<|stop|>")
        for again in (load_tokenizer(path), tokenizer_from_config(tokenizer.to_config())):
            assert again.fingerprint == tokenizer.fingerprint
        _write(path, metadata={"tokenizer.ggml.add_bos_token": True})
        assert load_tokenizer(path).bos_id == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"architecture": "qwen2"}, "architecture 'qwen2'"),
            ({"metadata": {"llama.expert_count": 4}}, r"llama\.expert_count, which is not implemented"),
            ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "'longrope' is not implemented"),
            ({"metadata": {"llama.rope.scaling.type": "linear"}}, r"lacks llama\.rope\.scaling\.factor"),
            ({"metadata": {"llama.rope.dimension_count": 4}}, "must be the head width 8"),
            ({"metadata": {"llama.vocab_size": 4}}, r"llama\.vocab_size is 4"),
            ({"metadata": {"llama.attention.head_count_kv": [2, 1]}}, "one whole number"),
            (
                {"metadata": {"llama.attention.head_count": 3}},
                "heads of an even width cannot share|multiple of|head width",
            ),
            ({"metadata": {"llama.block_count": 3}}, r"layers\.2\.\S+ is missing"),
            ({"metadata": {"llama.feed_forward_length": 63}}, "has shape"),
            ({"drop": ["llama.block_count"]}, r"llama\.block_count = None"),
            ({"drop": ["llama.attention.layer_norm_rms_epsilon"]}, "rms_epsilon"),
            ({"drop": ["token_embd.weight"]}, r"lacks the tensor.*embed_tokens"),
            ({"drop": ["blk.1.ffn_up.weight"]}, r"layers\.1\.mlp\.up_proj\.weight is missing"),
            ({"metadata": {"tokenizer.ggml.model": "llama"}}, "tokenizer 'llama'"),
            ({"metadata": {"tokenizer.ggml.pre": "qwen2"}}, "pre-tokenizer 'qwen2'"),
            ({"metadata": {"tokenizer.ggml.merges": ["a b c"]}}, "a merge that is no pair"),
            ({"metadata": {"tokenizer.ggml.merges": ["zz yy"]}}, "holds no byte-level BPE"),
            ({"drop": ["tokenizer.ggml.tokens"]}, r"lacks tokenizer\.ggml\.tokens"),
        ],
    )
    def test_refusals(self, tmp_path, options, message):
        _write(tmp_path / "a.gguf", **options)
        with pytest.raises(ValueError, match=message):
            load_gguf(tmp_path / "a.gguf")

    @pytest.mark.parametrize("size", [0, 3, 20, 200, 3000, -1, -5000])
    def test_cut_files(self, tmp_path, size):
        path = tmp_path / "a.gguf"
        _write(path)
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ValueError, match=r"a\.gguf is damaged or not a GGUF"):
            load_gguf(path)

    def test_missing_file(self, tmp_path):
        with pytest.raises(ValueError, match="does not exist"):
            load_gguf(tmp_path / "a.gguf")


@pytest.fixture(scope="module")
def texts():
    return json.loads((GOLDENS / "smollm2" / "texts.json").read_text())


@pytest.fixture(scope="module")
def default():
    own = os.environ.get("PLGA_SMOLLM2")
    path = pathlib.Path(own) if own else fetch.cache_folder() / fetch.DEFAULT_FILE
    if not path.is_file():
        pytest.skip("the default model is not at hand; PLGA_SMOLLM2 may name it")
    return load_gguf(path)


class TestDefaultModel:
    def test_published_ids(self, default, texts):
        _, tokenizer = default
        for text, ids in zip(texts["texts"], texts["ids"], strict=True):
            assert tokenizer.encode(text, special=True) == ids
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(texts["texts"]) == 200

    def test_published_chat(self, default, golden):
        pytest.importorskip("jinja2")
        ids = default[1].chat([{"role": "user", "content": "What is the capital of France?"}])
        assert ids == golden("smollm2/p3_chat")["input_ids"].tolist()

    def test_published_logits(self, default, texts, golden):
        """One batch: every prompt and its greedy continuation, padded. Each choice must be the largest logit again."""
        model, tokenizer = default
        cases = {name: golden(f"smollm2/{name}") for name in texts["prompts"]}
        rows = []
        for name, case in cases.items():
            assert tokenizer.encode(texts["prompts"][name], special=True) == case["input_ids"].tolist()
            rows.append(np.concatenate([case["input_ids"], case["greedy_ids"][:-1]]))
        tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for row, ids in zip(tokens, rows):
            row[: len(ids)] = ids
        real = np.arange(tokens.shape[1]) < np.array([[len(ids)] for ids in rows])
        run = jax.jit(lambda model, tokens, real: model(tokens, segment_ids=real)[0])
        logits = np.asarray(run(model, jnp.asarray(tokens), jnp.asarray(real, jnp.int32)))
        for row, case in zip(logits, cases.values()):
            length = len(case["input_ids"])
            prompt = row[:length]
            top = np.take_along_axis(prompt, case["top_indices"].astype(np.int64), axis=-1)
            # Two orders of float32 sums through 30 layers: 1.2e-4 for logits of 20, measured.
            np.testing.assert_allclose(top, case["top_logits"], rtol=0, atol=5e-4)
            total = np.log(np.exp(prompt.astype(np.float64)).sum(-1))
            np.testing.assert_allclose(total, case["logsumexp"], rtol=0, atol=5e-4)
            next_logit = np.take_along_axis(prompt[:-1], case["input_ids"][1:, None].astype(np.int64), -1)[:, 0]
            np.testing.assert_allclose(total[:-1] - next_logit, case["nll_next"], rtol=0, atol=5e-4)
            chosen = row[length - 1 : length - 1 + len(case["greedy_ids"])].argmax(-1)
            sure = case["greedy_top1_top2_gap"] > 1e-3
            assert sure.sum() >= 60
            np.testing.assert_array_equal(chosen[sure], case["greedy_ids"][sure])
