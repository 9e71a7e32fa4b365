"""Chances of seeing a fact, against counts over many seeds."""

import numpy as np
import pytest

from ris_jax.coverage import hit_probability, mean_hit_probability, reachability
from ris_jax.geometry import PublishedGeometry

STOCHASTIC = PublishedGeometry(length=120, seeds=2, density=0.04, local=6, anchors=4)
STRUCTURAL = STOCHASTIC.replace(mode="structural", block_max=11)  # ten blocks of 11 and one of 10
DRAWS = 1500
both = pytest.mark.parametrize("geometry", [STOCHASTIC, STRUCTURAL], ids=["stochastic", "structural"])


def row_masks(geometry, row, count=DRAWS):
    """A row's keys under `count` independent sets of seeds, bool [count, T]."""
    masks = np.zeros((count, geometry.length), bool)
    for i, line in enumerate(masks):
        line[geometry.replace(base_seed=1000 + geometry.seeds * i).samples(row)] = True
    masks[:, : geometry.anchors] = True
    masks[:, row - geometry.local : row + 1] = True
    masks[:, row + 1 :] = False
    return masks


@both
def test_hits_are_as_frequent_as_predicted(geometry):
    masks = row_masks(geometry, 100)
    for positions in ([50], [20, 21], [10, 30, 50, 70, 90], list(range(10, 40))):
        expected = hit_probability(geometry, 100, positions)
        counted = masks[:, positions].any(axis=1).mean()
        # Four standard errors of a frequency.
        assert abs(counted - expected) <= 4 * (expected * (1 - expected) / DRAWS) ** 0.5
        assert 0.05 < expected < 1


@both
def test_one_key_is_seen_with_the_probability_of_the_union(geometry):
    assert hit_probability(geometry, 100, [50]) == pytest.approx(geometry.expected().probability, rel=1e-12)


def test_cliques_tie_facts_together():
    """Members of one clique come without repetition: more different keys, so more hits than independence predicts."""
    clique = STRUCTURAL.replace(density=0.0, seeds=1)
    one, ten = (hit_probability(clique, 100, range(10, 10 + k)) for k in (1, 10))
    assert ten > 1 - (1 - one) ** 10


@both
def test_certain_and_impossible_hits(geometry):
    assert hit_probability(geometry, 100, [50, 94]) == 1.0  # 94 is the first of the window
    assert hit_probability(geometry, 100, [93]) < 1
    assert hit_probability(geometry, 100, [3]) == 1.0
    assert hit_probability(geometry, 100, [101, 119]) == 0.0
    assert hit_probability(geometry, 100, []) == 0.0
    assert hit_probability(geometry, 100, [50, 50]) == hit_probability(geometry, 100, [50])


@both
@pytest.mark.parametrize("occurrences", [1, 4])
def test_mean_over_places(geometry, occurrences):
    random, row = np.random.default_rng(0), 100
    exact = [hit_probability(geometry, row, random.choice(row + 1, occurrences, replace=False)) for _ in range(4000)]
    error = np.std(exact) / 4000**0.5
    assert abs(np.mean(exact) - mean_hit_probability(geometry, row, occurrences)) <= 4 * error
    assert mean_hit_probability(geometry, row, 0) == 0
    assert mean_hit_probability(geometry, row, row + 1) == 1


def test_window_alone_reaches_by_its_length_in_each_layer():
    """A geometry whose sampling is too thin to matter: 40 rows and one draw from a long window."""
    geometry = PublishedGeometry(length=2000, seeds=1, density=0.0, local=5, anchors=3)
    reached = reachability(geometry, 100, 4)
    thin = geometry.expected().probability * 2000
    for layer in range(5):
        assert reached[layer, 100 : 100 + 5 * layer + 1] == pytest.approx(1)
        assert (reached[layer, 100 + 5 * layer + 1 :] <= thin).all()
        assert (reached[layer, :100] == 0).all()
    # An anchor is seen by all rows after it, at once.
    assert reachability(geometry, 2, 1)[1, 2:] == pytest.approx(1)


@both
def test_reachability_is_near_what_masks_carry(geometry):
    """Mean field against products of whole masks. Means over rows differ by 0.012 at most, too high (measured)."""
    source, layers, count = 20, 3, 400
    counted = np.zeros((layers + 1, geometry.length))
    for i in range(count):
        mask = geometry.replace(base_seed=50_000 + 7 * i).mask()
        state = np.arange(geometry.length) == source
        for layer in range(layers + 1):
            counted[layer] += state
            state = (mask & state).any(axis=1)
    counted /= count
    expected = reachability(geometry, source, layers)
    assert abs((expected - counted).mean(axis=1)).max() < 0.02
    assert np.array_equal(expected[0], counted[0])
    assert (np.diff(expected, axis=0) >= -1e-9).all()


def test_two_hops_cover_more_than_one():
    geometry = PublishedGeometry(length=32768, density=0.001, seeds=10)
    one, two = reachability(geometry, 5000, 2)[1:, -1]
    assert one == pytest.approx(hit_probability(geometry, 32767, [5000]), rel=1e-6)
    assert one < 0.01 < 0.99 < two


def test_refuses_what_is_out_of_range():
    with pytest.raises(ValueError, match="row 120"):
        hit_probability(STOCHASTIC, 120, [3])
    with pytest.raises(ValueError, match=r"positions \[-1\]"):
        hit_probability(STOCHASTIC, 10, [-1])
    with pytest.raises(ValueError, match="12 occurrences"):
        mean_hit_probability(STOCHASTIC, 10, 12)
    with pytest.raises(ValueError, match="source 120"):
        reachability(STOCHASTIC, 120, 1)
    with pytest.raises(ValueError, match="layers -1"):
        reachability(STOCHASTIC, 0, -1)
