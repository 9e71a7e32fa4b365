"""Closed forms against tables of the published geometry: every row of a golden, and figures measured along streams."""

import math

import numpy as np
import pytest

from ris_jax.density import causal_pairs, fixed_keys, fixed_pairs, growth_exponent, real_share
from ris_jax.geometry import PublishedGeometry
from ris_jax.patterns import DenseGeometry, WindowGeometry

LENGTHS = [2**i for i in range(12, 21)]


def test_every_row_of_the_golden(golden):
    table = golden("ris/expected_density")
    rows = [dict(zip(table["columns"].tolist(), row.tolist())) for row in table["table"]]
    assert len(rows) == 3900
    kinds = {0: {}, 1: dict(mode="structural", budget="total"), 2: dict(mode="structural")}
    for row in rows:
        geometry = PublishedGeometry(
            length=int(row["T"]),
            seeds=int(row["n_seeds"]),
            density=row["nominal_d"],
            local=int(row["w_local"]),
            anchors=int(row["w_global"]),
            **kinds[row["label"]],
        )
        assert (geometry.block_size, geometry.num_samples) == (row["block"], row["num_global"]), row
        found = geometry.expected()
        numbers = [found.probability, found.last_row, found.mean_row, found.share, found.fixed_share]
        columns = ("p_pick", "row_last", "row_mean", "causal_fraction", "fixed_fraction")
        # The same formula, summed in another order; 4e-16 measured.
        np.testing.assert_allclose(numbers, [row[column] for column in columns], rtol=1e-14, err_msg=str(row))


@pytest.mark.parametrize(
    ("percent", "fields"),
    [
        (54.0, dict(length=32768, density=0.01, seeds=70)),
        (44.0, dict(length=32768, density=0.05, seeds=10)),
        (16.5, dict(length=32768, density=0.01, seeds=10, mode="structural", budget="total")),
        (64.7, dict(length=65536, density=0.01, seeds=100, mode="structural", budget="total")),
        (87.0, dict(length=65536, density=0.05, seeds=40)),
        (56.9, dict(length=65536, density=0.008, seeds=100, mode="structural", budget="total")),
        (47.4, dict(length=65536, density=0.003, seeds=200, mode="structural", budget="total")),
        (64.7, dict(length=65536, density=0.005, seeds=200, mode="structural", budget="total")),
        (14.3, dict(length=32768, density=0.01, seeds=1, mode="structural")),
        (95.3, dict(length=32768, density=0.01, seeds=40, mode="structural")),
        (48.1, dict(length=65536, density=0.03, seeds=10, mode="structural")),
        (59.9, dict(length=40960, density=0.03, seeds=30, local=16)),
    ],
)
def test_real_density_of_published_runs(percent, fields):
    """What those runs allowed, measured on 49 rows of their own streams: within 0.33 % of it, and of its rounding."""
    assert 100 * PublishedGeometry(**fields).share() == pytest.approx(percent, rel=0.0033, abs=0.05)


def log_density(factor):
    return lambda length: factor * math.log2(length) / length


