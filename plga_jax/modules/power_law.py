"""The module that makes an operator G from rotated queries."""

from collections.abc import Collection
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from plga_jax.array_types import Array, DType
from plga_jax.modules.initializers import InitLaw, operator_tensor, xavier_uniform
from plga_jax.modules.linear import LayerNorm
from plga_jax.ops.gated import GatedWeights
from plga_jax.ops.power_law import (
    RowMapUnits,
    density_operator,
    hadamard_power,
    positive_tensor,
    row_map,
    superposition,
)


class Chain(NamedTuple):
    """What the five operators leave behind; None where it was not asked for."""

    G_LM: Array
    A: Array | None = None
    A_LM: Array | None = None
    A_P: Array | None = None


class MetricLearner(nnx.Module):
    """G from rotated queries: Gram, one row map shared by all heads, and a power-law stage per head."""

    def __init__(
        self,
        heads: int,
        width: int,
        hidden: int,
        *,
        units: int,
        blocks: int,
        epsilon: float,
        law: InitLaw,
        dtype: DType,
        rngs: nnx.Rngs,
    ):
        """Makes the weights.

        Args:
            heads: N.
            width: H, of one head.
            hidden: F of a gated block.
            units: U, residual units.
            blocks: J, gated blocks per unit.
            epsilon: of every LayerNorm.
            law: initialisation law.
            dtype: of the stored weights; the chain computes in float32 or better.
            rngs: source of keys.
        """
        self.gram_norm = LayerNorm(width, axes=("H",), epsilon=epsilon, dtype=dtype)
        stack = (units, blocks)
        kernels = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        letters = {"gate": ("H", "F"), "up": ("H", "F"), "down": ("F", "H")}
        for name, shape in kernels.items():
            kernel = xavier_uniform(rngs.params(), (*stack, *shape), dtype)
            bias = jnp.zeros((*stack, shape[1]), dtype)
            setattr(self, f"{name}_kernel", nnx.Param(kernel, axes=("U", "J", *letters[name])))
            setattr(self, f"{name}_bias", nnx.Param(bias, axes=("U", "J", letters[name][1])))
        self.norm_scale = nnx.Param(jnp.ones((units, width), dtype), axes=("U", "H"))
        self.norm_bias = nnx.Param(jnp.zeros((units, width), dtype), axes=("U", "H"))
        for name in ("W", "P", "a"):
            tensor = operator_tensor(rngs.params(), heads, width, dtype, law=law)
            setattr(self, name, nnx.Param(tensor, axes=("N", "H", "J")))
        for name in ("b_W", "b_a"):
            zeros = jnp.zeros((heads, width, width), dtype)
            setattr(self, name, nnx.Param(zeros, axes=("N", "H", "J")))
        self.epsilon = epsilon

    @property
    def units(self) -> RowMapUnits:
        """The weights of the row map φ."""
        blocks = GatedWeights(
            self.gate_kernel[...],
            self.gate_bias[...],
            self.up_kernel[...],
            self.up_bias[...],
            self.down_kernel[...],
            self.down_bias[...],
        )
        return RowMapUnits(blocks, self.norm_scale[...], self.norm_bias[...])

    def metric(self, q: Array, valid: Array | None) -> Array:
        """The metric tensor of rotated queries.

        Args:
            q: rotated queries, [B, T, N, H].
            valid: bool [B, T], rows that take part in the Gram (None: all); or [B, X, T], one Gram per segment.

        Returns:
            [B, N, H, H], or [B, X, N, H, H] for segments, float32 or better.
        """
        if valid is None or valid.ndim == 2:
            gram = density_operator(q, valid)
        else:
            gram = jnp.stack([density_operator(q, valid[:, x]) for x in range(valid.shape[1])], 1)
        return self.metric_of(gram)

    def metric_of(self, gram: Array) -> Array:
        """The metric tensor of a Gram, A = φ(LN(D̂)).

        Args:
            gram: [..., N, H, H], float32 or better.

        Returns:
            [..., N, H, H].
        """
        return row_map(self.gram_norm(gram), self.units, epsilon=self.epsilon)

    def power_law(self, A: Array, collect: Collection[str] = ()) -> Chain:
        """The operator of a metric tensor.

        Args:
            A: [..., N, H, H].
            collect: names of intermediate tensors to keep.

        Returns:
            G_LM and the tensors asked for, each [..., N, H, H].
        """
        A_LM = positive_tensor(A, self.W[...], self.b_W[...])
        A_P = hadamard_power(A_LM, self.P[...])
        G_LM = superposition(A_P, self.a[...], self.b_a[...])
        kept = {"A": A, "A_LM": A_LM, "A_P": A_P}
        return Chain(G_LM, **{name: value for name, value in kept.items() if name in collect})
