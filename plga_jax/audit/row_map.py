"""How strongly a layer's row map φ contracts: Jacobians and pairwise ratios at the rows of its normalised Grams.

Everything is computed in float64, where Jacobians of a collapsed map, down to 1e-30, still have all their digits. The
rows are samples: what is found at them certifies nothing about other rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plga_jax.models.pldr import PLDR
from plga_jax.modules.power_law import MetricLearner
from plga_jax.ops.power_law import RowMapUnits, density_operator, row_map

_ROWS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction:
    """φ at R rows; float64."""

    largest: np.ndarray
    """σ_max of the Jacobian of the whole map, [R]."""
    smallest: np.ndarray
    """σ_min of it, [R]: rounding of 0 where a unit's LayerNorm forgets the mean of its row, as all do without ε."""
    units: np.ndarray
    """σ_max of each residual unit's Jacobian where the row arrives at it, [R, U]; their product bounds `largest`."""


def metric_learner(model: PLDR, layer: int) -> MetricLearner:
    """*Measured*: one layer's metric learner, in float64.

    Args:
        model: of learned operators.
        layer: 0 … L − 1.

    Returns:
        The module; use it inside `jax.enable_x64()`.

    Raises:
        ValueError: constant operators, which have no learner, or no such layer.
    """
    config = model.config
    if config.operator != "learned":
        raise ValueError("the model has constant operators and no metric learner: there is no row map to audit")
    if not 0 <= layer < config.num_layers:
        raise ValueError(f"layer={layer} must be in 0…{config.num_layers - 1}")
    with jax.enable_x64(True):
        return jax.tree.map(lambda x: jnp.asarray(np.asarray(x[layer]), jnp.float64), model.layers.attention.metric)


def normalised_rows(learner: MetricLearner, rotated_queries) -> np.ndarray:
    """*Measured*: the rows that φ is applied to, LN(D̂) of each head.

    Args:
        learner: of the layer, see `metric_learner`.
        rotated_queries: of a call without padding, [..., T, N, H].

    Returns:
        [..., N, H, H] float64.
    """
    with jax.enable_x64(True):
        q = jnp.asarray(np.asarray(rotated_queries, np.float64))
        flat = q.reshape(-1, *q.shape[-3:])
        rows = learner.gram_norm(density_operator(flat))
        return np.asarray(rows.reshape(*q.shape[:-3], *rows.shape[1:]))


def contraction(learner: MetricLearner, rows) -> Contraction:
    """*Measured*: singular values of the Jacobians of φ at rows; a sample, not a certificate.

    Args:
        learner: of the layer, see `metric_learner`.
        rows: [R, H], of `normalised_rows`.

    Returns:
        A `Contraction`.

    Raises:
        ValueError: rows that are not [R, H] or not finite.
    """
    rows = _checked(rows)
    with jax.enable_x64(True):
        composite, units = _jacobians(learner.units, jnp.asarray(rows), learner.epsilon)
    values = np.linalg.svd(np.asarray(composite), compute_uv=False)
    each = np.linalg.svd(np.asarray(units), compute_uv=False)
    return Contraction(largest=values[:, 0], smallest=values[:, -1], units=each[..., 0])


def pairwise_ratios(learner: MetricLearner, rows, groups) -> tuple[np.ndarray, np.ndarray]:
    """*Measured*: ‖φ(r) − φ(r')‖ / ‖r − r'‖ of all pairs of different rows; a sample, not a certificate.

    Args:
        learner: of the layer, see `metric_learner`.
        rows: [R, H], of `normalised_rows`.
        groups: [R] integers, such as the prompt each row comes from.

    Returns:
        Ratios of pairs within a group, and of pairs across groups; pairs of equal rows are left out.

    Raises:
        ValueError: rows that are not [R, H] or not finite, or another number of groups.
    """
    rows, groups = _checked(rows), np.asarray(groups)
    if groups.shape != rows.shape[:1]:
        raise ValueError(f"groups {groups.shape} must name one group for each of {len(rows)} rows")
    with jax.enable_x64(True):
        images = np.asarray(_images(learner.units, jnp.asarray(rows), learner.epsilon))
    first, second = np.triu_indices(len(rows), 1)
    apart = np.linalg.norm(rows[first] - rows[second], axis=-1)
    moved = np.linalg.norm(images[first] - images[second], axis=-1)
    differ, within = apart > 0, groups[first] == groups[second]
    ratios = moved[differ] / apart[differ]
    return ratios[within[differ]], ratios[~within[differ]]


@functools.partial(jax.jit, static_argnames="epsilon")
def _images(units: RowMapUnits, rows, epsilon: float):
    return row_map(rows, units, epsilon=epsilon)


@functools.partial(jax.jit, static_argnames="epsilon")
def _jacobians(units: RowMapUnits, rows, epsilon: float):
    """Of the whole map, [R, H, H], and of each unit, [R, U, H, H]."""

    def along(row):
        def step(carry, unit):
            row, composite = carry
            alone = jax.tree.map(lambda x: x[None], unit)
            apply = functools.partial(row_map, units=alone, epsilon=epsilon)
            jacobian = jax.jacfwd(apply)(row)
            return (apply(row), jnp.matmul(jacobian, composite, precision=lax.Precision.HIGHEST)), jacobian

        (_, composite), each = lax.scan(step, (row, jnp.eye(row.size, dtype=row.dtype)), units)
        return composite, each

    return lax.map(along, rows, batch_size=_ROWS_AT_ONCE)


def _checked(rows) -> np.ndarray:
    rows = np.asarray(rows, np.float64)
    if rows.ndim != 2 or not rows.size:
        raise ValueError(f"rows must be [at least one, H], got {rows.shape}")
    if not np.isfinite(rows).all():
        raise ValueError(f"{np.sum(~np.isfinite(rows))} of {rows.size} entries are not finite")
    return rows
