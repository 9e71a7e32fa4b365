"""Graph measures by definition on small graphs, and their null models against simulation."""

import math

import numpy as np
import pytest

from ris_jax import metrics
from ris_jax.patterns import WindowGeometry

# A path 0-1-2-3-4 with a hub at 0 for the truth; candidates find two of its five edges, one of them twice.
TRUTH = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
CANDIDATES = [(1, 0), (0, 1), (2, 2), (4, 0), (1, 3)]


def random_edges(nodes, edges, seed):
    low, high = np.triu_indices(nodes, 1)
    chosen = np.random.default_rng(seed).choice(len(low), edges, replace=False)
    return np.stack([low[chosen], high[chosen]], axis=1)


def preferential(nodes, links, seed):
    """A graph of very unequal degrees: each new node ties itself to the ends of old edges."""
    random, ends, edges = np.random.default_rng(seed), list(range(links)), []
    for node in range(links, nodes):
        for other in set(random.choice(ends, links).tolist()):
            edges.append((node, other))
            ends += [node, other]
    return np.array(edges)


def test_edges_are_undirected_distinct_and_without_loops():
    assert metrics.edge_keys(CANDIDATES, 5).tolist() == [1, 4, 8]
    assert metrics.degrees(CANDIDATES, 5).tolist() == [2, 2, 0, 1, 1]
    assert metrics.edge_keys(np.empty((0, 2)), 5).tolist() == []
    with pytest.raises(ValueError, match="Nodes 0 … 5 must be within 0 … 4"):
        metrics.edge_keys([(0, 5)], 5)
    with pytest.raises(ValueError, match="shape"):
        metrics.edge_keys([0, 1], 5)


def test_recall_and_reduction_by_definition():
    recall = metrics.edge_recall(CANDIDATES, TRUTH, 5)
    assert recall.value == 2 / 5
    # The band of three edges is 0-1, 1-2, 2-3, all of them true.
    assert recall.null == {"chance": 3 / 10, "band": 3 / 5}
    reduction = metrics.reduction(CANDIDATES, 5)
    assert reduction.value == reduction.null["random"] == 1 - 3 / 10
    assert math.isnan(metrics.edge_recall(CANDIDATES, np.empty((0, 2)), 5).value)


def test_recall_of_random_candidates_is_chance():
    truth = preferential(200, 3, 0)
    found = [metrics.edge_recall(random_edges(200, 2000, seed), truth, 200) for seed in range(40)]
    values = [m.value for m in found]
    assert found[0].null["chance"] == 2000 / 19900
    assert abs(np.mean(values) - 2000 / 19900) < 4 * np.std(values) / 40**0.5


def test_thinning_law_predicts_the_published_correlations():
    """One ratio mean/variance, fitted to the published correlation at 1 %, gives the others to 0.001."""
    ratio = (0.7200**-2 - 1) * 0.01 / 0.99
    predicted = [metrics.thinning_correlation(q, ratio, 1.0) for q in (0.001, 0.05)]
    assert predicted == pytest.approx([0.3099, 0.9212], abs=1e-3)


def test_centrality_correlation_of_random_candidates_is_thinning():
    truth = preferential(400, 4, 1)
    found = [metrics.centrality_correlation(random_edges(400, 8000, seed), truth, 400) for seed in range(30)]
    values, nulls = [m.value for m in found], [m.null["thinning"] for m in found]
    # The law takes the two ends of an edge as apart and the mean of a root as the root of a mean: 0.01 off (measured).
    assert np.mean(values) == pytest.approx(np.mean(nulls), abs=0.02)
    assert 0.5 < np.mean(nulls) < 0.95
    assert metrics.centrality_correlation(truth, truth, 400).value == pytest.approx(1)
    assert math.isnan(metrics.centrality_correlation(np.empty((0, 2)), truth, 400).null["thinning"])


def test_hub_recall_of_sampling_is_chance():
    """The candidates' degrees know nothing of the data: k/N, whatever the budget."""
    truth = preferential(300, 3, 2)
    assert metrics.hub_recall(truth, truth, 300).value == 1
    found = [metrics.hub_recall(random_edges(300, 3000, seed), truth, 300) for seed in range(300)]
    assert found[0].null["chance"] == 3 / 300
    values = [m.value for m in found]
    assert abs(np.mean(values) - 0.01) < 4 * np.std(values) / 300**0.5


