"""PLDR-LLM checkpoints of the published PyTorch programs: native `.pth` files and Hugging Face folders (v51, v52).

Both use the same tensor names, so one table serves both ways. The config is rebuilt from array shapes; what shapes do not tell
(RoPE layout, context, ε) comes from `config.json` or the caller, and a contradiction is an error.
"""

import dataclasses
import json
import os
import pathlib
import pickle
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.flax import load_file
from safetensors.numpy import save_file

from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig

Tensors = Mapping[str, np.ndarray]

_LAYER = "decoder.dec_layers.{l}."
_LINEARS = {
    ("attention", "query"): "mha1.wq",
    ("attention", "key"): "mha1.wk",
    ("attention", "value"): "mha1.wv",
    ("attention", "out"): "mha1.dense",
    ("ffn", "gate"): "ffn.gluw1",
    ("ffn", "up"): "ffn.gluw2",
    ("ffn", "down"): "ffn.gluw3",
}
_NORMS = {
    ("attention_norm",): "layernorm1",
    ("ffn_norm",): "layernorm2",
    ("attention", "metric", "gram_norm"): "mha1.layernorm1",
}
_CHAIN = {"W": "Wlst", "b_W": "blst", "P": "pwlst", "a": "alst", "b_a": "balst"}
_BLOCK = "mha1.reslayerAs.{u}.denseAs.{j}."
_GATED = {"gate": "gluw1", "up": "gluw2", "down": "gluw3"}
_CUSTOM_G = ("decoder.past_G_values", "decoder.past_G_values_status")


def _table(config: PLDRConfig) -> dict[tuple[str, ...], tuple[str, bool]]:
    """Our path of every parameter -> (published name with l, u, j open, whether the matrix is transposed)."""
    table = {
        ("embedding",): ("decoder.embedding.weight", False),
        ("norm", "scale"): ("decoder.layernorm1.weight", False),
        ("norm", "bias"): ("decoder.layernorm1.bias", False),
        ("head", "kernel"): ("final_layer.weight", True),
        ("head", "bias"): ("final_layer.bias", False),
    }
    for path, name in _LINEARS.items():
        table[("layers", *path, "kernel")] = (f"{_LAYER}{name}.weight", True)
        table[("layers", *path, "bias")] = (f"{_LAYER}{name}.bias", False)
    for path, name in _NORMS.items():
        table[("layers", *path, "scale")] = (f"{_LAYER}{name}.weight", False)
        table[("layers", *path, "bias")] = (f"{_LAYER}{name}.bias", False)
    metric = ("layers", "attention", "metric")
    for ours, theirs in _CHAIN.items():
        table[(*metric, ours)] = (f"{_LAYER}mha1.plgatt_layer.{theirs}", False)
    for ours, theirs in _GATED.items():
        table[(*metric, f"{ours}_kernel")] = (f"{_LAYER}{_BLOCK}{theirs}.weight", True)
        table[(*metric, f"{ours}_bias")] = (f"{_LAYER}{_BLOCK}{theirs}.bias", False)
    unit = f"{_LAYER}mha1.reslayerAs.{{u}}.layernormA."
    table[(*metric, "norm_scale")] = (f"{unit}weight", False)
    table[(*metric, "norm_bias")] = (f"{unit}bias", False)
    if config.operator == "constant":
        table = {path: entry for path, entry in table.items() if "metric" not in path}
    return table


def _instances(name: str, config: PLDRConfig) -> tuple[list[str], tuple[int, ...]]:
    """The published names that one of our stacked arrays gathers, and the shape of the stack."""
    sizes = {"l": config.num_layers, "u": config.residual_units, "j": config.blocks_per_unit}
    letters = [letter for letter in sizes if f"{{{letter}}}" in name]
    shape = tuple(sizes[letter] for letter in letters)
    return [name.format(**dict(zip(letters, index))) for index in np.ndindex(*shape)], shape


