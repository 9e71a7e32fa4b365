"""PLDR-LLM weights under their published names: the table of names and layouts, and the config that shapes tell.

The native programs and the Hugging Face port name their tensors alike, so one table serves both, and both ways.
"""

import re
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx

from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig

Tensors = Mapping[str, np.ndarray]

CUSTOM_G = "decoder.past_G_values"
"""Where the port keeps constant operators: [L, 3, 1, N, H, H], G last of the three."""

HF_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "model_width",
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
"""The port's names of config fields -> ours."""

_STATUS = "decoder.past_G_values_status"
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
_UNIT = "mha1.reslayerAs.{u}."
_BLOCK = _UNIT + "denseAs.{j}."
_GATED = {"gate": "gluw1", "up": "gluw2", "down": "gluw3"}


def config_from_tensors(tensors: Tensors, **known) -> PLDRConfig:
    """Rebuilds the config from names and shapes.

    Args:
        tensors: published names -> arrays, of which only the shapes are read.
        **known: fields that shapes do not tell (context, rope_layout, norm_epsilon, …), or to be checked against them;
            `model_width` may be checked as well.

    Returns:
        The config; `operator="constant"` when there is no metric learner.

    Raises:
        ValueError: names or shapes that are not a PLDR-LLM's, or that contradict `known`.
    """
    tensors = _with_prefix(tensors)
    first = _LAYER.format(l=0)
    vocabulary, width = _shape(tensors, "decoder.embedding.weight", 2)
    found = {
        "vocab_size": vocabulary,
        "model_width": width,
        "num_layers": _count(tensors, r"decoder\.dec_layers\.(\d+)\."),
        "hidden_width": _shape(tensors, f"{first}ffn.gluw1.weight", 2)[0],
    }
    if f"{first}mha1.plgatt_layer.Wlst" in tensors:
        unit = re.escape(first) + r"mha1\.reslayerAs\."
        found |= {"operator": "learned"}
        found["num_heads"], found["head_width"], _ = _shape(tensors, f"{first}mha1.plgatt_layer.Wlst", 3)
        found["metric_width"] = _shape(tensors, f"{first}{_BLOCK.format(u=0, j=0)}gluw1.weight", 2)[0]
        found["residual_units"] = _count(tensors, unit + r"(\d+)\.")
        found["blocks_per_unit"] = _count(tensors, unit + r"0\.denseAs\.(\d+)\.")
    else:
        found |= {"operator": "constant"}
        if CUSTOM_G in tensors:
            *_, found["num_heads"], found["head_width"], _ = _shape(tensors, CUSTOM_G, 6)
        elif known.get("num_heads"):
            found["head_width"] = width // known["num_heads"]
        else:
            raise ValueError("A checkpoint without metric learners does not tell its heads: pass num_heads=….")
    wrong = [
        f"{_published(name)} is {known[name]!r}, but the tensors say {value!r}"
        for name, value in found.items()
        if known.get(name) is not None and known[name] != value
    ]
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}. Correct config.json or the argument.")
    fields = known | found
    fields.pop("model_width")
    config = PLDRConfig(**fields)
    if config.model_width != width:
        raise ValueError(f"{config.num_heads} heads of {config.head_width} do not make the embedding's width {width}.")
    return config


