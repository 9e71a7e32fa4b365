"""Statistics against published tables, closed forms and counting by hand."""

import itertools
import math

import numpy as np
import pytest

from ris_jax import stats


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [(24, 32, 57.9, 86.7), (23, 32, 54.6, 84.4), (19, 32, 42.3, 74.5), (42, 64, 53.4, 76.1), (33, 64, 39.6, 63.4)],
)
def test_wilson_gives_known_intervals(right, asked, low, high):
    found = stats.wilson(right, asked)
    assert (round(100 * found.low, 1), round(100 * found.high, 1)) == (low, high)


@pytest.mark.parametrize("right", range(0, 21, 4))
def test_the_ends_of_wilson_solve_its_equation(right):
    z = 1.959963984540054
    for end in stats.wilson(right, 20):
        assert (end - right / 20) ** 2 == pytest.approx(z * z * end * (1 - end) / 20, abs=1e-15)


def test_wilson_widens_with_the_level_and_ends_at_the_borders():
    assert stats.wilson(0, 10).low == 0 and stats.wilson(10, 10).high == 1
    widths = [high - low for low, high in (stats.wilson(5, 10, level) for level in (0.5, 0.9, 0.99))]
    assert widths == sorted(widths)


def test_bootstrap_is_seeded_and_near_the_normal_interval():
    values = np.random.default_rng(0).normal(3, 2, 400)
    low, high = stats.bootstrap(values, seed=1)
    assert (low, high) == stats.bootstrap(values, seed=1)
    assert (low, high) != stats.bootstrap(values, seed=2)
    half = 1.96 * values.std() / 20
    # 2000 draws place a 2.5 % quantile to about 4 % of the half width (one standard deviation).
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.16 * half)


def test_bootstrap_draws_whole_rows():
    rows = np.stack([np.arange(30.0), np.arange(30.0) + 0.25], 1)
    found = stats.bootstrap(rows, lambda drawn: (drawn[:, 1] - drawn[:, 0]).mean())
    assert found == (0.25, 0.25)


@pytest.mark.parametrize(
    ("b", "c", "p"), [(8, 3, 0.226562), (15, 6, 0.078354), (14, 7, 0.189247), (4, 2, 0.6875), (5, 5, 1.0), (0, 0, 1.0)]
)
def test_mcnemar_gives_known_probabilities(b, c, p):
    first = [True] * b + [False] * c + [True, False]
    second = [False] * b + [True] * c + [True, False]
    found = stats.mcnemar(first, second)
    assert (found.first_only, found.second_only) == (b, c)
    assert found.p == pytest.approx(p, abs=5e-7)


def test_mcnemar_counts_the_coin_flips():
    b, c = 7, 2
    flips = itertools.product((0, 1), repeat=b + c)
    wanted = np.mean([abs(sum(flip) - (b + c) / 2) >= abs(b - (b + c) / 2) for flip in flips])
    assert stats.mcnemar([True] * b + [False] * c, [False] * b + [True] * c).p == wanted


def test_mcnemar_of_many_questions_neither_overflows_nor_vanishes():
    found = stats.mcnemar([True] * 1500 + [False] * 1300, [False] * 1500 + [True] * 1300)
    z = 199 / math.sqrt(2800)
    # At 3.8 standard deviations the normal law with continuity correction is 0.6 % off.
    assert found.p == pytest.approx(math.erfc(z / math.sqrt(2)), rel=1e-2)


def test_corrections_by_hand():
    p = [0.03, 0.01, 0.04, 0.5]
    np.testing.assert_allclose(stats.bonferroni(p), [0.12, 0.04, 0.16, 1.0], rtol=1e-15)
    np.testing.assert_allclose(stats.holm(p), [0.09, 0.04, 0.09, 0.5], rtol=1e-15)
    rng = np.random.default_rng(0).uniform(size=50)
    assert (stats.holm(rng) <= stats.bonferroni(rng)).all()
    assert (stats.holm(rng) >= rng).all()


def test_gap_recovery_may_leave_the_gap():
    assert [stats.gap_recovery(n / 32, 19 / 32, 23 / 32) for n in (18, 19, 22, 24)] == [-0.25, 0.0, 0.75, 1.25]
    with pytest.raises(ValueError, match="no gap"):
        stats.gap_recovery(0.5, 0.4, 0.4)


def test_spearman_sees_order_alone_and_shares_ties():
    x = np.array([0.1, 0.5, 2.0, 9.0])
    assert stats.spearman(x, np.exp(x)) == pytest.approx(1)
    assert stats.spearman(x, -x) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
    assert stats.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_baselines_count_the_key():
    key = list("ABBCBBA")
    assert stats.always_one_letter(key) == {"A": 2, "B": 4, "C": 1, "D": 0, "E": 0}
    assert stats.majority(key) == ("B", 4)
    assert stats.majority("BBAA") == ("A", 2)
    assert stats.recall_by_letter(key, list("ABCCAAB")) == {"A": (1, 2), "B": (1, 4), "C": (1, 1)}


def test_agreement_counts_pairs_of_runs():
    assert stats.agreement(["ABCD", "ABCD"]) == 1
    assert stats.agreement(["ABCD", "ABCE", "BBCE"]) == pytest.approx((3 + 2 + 3) / 12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stats.wilson(3, 2), "3 successes in 2"),
        (lambda: stats.wilson(0, 0), "need 0"),
        (lambda: stats.wilson(1, 2, 95), "within"),
        (lambda: stats.bootstrap(np.zeros(0)), "a row"),
        (lambda: stats.mcnemar([True], [True, False]), "not paired"),
        (lambda: stats.holm([0.1, 1.2]), r"in \[0, 1\]"),
        (lambda: stats.spearman([1, 1], [1, 2]), "constant"),
        (lambda: stats.spearman([1, 2, 3], [1, 2]), "not paired"),
        (lambda: stats.always_one_letter("AF"), "F"),
        (lambda: stats.majority([]), "empty"),
        (lambda: stats.agreement(["AB"]), "two runs"),
        (lambda: stats.recall_by_letter("AB", "A"), "zip"),
    ],
)
def test_what_has_no_answer_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