def config_from_tensors(tensors: Tensors, **known) -> PLDRConfig:
    """Rebuilds the config from names and shapes.

    Args:
        tensors: published names -> arrays (only their shapes are read).
        **known: fields that shapes do not tell (context, rope_layout, norm_epsilon, …), or to be checked against them.

    Returns:
        The config; `operator="constant"` when there is no metric learner.

    Raises:
        ValueError: names or shapes that are not a PLDR-LLM's, or that contradict `known`.
    """
    tensors = _with_prefix(tensors)

    def shape(name: str) -> tuple[int, ...]:
        if name not in tensors:
            raise ValueError(f"Not a PLDR-LLM checkpoint: it has no tensor {name!r}.")
        return tuple(tensors[name].shape)

    def count(pattern: str) -> int:
        found = {int(m.group(1)) for name in tensors if (m := re.match(pattern, name))}
        return max(found, default=-1) + 1

    first = _LAYER.format(l=0)
    V, D = shape("decoder.embedding.weight")
    found = {
        "vocab_size": V,
        "num_layers": count(r"decoder\.dec_layers\.(\d+)\."),
        "hidden_width": shape(f"{first}ffn.gluw1.weight")[0],
    }
    if f"{first}mha1.plgatt_layer.Wlst" in tensors:
        N, H, _ = shape(f"{first}mha1.plgatt_layer.Wlst")
        unit = re.escape(f"{first}mha1.reslayerAs.")
        found |= {
            "operator": "learned",
            "num_heads": N,
            "head_width": H,
            "metric_width": shape(f"{first}{_BLOCK.format(u=0, j=0)}gluw1.weight")[0],
            "residual_units": count(unit + r"(\d+)\."),
            "blocks_per_unit": count(unit + r"0\.denseAs\.(\d+)\."),
        }
    else:
        found["operator"] = "constant"
        if _CUSTOM_G[0] in tensors:
            found["num_heads"], found["head_width"] = shape(_CUSTOM_G[0])[3:5]
        elif "num_heads" in known:
            found["head_width"] = D // known["num_heads"]
        else:
            raise ValueError("A checkpoint without metric learners does not tell its heads: pass num_heads=….")
    wrong = {
        name: (known[name], value)
        for name, value in found.items()
        if known.get(name) is not None and known[name] != value
    }
    if wrong:
        listed = "; ".join(f"{n}: config {a}, tensors {b}" for n, (a, b) in wrong.items())
        raise ValueError(f"The config contradicts the tensors ({listed}); fix config.json.")
    config = PLDRConfig(**(known | found))
    if config.model_width != D:
        raise ValueError(f"{config.num_heads} heads of {config.head_width} do not make the embedding's width {D}.")
    return config


def model_from_tensors(tensors: Tensors, config: PLDRConfig) -> PLDR:
    """A model with published weights.

    Args:
        tensors: published names -> arrays; a missing `decoder.` prefix is supplied.
        config: its sizes, from `config_from_tensors`.

    Returns:
        The model, weights cast to `config.param_dtype`.

    Raises:
        ValueError: names missing or left over, or a wrong shape; the first few are listed.
    """
    tensors = _with_prefix(tensors)
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: PLDR(config, rngs=nnx.Rngs(0))), nnx.Param, ...)
    left, problems, values = set(tensors) - set(_CUSTOM_G), [], {}
    for path, (name, transposed) in _table(config).items():
        names, stack = _instances(name, config)
        missing = [name for name in names if name not in tensors]
        if missing:
            problems += [f"{name} is missing" for name in missing]
            continue
        left -= set(names)
        values[path] = (names, stack, transposed)
    problems += [f"{name} is not part of this model" for name in sorted(left)]
    loaded = []
    for path, variable in nnx.to_flat_state(params):
        if path not in values:
            continue
        names, stack, transposed = values[path]
        arrays = [np.asarray(tensors[name]) for name in names]
        shape = variable.shape[len(stack) :]
        expected = shape[::-1] if transposed else shape
        problems += [
            f"{name} has shape {array.shape}, expected {expected}"
            for name, array in zip(names, arrays)
            if array.shape != expected
        ]
        if not problems:
            arrays = [array.T if transposed else array for array in arrays]
            whole = np.stack(arrays).reshape(*stack, *shape) if stack else arrays[0]
            loaded.append((path, variable.replace(jnp.asarray(whole, config.param_dtype))))
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else "")
        raise ValueError(f"The checkpoint does not fit the config: {shown}.")
    model = nnx.merge(graphdef, nnx.from_flat_state(loaded), rest)
    if config.operator == "learned":
        return model
    N, H = config.num_heads, config.head_width
    G = np.broadcast_to(np.eye(H, dtype=np.float32), (config.num_layers, N, H, H))
    if _CUSTOM_G[0] in tensors:
        G = np.asarray(tensors[_CUSTOM_G[0]])[:, 2, 0]
    return model.with_operators(jnp.asarray(G))


def tensors_from_model(model: PLDR) -> dict[str, np.ndarray]:
    """The weights under their published names and layouts; the inverse of `model_from_tensors`, bit for bit.

    Args:
        model: the model.

    Returns:
        Published names -> arrays. Constant operators are stored as the port's `past_G_values`, with A and A_LM zero.
    """
    config = model.config
    params = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    tensors = {}
    for path, (name, transposed) in _table(config).items():
        names, stack = _instances(name, config)
        array = np.asarray(params[path][...])
        for name, part in zip(names, array.reshape(-1, *array.shape[len(stack) :])):
            tensors[name] = np.ascontiguousarray(part.T if transposed else part)
    if config.operator == "constant":
        G = np.asarray(model.layers.attention.G[...])
        values = np.zeros((config.num_layers, 3, 1, *G.shape[1:]), G.dtype)
        values[:, 2, 0] = G
        tensors[_CUSTOM_G[0]] = values
        tensors[_CUSTOM_G[1]] = np.ones((config.num_layers,), bool)
    return tensors


