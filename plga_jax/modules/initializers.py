"""The three published initialisation laws of PLDR-LLM, by name.

    law   value projection                 W, P, a
    soc   Xavier uniform, bias 0           Xavier normal
    kvg   uniform ±1/√D, bias too          Xavier normal      (a slip of that program, but one that moves criticality)
    hf    Xavier uniform, bias 0           Xavier uniform

Everywhere: other matrices Xavier uniform with bias 0, LayerNorm γ = 1 and β = 0, embedding N(0, 1).
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from plga_jax.array_types import Array, DType, PRNGKey

InitLaw = Literal["soc", "kvg", "hf"]
INIT_LAWS: tuple[str, ...] = get_args(InitLaw)


def xavier_uniform(key: PRNGKey, shape: tuple[int, ...], dtype: DType) -> Array:
    """Uniform in ±√(6/(fan_in + fan_out)) of the last two axes; leading axes are stacks of independent matrices.

    Args:
        key: typed key.
        shape: [..., fan_in, fan_out].
        dtype: of the result.

    Returns:
        An array of `shape`.
    """
    bound = (6.0 / (shape[-2] + shape[-1])) ** 0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def operator_tensor(key: PRNGKey, heads: int, width: int, dtype: DType, *, law: InitLaw) -> Array:
    """One of the tensors W, P, a of the chain.

    torch counts the fans of a [N, H, H] tensor as H·H and N·H, so the spread depends on the number of heads; JAX's
    `xavier_*` with default axes would give other numbers.

    Args:
        key: typed key.
        heads: N.
        width: H.
        dtype: of the result.
        law: "hf" draws uniformly, the native laws normally; both with variance 2/(H(H + N)).

    Returns:
        [N, H, H].
    """
    std = (2.0 / (width * (width + heads))) ** 0.5
    shape = (heads, width, width)
    if law == "hf":
        bound = 3.0**0.5 * std
        return jax.random.uniform(key, shape, dtype, -bound, bound)
    return jnp.asarray(std, dtype) * jax.random.normal(key, shape, dtype)
