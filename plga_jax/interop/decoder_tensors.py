"""Weights of pretrained decoders under their published names: the table of names and layouts, both ways."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx

from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig

Tensors = Mapping[str, np.ndarray]

HEAD = "lm_head.weight"
LAYER = "model.layers.{l}."
EMBEDDING = "model.embed_tokens.weight"

_LINEARS = {
    ("attention", "query"): "self_attn.q_proj",
    ("attention", "key"): "self_attn.k_proj",
    ("attention", "value"): "self_attn.v_proj",
    ("attention", "out"): "self_attn.o_proj",
    ("mlp", "gate"): "mlp.gate_proj",
    ("mlp", "up"): "mlp.up_proj",
    ("mlp", "down"): "mlp.down_proj",
}
_NORMS = {
    ("attention_norm",): "input_layernorm",
    ("mlp_norm",): "post_attention_layernorm",
    ("attention", "query_norm"): "self_attn.q_norm",
    ("attention", "key_norm"): "self_attn.k_norm",
}
_FLOATS = tuple(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))


def decoder_from_tensors(tensors: Tensors, config: DecoderConfig) -> Decoder:
    """A model with published weights.

    Args:
        tensors: published names -> arrays. Each is asked for once, and one kind of matrix is held at a time, so a
            mapping that reads or dequantises on demand never has two copies of a model in memory.
        config: its sizes.

    Returns:
        The model, weights cast to `config.param_dtype`.

    Raises:
        ValueError: names missing or left over, a wrong shape or dtype; the first few are listed.
    """
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param, ...)
    flat, table = nnx.to_flat_state(params), _table()
    wanted = [name for path, _ in flat for name in _names(table[path][0], config)]
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{name} is not part of this model" for name in sorted(_left(tensors, wanted))]
    loaded = []
    for path, variable in () if problems else flat:
        published, transposed = table[path]
        names = _names(published, config)
        shape = variable.shape[-2:] if path[0] != "layers" else variable.shape[1:]
        whole = np.empty((len(names), *shape), jnp.dtype(config.param_dtype))
        for name, part in zip(names, whole):
            array = tensors[name]
            if problem := _misfit(name, array, shape[::-1] if transposed else shape):
                problems.append(problem)
            else:
                part[...] = array.T if transposed else array
        loaded.append((path, variable.replace(jnp.asarray(whole.reshape(variable.shape)))))
    if not problems and config.tied and HEAD in tensors:
        problems = _untied(tensors)
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else "")
        raise ValueError(f"The weights do not fit the config: {shown}.")
    return nnx.merge(graphdef, nnx.from_flat_state(loaded), rest)


def tensors_from_decoder(model: Decoder) -> dict[str, np.ndarray]:
    """The weights under their published names and layouts; the inverse of `decoder_from_tensors`, bit for bit.

    Args:
        model: the model, its layers stacked.

    Returns:
        Published names -> arrays in the parameters' dtype.
    """
    table, tensors = _table(), {}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        published, transposed = table[path]
        array = np.asarray(param[...])
        for name, part in zip(_names(published, model.config), array if path[0] == "layers" else array[None]):
            tensors[name] = np.ascontiguousarray(part.T if transposed else part)
    return tensors


def _table() -> dict[tuple[str, ...], tuple[str, bool]]:
    """Our path of every parameter -> (published name with l open, whether the matrix is transposed)."""
    table = {
        ("embedding",): (EMBEDDING, False),
        ("norm", "scale"): ("model.norm.weight", False),
        ("head", "kernel"): (HEAD, True),
    }
    for path, name in _LINEARS.items():
        table[("layers", *path, "kernel")] = (f"{LAYER}{name}.weight", True)
        table[("layers", *path, "bias")] = (f"{LAYER}{name}.bias", False)
    for path, name in _NORMS.items():
        table[("layers", *path, "scale")] = (f"{LAYER}{name}.weight", False)
    return table


def _names(name: str, config: DecoderConfig) -> list[str]:
    """The published names that one of our arrays gathers."""
    return [name.format(l=l) for l in range(config.num_layers)] if "{l}" in name else [name]


def _left(tensors: Tensors, wanted: list[str]) -> set[str]:
    """Tensors that no parameter takes; older files also hold the rotary table, which the config tells."""
    known = {*wanted, HEAD}
    return {name for name in tensors if name not in known and not name.endswith("rotary_emb.inv_freq")}


def _misfit(name: str, array: np.ndarray, expected: tuple[int, ...]) -> str | None:
    if array.shape != expected:
        return f"{name} has shape {array.shape}, expected {expected}"
    if array.dtype not in _FLOATS:
        # Integers and eight-bit floats would be the codes of a quantised model, not weights.
        return f"{name} has dtype {array.dtype}, expected one of {', '.join(map(str, _FLOATS))}"
    return None


def _untied(tensors: Tensors) -> list[str]:
    """What is wrong with the head of a model that should have none of its own."""
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    if head.shape == embedding.shape and np.array_equal(head, embedding):
        return []
    return [f"the head is tied, but {HEAD} and {EMBEDDING} differ: say tie_word_embeddings = false"]
