"""Modules that own weights and call one op: Linear, GatedLinear, LayerNorm, RMSNorm.

Each `nnx.Param` carries `axes`, the letters of its trailing axes; stacking adds leading axes that `axes` does not name.
The sharding rules read them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from plga_jax.array_types import Array, DType
from plga_jax.modules.initializers import xavier_uniform
from plga_jax.ops.gated import GatedWeights, gated_linear, linear
from plga_jax.ops.norms import layer_norm, rms_norm


class Linear(nnx.Module):
    """y = x·W + b, W stored [in, out]."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        axes: tuple[str, str],
        dtype: DType = jnp.float32,
        compute_dtype: DType | None = None,
        torch_default: bool = False,
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ):
        """Makes the weights.

        Args:
            inputs: width of x.
            outputs: width of y.
            axes: letters of the kernel's two axes.
            dtype: of the stored weights.
            compute_dtype: of the product; None computes in the weights' dtype.
            torch_default: weight and bias uniform in ±1/√inputs instead of Xavier uniform with bias 0.
            use_bias: whether there is a b.
            rngs: source of keys.
        """
        shape = (inputs, outputs)
        if torch_default:
            bound = inputs**-0.5
            kernel = jax.random.uniform(rngs.params(), shape, dtype, -bound, bound)
            bias = jax.random.uniform(rngs.params(), (outputs,), dtype, -bound, bound)
        else:
            kernel = xavier_uniform(rngs.params(), shape, dtype)
            bias = jnp.zeros((outputs,), dtype)
        self.kernel = nnx.Param(kernel, axes=axes)
        self.bias = nnx.Param(bias, axes=axes[1:]) if use_bias else None
        self.compute_dtype = compute_dtype or dtype

    @classmethod
    def joined(cls, parts: Sequence["Linear"]) -> "Linear":
        """One map of the same input whose outputs are those of `parts`, side by side.

        Args:
            parts: maps of one input width and compute dtype.

        Returns:
            A map whose result `jnp.split` takes apart: one product in place of several short ones.
        """
        states = [nnx.state(part) for part in parts]
        # By leaves: the parts' outputs may have different letters, which makes their states different trees.
        arrays = [jnp.concatenate(same, axis=-1) for same in zip(*map(jax.tree.leaves, states), strict=True)]
        return nnx.merge(nnx.graphdef(parts[0]), jax.tree.unflatten(jax.tree.structure(states[0]), arrays))

    def __call__(self, x: Array) -> Array:
        """x [..., inputs] -> [..., outputs] in the compute dtype."""
        return linear(x.astype(self.compute_dtype), *self.weights)

    @property
    def weights(self) -> tuple[Array, Array | None]:
        """W and b."""
        return self.kernel[...], None if self.bias is None else self.bias[...]


class GatedLinear(nnx.Module):
    """GLU(x) = W₃(silu(W₁x + b₁) ⊙ (W₂x + b₂)) + b₃."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        dtype: DType = jnp.float32,
        compute_dtype: DType | None = None,
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ):
        """Makes the weights.

        Args:
            width: D, of input and output.
            hidden: F.
            dtype: of the stored weights.
            compute_dtype: of the products; None computes in the weights' dtype.
            use_bias: whether the three maps have biases.
            rngs: source of keys.
        """
        common = {"dtype": dtype, "use_bias": use_bias}
        into, out = {"axes": ("D", "F"), **common}, {"axes": ("F", "D"), **common}
        self.gate = Linear(width, hidden, **into, rngs=rngs)
        self.up = Linear(width, hidden, **into, rngs=rngs)
        self.down = Linear(hidden, width, **out, rngs=rngs)
        self.compute_dtype = compute_dtype or dtype

    def __call__(self, x: Array) -> Array:
        """x [..., D] -> [..., D] in the compute dtype."""
        if hasattr(self, "gate_up"):
            x = x.astype(self.compute_dtype)
            gate, up = jnp.split(linear(x, *self.gate_up.weights), 2, axis=-1)
            return linear(jax.nn.silu(gate) * up, *self.down.weights)
        weights = GatedWeights(*self.gate.weights, *self.up.weights, *self.down.weights)
        return gated_linear(x.astype(self.compute_dtype), weights)

    def join(self) -> None:
        """Puts W₁ and W₂ side by side, for one product of two; see `Linear.joined`."""
        self.gate_up = Linear.joined([self.gate, self.up])
        del self.gate, self.up


class LayerNorm(nnx.Module):
    """Layer normalisation with learned γ and β."""

    def __init__(self, width: int, *, axes: tuple[str] = ("D",), epsilon: float, dtype: DType = jnp.float32):
        """Makes γ = 1 and β = 0.

        Args:
            width: of the normalised axis.
            axes: its letter.
            epsilon: added to the variance.
            dtype: of the stored weights.
        """
        self.scale = nnx.Param(jnp.ones((width,), dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros((width,), dtype), axes=axes)
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """x [..., D] -> [..., D]."""
        return layer_norm(x, self.scale[...], self.bias[...], epsilon=self.epsilon)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with learned γ."""

    def __init__(self, width: int, *, axes: tuple[str] = ("D",), epsilon: float, dtype: DType = jnp.float32):
        """Makes γ = 1.

        Args:
            width: of the normalised axis.
            axes: its letter.
            epsilon: added to the mean square.
            dtype: of the stored weights.
        """
        self.scale = nnx.Param(jnp.ones((width,), dtype), axes=axes)
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """x [..., D] -> [..., D]."""
        return rms_norm(x, self.scale[...], epsilon=self.epsilon)
