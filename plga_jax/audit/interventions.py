"""Changes to operators and metric tensors at inference, with controls of equal size.

    commutant     G + λ(ΠG − G): the part that does not commute with the rotary embedding fades out
    complement    the same distance in a random direction off the commutant
    random        the same distance in any random direction
    centroid      A → its mean row in every row: what a collapse does to A, at once

A loss that rises under the first and not under the controls tells that the part which was removed is used. All are
functions from arrays to arrays; `PLDR(…, operators=)` applies operators at inference.
"""

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.audit import commutant
from plga_jax.models.pldr import PLDR
from plga_jax.ops.rope import Layout

DIRECTIONS = ("commutant", "complement", "random")


def mix_operators(G, strength: float, *, direction: str = "commutant", layout: Layout = "interleaved", seed: int = 0):
    """*Measured*: operators moved by λ‖G − ΠG‖ towards the commutant, or as far in a random direction.

    Args:
        G: [..., H, H].
        strength: λ; 0 leaves G, 1 ends at ΠG.
        direction: one of `DIRECTIONS`.
        layout: rotary planes of the model.
        seed: of the random directions; every operator has its own.

    Returns:
        [..., H, H] float64: the same distance λ‖G − ΠG‖ from G, whichever the direction.

    Raises:
        ValueError: an unknown direction, a strength that is not finite, or operators that `commutant` refuses.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r} is unknown; choose one of {', '.join(DIRECTIONS)}")
    if not np.isfinite(strength):
        raise ValueError(f"strength={strength} must be a finite number; 0 changes nothing, 1 projects")
    G = commutant.operators(G, layout)
    off = commutant.projection(G, layout=layout) - G
    if direction == "commutant":
        return G + strength * off
    drawn = np.random.default_rng(seed).normal(size=G.shape)
    if direction == "complement":
        drawn = drawn - commutant.projection(drawn, layout=layout)
    size = np.linalg.norm(off, axis=(-2, -1), keepdims=True)
    return G + strength * size * drawn / np.linalg.norm(drawn, axis=(-2, -1), keepdims=True)


def project_rows(A, *, keep: int = 0) -> np.ndarray:
    """*Measured*: metric tensors whose rows are replaced by their mean row.

    Args:
        A: [..., H, J].
        keep: rows that stay as they are, those farthest from the mean.

    Returns:
        [..., H, J] float64, of rank one but for the rows kept.

    Raises:
        ValueError: `keep` outside 0 … H, or an entry that is not finite.
    """
    A = np.asarray(A, np.float64)
    if A.ndim < 2 or not 0 <= keep <= A.shape[-2]:
        raise ValueError(f"keep={keep} must be within 0…{A.shape[-2] if A.ndim > 1 else 0} rows of {A.shape}")
    if not np.isfinite(A).all():
        raise ValueError(
            f"{np.sum(~np.isfinite(A))} of {A.size} entries are not finite; audit the last finite checkpoint"
        )
    mean = A.mean(axis=-2, keepdims=True)
    distance = np.linalg.norm(A - mean, axis=-1)
    rank = np.argsort(np.argsort(-distance, axis=-1, kind="stable"), axis=-1)
    return np.where((rank < keep)[..., None], A, mean)


def operators_from_metric(model: PLDR, A) -> np.ndarray:
    """*Measured*: the operators that a model's power-law stages make of given metric tensors.

    Args:
        model: of learned operators.
        A: [L, B, N, H, H].

    Returns:
        G, [L, B, N, H, H] float32.

    Raises:
        ValueError: constant operators.
    """
    if model.config.operator != "learned":
        raise ValueError("the model has constant operators: no stage makes them of a metric tensor")
    return np.asarray(_power_law(model, jnp.asarray(np.asarray(A, np.float32))))


@jax.jit
def _power_law(model: PLDR, A):
    return jax.lax.map(lambda pair: pair[0].attention.metric.power_law(pair[1]).G_LM, (model.layers, A))
