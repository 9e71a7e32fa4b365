"""The Gram that looks back only: every row takes its operator from rows up to its own.

    D̂_t = Σ_{n ≤ t} q̂_n q̂_nᵀ,    r = c·⌊t/c⌋,    score(t, s) = q̂_tᵀ G(D̂_r) k̂_s / √H

The operator is made anew at rows 0, c, 2c, … of a document, its *refreshes*, and serves until the next. Row t never
depends on a later one, whatever c: a block of tokens gives what its tokens give one by one. c = 1 lets every row see
its whole past; the larger c, the older the operator, and from c = T on all rows use that of the first token. No c is
the Gram over all rows of a call, which is not causal.

Source: the causal variant proposed for "Power law graph attention: exact generalization of SDPA, empirical collapse at
inference" (D̂_t of its discussion); refreshing every c rows is ours.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array, statistics_dtype
from plga_jax.ops.power_law import density_operator, fold_operator

_NEVER = np.iinfo(np.int32).max
"""Place of a row whose operator is never made: beyond every array, so that what is read there is NaN."""

_TOGETHER = 8
"""Operators made at once. A pass back keeps one Gram for so many operators, and makes the chain of so many again."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Refreshes:
    """Which refresh serves which row. R refreshes per batch row, at most c rows served by each.

    Attributes:
        place: int32 [B, T], r·c + j for the j-th row served by refresh r, which is made at j = 0. −1 where no refresh
            of this call serves: padding, and rows that go on with the operator of an earlier call.
        starts: bool [B, R], True where a document begins, and with it its Gram.
        every: c, at most T.
    """

    place: Array
    starts: Array
    every: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of_documents(cls, member: Array, positions: Array, valid: Array, *, every: int) -> Self:
        """The refreshes of whole documents, one after another.

        Args:
            member: bool [B, X, T], the rows of each document.
            positions: int [B, T]; a document's rows count in this order, wherever they stand.
            valid: bool [B, T], False for padding. A valid row of no document gets NaN from `fold_cumulative`: its
                operator was never made, and a silent one would be wrong.
            every: c, 1 or more.

        Returns:
            Refreshes with R = ⌊(T + X·(c − 1)) / c⌋, the most that X documents can need: ⌈T/c⌉ for one.
        """
        _, X, T = member.shape
        c = min(every, T)
        R = min((T + X * (c - 1)) // c, T)
        last = np.iinfo(positions.dtype).max
        order = jnp.argsort(jnp.argsort(jnp.where(member, positions[:, None], last), axis=2), axis=2)
        needed = -(-jnp.sum(member, axis=2, dtype=jnp.int32) // c)
        first = jnp.cumsum(needed, axis=1, dtype=jnp.int32) - needed
        place = jnp.sum(jnp.where(member, c * first[:, :, None] + order.astype(jnp.int32), 0), axis=1, dtype=jnp.int32)
        outside = jnp.where(valid, _NEVER, -1)
        starts = jnp.any(jnp.arange(R, dtype=jnp.int32)[None, None] == first[:, :, None], axis=1)
        return cls(place=jnp.where(jnp.any(member, axis=1), place, outside), starts=starts, every=c)

    @classmethod
    def of_continuation(cls, slots: Array, valid: Array, length: Array, *, every: int) -> Self:
        """The refreshes of rows that continue one document.

        Args:
            slots: int32 [B, T], consecutive from `length` over the valid rows.
            valid: bool [B, T], False for padding.
            length: int32 [B], rows of the document before these.
            every: c, 1 or more.

        Returns:
            Refreshes with R = ⌈T/c⌉. Rows before the first of them are served by the last refresh of the rows before.
        """
        B, T = slots.shape
        place = slots - every * -(-length // every)[:, None]
        c = min(every, T)
        starts = jnp.zeros((B, -(-T // c)), bool)
        return cls(place=jnp.where(valid, jnp.maximum(place, -1), -1), starts=starts, every=c)


class Cumulative(NamedTuple):
    """What `fold_cumulative` makes of some rows."""

    folded: Array  # [B, T, N, J], 0 where no refresh of this call serves
    gram: Array  # D̂ of all rows so far, [B, N, H, H]
    kept: Any  # of every refresh, [B, R, ...]; or of the last one, [B, ...]


def fold_cumulative(
    q: Array,
    refreshes: Refreshes,
    make: Callable[[Array], tuple[Array, Any]],
    *,
    gram: Array | None = None,
    last: Any = None,
) -> Cumulative:
    """Folds into every query the operator of its past: `fold_operator` for a Gram that grows row by row.

    A scan over refreshes, `_TOGETHER` at a time, so that neither R operators nor what they are made from are ever held
    at once; the reverse pass makes them again. The program's size does not depend on T.

    Args:
        q: rotated queries, [B, T, N, H].
        refreshes: which operator serves which row.
        make: Grams [..., N, H, H] -> their operators [..., N, H, J], and a tree of arrays with the same leading axes to
            keep. Each refresh costs what the one operator of an ordinary call does.
        gram: D̂ of the rows before, [B, N, H, H] in float32 or better; None: there are none.
        last: kept of the refresh before these rows, [B, ...]: the last refresh's is returned in its place. None returns
            those of all refreshes, which takes R times the memory.

    Returns:
        Folded queries in the dtype of `q`, the Gram with these rows added (of the last document), and what was kept.
        What refreshes without rows keep means nothing.
    """
    B, _, N, H = q.shape
    R, C = refreshes.starts.shape[1], refreshes.every
    steps = -(-R // _TOGETHER)
    M = -(-R // steps)
    places = steps * M * C

    at = jnp.where(refreshes.place < 0, places, refreshes.place)
    empty = jnp.zeros((places, N, H), q.dtype)
    rows = jax.vmap(lambda row, at: empty.at[at].set(row, mode="drop"))(q, at)
    rows = jnp.moveaxis(rows.reshape(B, steps, M, C, N, H), 0, 2)
    starts = jnp.pad(refreshes.starts, ((0, 0), (0, steps * M - R)))
    starts = jnp.moveaxis(starts.reshape(B, steps, M), 0, 2)
    final = jnp.max(refreshes.place, axis=1) // C  # −1: no refresh
    if gram is None:
        gram = jnp.zeros((B, N, H, H), statistics_dtype(q.dtype))

    def add(gram, refresh):
        start, first, served = refresh
        gram = jnp.where(start[:, None, None, None], 0, gram)
        return gram + served, gram + first

    def step(carry, inputs):
        gram, last = carry
        index, rows, starts = inputs
        flat = rows.reshape(M * B, C, N, H)
        served, first = (density_operator(x).reshape(M, B, N, H, H) for x in (flat, flat[:, :1]))
        gram, grams = jax.lax.scan(add, gram, (starts, first, served), unroll=True)
        operators, kept = make(grams)
        folded = fold_operator(flat, operators.reshape(M * B, *operators.shape[2:]))
        if last is None:
            return (gram, None), (folded.reshape(M, B, C, N, -1), kept)
        here = final - index * M

        def newer(kept, last):
            found = kept[jnp.clip(here, 0, M - 1), jnp.arange(B)].astype(last.dtype)
            return jnp.where(((here >= 0) & (here < M)).reshape(B, *[1] * (last.ndim - 1)), found, last)

        return (gram, jax.tree.map(newer, kept, last)), (folded.reshape(M, B, C, N, -1), None)

    inputs = (jnp.arange(steps, dtype=jnp.int32), rows, starts)
    (gram, last), (folded, kept) = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), (gram, last), inputs)
    folded = jnp.moveaxis(folded, 2, 0).reshape(B, places, N, -1)
    served = (refreshes.place >= 0)[:, :, None, None]
    at = jnp.maximum(refreshes.place, 0)[:, :, None, None]
    folded = jnp.take_along_axis(folded, at, axis=1, mode="fill", fill_value=jnp.nan)
    if last is None:
        last = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(steps * M, *x.shape[2:])[:R], 0, 1), kept)
    return Cumulative(jnp.where(served, folded, 0), gram, last)
