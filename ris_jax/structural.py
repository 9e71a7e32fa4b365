"""The published structural geometry as dense tiles in permuted order.

A seed's cliques are random classes of positions, so in the order of its permutation they are blocks on the diagonal.
Each row's keys are split into disjoint parts, each is computed where it is dense, and the parts are merged by their
log-sum-exp:

    fixed      window and anchors: for a tile of queries one slice of keys, and the first keys
    cliques    for each seed the blocks of its permutation; causal by original position, without what is fixed or
               shares a clique of an earlier seed as well
    samples    gathered for each row, without everything above and without repetition

The union is exactly that of the mask. No table of T×T is formed: memory is O(S·T + T·m), m the samples left of a row.

Work per head, in pairs: S·T·B for the cliques (a block is computed whole, later keys included), T·(local + anchors +
tile) for what is fixed, and T·m gathered pairs, each several times dearer than one of a product. Causal dense attention
computes T²/2. So this is cheaper only where S·B + local + anchors + several·m is well below T/2: cliques of 1 % pay up
to about 30 seeds with one sample each, and never with 50. With samples of the percents of T that the published program
adds to its cliques, m is what one pays for and dense attention is cheaper. Measured on two CPU cores with 9 heads of
64, 10 seeds with cliques of 1 %, window 256: as fast as dense at 8k, 2.8 times as fast at 16k.
"""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plga_jax.array_types import Array, AttentionFn, statistics_dtype
from plga_jax.ops.attention import attention, merge_partials
from plga_jax.ops.masks import Mask
from ris_jax.geometry import PublishedGeometry
from ris_jax.mask_stream import MaskStream
from ris_jax.streams import Stream

_TILE = 256
"""Queries of a tile of window and anchors."""

_GATHERED = 2**14
"""Keys gathered at a time."""

