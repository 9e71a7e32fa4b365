"""Stacks of equal layers: run by one scan, or laid out one by one for decoding on CPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def over_layers(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, layers: nnx.Module, *inputs: Any):
    """`lax.scan` of `step(carry, (index, layer, *inputs of the layer))`, or its loop over unstacked layers.

    Args:
        step: returns (carry, outputs).
        carry: what goes from layer to layer.
        layers: a stack, or the `nnx.List` that `unstack` makes of it.
        *inputs: trees of arrays [L, ...], or None.

    Returns:
        The last carry, and the outputs stacked along a new first axis.
    """
    if not isinstance(layers, nnx.List):
        num_layers = jax.tree.leaves(nnx.state(layers))[0].shape[0]
        return lax.scan(step, carry, (jnp.arange(num_layers), layers, *inputs))
    outputs = []
    for index, layer in enumerate(layers):
        carry, output = step(carry, (index, layer, *jax.tree.map(lambda x, i=index: x[i], inputs)))
        outputs.append(output)
    return carry, jax.tree.map(lambda *each: jnp.stack(each), *outputs)


def unstack(layers: nnx.Module) -> nnx.List:
    """The layers of a stack in arrays of their own, for decoding on CPU.

    A scan over stacked weights copies every layer's slice before XLA:CPU multiplies with it. A block of tokens hides
    that copy; a single token does nothing but read weights, and takes 2.5 times longer for it. Layers in arrays of
    their own are read where they lie, for the price of one copy of the weights and a program that grows with the number
    of layers. Matrices of one input may then be joined as well: short products leave two cores waiting.

    Args:
        layers: a stack, every array [L, ...].

    Returns:
        L layers. Their parameters have other paths and shapes, so train, save and transform the stack.
    """
    graphdef, state = nnx.split(layers)
    # One jitted cut per layer: cutting array by array would dispatch hundreds of tiny programs.
    cut = jax.jit(lambda state, index: jax.tree.map(lambda x: x[index], state))
    num_layers = jax.tree.leaves(state)[0].shape[0]
    return nnx.List([nnx.merge(graphdef, cut(state, index)) for index in range(num_layers)])
