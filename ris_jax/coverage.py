"""Whether a row gets to see what it asks about: in one layer, and by way of other rows through depth."""

import itertools
import math
from collections.abc import Iterable

import numpy as np

from ris_jax.geometry import PublishedGeometry

_CERTAIN = 1e-16
"""The smallest chance of a miss that is told apart from none; keeps sums of logarithms finite."""


def hit_probability(geometry: PublishedGeometry, row: int, positions: Iterable[int]) -> float:
    """The chance that a row sees at least one of some keys, over the choice of seeds.

    It is exact: that the draws of a row exclude each other's places, that the members of a clique come without
    repetition, that window and anchors are certain and later keys are never seen is all in it.

    Args:
        geometry: published geometry; its base seed does not matter.
        row: the query, 0 … T-1.
        positions: keys that hold the answer, 0 … T-1; repeated ones count once.

    Returns:
        The probability; 1 when one of them is local or an anchor.

    Raises:
        ValueError: row or position outside of the geometry.
    """
    T = geometry.length
    keys = {int(c) for c in positions}
    if not all(0 <= c < T for c in (row, *keys)):
        raise ValueError(f"row {row} and positions {sorted(keys)} must be within 0 … {T - 1}.")
    keys = {c for c in keys if c <= row}
    if any(c >= row - geometry.local or c < geometry.anchors for c in keys):
        return 1.0
    return -math.expm1(_log_miss(geometry, len(keys)))


def mean_hit_probability(geometry: PublishedGeometry, row: int, occurrences: int) -> float:
    """`hit_probability` averaged over the places where a fact may stand before (or at) the row.

    Args:
        geometry: published geometry.
        row: the query, 0 … T-1.
        occurrences: k, how many different causal keys hold the fact, at random.

    Returns:
        The probability.

    Raises:
        ValueError: row outside of the geometry, or more occurrences than causal keys.
    """
    if not 0 <= row < geometry.length or not 0 <= occurrences <= row + 1:
        raise ValueError(f"row {row} must be within 0 … {geometry.length - 1}, {occurrences} occurrences in 0 … row+1.")
    free = row + 1 - geometry.fixed_count(row)
    if occurrences > free:
        return 1.0
    none_fixed = _log_choose(free, occurrences) - _log_choose(row + 1, occurrences)
    return -math.expm1(none_fixed + _log_miss(geometry, occurrences))


def reachability(geometry: PublishedGeometry, source: int, layers: int) -> np.ndarray:
    """The chance that what stands at one position can have reached each row after some layers.

    After one layer a row holds what it sees; after two, also what the rows it sees have seen: a missed fact may still
    come by two hops. Layers share one geometry, as published, and a row's sight of different keys is taken as
    independent (mean field), which says slightly too much: the mean over rows by 0.01 in tests. It bounds what
    attention *could* carry; that it learnt to is another matter.

    Args:
        geometry: published geometry.
        source: the position of the fact, 0 … T-1.
        layers: depth.

    Returns:
        float64 [layers + 1, T]: row l is the state after l layers, good to about 1e-9; row 0 marks the source.

    Raises:
        ValueError: source outside of the geometry, or layers below 0.
    """
    T = geometry.length
    if not 0 <= source < T or layers < 0:
        raise ValueError(f"source {source} must be within 0 … {T - 1} and layers {layers} at least 0.")
    p = geometry.expected().probability
    rows = np.arange(T)
    low = np.maximum(rows - geometry.local, 0)
    anchors = np.minimum(geometry.anchors, low)
    reached = np.zeros((layers + 1, T))
    reached[0, source] = 1
    for before, after in itertools.pairwise(reached):
        seen = _prefix(np.log(np.maximum(1 - before, _CERTAIN)))
        drawn = _prefix(np.log(np.maximum(1 - p * before, _CERTAIN)))
        log_miss = (seen[rows + 1] - seen[low]) + seen[anchors] + (drawn[low] - drawn[anchors])
        # Differences of long sums leave dust of either sign where nothing can arrive.
        after[:] = np.where(log_miss < -1e-9, -np.expm1(log_miss), 0)
    return reached


def _log_miss(geometry: PublishedGeometry, keys: int) -> float:
    """log of the chance that no seed draws any of `keys` different keys that are not the row itself."""
    T = geometry.length
    if keys == 0:
        return 0.0
    by_draws = geometry.num_samples * math.log1p(-keys / T)
    clique = geometry.block_size
    if clique <= 1:
        return geometry.seeds * by_draws
    blocks, rest = divmod(T, clique)
    by_clique = 0.0
    for size, rows in ((clique, blocks * clique), (rest, rest)):
        # The other size-1 members of the row's clique are a draw without repetition from T-1 keys.
        if rows and T - 1 - keys >= size - 1:
            by_clique += rows / T * math.exp(_log_choose(T - 1 - keys, size - 1) - _log_choose(T - 1, size - 1))
    return geometry.seeds * (by_draws + math.log(by_clique)) if by_clique else -math.inf


def _log_choose(n: int, k: int) -> float:
    if k > n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _prefix(values: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, …, T values."""
    return np.concatenate([[0.0], np.cumsum(values)])
