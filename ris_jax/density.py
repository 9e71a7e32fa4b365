"""How much of dense attention a geometry really computes, before it is computed.

Three numbers go by the name of density, and only the last says what attention costs:

    nominal density    the published argument: samples of one seed per row, over T. Neither seeds nor causality count
    published recall   allowed pairs over T·T, at most about one half
    real density       allowed pairs over the T(T+1)/2 causal ones: the share of dense attention's work

Row r of the published geometry sees A(r) fixed keys (window, anchors, itself) and each of its other causal keys with
probability p, the chance that at least one of S seeds draws it:

    p = 1 - [(1 - p_c)(1 - 1/T)^n]^S,     p_c = (q·B(B-1) + m(m-1)) / (T(T-1)),  q = T div B, m = T mod B

n samples with repetition and, in the structural mode, cliques of B rows (p_c = 0 without them). This is exact but for
the bias of u mod T, below T/2**32. The papers' 1 - (1-d)^S is the case without window, anchors and causality.

Work grows as T·r(T), r the mean number of keys. With n = d·T, r tends to T(1 - e^(-dS)): the exponent is 2 whatever d.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np


def causal_pairs(length: int) -> int:
    """How many pairs causal attention has.

    Args:
        length: T.

    Returns:
        T(T+1)/2.
    """
    return length * (length + 1) // 2


def real_share(chunks: Iterable[np.ndarray], length: int) -> float:
    """The real density of a mask, counted.

    Args:
        chunks: of packed rows, uint8 [rows, ceil(T/8)], together the whole mask; see `Geometry.chunks`.
        length: T.

    Returns:
        Allowed pairs over T(T+1)/2.
    """
    return sum(int(np.bitwise_count(chunk).sum(dtype=np.int64)) for chunk in chunks) / causal_pairs(length)


def fixed_keys(row: np.ndarray | int, *, local: int, anchors: int) -> np.ndarray:
    """How many keys a row sees by window and anchors.

    Args:
        row: integers, rows counted from 0.
        local: keys of the window, the row itself included.
        anchors: keys at the start.

    Returns:
        int64, shaped as `row`.
    """
    keys = np.asarray(row, np.int64) + 1
    return np.minimum(keys, local) + np.minimum(np.maximum(keys - local, 0), anchors)


def fixed_pairs(length: int, *, local: int, anchors: int) -> int:
    """The sum of `fixed_keys` over all rows, without a row being looked at.

    Args:
        length: T.
        local: as in `fixed_keys`.
        anchors: as in `fixed_keys`.

    Returns:
        Pairs.
    """
    return _capped_sum(length, local) + _capped_sum(max(0, length - local), anchors)


def _capped_sum(length: int, cap: int) -> int:
    """The sum of min(i, cap) over i = 1 … length."""
    ramp = min(length, cap)
    return causal_pairs(ramp) + (length - ramp) * cap


def union_probability(length: int, *, samples: int, clique: int, seeds: int) -> float:
    """The chance that a key, neither in the window nor an anchor, is in the union of a row's samples (module, p).

    Args:
        length: T.
        samples: n, draws of one seed in one row.
        clique: B, the clique's size; 0 or 1 for none.
        seeds: S.

    Returns:
        p within 0 … 1.
    """
    if length == 1:
        return 1.0
    blocks, rest = divmod(length, clique) if clique else (0, 0)
    together = (blocks * clique * (clique - 1) + rest * (rest - 1)) / (length * (length - 1))
    if together == 1:
        return 1.0
    return -math.expm1(seeds * (math.log1p(-together) + samples * math.log1p(-1 / length)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedUnion:
    """What the rows of a geometry see on average."""

    probability: float
    """p: the chance of a causal key that is neither local nor an anchor."""
    last_row: float
    """Keys of row T-1, the first to decode from."""
    mean_row: float
    """Keys of a row, averaged over all rows."""
    share: float
    """Real density: pairs over T(T+1)/2."""
    fixed_share: float
    """The part of it that window and anchors alone make up."""


def expected_union(length: int, *, local: int, anchors: int, probability: float) -> ExpectedUnion:
    """Expected sizes where every causal key that is not fixed is seen with one probability.

    Args:
        length: T.
        local: keys of the window, the row itself included.
        anchors: keys at the start.
        probability: p.

    Returns:
        The expectation, exact.
    """
    pairs = causal_pairs(length)
    fixed = fixed_pairs(length, local=local, anchors=anchors)
    last = int(fixed_keys(length - 1, local=local, anchors=anchors))
    expected = fixed + (pairs - fixed) * probability
    return ExpectedUnion(
        probability=probability,
        last_row=last + (length - last) * probability,
        mean_row=expected / length,
        share=expected / pairs,
        fixed_share=fixed / pairs,
    )


def growth_exponent(lengths: Sequence[float], values: Sequence[float]) -> float:
    """The exponent a in value ~ T^a, by least squares in logarithms.

    Args:
        lengths: at least two different lengths.
        values: what grows with them; positive.

    Returns:
        a.

    Raises:
        ValueError: fewer than two different lengths, or numbers that have no logarithm.
    """
    lengths, values = np.asarray(lengths, np.float64), np.asarray(values, np.float64)
    if lengths.shape != values.shape or len(set(lengths.tolist())) < 2:
        raise ValueError(f"An exponent needs two lengths or more, each with its value; got {lengths} and {values}.")
    if min(lengths.min(), values.min()) <= 0:
        raise ValueError(f"An exponent needs positive numbers; got lengths {lengths} and values {values}.")
    x = np.log(lengths) - np.log(lengths).mean()
    return float(x @ np.log(values) / (x @ x))
