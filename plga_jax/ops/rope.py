"""Rotary position embedding, in both plane layouts and at arbitrary positions.

Plane a turns by the angle n·θ_a at position n. "interleaved" (torchtune, GPT-J, PLDR v51) makes plane a of the entries
(2a, 2a+1); "half" (NeoX, Llama, PLDR v52) of (a, a + H/2). The two differ by `half_split_permutation`, exactly.
"""

from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array, statistics_dtype

Layout = Literal["interleaved", "half"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


def frequencies(width: int, *, base: float = 10_000.0) -> np.ndarray:
    """The angular frequencies θ_a = base^(−2a/H) of the H/2 planes.

    Args:
        width: head width H, even.
        base: Θ; the slowest plane turns about 1/base radians per position.

    Returns:
        float64 [H/2] on the host, in radians per position. Casting is left to the user, so that it happens once.

    Raises:
        ValueError: the width is odd or not positive.
    """
    if width < 2 or width % 2:
        raise ValueError(f"RoPE turns pairs of entries: head width {width} must be even and at least 2.")
    return float(base) ** (-np.arange(0, width, 2, dtype=np.float64) / width)


_unscaled = frequencies  # in `rope` the name is an argument


def rope(
    x: Array,
    positions: Array,
    *,
    base: float = 10_000.0,
    layout: Layout = "interleaved",
    frequencies: np.ndarray | Array | None = None,
    scale: float = 1.0,
) -> Array:
    """Turns queries or keys by their positions.

    Args:
        x: [B, T, N, H], H even.
        positions: integer [B, T], or [1, T] to share them over the batch; any values, in any order.
        base: Θ of the unscaled frequencies; not read when `frequencies` are given.
        layout: which entries form a plane.
        frequencies: [H/2] in radians per position, such as those of a `RopeConfig`; None makes them from `base`.
        scale: multiplies cos and sin, once; scores of queries and keys turned alike grow by its square.

    Returns:
        [B, T, N, H] in the dtype of `x`. Angles and products are float32 (float64 for float64 input): bfloat16 angles
        alias above position 256.

    Raises:
        ValueError: odd head width, unknown layout, or frequencies that are not H/2.

    Source: Su et al. 2021, eq. 34; layouts as in torchtune (interleaved) and transformers (half).
    """
    if layout not in LAYOUTS:
        raise ValueError(f"RoPE layout {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}.")
    dtype = statistics_dtype(x.dtype)
    H = x.shape[-1]
    if frequencies is None:
        frequencies = _unscaled(H, base=base)
    if H % 2 or frequencies.shape != (H // 2,):
        raise ValueError(f"Heads of width {H} need frequencies of shape [H/2] = {[H / 2]}, got {frequencies.shape}.")
    theta = jnp.asarray(frequencies, dtype)
    angles = positions.astype(dtype)[:, :, None, None] * theta[None, None, None, :]
    factor = jnp.asarray(scale, dtype)
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    wide = x.astype(dtype)
    if layout == "half":
        first, second = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    else:
        pairs = wide.reshape(*x.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        turned = turned.reshape(x.shape)
    return turned.astype(x.dtype)


def half_split_permutation(width: int) -> np.ndarray:
    """π = (0, 2, …, H−2, 1, 3, …, H−1): entry j of the half layout is entry π_j of the interleaved one.

    Args:
        width: head width H, even.

    Returns:
        int [H]. `rope(x[..., π], layout="half") == rope(x, layout="interleaved")[..., π]`, exactly.
    """
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def commutant_projection(G: Array, *, layout: Layout = "interleaved") -> Array:
    """The part of an operator that commutes with every rotation of the embedding.

    In each plane's 2×2 diagonal block [[p, q], [r, s]] it keeps [[c, −t], [t, c]], c = (p + s)/2, t = (r − q)/2; all
    else is 0. Such a G makes the score q̂ₘᵀGk̂ₙ depend on m − n only.

    Args:
        G: [..., H, H].
        layout: which entries form a plane.

    Returns:
        [..., H, H]; applying it twice changes nothing.
    """
    H = G.shape[-1]
    order = half_split_permutation(H) if layout == "interleaved" else np.arange(H)
    first, second = order[: H // 2], order[H // 2 :]
    c = (G[..., first, first] + G[..., second, second]) / 2
    t = (G[..., second, first] - G[..., first, second]) / 2
    out = jnp.zeros_like(G)
    out = out.at[..., first, first].set(c).at[..., second, second].set(c)
    return out.at[..., second, first].set(t).at[..., first, second].set(-t)
