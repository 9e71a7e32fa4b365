"""The published measures of candidate graphs, each beside what chance gives.

A geometry, seen as an undirected graph over N tokens, is compared with a true graph or with attention. The papers give
such numbers alone, and several of them are what any random graph of as many edges has: the degrees of sampled
candidates do not depend on the data. So every measure here comes with its null models:

    chance, random   a random graph of as many edges (expected), or k random nodes
    band             the graph of as many edges between nearest neighbours
    thinning         every true edge kept with the same probability, independently

An edge list is an integer array [E, 2]; order, direction, repetition and loops do not matter.
"""

import dataclasses
import math

import numpy as np

from ris_jax.geometry import Geometry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A number and what it is to be compared with."""

    value: float
    """What was measured; nan where it is not defined."""
    null: dict[str, float]
    """The same measure under each null model, expected."""


def edge_keys(edges: np.ndarray, nodes: int) -> np.ndarray:
    """Edges as numbers i·N + j with i < j.

    Args:
        edges: integers [E, 2].
        nodes: N.

    Returns:
        int64, ascending, without repetition or loops.

    Raises:
        ValueError: a wrong shape, or a node outside of 0 … N-1.
    """
    edges = np.asarray(edges, np.int64)
    if edges.ndim != 2 or edges.shape[1] != 2:
        raise ValueError(f"edges must have shape [E, 2], got {edges.shape}.")
    if edges.size and not 0 <= edges.min() <= edges.max() < nodes:
        raise ValueError(f"Nodes {edges.min()} … {edges.max()} must be within 0 … {nodes - 1}.")
    low, high = edges.min(axis=1, initial=nodes), edges.max(axis=1, initial=-1)
    return np.unique((low * nodes + high)[low < high])


def degrees(edges: np.ndarray, nodes: int) -> np.ndarray:
    """How many different neighbours each node has.

    Args:
        edges: integers [E, 2].
        nodes: N.

    Returns:
        int64 [N].
    """
    return _degrees(edge_keys(edges, nodes), nodes)


def geometry_edges(geometry: Geometry) -> np.ndarray:
    """The candidate graph of a geometry: an edge for each pair that meets. For small windows.

    Args:
        geometry: of at most 16384 tokens.

    Returns:
        int64 [E, 2], (key, query), without loops.
    """
    query, key = np.nonzero(np.tril(geometry.mask(), -1))
    return np.stack([key, query], axis=1)


def pivot_edges(nodes: int, redundancy: int, random: np.random.Generator) -> np.ndarray:
    """The papers' generalised sampling: every pivot draws R+1 different nodes, itself dropped.

    Args:
        nodes: N.
        redundancy: R.
        random: generator.

    Returns:
        int64 [E, 2].
    """
    drawn = min(nodes, redundancy + 1)
    partners = np.stack([random.choice(nodes, drawn, replace=False) for _ in range(nodes)])
    edges = np.stack([np.repeat(np.arange(nodes), drawn), partners.reshape(-1)], axis=1)
    return edges[edges[:, 0] != edges[:, 1]]


def adaptive_redundancy(nodes: int) -> int:
    """The papers' heuristic for R: a half of N, then 167.49·0.999^N, never below 5 from 250 nodes on.

    Args:
        nodes: N.

    Returns:
        R.
    """
    if nodes < 250:
        return max(1, round(nodes / 2))
    return max(5, round(167.49 * 0.999**nodes)) if nodes < 3000 else 5


def log_redundancy(nodes: int) -> int:
    """R = ceil(3·log2 N).

    Args:
        nodes: N, at least 1.

    Returns:
        R.
    """
    return math.ceil(3 * math.log2(nodes))


def edge_recall(candidates: np.ndarray, truth: np.ndarray, nodes: int) -> Measured:
    """The part of the true edges that are candidates, |C ∩ E| / |E|.

    Args:
        candidates: integers [C, 2].
        truth: integers [E, 2].
        nodes: N.

    Returns:
        The recall; chance is the candidates' share of all pairs.
    """
    found, true = edge_keys(candidates, nodes), edge_keys(truth, nodes)
    band = _band(nodes, len(found))
    return Measured(
        value=_ratio(_common(found, true), len(true)),
        null={"chance": _ratio(len(found), _pairs(nodes)), "band": _ratio(_common(band, true), len(true))},
    )


def reduction(candidates: np.ndarray, nodes: int) -> Measured:
    """The part of all pairs that are no candidates, 1 - |C| / (N(N-1)/2).

    Args:
        candidates: integers [C, 2].
        nodes: N.

    Returns:
        The reduction. It says nothing of the choice: every graph of as many edges has the same, and so the same null.
    """
    value = 1 - _ratio(len(edge_keys(candidates, nodes)), _pairs(nodes))
    return Measured(value=value, null={"random": value, "band": value})


def centrality_correlation(candidates: np.ndarray, truth: np.ndarray, nodes: int) -> Measured:
    """Pearson correlation of degrees, in the true graph and in what candidates leave of it.

    Args:
        candidates: integers [C, 2].
        truth: integers [E, 2].
        nodes: N.

    Returns:
        The correlation; the null is `thinning_correlation` at the share of true edges that were kept.
    """
    true = edge_keys(truth, nodes)
    kept = np.intersect1d(edge_keys(candidates, nodes), true, assume_unique=True)
    degree = _degrees(true, nodes)
    null = thinning_correlation(_ratio(len(kept), len(true)), float(degree.mean()), float(degree.var()))
    return Measured(value=_pearson(degree, _degrees(kept, nodes)), null={"thinning": null})


def thinning_correlation(kept: float, mean: float, variance: float) -> float:
    """Correlation of degrees before and after every edge is kept with one probability, independently.

    corr = [1 + ((1-q)/q)·mean/variance]^(-1/2), since a degree d becomes a binomial of d and q. The two ends of an
    edge are taken as apart, which they are nearly.

    Args:
        kept: q, probability that an edge stays.
        mean: of the degrees.
        variance: of the degrees.

    Returns:
        The correlation; nan where nothing is kept or all degrees are equal.
    """
    if not kept or not variance:
        return math.nan
    return (1 + (1 - kept) / kept * mean / variance) ** -0.5


def hub_recall(candidates: np.ndarray, truth: np.ndarray, nodes: int) -> Measured:
    """The part of the true hubs (the top 1 % by degree) that are hubs among the candidates.

    Args:
        candidates: integers [C, 2].
        truth: integers [E, 2].
        nodes: N.

    Returns:
        The recall; chance is k/N for k = max(1, N div 100) hubs.
    """
    hubs, found = (_hubs(degrees(edges, nodes)) for edges in (truth, candidates))
    return Measured(value=_common(hubs, found) / len(hubs), null={"chance": len(hubs) / nodes})


def mass_captured(candidates: np.ndarray, attention: np.ndarray) -> Measured:
    """The attention that lies on candidate pairs, of all that lies between different tokens.

    Args:
        candidates: integers [C, 2].
        attention: [N, N], averaged over layers and heads as wanted; made symmetric, (A + Aᵀ)/2.

    Returns:
        The share of the mass; nulls are a random graph and the band of as many edges.
    """
    nodes = len(attention)
    mass = np.asarray(attention, np.float64)
    mass = (mass + mass.T) / 2
    np.fill_diagonal(mass, 0)
    found = edge_keys(candidates, nodes)

    def captured(keys):
        return _ratio(2 * float(mass[keys // nodes, keys % nodes].sum()), float(mass.sum()))

    null = {"random": _ratio(len(found), _pairs(nodes)), "band": captured(_band(nodes, len(found)))}
    return Measured(value=captured(found), null=null)


def hub_distance(candidates: np.ndarray, truth: np.ndarray, nodes: int) -> Measured:
    """Mean |i - j| of the candidate edges at recovered hubs: true hubs that are hubs among the candidates.

    Args:
        candidates: integers [C, 2].
        truth: integers [E, 2].
        nodes: N.

    Returns:
        The distance in tokens, nan if no hub was recovered. Nulls: a random edge anywhere, (N+1)/3, and the band.
    """
    found = edge_keys(candidates, nodes)
    hubs = np.intersect1d(_hubs(degrees(truth, nodes)), _hubs(_degrees(found, nodes)))
    low, high = found // nodes, found % nodes
    distance = (high - low)[np.isin(low, hubs) | np.isin(high, hubs)]
    band = _band(nodes, len(found))
    return Measured(
        value=_ratio(float(distance.sum()), len(distance)),
        null={"random": (nodes + 1) / 3, "band": _ratio(float((band % nodes - band // nodes).sum()), len(band))},
    )


def segment_ratios(candidates: np.ndarray, truth: np.ndarray, nodes: int) -> dict[str, Measured]:
    """The part of their true degree that nodes keep, apart for hubs, for the middle and for the lower half.

    Args:
        candidates: integers [C, 2].
        truth: integers [E, 2].
        nodes: N.

    Returns:
        For "top" (1 %), "middle" (to 50 %) and "lower" half: the ratio of degrees. The null is one for all, the share
        of true edges kept: thinning spares nobody.
    """
    true = edge_keys(truth, nodes)
    kept = np.intersect1d(edge_keys(candidates, nodes), true, assume_unique=True)
    before, after = _degrees(true, nodes), _degrees(kept, nodes)
    order = np.argsort(-before, kind="stable")
    parts = np.split(order, [max(1, nodes // 100), nodes // 2]) if nodes > 1 else (order, order[:0], order[:0])
    null = {"thinning": _ratio(len(kept), len(true))}
    return {
        name: Measured(value=_ratio(float(after[part].sum()), float(before[part].sum())), null=null)
        for name, part in zip(("top", "middle", "lower"), parts)
    }


def connectivity(candidates: np.ndarray, nodes: int) -> Measured:
    """The share of nodes in the largest connected part.

    Args:
        candidates: integers [C, 2].
        nodes: N.

    Returns:
        The share. Nulls: the giant component of a random graph of as many edges, s = 1 - exp(-c·s) with c the mean
        degree, and the band, which is connected once it has N-1 edges.
    """
    keys = edge_keys(candidates, nodes)
    mean = 2 * len(keys) / nodes
    giant = 1.0
    for _ in range(200):  # a contraction, but for c near 1
        giant = -math.expm1(-mean * giant)
    band = min(len(keys) + 1, nodes) / nodes
    return Measured(value=_largest_part(keys, nodes) / nodes, null={"random": max(giant, 1 / nodes), "band": band})


def _largest_part(keys: np.ndarray, nodes: int) -> int:
    low, high = keys // nodes, keys % nodes
    label = np.arange(nodes)
    while True:
        # Each node takes the smallest label around it, then the label of its label: halves the way every round.
        smaller = label.copy()
        np.minimum.at(smaller, low, label[high])
        np.minimum.at(smaller, high, label[low])
        smaller = smaller[smaller]
        if np.array_equal(smaller, label):
            return int(np.bincount(label).max())
        label = smaller


def _band(nodes: int, edges: int) -> np.ndarray:
    """Keys of the shortest `edges` pairs: whole diagonals, then a part of the next, from its start."""
    keys, distance = [], 1
    while edges > 0 and distance < nodes:
        low = np.arange(min(edges, nodes - distance))
        keys.append(low * nodes + low + distance)
        edges -= len(low)
        distance += 1
    return np.concatenate(keys) if keys else np.empty(0, np.int64)


def _degrees(keys: np.ndarray, nodes: int) -> np.ndarray:
    return np.bincount(keys // nodes, minlength=nodes) + np.bincount(keys % nodes, minlength=nodes)


def _hubs(degree: np.ndarray) -> np.ndarray:
    """The top 1 % by degree, ties to the earlier node."""
    return np.argsort(-degree, kind="stable")[: max(1, len(degree) // 100)]


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    return _ratio(float(x @ y), math.sqrt(float(x @ x) * float(y @ y)))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    return len(np.intersect1d(a, b, assume_unique=True))


def _pairs(nodes: int) -> int:
    return nodes * (nodes - 1) // 2


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