PAPER = dict(mode="structural", density=0.01, budget="total")
CAPPED = dict(mode="structural", density=0.0, block_max=655)
GROWTH = [
    # fields, last row at 4k, 64k and 1M, share in percent at 64k and 1M, exponent of the mean row over all and at last
    (dict(density=0.001, seeds=1), (1284, 1345, 2327), (4.0, 0.34), 0.076, 0.227),
    (dict(density=0.001, seeds=10), (1308, 1915, 11696), (4.8, 1.24), 0.296, 0.743),
    (dict(density=0.001, seeds=40), (1389, 3780, 42324), (7.6, 4.15), 0.53, 0.921),
    (dict(density=0.001, seeds=100), (1543, 7348, 100892), (13.0, 9.73), 0.691, 0.968),
    (dict(density=0.01, seeds=1), (1308, 1920, 11701), (4.8, 1.24), 0.296, 0.743),
    (dict(density=0.01, seeds=10), (1543, 7393, 100937), (13.0, 9.74), 0.691, 0.968),
    (dict(density=0.01, seeds=40), (2191, 22455, 346533), (35.5, 33.13), 0.884, 0.993),
    (dict(density=0.01, seeds=100), (3036, 41885, 663270), (64.6, 63.30), 0.96, 0.998),
    (dict(density=0.05, seeds=1), (1418, 4414, 52357), (8.6, 5.11), 0.57, 0.936),
    (dict(density=0.05, seeds=10), (2385, 26559, 413355), (41.7, 39.49), 0.906, 0.995),
    (dict(density=0.05, seeds=40), (3712, 56836, 906836), (87.0, 86.50), 0.988, 0.999),
    (dict(density=0.05, seeds=100), (4077, 65103, 1041519), (99.4, 99.33), 0.999, 1.0),
    (dict(PAPER, seeds=50), (2393, 26640, 414956), (41.8, 39.65), 0.906, 0.995),
    (dict(CAPPED, seeds=50), (4081, 26640, 33493), (41.8, 3.31), 0.358, 0.024),
    (dict(PAPER, seeds=100), (3066, 41991, 665232), (64.8, 63.49), 0.959, 0.998),
    (dict(CAPPED, seeds=100), (4096, 41991, 64715), (64.8, 6.29), 0.493, 0.046),
    (dict(PAPER, seeds=200), (3719, 56909, 908260), (87.1, 86.63), 0.988, 0.999),
    (dict(CAPPED, seeds=200), (4096, 56909, 124306), (87.1, 11.96), 0.634, 0.089),
    (dict(mode="structural", density=0.03, seeds=30), (4046, 55453, 647018), (84.9, 61.75), 0.9, 0.948),
    (dict(density=log_density(1), seeds=1), (1289, 1297, 1301), (3.9, 0.25), 0.025, 0.001),
    (dict(density=log_density(1), seeds=10), (1362, 1438, 1481), (4.1, 0.26), 0.033, 0.006),
    (dict(density=log_density(1), seeds=100), (1996, 2831, 3277), (6.2, 0.43), 0.086, 0.034),
    (dict(density=log_density(8), seeds=1), (1346, 1406, 1441), (4.1, 0.26), 0.031, 0.005),
    (dict(density=log_density(8), seeds=10), (1869, 2524, 2878), (5.7, 0.40), 0.077, 0.03),
    (dict(density=log_density(8), seeds=100), (3826, 12681, 17140), (20.9, 1.75), 0.253, 0.075),
    (dict(density=log_density(64), seeds=1), (1762, 2277, 2559), (5.4, 0.37), 0.068, 0.026),
    (dict(density=log_density(64), seeds=10), (3664, 10576, 13988), (17.8, 1.45), 0.226, 0.071),
    (dict(density=log_density(64), seeds=100), (4096, 52068, 121630), (79.8, 11.71), 0.62, 0.151),
    (dict(density=log_density(40.96), seeds=1), (1599, 1920, 2099), (4.8, 0.32), 0.055, 0.019),
    (dict(density=log_density(40.96), seeds=10), (3247, 7393, 9429), (13.0, 1.02), 0.18, 0.063),
    (dict(density=log_density(40.96), seeds=70), (4095, 33616, 57004), (52.2, 5.55), 0.461, 0.108),
]


@pytest.mark.parametrize(("fields", "last", "shares", "exponent", "late"), GROWTH)
def test_growth_with_the_window(fields, last, shares, exponent, late):
    """A fixed density ends at exponent 1 (quadratic work); only a budget of c·log2(T)/T or a capped clique does not."""
    expected = {}
    for length in LENGTHS:
        made = {name: value(length) if callable(value) else value for name, value in fields.items()}
        expected[length] = PublishedGeometry(length=length, **made).expected()
    means = [expected[length].mean_row for length in LENGTHS]
    assert [expected[length].last_row for length in LENGTHS[::4]] == pytest.approx(last, abs=0.51)
    # Shares are rounded twice in the table (12.948, 12.95, 13.0), exponents once.
    assert [100 * expected[length].share for length in LENGTHS[4::4]] == pytest.approx(shares, abs=0.055)
    assert growth_exponent(LENGTHS, means) == pytest.approx(exponent, abs=5.1e-4)
    assert growth_exponent(LENGTHS[-2:], means[-2:]) == pytest.approx(late, abs=5.1e-4)


@pytest.mark.parametrize("local", [1, 5, 30, 200])
@pytest.mark.parametrize("anchors", [0, 3, 50, 200])
def test_fixed_pairs_are_the_sum_of_fixed_keys(local, anchors):
    for length in (1, 4, 100):
        t, c = np.arange(length)[:, None], np.arange(length)
        allowed = (c <= t) & ((t - c < local) | (c < anchors))
        assert np.array_equal(fixed_keys(np.arange(length), local=local, anchors=anchors), allowed.sum(axis=1))
        assert fixed_pairs(length, local=local, anchors=anchors) == allowed.sum()


def test_real_share_counts_pairs():
    assert real_share(DenseGeometry(length=77).chunks(10), 77) == 1
    window = WindowGeometry(length=77, local=3, anchors=0)
    assert real_share(window.chunks(10), 77) == (3 * 77 - 3) / causal_pairs(77)


def test_papers_formula_is_the_case_without_window_and_causality():
    """1 - (1-d)^S for Bernoulli sampling; with repetition it is 1 - (1 - 1/T)^(nS), closer to 1 - e^(-dS)."""
    found = PublishedGeometry(length=10**6, density=0.01, seeds=70).expected().probability
    assert found == pytest.approx(1 - math.exp(-0.7), rel=1e-6)
    assert found == pytest.approx(1 - 0.99**70, rel=0.004)


def test_exponents():
    lengths = np.array([1000, 4000, 9000])
    assert growth_exponent(lengths, 3 * lengths**1.5) == pytest.approx(1.5, abs=1e-12)
    with pytest.raises(ValueError, match="two lengths or more"):
        growth_exponent([5, 5], [1, 2])
    with pytest.raises(ValueError, match="two lengths or more"):
        growth_exponent([5, 6], [1, 2, 3])
    with pytest.raises(ValueError, match="positive numbers"):
        growth_exponent([5, 6], [1, 0])
