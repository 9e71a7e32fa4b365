"""What the language models share beside their configs: kernels by name, layers one by one, the last token's row."""

from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from plga_jax.array_types import Array
from plga_jax.models.stacking import unstack
from plga_jax.ops.attention import attention


class LanguageModel(nnx.Module):
    """A model with a `config` and a stack of `layers`, each of which can `join` its maps of one input."""

    def unstacked(self) -> Self:
        """The same model with each layer in arrays of its own, for decoding on CPU; see `stacking.unstack`.

        Returns:
            A model for `prefill`, `extend` and calls.
        """
        if isinstance(self.layers, nnx.List):
            return self
        copy = nnx.merge(*nnx.split(self))
        copy.layers = unstack(self.layers)
        for layer in copy.layers:
            layer.join()
        return copy

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(x.size for x in jax.tree.leaves(nnx.state(self, nnx.Param)))

    @property
    def _scale(self) -> float:
        return self.config.head_width**-0.5

    def _attention(self, q, k, v, mask=None, *, scale=None, return_lse=False):
        implementation = self.config.attention
        return attention(q, k, v, mask, scale=scale, return_lse=return_lse, implementation=implementation)


def last_real(x: Array, valid: Array) -> Array:
    """The row of each sequence's last real token, wherever its padding stands.

    Args:
        x: [B, T, D].
        valid: bool [B, T].

    Returns:
        [B, 1, D].
    """
    columns = jnp.arange(x.shape[1])[None]
    last = jnp.max(jnp.where(valid, columns, 0), axis=1)
    return jnp.take_along_axis(x, last[:, None, None], axis=1)