_DRAWN = 2**22
"""Samples looked at at a time on the host."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CliquePlan:
    """A structural geometry's first T rows, as index arrays; a pytree.

    Attributes:
        members: int32 [S, blocks, B], positions of each block of each seed; -1 where there is none.
        block_of: int32 [S, T], the block of each position.
        samples: int32 [T, m], a row's samples that are in no other part, once each; filled up with -1.
        local: keys of the window, the row itself included.
        anchors: keys at the start.
    """

    members: Array
    block_of: Array
    samples: Array
    local: int = dataclasses.field(metadata={"static": True})
    anchors: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, geometry: PublishedGeometry, length: int | None = None) -> Self:
        """Draws the cliques and samples on the host.

        Args:
            geometry: the structural one.
            length: rows wanted; None means all.

        Returns:
            The plan.

        Raises:
            ValueError: another geometry, or more rows than it has.
        """
        _check(geometry)
        length = geometry.length if length is None else length
        if not 1 <= length <= geometry.length:
            raise ValueError(f"length = {length} must be within 1 … {geometry.length}, the geometry's.")
        S, B = geometry.seeds, geometry.block_size
        blocks = -(-geometry.length // B)
        members = np.full((S, blocks * B), -1, np.int32)
        block_of = np.empty((S, geometry.length), np.int32)
        for seed in range(S):
            order = Stream(geometry.base_seed + seed).permutation(geometry.length)
            block_of[seed, order] = np.arange(geometry.length) // B
            members[seed, : geometry.length] = np.where(order < length, order, -1)
        fixed = {"local": geometry.local + 1, "anchors": geometry.anchors}
        return cls(
            members=jnp.asarray(members.reshape(S, blocks, B)),
            block_of=jnp.asarray(block_of[:, :length]),
            samples=jnp.asarray(_samples(geometry, block_of, length)),
            **fixed,
        )


def structural_attention(geometry: PublishedGeometry) -> AttentionFn:
    """Attention of a whole sequence to itself under the structural geometry.

    Args:
        geometry: structural; a sequence may be shorter than its window.

    Returns:
        An `AttentionFn` for T = S queries and keys. Its mask may be None or `Mask()`; others raise.

    Raises:
        ValueError: another geometry.
    """
    _check(geometry)

    @functools.lru_cache(maxsize=1)
    def plan(length: int) -> CliquePlan:
        # Not part of a program that is being traced, so that the next one can have it too.
        with jax.ensure_compile_time_eval():
            return CliquePlan.of(geometry, length)

    def attend(q, k, v, mask=None, *, scale=None, return_lse=False):
        if jax.tree.leaves(mask) or (mask is not None and mask != Mask()):
            raise ValueError(
                "Cliques in permuted order know no mask but the causal one; read padded, packed or windowed input "
                "through open_cache."
            )
        out, lse = clique_attention(q, k, v, plan(q.shape[1]), scale=scale)
        return (out, lse) if return_lse else out

    return attend


def clique_attention(
    q: Array, k: Array, v: Array, plan: CliquePlan, *, scale: float | None = None
) -> tuple[Array, Array]:
    """Attention of a whole sequence to itself under a plan.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, T, K, H].
        v: values [B, T, K, H].
        plan: for T rows.
        scale: of the scores; None means H**-0.5.

    Returns:
        out [B, T, N, H] in the dtype of q, and lse [B, T, N].

    Raises:
        ValueError: another number of queries or keys than the plan has rows.
    """
    T = plan.block_of.shape[1]
    if q.shape[1] != T or k.shape[1] != T:
        raise ValueError(f"The plan is for {T} queries and keys, got {q.shape[1]} and {k.shape[1]}.")
    dtype = q.dtype
    # In float32 throughout: partial results are not rounded before they are merged.
    q, k, v = (x.astype(statistics_dtype(dtype)) for x in (q, k, v))
    parts = functools.partial(attention, scale=scale, return_lse=True)
    merged = merge_partials([_fixed(q, k, v, plan, parts), _sampled(q, k, v, plan, parts)])
    out, lse = _cliques(q, k, v, plan, parts, merged)
    return out.astype(dtype), lse


def _fixed(q, k, v, plan, parts):
    """Window and anchors, one tile of queries at a time."""
    B, T, N, H = q.shape
    tile, before = min(_TILE, T), min(plan.local - 1, T)
    anchors, tiles = min(plan.anchors, T), -(-T // tile)
    # The slice of a tile begins `before` keys ahead of it, which the padding makes true of the first ones as well.
    padded_k, padded_v = (jnp.pad(x, ((0, 0), (before, tiles * tile - T), (0, 0), (0, 0))) for x in (k, v))
    queries = jnp.pad(q, ((0, 0), (0, tiles * tile - T), (0, 0), (0, 0))).reshape(B, tiles, tile, N, H)

    def one(inputs):
        start, q = inputs
        near = start - before + jnp.arange(before + tile, dtype=jnp.int32)
        rows, first = (start + jnp.arange(tile, dtype=jnp.int32))[:, None], jnp.arange(anchors, dtype=jnp.int32)
        meet_near = (near[None] >= 0) & (near[None] <= rows) & (near[None] > rows - plan.local)
        meet = jnp.concatenate([meet_near, first[None] <= rows - plan.local], axis=1)
        near_k, near_v = (lax.dynamic_slice_in_dim(x, start, before + tile, axis=1) for x in (padded_k, padded_v))
        keys, values = (jnp.concatenate([x, y[:, :anchors]], axis=1) for x, y in ((near_k, k), (near_v, v)))
        return parts(q, keys, values, Mask(causal=False, pairs=meet[None, None]))

    starts = jnp.arange(tiles, dtype=jnp.int32) * tile
    found = lax.map(one, (starts, queries.swapaxes(0, 1)))
    return tuple(x.swapaxes(0, 1).reshape(B, tiles * tile, *x.shape[3:])[:, :T] for x in found)


def _sampled(q, k, v, plan, parts):
    """Samples, gathered for some rows at a time; each row is a batch entry of its own."""
    (B, T, N, H), m = q.shape, plan.samples.shape[1]
    rows = min(max(1, _GATHERED // max(m, 1)), T)
    groups = -(-T // rows)
    queries = jnp.pad(q, ((0, 0), (0, groups * rows - T), (0, 0), (0, 0))).reshape(B, groups, rows, N, H)
    samples = jnp.pad(plan.samples, ((0, groups * rows - T), (0, 0)), constant_values=-1).reshape(groups, rows, m)

    def one(inputs):
        q, index = inputs

        def gathered(x):
            return jnp.take(x, jnp.maximum(index, 0), axis=1).reshape(B * rows, m, *x.shape[2:])

        real = jnp.broadcast_to(index[None] >= 0, (B, rows, m)).reshape(B * rows, m)
        mask = Mask(causal=False, k_valid=real)
        out, lse = parts(q.reshape(B * rows, 1, N, H), gathered(k), gathered(v), mask)
        return out.reshape(B, rows, N, -1), lse.reshape(B, rows, N)

    found = lax.map(one, (queries.swapaxes(0, 1), samples))
    return tuple(x.swapaxes(0, 1).reshape(B, groups * rows, *x.shape[3:])[:, :T] for x in found)


def _cliques(q, k, v, plan, parts, merged):
    """Merges the cliques of one seed after the other into a partial result."""

    def per_seed(merged, inputs):
        seed, blocks = inputs

        def per_block(merged, members):
            real, index = members >= 0, jnp.maximum(members, 0)
            row, key = index[:, None], index[None, :]
            meet = real[:, None] & real[None, :] & (key <= row - plan.local) & (key >= plan.anchors)
            classes = plan.block_of[:, index]

            def unless_shared(earlier, meet):
                return meet & (classes[earlier][:, None] != classes[earlier][None, :])

            meet = lax.fori_loop(0, seed, unless_shared, meet)
            block = (jnp.take(x, index, axis=1) for x in (q, k, v))
            partial = parts(*block, Mask(causal=False, pairs=meet[None, None]))
            held = tuple(jnp.take(x, index, axis=1) for x in merged)
            place = jnp.where(real, members, q.shape[1])
            new = merge_partials([held, partial])
            return tuple(x.at[:, place].set(y, mode="drop") for x, y in zip(merged, new)), None

        return lax.scan(per_block, merged, blocks)[0], None

    seeds = jnp.arange(plan.members.shape[0], dtype=jnp.int32)
    return lax.scan(per_seed, merged, (seeds, plan.members))[0]


def _check(geometry) -> None:
    if not isinstance(geometry, PublishedGeometry) or geometry.mode != "structural":
        raise ValueError(f"Only the structural mode of the published geometry has cliques, got {geometry}.")


def _samples(geometry: PublishedGeometry, block_of: np.ndarray, length: int) -> np.ndarray:
    """int32 [length, m]: the samples of each row that nothing else gives it."""
    S, B, n = geometry.seeds, geometry.block_size, geometry.num_samples
    stream, lists = MaskStream(geometry), []
    step = max(1, _DRAWN // (S * (B + n)))
    for start in range(0, length, step):
        count = min(step, length - start)
        rows = np.arange(start, start + count)[:, None]
        keys = np.sort(stream.samples(count).reshape(count, S, B + n)[:, :, B:].reshape(count, S * n), axis=1)
        free = (keys >= geometry.anchors) & (keys < rows - geometry.local)
        free[:, 1:] &= keys[:, 1:] != keys[:, :-1]
        for classes in block_of:
            free &= classes[rows] != classes[keys]
        width = int(free.sum(axis=1).max())
        # Those that stay move to the front, in order.
        order = np.argsort(~free, axis=1, kind="stable")[:, :width]
        lists.append(np.where(np.take_along_axis(free, order, 1), np.take_along_axis(keys, order, 1), -1))
    width = max(part.shape[1] for part in lists)
    padded = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=-1) for part in lists]
    return np.concatenate(padded).astype(np.int32)