def load_hf(folder: str | os.PathLike, **overrides) -> PLDR:
    """Reads a Hugging Face folder of the PLDR-LLM family.

    Args:
        folder: holds `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`.
        **overrides: fields of `PLDRConfig` that a file does not decide, such as `compute_dtype` or `attention`.

    Returns:
        The model: v51 (interleaved planes) or v52 (half-split), learned or custom G.

    Raises:
        ValueError: a file is missing, damaged, not of this family, or uses an option that is not implemented.
    """
    folder = pathlib.Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no config.json; name a Hugging Face model folder.")
    try:
        declared = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from None
    known = _config_from_hf(declared)
    return _model(_read_safetensors(folder), known, overrides)


def save_hf(model: PLDR, folder: str | os.PathLike) -> None:
    """Writes `config.json` and `model.safetensors` that the published port reads.

    Args:
        model: the model.
        folder: made if needed. Each file is written to a temporary name and renamed.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file(tensors_from_model(model), partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(_config_to_hf(model.config), indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")


def load_pth(path: str | os.PathLike, **known) -> PLDR:
    """Reads a native `.pth` checkpoint. Needs torch (extra `torch`), and never runs code from the file.

    Args:
        path: a file with `model_state_dict`, or a bare state dict.
        **known: fields of `PLDRConfig` that shapes do not tell; `rope_layout` is "interleaved" in native checkpoints.

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
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read as a checkpoint: {reason}") from None
    state = state.get("model_state_dict", state) if isinstance(state, dict) else {}
    tensors = {name: value.float().numpy() for name, value in state.items() if torch.is_tensor(value)}
    return _model(tensors, {}, known)


def load_operators(path: str | os.PathLike) -> jax.Array:
    """Reads constant operators from an `.npz` (the shipped G pickles are converted to it once, elsewhere; no pickle is loaded).

    Args:
        path: holds `G_LM` or a single array, [L, N, H, H] or [L, 1, N, H, H].

    Returns:
        G, [L, N, H, H].

    Raises:
        ValueError: missing or damaged file, or another shape.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            name = "G_LM" if "G_LM" in file.files else file.files[0]
            G = file[name]
    except (OSError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is not an .npz of operators ({error}).") from None
    if G.ndim == 5 and G.shape[1] == 1:
        G = G[:, 0]
    if G.ndim != 4 or G.shape[-1] != G.shape[-2]:
        raise ValueError(f"Operators in {path} have shape {G.shape}; expected [L, N, H, H].")
    return jnp.asarray(G)


def _model(tensors: Tensors, known: dict, overrides: dict) -> PLDR:
    return model_from_tensors(tensors, config_from_tensors(tensors, **(known | overrides)))


def _with_prefix(tensors: Tensors) -> Tensors:
    """Supplies the `decoder.` that a bare PldrllmModel drops."""
    if "embedding.weight" not in tensors:
        return tensors
    bare = ("embedding.", "layernorm1.", "dec_layers.", "past_G_values")
    return {f"decoder.{n}" if n.startswith(bare) else n: array for n, array in tensors.items()}


def _read_safetensors(folder: pathlib.Path) -> Tensors:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    tensors = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder} holds no {name}.")
        try:
            tensors |= load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or not a safetensors file ({error}).") from None
    return tensors


_FIELDS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "head_dim": "head_width",
    "intermediate_size": "hidden_width",
    "A_dff": "metric_width",
    "num_reslayerA": "residual_units",
    "num_denseA": "blocks_per_unit",
    "max_position_embeddings": "context",
    "layer_norm_eps": "norm_epsilon",
    "rope_theta": "rope_base",
    "pad_token_id": "pad_id",
}
_LEARNER_FIELDS = ("A_dff", "num_reslayerA", "num_denseA")
# Options of the port's config that change the map; other values than these are refused.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": True,
    "glu_bias": True,
    "final_bias": True,
    "tie_word_embeddings": False,
    "rope_scaling": None,
}


def _config_from_hf(declared: dict) -> dict:
    if declared.get("model_type") != "pldrllm":
        raise ValueError(f"config.json has model_type {declared.get('model_type')!r}; this reader takes 'pldrllm'.")
    for name, value in _FIXED.items():
        if declared.get(name, value) != value:
            raise ValueError(f"config.json: {name} = {declared[name]!r} is not implemented ({value!r} is).")
    known = {ours: declared[hf] for hf, ours in _FIELDS.items() if declared.get(hf) is not None}
    if declared.get("custom_G_type") is not None:
        for name in _LEARNER_FIELDS:
            known.pop(_FIELDS[name], None)
        known["operator"] = "constant"
    known["rope_layout"] = "interleaved" if declared.get("reference_rope", True) else "half"
    known["init"] = "hf"
    return known


def _config_to_hf(config: PLDRConfig) -> dict:
    fields = dataclasses.asdict(config)
    return {
        "architectures": ["PldrllmForCausalLM"],
        "model_type": "pldrllm",
        **{hf: fields[ours] for hf, ours in _FIELDS.items()},
        **_FIXED,
        "hidden_size": config.model_width,
        "reference_rope": config.rope_layout == "interleaved",
        "custom_G_type": "external" if config.operator == "constant" else None,
        "cache_first_G": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "use_cache": True,
        "dtype": config.param_dtype,
    }
