"""Hugging Face folders of pretrained decoders: Llama (TinyLlama, SmolLM, …), Qwen2 and Qwen2.5, Qwen3, Mistral."""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import DType
from plga_jax.interop import hf_files
from plga_jax.interop.decoder_tensors import EMBEDDING, LAYER, decoder_from_tensors, tensors_from_decoder
from plga_jax.models.config import float_name
from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.ops.rope_scaling import RopeConfig

GENERATION = "generation_config.json"

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "model_width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_width",
    "intermediate_size": "hidden_width",
    "max_position_embeddings": "context",
}
"""Published names of sizes -> ours."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}

_LAYER_TYPES = ("full_attention", "sliding_attention")

# Options that change the map: other values than these, and null, are refused.
_FIXED = {
    "hidden_act": "silu",
    "use_mrope": False,
    "is_decoder": True,
    "quantization_config": None,
    "add_cross_attention": False,
}


def load_decoder(
    folder: str | os.PathLike,
    *,
    compute_dtype: DType | None = None,
    param_dtype: DType | None = None,
    **overrides,
) -> Decoder:
    """Reads a Hugging Face folder.

    Args:
        folder: holds `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`; the ids that
            end a text come from `generation_config.json` where there is one.
        compute_dtype: of matrix products; None is float32.
        param_dtype: of the weights in memory; None is float32 (float64 when that is computed in), and bfloat16 where
            both the file and the products are.
        **overrides: fields of `DecoderConfig` that weights do not decide: `attention`; `rope` and `context` to stretch
            the window.

    Returns:
        The model. Files are mapped, and converted one kind of matrix at a time.

    Raises:
        ValueError: a file is missing, damaged, of another family, contradicts itself, or uses an option that is not
            implemented.
    """
    declared = hf_files.read_config(folder)
    generation = pathlib.Path(folder) / GENERATION
    known = config_from_hf(declared, hf_files.read_object(generation) if generation.is_file() else {})
    tensors = hf_files.read_tensors(folder)
    known = _checked_against(tensors, known)
    compute = float_name("compute_dtype", compute_dtype or "float32")
    if param_dtype is None:
        halved = compute == "bfloat16" and tensors[EMBEDDING].dtype == jnp.bfloat16
        param_dtype = "bfloat16" if halved else "float64" if compute == "float64" else "float32"
    return decoder_from_tensors(
        tensors, DecoderConfig(**known | {"compute_dtype": compute, "param_dtype": param_dtype} | overrides)
    )


def save_decoder(model: Decoder, folder: str | os.PathLike) -> None:
    """Writes `config.json` and `model.safetensors` that the published loaders read.

    Args:
        model: the model, its layers stacked.
        folder: made if needed. Each file is written to a temporary name and renamed.

    Raises:
        ValueError: no published architecture has this combination of biases, norms and windows.
    """
    hf_files.write_folder(folder, config_to_hf(model.config), tensors_from_decoder(model))


def config_from_hf(declared: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` says, in the names of `DecoderConfig`.

    Args:
        declared: fields of `config.json`.
        generation: fields of `generation_config.json`; its ids win.

    Returns:
        Fields. Sizes that the file leaves out stay out: the weights' shapes tell them.

    Raises:
        ValueError: an unknown architecture or option, or a missing or senseless number.
    """
    kind = declared.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"config.json has model_type {kind!r}; this reader takes {', '.join(sorted(_ARCHITECTURES))}. "
            "Other architectures are not implemented."
        )
    for name, value in _FIXED.items():
        if declared.get(name) not in (None, value):
            raise ValueError(f"config.json: {name} = {declared[name]!r} is not implemented ({value!r} is).")
    known = {}
    for theirs, ours in _FIELDS.items():
        value = declared.get(theirs)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"config.json: {theirs} = {value!r} must be a whole number.")
            known[ours] = value
    for theirs in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        if _FIELDS[theirs] not in known:
            raise ValueError(f"config.json lacks {theirs}, which weights do not tell surely; download it again.")
    known["rope"] = RopeConfig.from_hf(declared)
    known["context"] = _context(known["rope"], known["context"])
    known["norm_epsilon"] = _positive(declared, "rms_norm_eps", 1e-6)
    known["tied"] = _flag(declared, "tie_word_embeddings")
    biased = _flag(declared, "attention_bias")
    known["qkv_bias"] = kind == "qwen2" or (kind != "mistral" and biased)
    known["out_bias"] = kind in ("llama", "qwen3") and biased
    known["mlp_bias"] = kind == "llama" and _flag(declared, "mlp_bias")
    known["qk_norm"] = kind == "qwen3"
    return known | _windows(kind, declared) | _ids(declared, generation)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`.

    Args:
        config: sizes and choices.

    Returns:
        Fields of `config.json`.

    Raises:
        ValueError: no published architecture has this combination of biases, norms and windows.
    """
    windowed, every = config.windowed_layers, tuple(range(config.num_layers))
    biases = config.qkv_bias, config.out_bias, config.mlp_bias
    if config.qk_norm and biases in ((False,) * 3, (True, True, False)):
        kind = "qwen3"
    elif not config.qk_norm and biases == (True, False, False):
        kind = "qwen2"
    elif not config.qk_norm and not any(biases) and windowed == every:
        kind = "mistral"
    elif not config.qk_norm and config.qkv_bias == config.out_bias and not windowed:
        kind = "llama"
    else:
        raise ValueError(
            f"No published architecture has qkv_bias, out_bias, mlp_bias = {biases} with qk_norm = {config.qk_norm} "
            f"and windowed layers {windowed}."
        )
    declared = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        **{theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "pad_token_id": config.pad_id,
        "dtype": config.param_dtype,
        **config.rope.to_hf(),
    }
    if config.rope.context is not None:
        declared["max_position_embeddings"] = config.rope.context
    if kind == "mistral":
        declared["sliding_window"] = config.window
    elif kind != "llama":
        kinds = [_LAYER_TYPES[layer in windowed] for layer in every]
        declared |= {"use_sliding_window": bool(windowed), "sliding_window": config.window, "layer_types": kinds}
    return declared


def _checked_against(tensors: Mapping[str, np.ndarray], known: dict[str, Any]) -> dict[str, Any]:
    """Completes the sizes from the shapes of the first layer and the embedding; contradictions are errors."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in tensors or tensors[name].ndim != 2:
            found = tensors[name].shape if name in tensors else "nothing"
            raise ValueError(f"Not the weights of a decoder: {name} should be a matrix, found {found}.")
        return tensors[name].shape

    first = LAYER.format(l=0)
    vocabulary, width = shape(EMBEDDING)
    queries = shape(f"{first}self_attn.q_proj.weight")[0]
    head_width = queries // max(known["num_heads"], 1)
    found = {
        "vocab_size": vocabulary,
        "model_width": width,
        "num_layers": len({match[1] for name in tensors if (match := re.match(r"model\.layers\.(\d+)\.", name))}),
        "hidden_width": shape(f"{first}mlp.gate_proj.weight")[0],
        "head_width": head_width,
        "num_kv_heads": shape(f"{first}self_attn.k_proj.weight")[0] // max(head_width, 1),
    }
    theirs = {ours: name for name, ours in _FIELDS.items()}
    wrong = [
        f"{theirs[name]} is {known[name]}, but the tensors say {value}"
        for name, value in found.items()
        if known.get(name, value) != value
    ]
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}. Correct config.json, or download the folder again.")
    return known | found


def _context(rope: RopeConfig, declared: int) -> int:
    """The longest input after scaling: files of stretched models often keep the trained length."""
    grown = {"yarn": rope.original_context, "dynamic": rope.context}.get(rope.kind)
    return max(declared, round(grown * rope.factor)) if grown and rope.factor else declared


def _windows(kind: str, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers are windowed, and how wide; published windows count the query, as ours do."""
    layers, window = declared["num_hidden_layers"], declared.get("sliding_window")
    types = declared.get("layer_types")
    if kind == "llama":
        on, first = False, 0
    elif kind == "mistral":
        # A file that does not mention the window has the family's first one; null switches it off.
        window = declared.get("sliding_window", 4096)
        on, first = window is not None, 0
    else:
        on, first = _flag(declared, "use_sliding_window"), declared.get("max_window_layers", 28)
    if types is None:
        windowed = tuple(range(first, layers)) if on else ()
    elif not isinstance(types, list) or len(types) != layers or any(name not in _LAYER_TYPES for name in types):
        raise ValueError(
            f"config.json: layer_types = {types!r} must name {layers} layers, each "
            f"{' or '.join(_LAYER_TYPES)}; other kinds are not implemented."
        )
    else:
        windowed = tuple(layer for layer, name in enumerate(types) if name == "sliding_attention")
    if not windowed:
        return {}
    if not on or not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(
            f"config.json: layers {windowed} are windowed, but sliding_window = {window!r} (in use: {on}); "
            "it must be a whole number of at least 1 token."
        )
    return {"window": window, "windowed_layers": windowed}


def _ids(declared: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Ids that begin, end and pad a text; negative ones are how older files say that there is none."""

    def ids(name: str) -> tuple[int, ...]:
        value = generation.get(name) if generation.get(name) is not None else declared.get(name)
        value = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in value):
            raise ValueError(f"{name} = {value!r} must be token ids.")
        return tuple(token for token in value if token >= 0)

    ends, pads = ids("eos_token_id"), ids("pad_token_id")
    return {"bos_id": next(iter(ids("bos_token_id")), None), "eos_ids": ends, "pad_id": next(iter(pads + ends), 0)}


def _flag(declared: Mapping[str, Any], name: str) -> bool:
    value = declared.get(name)
    if value not in (None, True, False):
        raise ValueError(f"config.json: {name} = {value!r} must be true or false.")
    return bool(value)


def _positive(declared: Mapping[str, Any], name: str, default: float) -> float:
    value = declared.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"config.json: {name} = {value!r} must be a positive number.")
    return float(value)
