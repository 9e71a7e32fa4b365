"""How far an operator is from commuting with the rotary embedding.

An operator commutes with every rotation when it is, in each rotary plane, a scaled rotation and nothing between planes:
the d-dimensional commutant of the d² operators. Scores under such a G depend on m − n only. `layout` says which
entries form a plane: the wrong one is a negative control.
"""

import jax
import numpy as np

from plga_jax.ops import rope
from plga_jax.ops.rope import Layout


def projection(G, *, layout: Layout = "interleaved") -> np.ndarray:
    """*Measured*: Π G, the nearest operator that commutes with every rotation.

    Args:
        G: [..., H, H], H even.
        layout: which entries form a rotary plane.

    Returns:
        [..., H, H] float64.

    Raises:
        ValueError: if the matrices are not square, H is odd, `layout` is unknown or an entry is not finite.
    """
    with jax.enable_x64(True):
        return np.array(rope.commutant_projection(jax.numpy.asarray(operators(G, layout)), layout=layout))


def residual(G, *, layout: Layout = "interleaved") -> np.ndarray:
    """*Measured*: ‖G − Π G‖ / ‖G‖ in the Frobenius norm; 0 for the zero operator, which commutes.

    Args:
        G: [..., H, H], H even; one [H, H] operator, or any stack.
        layout: which entries form a rotary plane.

    Returns:
        [...] float64 in [0, 1]: 0 for an operator that commutes, `isotropic_residual(H)` for one without direction.

    Raises:
        ValueError: if the matrices are not square, H is odd, `layout` is unknown or an entry is not finite.
    """
    G = operators(G, layout)
    # Divided by the largest entry first: squares of a collapsed tensor underflow.
    largest = np.max(np.abs(G), axis=(-2, -1), keepdims=True)
    G = G / np.where(largest == 0, 1.0, largest)
    size = np.linalg.norm(G, axis=(-2, -1))
    off = np.linalg.norm(G - projection(G, layout=layout), axis=(-2, -1))
    return off / np.where(size == 0, 1.0, size)


def isotropic_residual(width: int) -> float:
    """*Bound*: sqrt(1 − 1/H), the residual of an operator whose energy is even over all directions.

    The root mean square of the residual of isotropic random operators, and a value below which learning, not chance,
    is at work.

    Args:
        width: H, even.

    Returns:
        A number in (0, 1); 0.99216 for H = 64.

    Raises:
        ValueError: if `width` is odd or not positive.
    """
    rope.frequencies(width)
    return float(np.sqrt(1 - 1 / width))


def operators(G, layout: Layout) -> np.ndarray:
    """*Measured*: `G` as float64, checked to be operators on rotary planes.

    Args:
        G: [..., H, H].
        layout: which entries form a rotary plane.

    Returns:
        [..., H, H] float64.

    Raises:
        ValueError: if the matrices are not square, H is odd, `layout` is unknown or an entry is not finite.
    """
    G = np.asarray(G, np.float64)
    if G.ndim < 2 or G.shape[-1] != G.shape[-2] or G.shape[-1] < 2 or G.shape[-1] % 2:
        raise ValueError(f"operators must be [..., H, H] with H even, since rotary planes are pairs; got {G.shape}")
    if layout not in rope.LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(rope.LAYOUTS)}")
    if not np.isfinite(G).all():
        raise ValueError(
            f"{np.sum(~np.isfinite(G))} of {G.size} entries are not finite; audit the last finite checkpoint"
        )
    return G
