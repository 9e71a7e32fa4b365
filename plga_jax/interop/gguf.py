"""GGUF files of the Llama kind (Llama, TinyLlama, SmolLM, Mistral): weights of any quantisation, and the tokenizer.

Quantised weights are dequantised on reading; the model computes with floats.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from plga_jax.array_types import DType
from plga_jax.gguf_files import metadata, open_gguf
from plga_jax.interop.decoder_tensors import EMBEDDING, HEAD, LAYER, decoder_from_tensors
from plga_jax.models.config import float_name
from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.ops.rope_scaling import RopeConfig
from plga_jax.tokenizers_hf import HFTokenizer

_NAMES = {"token_embd": EMBEDDING.removesuffix(".weight"), "output_norm": "model.norm"} | {
    "output": HEAD.removesuffix(".weight")
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}

# Fields of the architecture that are read here, or do not matter to the map.
_SIZES = {
    "block_count": "num_layers",
    "embedding_length": "model_width",
    "feed_forward_length": "hidden_width",
    "attention.head_count": "num_heads",
    "context_length": "context",
}
_READ = {
    *_SIZES,
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "vocab_size",
    "tensor_data_layout",
}


def load_gguf(
    path: str | os.PathLike[str],
    *,
    compute_dtype: DType | None = None,
    param_dtype: DType | None = None,
    **overrides,
) -> tuple[Decoder, HFTokenizer]:
    """Reads a file.

    Args:
        path: of the file.
        compute_dtype: of matrix products; None is float32.
        param_dtype: of the weights in memory; None is float32, whatever the quantisation.
        **overrides: fields of `DecoderConfig` that weights do not decide: `attention`; `rope` and `context` to stretch
            the window.

    Returns:
        The model and its tokenizer. Tensors are dequantised one by one.

    Raises:
        ValueError: the file is missing, damaged, of another architecture, or uses an option that is not implemented.
    """
    path = pathlib.Path(path)
    reader = open_gguf(path)
    fields = metadata(reader)
    tensors = _Dequantised(reader, path, _head_counts(fields, path))
    compute = float_name("compute_dtype", compute_dtype or "float32")
    weights = param_dtype or ("float64" if compute == "float64" else "float32")
    known = _config(fields, tensors, path) | {"compute_dtype": compute, "param_dtype": weights}
    model = decoder_from_tensors(tensors, DecoderConfig(**known | overrides))
    return model, HFTokenizer.from_gguf_metadata(fields, path)


class _Dequantised(Mapping[str, np.ndarray]):
    """The tensors of a file under their published names and in their published layout, dequantised when asked for."""

    def __init__(self, reader: GGUFReader, path: pathlib.Path, heads: tuple[int, int]):
        self._path, self._heads = path, heads
        self._stored = {_published(tensor.name): tensor for tensor in reader.tensors}

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._stored[name]
        try:
            array = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{self._path}: {tensor.name} cannot be dequantised ({error}).") from None
        for part, heads in zip((".q_proj.", ".k_proj."), self._heads):
            if part in name:
                array = _half_split(array, heads, f"{self._path}: {tensor.name}")
        return array

    def __contains__(self, name: object) -> bool:
        # The mapping's own test would dequantise.
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def stored(self, name: str) -> ReaderTensor:
        """What the file holds under a published name."""
        if name not in self._stored:
            raise ValueError(f"{self._path} lacks the tensor that is published as {name}; download it again.")
        return self._stored[name]


def _published(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    match stem.split("."):
        case ["blk", layer, kind] if kind in _LAYER_NAMES:
            return f"{LAYER.format(l=layer)}{_LAYER_NAMES[kind]}.{suffix}"
    return name


def _half_split(array: np.ndarray, heads: int, what: str) -> np.ndarray:
    """Rows of q or k from interleaved planes, in which GGUF files of this kind are stored, to half-split ones."""
    if array.shape[0] % (2 * heads):
        raise ValueError(f"{what} has {array.shape[0]} rows, which {heads} heads of an even width cannot share.")
    planes = array.reshape(heads, -1, 2, *array.shape[1:])
    return planes.swapaxes(1, 2).reshape(array.shape)


def _head_counts(fields: Mapping[str, Any], path: pathlib.Path) -> tuple[int, int]:
    """N and K. The architecture is checked here, before anything is made of its fields."""
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise ValueError(
            f"{path} has the architecture {kind!r}; of GGUF files, only 'llama' is implemented. "
            "Use the model's Hugging Face folder."
        )
    unknown = sorted(name for name in fields if name.startswith("llama.") and name.removeprefix("llama.") not in _READ)
    if unknown:
        raise ValueError(f"{path} has {', '.join(unknown)}, which is not implemented.")
    heads = _size(fields, "attention.head_count", path)
    return heads, _size(fields, "attention.head_count_kv", path, default=heads)


def _config(fields: Mapping[str, Any], tensors: _Dequantised, path: pathlib.Path) -> dict[str, Any]:
    """Fields of `DecoderConfig`; shapes are checked when the weights are read."""
    known = {ours: _size(fields, theirs, path) for theirs, ours in _SIZES.items()}
    # Shapes are stored with the fastest axis first: [in, out].
    vocabulary = int(tensors.stored(EMBEDDING).shape[-1])
    first = LAYER.format(l=0)
    width = int(tensors.stored(f"{first}self_attn.q_proj.weight").shape[-1]) // known["num_heads"]
    known["num_kv_heads"] = _size(fields, "attention.head_count_kv", path, default=known["num_heads"])
    for name in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        if _size(fields, name, path, default=width) != width:
            raise ValueError(f"{path}: llama.{name} = {fields[f'llama.{name}']} must be the head width {width}.")
    if _size(fields, "vocab_size", path, default=vocabulary) != vocabulary:
        raise ValueError(f"{path}: llama.vocab_size is {fields['llama.vocab_size']}, the embedding has {vocabulary}.")
    epsilon = fields.get("llama.attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise ValueError(f"{path} lacks llama.attention.layer_norm_rms_epsilon.")
    bos_id, eos_id = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    pad_id = fields.get("tokenizer.ggml.padding_token_id", eos_id)
    return known | {
        "vocab_size": vocabulary,
        "head_width": width,
        "rope": _rope(fields, known["context"], path),
        # Stored in float32: the decimal it stands for is what the model was trained with.
        "norm_epsilon": _shortest(epsilon),
        "tied": HEAD not in tensors,
        "qkv_bias": f"{first}self_attn.q_proj.bias" in tensors,
        "out_bias": f"{first}self_attn.o_proj.bias" in tensors,
        "mlp_bias": f"{first}mlp.gate_proj.bias" in tensors,
        "bos_id": bos_id,
        "eos_ids": () if eos_id is None else (eos_id,),
        "pad_id": pad_id or 0,
    }


def _rope(fields: Mapping[str, Any], context: int, path: pathlib.Path) -> RopeConfig:
    kind = fields.get("llama.rope.scaling.type", "none")
    base = _shortest(fields.get("llama.rope.freq_base", 10_000.0))
    if kind == "none":
        return RopeConfig(base=base, context=context)
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{path}: llama.rope.scaling.type = {kind!r} is not implemented; none, linear and yarn are.")
    if (factor := fields.get("llama.rope.scaling.factor")) is None:
        raise ValueError(f"{path} lacks llama.rope.scaling.factor, which {kind} scaling needs.")
    original = fields.get("llama.rope.scaling.original_context_length")
    return RopeConfig(kind=kind, base=base, context=context, factor=_shortest(factor), original_context=original)


def _size(fields: Mapping[str, Any], name: str, path: pathlib.Path, default: int | None = None) -> int:
    value = fields.get(f"llama.{name}", default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        # Per-layer lists exist for models whose layers differ.
        raise ValueError(f"{path}: llama.{name} = {value!r} must be one whole number of at least 1.")
    return value


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to a float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))