def model_from_tensors(tensors: Tensors, config: PLDRConfig) -> PLDR:
    """A model with published weights.

    Args:
        tensors: published names -> arrays; a missing `decoder.` prefix is supplied.
        config: its sizes, from `config_from_tensors`.

    Returns:
        The model, weights cast to `config.param_dtype`. Constant operators that the tensors do not hold are I.

    Raises:
        ValueError: names missing or left over, a wrong shape or dtype; the first few are listed.
    """
    tensors = _with_prefix(tensors)
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: PLDR(config, rngs=nnx.Rngs(0))), nnx.Param, ...)
    table = _table(config)
    left, missing, misfits, loaded = set(tensors) - {CUSTOM_G, _STATUS}, [], [], []
    for path, variable in nnx.to_flat_state(params):
        name, transposed = table[path]
        names, stack = _instances(name, config)
        left -= set(names)
        if absent := [name for name in names if name not in tensors]:
            missing += [f"{name} is missing" for name in absent]
            continue
        arrays = [np.asarray(tensors[name]) for name in names]
        shape = variable.shape[len(stack) :]
        expected = shape[::-1] if transposed else shape
        wrong = [problem for item in zip(names, arrays) if (problem := _misfit(*item, expected))]
        misfits += wrong
        if not wrong:
            whole = np.stack([array.T if transposed else array for array in arrays]).reshape(*stack, *shape)
            loaded.append((path, variable.replace(jnp.asarray(whole, config.param_dtype))))
    problems = missing + [f"{name} is not part of this model" for name in sorted(left)] + misfits
    operators = None
    if config.operator == "constant" and CUSTOM_G in tensors:
        values = np.asarray(tensors[CUSTOM_G])
        N, H = config.num_heads, config.head_width
        if problem := _misfit(CUSTOM_G, values, (config.num_layers, 3, 1, N, H, H)):
            problems.append(problem)
        else:
            operators = jnp.asarray(values[:, 2, 0], config.param_dtype)
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else "")
        raise ValueError(f"The checkpoint does not fit the config: {shown}.")
    model = nnx.merge(graphdef, nnx.from_flat_state(loaded), rest)
    if config.operator == "learned":
        return model
    if operators is None:
        shape = model.layers.attention.G.shape
        operators = jnp.broadcast_to(jnp.eye(config.head_width, dtype=config.param_dtype), shape)
    return model.with_operators(operators)


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
        tensors[CUSTOM_G] = values
        tensors[_STATUS] = np.ones((config.num_layers,), bool)
    return tensors


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
    table[(*metric, "norm_scale")] = (f"{_LAYER}{_UNIT}layernormA.weight", False)
    table[(*metric, "norm_bias")] = (f"{_LAYER}{_UNIT}layernormA.bias", False)
    if config.operator == "constant":
        table = {path: entry for path, entry in table.items() if "metric" not in path}
    return table


def _instances(name: str, config: PLDRConfig) -> tuple[list[str], tuple[int, ...]]:
    """The published names that one of our stacked arrays gathers, and the shape of the stack."""
    sizes = {"l": config.num_layers, "u": config.residual_units, "j": config.blocks_per_unit}
    letters = [letter for letter in sizes if f"{{{letter}}}" in name]
    shape = tuple(sizes[letter] for letter in letters)
    return [name.format(**dict(zip(letters, index))) for index in np.ndindex(*shape)], shape


def _published(field: str) -> str:
    """How to name one of our config fields in a message about a published config."""
    theirs = {ours: name for name, ours in HF_FIELDS.items()} | {"operator": "custom_G_type"}
    name = theirs.get(field, field)
    return field if name == field else f"{name} ({field} here)"


def _shape(tensors: Tensors, name: str, axes: int) -> tuple[int, ...]:
    if name not in tensors:
        raise ValueError(f"Not a PLDR-LLM checkpoint: it has no tensor {name!r}.")
    shape = tuple(tensors[name].shape)
    if len(shape) != axes:
        raise ValueError(f"Not a PLDR-LLM checkpoint: {name} has shape {shape}, expected {axes} axes.")
    return shape


def _count(tensors: Tensors, pattern: str) -> int:
    return len({match.group(1) for name in tensors if (match := re.match(pattern, name))})


def _misfit(name: str, array: np.ndarray, expected: tuple[int, ...]) -> str | None:
    if array.shape != expected:
        return f"{name} has shape {array.shape}, expected {expected}"
    if not jnp.issubdtype(array.dtype, jnp.floating):
        # Integers would be the codes of a quantised checkpoint, not weights.
        return f"{name} has dtype {array.dtype}, expected a floating dtype"
    return None


def _with_prefix(tensors: Tensors) -> Tensors:
    """Supplies the `decoder.` that a bare decoder's state dict drops."""
    if "embedding.weight" not in tensors:
        return tensors
    bare = ("embedding.", "layernorm1.", "dec_layers.", "past_G_values")
    return {f"decoder.{n}" if n.startswith(bare) else n: array for n, array in tensors.items()}
