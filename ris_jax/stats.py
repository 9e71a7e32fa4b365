"""Statistics of right and wrong answers: intervals, paired tests, corrections, baselines. NumPy alone."""

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """Both ends of an interval."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class McNemar:
    """An exact McNemar test.

    Attributes:
        first_only: questions that only the first one answered right.
        second_only: questions that only the second one answered right.
        p: two-sided probability of a split at least as uneven if both were equally good.
    """

    first_only: int
    second_only: int
    p: float


def wilson(successes: int, trials: int, level: float = 0.95) -> Interval:
    """Score interval of a proportion (Wilson 1927), without continuity correction.

    Args:
        successes: k, 0 to `trials`.
        trials: n, at least 1.
        level: of confidence, within (0, 1).

    Returns:
        The interval, within [0, 1].

    Raises:
        ValueError: on counts or levels outside these ranges.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes in {trials} trials: need 0 ≤ successes ≤ trials and a trial")
    z = statistics.NormalDist().inv_cdf((1 + _level(level)) / 2)
    share, scale = successes / trials, 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # Exact at the ends, where rounding would leave 1e-17.
    return Interval(centre - half if successes else 0.0, centre + half if successes < trials else 1.0)


def bootstrap(
    values: np.ndarray,
    statistic: Callable[[np.ndarray], float] = np.mean,
    *,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of a statistic over resampled rows.

    Args:
        values: [N, ...]; rows (questions, passages) are drawn with replacement, paired entries of a row together.
        statistic: from [N, ...] to a number.
        level: of confidence, within (0, 1).
        draws: resamples.
        seed: of the draws; equal seeds give equal intervals.

    Returns:
        The interval.

    Raises:
        ValueError: without rows or draws, or on a level outside its range.
    """
    values = np.asarray(values)
    if values.ndim < 1 or len(values) < 1 or draws < 1:
        raise ValueError(f"{draws} draws from values of shape {values.shape}: need a row and a draw at least")
    tail = (1 - _level(level)) / 2
    rng = np.random.default_rng(seed)
    found = [float(statistic(values[rng.integers(len(values), size=len(values))])) for _ in range(draws)]
    low, high = np.quantile(found, [tail, 1 - tail])
    return Interval(float(low), float(high))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Exact two-sided McNemar test of two ways of answering the same questions.

    Args:
        first: [N] whether the first one answered each question right.
        second: [N] the same of the second one, questions in the same order.

    Returns:
        Both discordant counts and p = min(1, 2 Σ_{i ≤ min(b, c)} C(b + c, i) / 2^(b + c)).

    Raises:
        ValueError: if the two are not of one length.
    """
    first, second = np.asarray(first, bool), np.asarray(second, bool)
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(f"answers of shapes {first.shape} and {second.shape} are not paired: give the same questions")
    b, c = int((first & ~second).sum()), int((second & ~first).sum())
    tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1))
    return McNemar(first_only=b, second_only=c, p=min(1.0, 2 * tail / 2 ** (b + c)))


def bonferroni(p: Sequence[float]) -> np.ndarray:
    """Probabilities multiplied by their number, at most 1.

    Args:
        p: [N] of a family of tests.

    Returns:
        float64 [N].
    """
    p = _probabilities(p)
    return np.minimum(1.0, p * len(p))


def holm(p: Sequence[float]) -> np.ndarray:
    """Holm's step-down correction (1979), never less powerful than Bonferroni's.

    Args:
        p: [N] of a family of tests.

    Returns:
        float64 [N], in the order of `p`.
    """
    p = _probabilities(p)
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return corrected


def gap_recovery(accuracy: float, floor: float, ceiling: float) -> float:
    """Share of the way from a floor to a ceiling: 0 at the floor, 1 at the ceiling, free to leave both.

    Args:
        accuracy: of what is judged.
        floor: accuracy without the documents.
        ceiling: accuracy of dense attention.

    Returns:
        (accuracy − floor) / (ceiling − floor).

    Raises:
        ValueError: if floor and ceiling are equal: there is no gap.
    """
    if floor == ceiling:
        raise ValueError(f"floor and ceiling are both {floor}: there is no gap to recover")
    return (accuracy - floor) / (ceiling - floor)


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation, ties sharing their mean rank.

    Args:
        x: [N], at least two different values.
        y: [N], likewise.

    Returns:
        Pearson's correlation of the ranks.

    Raises:
        ValueError: if lengths differ, or a side is constant.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"shapes {x.shape} and {y.shape} are not paired")
    if len(x) == 0 or np.ptp(x) == 0 or np.ptp(y) == 0:
        raise ValueError("a constant has no rank correlation: give two different values at least on each side")
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def always_one_letter(key: Sequence[str], letters: str = "ABCDE") -> dict[str, int]:
    """Right answers of whoever always gives the same letter: the balance of the key.

    Args:
        key: right letters.
        letters: that can be given.

    Returns:
        Right answers by letter, every letter named.

    Raises:
        ValueError: if the key has other letters.
    """
    counts = Counter(key)
    if odd := sorted(set(counts) - set(letters)):
        raise ValueError(f"the key holds {odd}, the letters are {letters!r}")
    return {letter: counts[letter] for letter in letters}


def majority(key: Sequence[str]) -> tuple[str, int]:
    """The most frequent right letter and how often it is right; of equals the first in the alphabet.

    Raises:
        ValueError: if the key is empty.
    """
    if not len(key):
        raise ValueError("the key is empty: there is no majority")
    return min(Counter(key).items(), key=lambda item: (-item[1], item[0]))


def recall_by_letter(key: Sequence[str], given: Sequence[str]) -> dict[str, tuple[int, int]]:
    """How many of the questions whose answer is a letter were answered with it.

    Args:
        key: [N] right letters.
        given: [N] letters given.

    Returns:
        (right, asked) by letter, in alphabetical order; letters that are never right are left out.

    Raises:
        ValueError: if lengths differ.
    """
    asked = Counter(key)
    right = Counter(wanted for wanted, letter in zip(key, given, strict=True) if wanted == letter)
    return {letter: (right[letter], asked[letter]) for letter in sorted(asked)}


def agreement(given: Sequence[Sequence[str]]) -> float:
    """Mean share of questions to which two of several runs give the same letter, right or wrong.

    Args:
        given: [R][N] letters of R ≥ 2 runs.

    Returns:
        The mean over all pairs of runs.

    Raises:
        ValueError: with less than two runs, or runs of different length.
    """
    if len(given) < 2 or len({len(run) for run in given}) != 1 or not len(given[0]):
        raise ValueError("agreement needs two runs at least, which answered the same questions")
    letters = np.array([list(run) for run in given])
    return float(np.mean([(a == b).mean() for a, b in itertools.combinations(letters, 2)]))


def _level(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must be within (0, 1), for example 0.95")
    return level


def _probabilities(p: Sequence[float]) -> np.ndarray:
    p = np.asarray(p, np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"probabilities are one list of numbers in [0, 1], got {p}")
    return p


def _ranks(values: np.ndarray) -> np.ndarray:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]