def test_mass_captured():
    attention = np.tril(np.exp(np.random.default_rng(3).normal(size=(60, 60))))
    attention /= attention.sum(axis=1, keepdims=True)
    whole = metrics.geometry_edges(WindowGeometry(length=60, local=60, anchors=0))
    assert metrics.mass_captured(whole, attention).value == pytest.approx(1)
    window = metrics.geometry_edges(WindowGeometry(length=60, local=4, anchors=0))
    found = metrics.mass_captured(window, attention)
    t, c = np.nonzero(attention)
    near = (t - c > 0) & (t - c < 4)
    assert found.value == pytest.approx(attention[t[near], c[near]].sum() / np.tril(attention, -1).sum())
    assert found.null["band"] == found.value, "a window without anchors is the band"
    values = [metrics.mass_captured(random_edges(60, len(window), seed), attention).value for seed in range(200)]
    assert abs(np.mean(values) - found.null["random"]) < 4 * np.std(values) / 200**0.5


def test_hub_distance():
    # Both graphs have their one hub at node 9.
    star = [(9, node) for node in (1, 5, 30)]
    found = metrics.hub_distance([*star, (40, 41)], [(9, node) for node in range(20, 30)], 50)
    assert found.value == (8 + 4 + 21) / 3
    assert found.null == {"random": 51 / 3, "band": 1.0}
    assert math.isnan(metrics.hub_distance(star, [(1, 2), (1, 3)], 50).value)
    edges = random_edges(50, 1225, 0)
    assert abs(edges[:, 0] - edges[:, 1]).mean() == pytest.approx(17)


def test_segment_ratios():
    truth = preferential(300, 3, 4)
    everything = metrics.segment_ratios(truth, truth, 300)
    assert [m.value for m in everything.values()] == [1, 1, 1] and list(everything) == ["top", "middle", "lower"]
    found = [metrics.segment_ratios(random_edges(300, 10000, seed), truth, 300) for seed in range(40)]
    for name in everything:
        values = np.array([m[name].value - m[name].null["thinning"] for m in found])
        assert abs(values.mean()) < 4 * values.std() / 40**0.5


def test_connectivity():
    assert metrics.connectivity([(0, 1), (1, 2), (4, 5)], 8).value == 3 / 8
    assert metrics.connectivity([(i, i + 1) for i in range(99)], 100).value == 1
    shuffled = np.random.default_rng(5).permutation(500)
    assert metrics.connectivity(np.stack([shuffled[:-1], shuffled[1:]], axis=1), 500).value == 1
    found = [metrics.connectivity(random_edges(2000, 1500, seed), 2000) for seed in range(20)]
    # A finite graph: the giant component's share is 0.583 in the limit of mean degree 1.5.
    assert found[0].null["random"] == pytest.approx(0.5828, abs=1e-4)
    assert np.mean([m.value for m in found]) == pytest.approx(0.5828, abs=0.02)
    assert metrics.connectivity(np.empty((0, 2)), 10).value == metrics.connectivity(np.empty((0, 2)), 10).null["band"]


def test_redundancies():
    assert [metrics.adaptive_redundancy(n) for n in (1, 100, 249, 250, 1000, 2999, 3000, 10**6)] == [
        1, 50, 124, 130, 62, 8, 5, 5,
    ]  # fmt: skip
    assert [metrics.log_redundancy(n) for n in (1, 2, 1000, 2**20)] == [0, 3, 30, 60]


def test_pivots_draw_distinct_partners():
    edges = metrics.pivot_edges(40, 6, np.random.default_rng(0))
    assert len(set(map(tuple, edges.tolist()))) == len(edges)
    degree = np.bincount(edges[:, 0], minlength=40)
    assert (degree >= 6).all() and (degree <= 7).all()
    assert len(metrics.pivot_edges(5, 9, np.random.default_rng(0))) == 20


def test_geometry_edges_are_the_mask():
    geometry = WindowGeometry(length=30, local=3, anchors=2)
    edges = metrics.geometry_edges(geometry)
    assert metrics.edge_keys(edges, 30).size == len(edges) == geometry.mask().sum() - 30
