"""Decoding with anchors: what a token of an answer attends to, at a cost that does not grow with the document.

A token of an answer attends to its window, which moves with it, and to far keys: the anchors, the samples of one row,
and that row itself. The far keys of each layer are copied together when their row is chosen; from then on a step
reads the A far keys and the W of the window, in shapes that do not change, and the two partial results are merged by
their log-sum-exp, far keys that the window holds left out. That is one softmax over the union of both sets, each key
once: PFUS, without a set union in the program.

Which row the far keys are of is the policy:

    frozen    the first generated token's, for the whole answer (as published)
    refresh   the present one's, chosen anew every k tokens
    own       each token's own: what it would have seen in prefill

Rows past the end of the geometry do not exist; its last row stands in. Its window then also stays where it begins and
grows by one key with each token (as published), or slides on (`slide`).
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plga_jax.array_types import Array, AttentionFn, statistics_dtype
from plga_jax.caches import KVCache
from plga_jax.ops.attention import merge_partials
from plga_jax.ops.masks import Mask
from ris_jax.attend import DenseCache, StoredCache, StreamedCache, stream_at
from ris_jax.geometry import Geometry, PublishedGeometry

POLICIES = ("frozen", "refresh", "own")

MIXES = ("exact", "half")

_NEVER = 2**30
_COPIED = 256
"""Far keys that are copied at a time."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AnchorCache(StoredCache):
    """A cache for the tokens of one answer, one at a time.

    Attributes:
        store: all keys and values; the answer's are added to it.
        keys: the far keys together, [L, B, A, K, H].
        values: likewise.
        table: int32 [P, B, A], positions of the far keys for the P choices to come, ascending, filled up with -1.
        start: int32 [B], where the answer begins.
        every: int32 [], tokens from one choice to the next.
        room: int32 [], tokens that the answer may have.
        geometry: which earlier tokens a token attends to.
        width: W, keys that are read as the window.
        slide: whether the window slides on past the end of the geometry.
        mix: "exact", or "half": the mean of both partial results, to see what the merge is worth.
    """

    store: KVCache
    keys: Array
    values: Array
    table: Array
    start: Array
    every: Array
    room: Array
    geometry: Geometry = dataclasses.field(metadata={"static": True})
    width: int = dataclasses.field(metadata={"static": True})
    slide: bool = dataclasses.field(metadata={"static": True})
    mix: str = dataclasses.field(metadata={"static": True})

    @property
    def overflowed(self) -> Array:
        """bool [B]: rows with more tokens than the store can hold, or than the answer was given room for."""
        return self.store.overflowed | (self.store.length - self.start > self.room)

    def attend(
        self,
        layer: Array,
        q: Array,
        slots: Array,
        valid: Array,
        attention: AttentionFn,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Array, Self]:
        """Attention of one new token per row; arguments as `KVCache.attend`, T = 1.

        Returns:
            [B, 1, N, H], and the cache with the far keys of this layer where they were due.

        Raises:
            ValueError: more than one token.
        """
        if q.shape[1] != 1:
            raise ValueError(f"An answer is read one token at a time, got {q.shape[1]}; close() it before other text.")
        slot = slots[:, 0]
        step = jnp.maximum(slot - self.start, 0)
        choice = jnp.minimum(step // self.every, self.table.shape[0] - 1)
        index = jnp.take_along_axis(self.table, choice[None, :, None], axis=0)[0]
        due = valid[:, 0] & (step % self.every == 0)
        cache = self._collected(layer, index, due)

        row = slot if self.slide else jnp.minimum(slot, self.geometry.length - 1)
        first = jnp.maximum(row - (_window(self.geometry) - 1), 0)
        lowest = jnp.zeros_like(slot) if window is None else slot - (window - 1)
        near_k, near_v, positions = self._near(layer, slot)
        near = (positions >= jnp.maximum(first, lowest)[:, None]) & (positions <= slot[:, None])
        far = (index >= jnp.maximum(lowest, 0)[:, None]) & (index < first[:, None])
        far_k, far_v = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (cache.keys, cache.values))

        # In float32 throughout: partial results are not rounded before they are merged.
        dtype = statistics_dtype(q.dtype)
        partials = [
            attention(
                *(x.astype(dtype) for x in (q, k, v)),
                Mask(causal=False, k_valid=meet),
                scale=scale,
                return_lse=True,
            )
            for k, v, meet in ((near_k, near_v, near), (far_k, far_v, far))
        ]
        merge = merge_partials if self.mix == "exact" else _halves
        return merge(partials)[0].astype(q.dtype), cache

    def close(self) -> StreamedCache:
        """The cache for further text, the answer included."""
        return StreamedCache.around(self.store, self.geometry)

    def _collected(self, layer: Array, index: Array, due: Array) -> Self:
        """Copies the far keys of one layer together, for the rows where they are due."""
        A = index.shape[1]
        size = min(_COPIED, A)
        batch = jnp.arange(index.shape[0], dtype=jnp.int32)[:, None]

        def copy(i, arrays):
            begin = jnp.minimum(i * size, A - size)
            position = lax.dynamic_slice_in_dim(index, begin, size, axis=1)
            place = begin + jnp.arange(size, dtype=jnp.int32)
            place = jnp.where(due[:, None], place[None], A)

            def write(held, store):
                new = store.at[layer, batch, jnp.maximum(position, 0)].get(mode="clip")
                return held.at[layer, batch, place].set(new, mode="drop")

            return write(arrays[0], self.store.k), write(arrays[1], self.store.v)

        # A loop of no rounds when nothing is due: a loop writes in place, where a conditional would copy.
        rounds = jnp.where(due.any(), -(-A // size), 0)
        keys, values = lax.fori_loop(0, rounds, copy, (self.keys, self.values))
        return dataclasses.replace(self, keys=keys, values=values)

    def _near(self, layer: Array, slot: Array) -> tuple[Array, Array, Array]:
        """The last W keys and values, [B, W, K, H], and their positions, int32 [B, W]."""
        begin = jnp.clip(slot - (self.width - 1), 0, self.capacity - self.width)

        def cut(array):
            def one(rows, begin):
                _, _, K, H = rows.shape
                return lax.dynamic_slice(rows, (layer, begin, 0, 0), (1, self.width, K, H))[0]

            return jax.vmap(one, in_axes=(1, 0))(array, begin)

        positions = begin[:, None] + jnp.arange(self.width, dtype=jnp.int32)[None]
        return cut(self.store.k), cut(self.store.v), positions


def respond(
    cache: Any,
    *,
    policy: str = "frozen",
    every: int = 64,
    room: int,
    slide: bool = False,
    mix: str = "exact",
) -> Any:
    """The cache for one answer, token by token. Nothing of an earlier answer's choices remains in it.

    Args:
        cache: what the texts before were read into.
        policy: when the far keys are chosen, one of `POLICIES`.
        every: tokens between two choices, for "refresh".
        room: the most tokens that the answer will have.
        slide: past the end of the geometry, let the window slide instead of grow.
        mix: "exact" or "half"; see `AnchorCache`.

    Returns:
        A cache for `Decoder.extend`; `close()` gives back the one for further text.

    Raises:
        ValueError: an unknown policy or mix, numbers below 1, or a geometry without a window.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy = {policy!r} is unknown; choose one of {', '.join(POLICIES)}.")
    if mix not in MIXES:
        raise ValueError(f"mix = {mix!r} is unknown; choose one of {', '.join(MIXES)}.")
    for name, value in (("every", every), ("room", room)):
        if value < 1:
            raise ValueError(f"{name} = {value} must be at least 1 token.")
    if isinstance(cache, DenseCache):
        return cache
    if not isinstance(cache, StreamedCache):
        return cache.respond(policy=policy, every=every)
    every = {"frozen": _NEVER, "refresh": every, "own": 1}[policy]
    return _opened(cache, every=every, room=room, slide=slide, mix=mix)


def far_keys(geometry: Geometry, rows: Iterable[int]) -> dict[int, np.ndarray]:
    """What rows see beyond their window.

    Args:
        geometry: the published one: its `anchor_row`, which includes the row itself. Others: what is in a row's mask
            and not in its window.
        rows: within the geometry.

    Returns:
        For each row the keys, int32, ascending.
    """
    rows = sorted(set(rows))
    if not isinstance(geometry, PublishedGeometry):
        keys, counts = geometry.union(rows)
        lists = {row: line[:count] for row, line, count in zip(rows, keys, counts.tolist())}
        return {row: line[line <= row - _window(geometry)] for row, line in lists.items()}
    found = {}
    with stream_at(geometry, rows[0]) as stream:  # one walk: seeking forward is cheap
        for row in rows:
            stream.seek(row)
            samples = stream.samples(1)[0]
            anchors = np.arange(min(geometry.anchors, row + 1), dtype=np.int32)
            samples = samples[(samples >= 0) & (samples <= row)]
            found[row] = np.unique(np.concatenate([anchors, samples, np.array([row], np.int32)]))
    return found


def _opened(cache: StreamedCache, *, every: int, room: int, slide: bool, mix: str) -> AnchorCache:
    geometry, T = cache.geometry, cache.geometry.length
    starts = np.asarray(cache.length)
    choices = -(-room // every)
    rows = np.minimum(starts[None] + np.arange(choices)[:, None] * every, T - 1)
    found = far_keys(geometry, rows.reshape(-1).tolist())
    longest = _round_up(max(len(keys) for keys in found.values()))
    table = np.full((*rows.shape, longest), -1, np.int32)
    for place, row in np.ndenumerate(rows):
        table[place][: len(found[int(row)])] = found[int(row)]

    growth = 0 if slide else max(min(int(starts.max()) + room, cache.capacity) - T, 0)
    L, B, _, K, H = cache.store.k.shape
    keys, values = (jnp.zeros((L, B, longest, K, H), x.dtype) for x in (cache.store.k, cache.store.v))
    return AnchorCache(
        store=cache.store,
        keys=keys,
        values=values,
        table=jnp.asarray(table),
        start=jnp.asarray(starts.copy()),
        every=jnp.int32(every),
        room=jnp.int32(min(room, _NEVER)),
        geometry=geometry,
        width=min(_window(geometry) + -(-growth // 64) * 64, cache.capacity),
        slide=slide,
        mix=mix,
    )


def _window(geometry: Geometry) -> int:
    """Keys of a row's window, itself included."""
    local = getattr(geometry, "local", None)
    if local is None:
        raise ValueError(f"A geometry of kind {geometry.kind!r} has no window to decode with.")
    return local + 1 if isinstance(geometry, PublishedGeometry) else local


def _round_up(count: int) -> int:
    """At most an eighth more, so that lists of similar lengths share one program."""
    grain = max(64, (1 << count.bit_length()) // 16)
    return -(-count // grain) * grain


def _halves(partials: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The mean of two partial results where both saw a key: what mixing without a common softmax would give."""
    return merge_partials([(out, jnp.where(lse > -jnp.inf, jnp.zeros_like(lse), lse)) for out, lse in partials])
