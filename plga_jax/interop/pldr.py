"""PLDR-LLM checkpoints of the published PyTorch programs: Hugging Face folders (v51, v52) and native `.pth` files.

The config is rebuilt from array shapes; what shapes do not tell (RoPE layout, context, ε) comes from `config.json` or
the caller, and a contradiction is an error. No pickle is run.
"""

import os
import pathlib
import pickle
import zipfile
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.interop import hf_files
from plga_jax.interop.pldr_tensors import (
    CUSTOM_G,
    HF_FIELDS,
    Tensors,
    config_from_tensors,
    model_from_tensors,
    tensors_from_model,
)
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig

# Options of the port's config that change the map; other values than these are refused.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": True,
    "glu_bias": True,
    "final_bias": True,
    "tie_word_embeddings": False,
}
_REALS = ("layer_norm_eps", "rope_theta")


def load_hf(folder: str | os.PathLike, **overrides) -> PLDR:
    """Reads a Hugging Face folder of the PLDR-LLM family.

    Args:
        folder: holds `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`.
        **overrides: fields of `PLDRConfig` that a file does not decide, such as `compute_dtype` or `attention`. Weights
            become float32, whatever the file stores, unless `param_dtype` says otherwise.

    Returns:
        The model: v51 (interleaved planes) or v52 (half-split), learned or constant G. The port's `cache_first_G` is
        not followed: every row of a batch keeps its own operators.

    Raises:
        ValueError: a file is missing, damaged, not of this family, contradicts itself, or uses an option that is not
            implemented.
    """
    declared = hf_files.read_config(folder)
    known = _config_from_hf(declared)
    tensors = hf_files.read_tensors(folder)
    custom = declared.get("custom_G_type")
    if custom not in (None, "identity") and not {CUSTOM_G, CUSTOM_G.removeprefix("decoder.")} & set(tensors):
        raise ValueError(
            f"config.json says custom_G_type = {custom!r}, but {CUSTOM_G} is not among the tensors. "
            "Say 'identity' there, and give the operators to PLDR.with_operators."
        )
    return _model(tensors, known | overrides)


def save_hf(model: PLDR, folder: str | os.PathLike) -> None:
    """Writes `config.json` and `model.safetensors` that the published port reads.

    Args:
        model: the model.
        folder: made if needed. Each file is written to a temporary name and renamed.
    """
    hf_files.write_folder(folder, _config_to_hf(model.config), tensors_from_model(model))


def load_pth(path: str | os.PathLike, **known) -> PLDR:
    """Reads a native `.pth` checkpoint. Needs torch (extra `torch`), and never runs code from the file.

    Args:
        path: a file with `model_state_dict`, or a bare state dict.
        **known: fields of `PLDRConfig` that shapes do not tell, or to be checked. `rope_layout` is "interleaved" in
            native checkpoints. Those of v510G hold neither their operators nor the number of heads: pass `num_heads`,
            and give the operators to `PLDR.with_operators`.

    Returns:
        The model.

    Raises:
        ValueError: torch is missing, or the file is missing, damaged or not a PLDR-LLM.
    """
    try:
        import torch
    except ImportError:
        raise ValueError(
            "Reading .pth files needs torch: install the extra with pip install 'plga-jax[torch]', "
            "or convert the checkpoint to safetensors elsewhere."
        ) from None
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; name a .pth file.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # torch's own message advises to load the file unsafely; this one does not.
        raise ValueError(f"{path} is damaged or holds more than tensors and numbers; it was not run.") from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} cannot be read as a checkpoint: {reason}") from None
    if isinstance(state, dict):
        state = state.get("model_state_dict", state)
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a dict of tensors.")
    # numpy has no half precisions of torch's.
    half = (torch.float16, torch.bfloat16)
    tensors = {
        name: (value.float() if value.dtype in half else value).numpy()
        for name, value in state.items()
        if torch.is_tensor(value)
    }
    return _model(tensors, known)


def load_operators(path: str | os.PathLike) -> jax.Array:
    """Reads constant operators from an `.npz` (published pickles of them are converted elsewhere: none is loaded).

    Args:
        path: holds `G_LM` or a single array, [L, N, H, H] or [L, 1, N, H, H].

    Returns:
        G, [L, N, H, H].

    Raises:
        ValueError: missing or damaged file, or another shape.
    """
    try:
        # Opened here, because numpy leaves a damaged file open.
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            if "G_LM" not in file.files and len(file.files) != 1:
                raise ValueError(f"it holds {', '.join(file.files) or 'nothing'}, not G_LM or a single array")
            G = file["G_LM" if "G_LM" in file.files else file.files[0]]
    except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not an .npz of operators ({error}).") from None
    if G.ndim == 5 and G.shape[1] == 1:
        G = G[:, 0]
    if G.ndim != 4 or G.shape[-1] != G.shape[-2] or not np.issubdtype(G.dtype, np.floating):
        raise ValueError(f"Operators in {path} are {G.dtype}{list(G.shape)}; expected floats of shape [L, N, H, H].")
    return jnp.asarray(G)


def _model(tensors: Tensors, known: dict[str, Any]) -> PLDR:
    return model_from_tensors(tensors, config_from_tensors(tensors, **known))


def _config_from_hf(declared: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` says, in our names; what it leaves out or null stays out."""
    if declared.get("model_type") != "pldrllm":
        raise ValueError(f"config.json has model_type {declared.get('model_type')!r}; this reader takes 'pldrllm'.")
    for name, value in _FIXED.items():
        if declared.get(name, value) != value:
            raise ValueError(f"config.json: {name} = {declared[name]!r} is not implemented ({value!r} is).")
    known = {}
    declared = declared | _rope(declared)
    for theirs, ours in HF_FIELDS.items():
        value = declared.get(theirs)
        if value is None:
            continue
        real = theirs in _REALS
        if not isinstance(value, int | float if real else int) or isinstance(value, bool):
            raise ValueError(f"config.json: {theirs} = {value!r} must be a {'' if real else 'whole '}number.")
        known[ours] = value
    known["operator"] = "learned" if declared.get("custom_G_type") is None else "constant"
    known["rope_layout"] = "interleaved" if declared.get("reference_rope", True) else "half"
    known["init"] = "hf"
    return known


def _rope(declared: dict[str, Any]) -> dict[str, Any]:
    """The base, where newer configs keep it; a scaled table is refused."""
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        options = declared.get(name)
        if options is None:
            continue
        kind = options.get("rope_type", options.get("type")) if isinstance(options, dict) else options
        if kind != "default":
            raise ValueError(f"config.json: {name} = {options!r} is not implemented; only the unscaled table is.")
        found |= {"rope_theta": options["rope_theta"]} if "rope_theta" in options else {}
    return found


def _config_to_hf(config: PLDRConfig) -> dict[str, Any]:
    return {
        "architectures": ["PldrllmForCausalLM"],
        "model_type": "pldrllm",
        **{theirs: getattr(config, ours) for theirs, ours in HF_FIELDS.items()},
        **_FIXED,
        "rope_scaling": None,
        "reference_rope": config.rope_layout == "interleaved",
        "custom_G_type": "external" if config.operator == "constant" else None,
        "cache_first_G": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "use_cache": True,
        "dtype": config.param_dtype,
    }
