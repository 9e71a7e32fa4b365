"""Sparse attention by whole key blocks: a cache whose `attend` reads, for each tile of queries, a list of blocks.

Keys lie in blocks, [L, B, K, blocks, H, block] and transposed, so that a tile gathers the blocks it needs and makes one
dense product with each. The list of a tile is anchors, window and chosen blocks; one softmax runs over their union,
every key once. Which blocks are chosen is the geometry's business: `ProbeGeometry` ranks them by the tile's first
query, `BlockSharedGeometry` draws them.

Tiles are cut by absolute position. Where a chunk begins inside a tile, the list chosen in an earlier chunk is carried
on, so results do not depend on how a text is cut into chunks. Nothing here is T×T: for a chunk, temporary memory grows
with chunk × (window + chosen keys), and ranking keeps one number per probe and block.
"""

import dataclasses
import functools
import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plga_jax.array_types import Array, AttentionFn, DType, statistics_dtype
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.ops.attention import merge_partials
from ris_jax.block_shared import BlockSharedGeometry
from ris_jax.probe import ProbeGeometry

_NUMBERS = 1 << 20
"""Scores that are held at a time for one product; measured: beyond, they leave the processor's caches."""

_ints = functools.partial(jnp.arange, dtype=jnp.int32)

_NEVER = 2**30
"""A stride that no text reaches."""

_FEW_ROWS = 16
"""Tiles of fewer rows do not read the window by themselves."""

_SPAN = 4096
"""Keys that a probe scores at a time."""


class Mark(NamedTuple):
    """A place in a text to return to: everything but keys and values."""

    length: Array
    chosen: Array
    pairs: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseCache:
    """Keys and values in blocks, and what the queries chose.

    Attributes:
        keys: rotated keys, [L, B, K, blocks, H, block]; bfloat16 as its bits, see `_bits`.
        values: [L, B, K, blocks, block, H], likewise.
        length: int32 [B], tokens held per row.
        chosen: int32 [L, B, K, C], the blocks chosen by the last probe of each head, best first; −1 for none.
        pairs: float32 [L, B, K], (query, key) pairs read so far, per query head.
        geometry: what is read.
        reading: the geometry for text, while a response has one of its own; else None.
    """

    keys: Array
    values: Array
    length: Array
    chosen: Array
    pairs: Array
    geometry: ProbeGeometry | BlockSharedGeometry = dataclasses.field(metadata={"static": True})
    reading: ProbeGeometry | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def open(
        cls,
        geometry: ProbeGeometry | BlockSharedGeometry,
        config: DecoderConfig,
        *,
        batch: int = 1,
        capacity: int | None = None,
        dtype: DType | None = None,
    ) -> Self:
        """An empty cache.

        Args:
            geometry: what is read.
            config: of the model.
            batch: B.
            capacity: tokens per row, rounded up to whole blocks; None takes the geometry's length.
            dtype: of keys and values; None takes the compute dtype.

        Returns:
            A cache of length 0.

        Raises:
            ValueError: windowed layers, recall heads that the model does not have, or single random keys.
        """
        L, K, H = config.num_layers, config.num_kv_heads, config.head_width
        if config.windowed_layers:
            raise ValueError("This model has layers with a window of their own; read it with a dense geometry.")
        capacity = geometry.length if capacity is None else capacity
        recall = getattr(geometry, "recall", ())
        if any(layer >= L or head >= K for layer, head in recall):
            raise ValueError(f"recall names heads beyond {L} layers of {K} key/value heads: {recall}.")
        block = _block(geometry)
        blocks = -(-capacity // block)
        # The zeros of what is held, not zeros to be made into it: for a moment those would lie beside it.
        held = _held_dtype(dtype or config.compute_dtype)
        return cls(
            keys=jnp.zeros((L, batch, K, blocks, H, block), held),
            values=jnp.zeros((L, batch, K, blocks, block, H), held),
            length=jnp.zeros((batch,), jnp.int32),
            chosen=jnp.full((L, batch, K, _num_chosen(geometry)), -1, jnp.int32),
            pairs=jnp.zeros((L, batch, K), jnp.float32),
            geometry=geometry,
        )

    @property
    def capacity(self) -> int:
        """S, tokens per row."""
        return self.keys.shape[3] * self.keys.shape[5]

    @property
    def overflowed(self) -> Array:
        """bool [B]: rows that were given more tokens than they can hold."""
        return self.length > self.capacity

    def ready(self, start: int, stop: int) -> Self:
        """The cache for a chunk at positions start … stop − 1; nothing is needed here."""
        return self

    def mark(self) -> Mark:
        """A place to `rewind` to. It holds copies, so it outlives caches that were donated."""
        return Mark(*(jnp.array(x, copy=True) for x in (self.length, self.chosen, self.pairs)))

    def rewind(self, mark: Mark) -> Self:
        """The cache as it was at a mark: keys beyond its length are seen by nobody."""
        copy = Mark(*(jnp.array(x, copy=True) for x in mark))
        return dataclasses.replace(self, length=copy.length, chosen=copy.chosen, pairs=copy.pairs)

    def slots(self, valid: Array) -> Array:
        """Positions of new tokens, int32 [B, T], consecutive over a row's valid ones; see `KVCache.slots`."""
        return self.length[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1

    def append(self, layer: Array, k: Array, v: Array, slots: Array, valid: Array) -> Self:
        """Writes new keys and values into one layer; arguments as for `KVCache.append`."""
        block = self.keys.shape[5]
        slots = jnp.where(valid, slots, self.capacity)
        row, head = _ints(k.shape[0])[:, None, None], _ints(k.shape[2])[None, None, :]
        index, offset = slots[:, :, None] // block, slots[:, :, None] % block
        return dataclasses.replace(
            self,
            keys=self.keys.at[layer, row, head, index, :, offset].set(_bits(k, self.keys.dtype), mode="drop"),
            values=self.values.at[layer, row, head, index, offset].set(_bits(v, self.values.dtype), mode="drop"),
        )

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
        """Attention of the queries just appended to what the geometry lets them read.

        Args:
            layer: int, which layer.
            q: rotated queries, [B, T, N, H].
            slots: int32 [B, T], from `slots`.
            valid: bool [B, T].
            attention: not used; products are made here.
            scale: of the scores.
            window: must be None.

        Returns:
            [B, T, N, H], and the cache with the blocks last chosen and the pairs read.
        """
        if window is not None:
            raise ValueError("A layer with a window of its own cannot be read by this cache.")
        B, T, N, H = q.shape
        K = self.keys.shape[2]
        layer = jnp.asarray(layer, jnp.int32)
        # Scores are held in float32, and products of a few rows are fastest so on CPU; the cache may be narrower.
        dtype = statistics_dtype(q.dtype)
        grouped = q.astype(dtype).reshape(B, T, K, N // K, H) * scale
        rows = (_ints(B), grouped, slots, valid, self.chosen[layer])
        attend = functools.partial(_attend_row, self, layer)
        # One sequence is not mapped: vmap would turn "rank at every r-th token" into "rank always, and select".
        results = jax.vmap(attend)(*rows) if B > 1 else [x[None] for x in attend(*(x[0] for x in rows))]
        out, pairs, chosen = results
        cache = dataclasses.replace(
            self, chosen=self.chosen.at[layer].set(chosen), pairs=self.pairs.at[layer].add(pairs)
        )
        return out.reshape(B, T, N, H).astype(q.dtype), cache

    def advance(self, valid: Array) -> Self:
        """Counts the tokens just appended to every layer; see `KVCache.advance`."""
        return dataclasses.replace(self, length=self.length + jnp.sum(valid, axis=1, dtype=jnp.int32))

    def respond(self, *, policy: str = "refresh", every: int | None = None) -> Self:
        """The cache for one response, token by token.

        Args:
            policy: "frozen" keeps the blocks chosen last, "own" ranks anew for each token, "refresh" as `every` says.
            every: tokens between rankings; None is `ProbeGeometry.answering`.

        Returns:
            The cache; `close` gives back the one for further text.

        Raises:
            ValueError: an unknown policy, or `every` below 1.
        """
        if policy not in ("frozen", "refresh", "own"):
            raise ValueError(f"policy = {policy!r} is unknown; choose 'frozen', 'refresh' or 'own'.")
        if every is not None and every < 1:
            raise ValueError(f"every = {every} must be at least 1 token.")
        if not isinstance(self.geometry, ProbeGeometry):
            return self
        every = {"frozen": _NEVER, "own": 1}.get(policy, every)
        geometry = self.geometry
        geometry = geometry.replace(stride=every, recall_stride=every) if every else geometry.answering()
        return dataclasses.replace(self, geometry=geometry, reading=self.geometry)

    def close(self) -> Self:
        """The cache for further text, the response included."""
        return dataclasses.replace(self, geometry=self.reading or self.geometry, reading=None)

    def real_share(self) -> Array:
        """Pairs read over the causal ones, of all that was read: float [B], the mean over heads and layers."""
        causal = self.length.astype(jnp.float32) * (self.length + 1).astype(jnp.float32) / 2
        return self.pairs.mean(axis=(0, 2)) / jnp.maximum(causal, 1)


def _bits(x: Array, dtype: DType) -> Array:
    """Numbers as the cache of a dtype holds them: bfloat16, or uint16 that stands for it, as bits.

    XLA:CPU widens the operand of a bfloat16 gather to float32 first: all of the cache, at every step.
    """
    if _held_dtype(dtype) != jnp.uint16:
        return x.astype(dtype)
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _held_dtype(dtype: DType) -> jnp.dtype:
    """What numbers of a dtype are held as, see `_bits`."""
    return jnp.dtype(jnp.uint16 if jnp.dtype(dtype) == jnp.bfloat16 else dtype)


def _numbers(x: Array, dtype: DType) -> Array:
    """What `_bits` holds, in a dtype."""
    if x.dtype != jnp.uint16:
        return x.astype(dtype)
    # bfloat16 is the upper half of float32.
    return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)


def _block(geometry) -> int:
    return geometry.block if geometry.block > 1 else 64


def _num_chosen(geometry) -> int:
    if isinstance(geometry, ProbeGeometry):
        return geometry.blocks + geometry.random
    return 0


def _attend_row(cache: SparseCache, layer, b, q, slots, valid, chosen):
    """One sequence: q [T, K, G, H] -> out [T, K, G, H], pairs [K], chosen [K, C]."""
    geometry, (T, K, _, _) = cache.geometry, q.shape
    if not isinstance(geometry, ProbeGeometry):
        tiles = _Tiles.cut(q, slots, valid, cache.length[b], geometry.tile)
        draw = jax.vmap(jax.vmap(geometry.sample_blocks, (None, 0)), (0, None))
        listed = draw(tiles.begins // geometry.tile, layer * K + _ints(K))
        if geometry.block > 1:
            return *_attend_tiles(cache, layer, b, tiles, listed, _ints(K)), chosen
        fixed, pairs = _attend_lists(cache, layer, b, tiles, fixed=True, listed=None, heads=_ints(K))
        picked, more = _attend_keys(cache, layer, b, tiles, listed)
        return merge_partials([fixed, picked])[0], pairs + more, chosen
    recall = np.zeros((cache.keys.shape[0], K), bool)
    for pair in geometry.recall:
        recall[pair] = True
    # Heads of a layer in order, those that recall last; how many recall decides the program.
    order, counts = np.argsort(recall, axis=1, kind="stable"), recall.sum(1)
    kinds = sorted(set(counts.tolist()))

    def program(count: int):
        def run(heads):
            groups = [
                (heads[: K - count], geometry.stride, geometry.ranking),
                (heads[K - count :], geometry.recall_stride, "best"),
            ]
            now, out, pairs = chosen, jnp.zeros_like(q), jnp.zeros((K,), jnp.float32)
            for which, stride, ranking in groups:
                if not which.shape[0]:
                    continue
                tiles = _Tiles.cut(q[:, which], slots, valid, cache.length[b], stride)
                listed, held = _choose(cache, layer, b, tiles, now[which], which, ranking)
                now = now.at[which].set(held)
                if T > 1:
                    part, read = _attend_tiles(cache, layer, b, tiles, listed, which)
                    out, pairs = out.at[:, which].set(part), pairs.at[which].set(read)
            return out, pairs, now

        return run

    programs = [program(count) for count in kinds]
    out, pairs, now = lax.switch(
        jnp.asarray(np.searchsorted(kinds, counts))[layer], programs, jnp.asarray(order, jnp.int32)[layer]
    )
    if T == 1:  # one row is one tile for all heads, whenever they were ranked
        tiles = _Tiles.cut(q, slots, valid, cache.length[b], 1)
        out, pairs = _attend_tiles(cache, layer, b, tiles, now[None], _ints(K))
    return out, pairs, now


class _Tiles(NamedTuple):
    """The queries of a chunk on a grid of tiles, which begin at multiples of their rows."""

    q: Array  # [tiles, K, G, R, H]
    positions: Array  # int32 [tiles, R]; −1 where there is no query
    begins: Array  # int32 [tiles], position of each tile's first row
    place: Array  # int32 [T], where on the grid each query is; tiles·R for padding
    start: Array  # int32 [], position of the first query
    stop: Array  # int32 [], position after the last
    stride: int  # rows that share a list of blocks, a multiple of R

    @classmethod
    def cut(cls, q: Array, slots: Array, valid: Array, start: Array, stride: int) -> "_Tiles":
        """Lays q [T, K, G, H] out by position."""
        T, *shape = q.shape
        # A single query is a tile by itself. 64 rows fill a product; more would only widen the window's share.
        rows = 1 if T == 1 else math.gcd(stride, 64)
        count = 1 if T == 1 else (T + rows - 2) // rows + 1
        first = start - start % rows
        place = jnp.where(valid, slots - first, count * rows)
        grid = jnp.zeros((count * rows, *shape), q.dtype).at[place].set(q, mode="drop")
        positions = jnp.full((count * rows,), -1, jnp.int32).at[place].set(slots, mode="drop")
        return cls(
            q=grid.reshape(count, rows, *shape).transpose(0, 2, 3, 1, 4),
            positions=positions.reshape(count, rows),
            begins=first + rows * _ints(count),
            place=place,
            start=start,
            stop=start + jnp.sum(valid, dtype=jnp.int32),
            stride=stride,
        )

    def wider(self, factor: int) -> "_Tiles":
        """The same queries in tiles of `factor` times as many rows, begun where these begin."""
        count = self.begins.size
        pad = -count % factor
        q = jnp.pad(self.q, ((0, pad), *((0, 0),) * 4))
        q = q.reshape(-1, factor, *q.shape[1:]).transpose(0, 2, 3, 1, 4, 5)
        positions = jnp.pad(self.positions, ((0, pad), (0, 0)), constant_values=-1)
        return self._replace(
            q=q.reshape(*q.shape[:3], -1, q.shape[-1]),
            positions=positions.reshape(q.shape[0], -1),
            begins=self.begins[::factor],
        )

    def collect(self, out: Array) -> Array:
        """Takes [tiles, K, G, R, H] back to the order of the chunk, [T, K, G, H]; 0 for padding."""
        flat = out.transpose(0, 3, 1, 2, 4).reshape(-1, *out.shape[1:3], out.shape[4])
        return flat.at[self.place].get(mode="fill", fill_value=0)


def _choose(
    cache: SparseCache, layer, b, tiles: _Tiles, held: Array, heads: Array, ranking: str
) -> tuple[Array, Array]:
    """The blocks chosen for each tile, int32 [tiles, K, C], and for what follows the chunk, [K, C]."""
    geometry, stride, rows = cache.geometry, tiles.stride, tiles.positions.shape[1]
    span = tiles.positions.size
    probes = 1 if span == 1 else -(-span // stride)
    first = -(-tiles.begins[0] // stride) * stride
    places = first + stride * _ints(probes)
    asks = (places >= tiles.start) & (places < tiles.stop)

    def rank():
        index = jnp.clip((places - tiles.begins[0]) // rows, 0, tiles.begins.size - 1)
        scores = _scores(cache, layer, b, tiles.q[index, :, :, 0], jnp.where(asks, places, -1), heads, ranking)
        return _best(geometry, scores, places, layer, heads, stride)

    found = lax.cond(asks.any(), rank, lambda: jnp.full((probes, *held.shape), -1, jnp.int32))
    # Each tile takes the list of the last probe at or before it: of this chunk, or the one held from before.
    lists = jnp.concatenate([held[None], found])
    after = jnp.where(first < tiles.start, 1, 0)  # a probe of an earlier chunk: its list is the one held

    def last_probe(position):
        index = (position - first) // stride + 1
        return jnp.where(index <= after, 0, index)

    listed = lists[jnp.clip(last_probe(tiles.begins), 0, probes)]
    final = lists[jnp.clip(last_probe(tiles.stop - 1), 0, probes)]
    return listed, jnp.where(tiles.stop > tiles.start, final, held)


def _scores(cache: SparseCache, layer, b, q: Array, positions: Array, heads: Array, ranking: str) -> Array:
    """How much each probe wants each block, [P, K, blocks], the logarithm of a weight.

    q is [P, K, G, H]. Of the G query heads that share keys, the one that wants a block most counts.
    """
    P, K, G, H = q.shape
    *_, blocks, _, block = cache.keys.shape
    span = min(max(_SPAN // block, 1), blocks)
    size = min(P, max(_NUMBERS // (G * span * block), 1))
    batches = -(-P // size)
    pad = batches * size - P
    q = jnp.pad(q, ((0, pad), (0, 0), (0, 0), (0, 0))).reshape(batches, size, K, G, H)
    positions = jnp.pad(positions, (0, pad), constant_values=-1).reshape(batches, size)
    gather = jax.nn.logsumexp if ranking == "mass" else jnp.max

    def batch(inputs):
        q, positions, head = inputs  # [size, G, H], [size], []
        rows = q.reshape(size * G, H)

        def step(i, best):
            # The last span may reach back over the one before it: blocks are scored twice, not missed.
            begin = jnp.minimum(i * span, blocks - span)
            index = (layer, b, head, begin, jnp.int32(0), jnp.int32(0))
            keys = lax.dynamic_slice(cache.keys, index, (1, 1, 1, span, H, block))[0, 0, 0]
            keys = _numbers(keys, q.dtype)
            starts = (begin + _ints(span)) * block
            if ranking == "pooled":
                found = jnp.einsum("rh,nh->nr", rows, keys.mean(-1)).reshape(span, size, G)
                seen = (starts + block - 1)[:, None] <= positions[None]
            else:
                scores = jnp.einsum("nrh,nhs->nrs", jnp.broadcast_to(rows, (span, *rows.shape)), keys)
                place = starts[:, None] + _ints(block)[None]
                sees = place[:, None, :] <= positions[None, :, None]
                scores = jnp.where(sees[:, :, None], scores.reshape(span, size, G, block), -jnp.inf)
                found, seen = gather(scores, axis=-1), jnp.ones((1, 1), bool)
            found = jnp.where(seen[:, :, None], found, -jnp.inf)
            return lax.dynamic_update_slice_in_dim(best, found, begin, axis=0)

        best = jnp.full((blocks, size, G), -jnp.inf, q.dtype)
        spans = (jnp.max(positions) + span * block) // (span * block)
        best = lax.fori_loop(0, spans, step, best)
        top = gather(best, axis=0, keepdims=True)
        return (best - jnp.where(top == -jnp.inf, 0, top)).max(-1).T

    pairs = [(i, k) for i in range(batches) for k in range(K)]
    which = jnp.asarray(pairs, jnp.int32)
    scores = lax.map(
        lambda ik: batch((q[ik[0], :, ik[1]], positions[ik[0]], heads[ik[1]])), which
    )  # [batches·K, size, blocks]
    scores = scores.reshape(batches, K, size, blocks).swapaxes(1, 2).reshape(-1, K, blocks)
    return scores[:P]


def _best(geometry: ProbeGeometry, scores: Array, places: Array, layer, heads: Array, stride: int) -> Array:
    """The best blocks of each probe in order, int32 [P, K, C], −1 where there are none."""
    P, K, blocks = scores.shape
    starts = _ints(blocks) * geometry.block
    # Worth listing: some key is out of the window of the last row served, and is no anchor.
    outside = starts[None] <= (places + stride - 1)[:, None] - geometry.local
    free = outside & (starts + geometry.block > geometry.anchors)[None]
    scores = jnp.where(free[:, None], scores, -jnp.inf)
    picks = []
    if count := min(geometry.blocks, blocks):
        values, index = lax.top_k(scores, count)
        allowed = _ints(count)[None] < geometry.chosen(places)[:, None]
        picks.append(jnp.where((values > -jnp.inf) & allowed[:, None], index, -1))
    if extra := min(geometry.random, blocks):
        key = jax.random.fold_in(jax.random.key(geometry.seed), layer)
        keys = jax.vmap(lambda place: jax.random.fold_in(key, place))(places)
        drawn = jax.vmap(lambda k: jax.vmap(lambda h: jax.random.uniform(jax.random.fold_in(k, h), (blocks,)))(heads))(
            keys
        )
        taken = (picks[0][..., None] == _ints(blocks)[None, None, None]).any(2) if picks else False
        values, index = lax.top_k(jnp.where((scores > -jnp.inf) & ~taken, drawn, -1.0), extra)
        picks.append(jnp.where(values >= 0, index, -1))
    picked = jnp.concatenate(picks, axis=-1) if picks else jnp.zeros((P, K, 0), jnp.int32)
    short = _num_chosen(geometry) - picked.shape[-1]
    return jnp.pad(picked, ((0, 0), (0, 0), (0, short)), constant_values=-1)


def _attend_tiles(cache: SparseCache, layer, b, tiles: _Tiles, listed: Array, heads: Array) -> tuple[Array, Array]:
    """Window, anchors and listed blocks, every key once: out [T, K, G, H], pairs [K]."""
    rows = tiles.positions.shape[1]
    attend = functools.partial(_attend_lists, cache, layer, b, heads=heads)
    if rows >= _FEW_ROWS or tiles.begins.size == 1:
        (out, _), pairs = attend(tiles, fixed=True, listed=listed)
        return out, pairs
    # All rows share the window: it is read by larger tiles, and merged with what tiles of few rows list.
    fixed, pairs = attend(tiles.wider(_FEW_ROWS // rows), fixed=True, listed=None)
    if not listed.shape[-1]:
        return fixed[0], pairs
    picked, more = attend(tiles, fixed=False, listed=listed)
    return merge_partials([fixed, picked])[0], pairs + more


def _attend_lists(cache: SparseCache, layer, b, tiles: _Tiles, *, fixed: bool, listed: Array | None, heads: Array):
    """Attention of tiles to lists of blocks: (out [T, K, G, H], lse [T, K, G]), pairs [K]."""
    geometry, block = cache.geometry, cache.keys.shape[5]
    count, K, G, R, H = tiles.q.shape
    lists = []  # (blocks [tiles, K, m], first key, last key that a row may take from them): every key once
    edge = tiles.positions - geometry.local  # last key before the window
    if fixed:
        window = (tiles.begins[:, None] - geometry.local + 1) // block + _ints((geometry.local + R - 2) // block + 2)[
            None
        ]
        anchors = jnp.broadcast_to(_ints(-(-geometry.anchors // block)), (count, -(-geometry.anchors // block)))
        lists.append((_per_head(window, K), edge + 1, tiles.positions))
        lists.append((_per_head(anchors, K), jnp.zeros_like(edge), jnp.minimum(edge, geometry.anchors - 1)))
    if listed is not None and listed.shape[-1]:
        lists.append((listed, jnp.full_like(edge, geometry.anchors), edge))
    blocks = jnp.concatenate([x for x, _, _ in lists], axis=-1)
    kind = np.repeat(np.arange(len(lists)), [x.shape[-1] for x, _, _ in lists])
    low, high = (jnp.stack([x[i] for x in lists])[kind].transpose(1, 2, 0) for i in (1, 2))  # [tiles, R, m]

    m = blocks.shape[-1]
    each = max(min(_NUMBERS // (G * R * m * block), 2 * _NUMBERS // (m * block * H), count * K), 1)
    batches = -(-count * K // each)

    def batched(x):
        x = jnp.pad(x, ((0, batches * each - count * K), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(batches, each, *x.shape[1:])

    tile, head = jnp.repeat(_ints(count), K), jnp.tile(_ints(K), count)
    flat_q, flat_blocks = tiles.q.reshape(-1, G, R, H), blocks.reshape(-1, m)

    def batch(inputs):
        q, blocks, tile, head = inputs  # [x, G, R, H], [x, m], [x], [x]
        index = (layer, b, heads[head][:, None], jnp.clip(blocks, 0, cache.keys.shape[3] - 1))
        keys, values = _numbers(cache.keys[index], q.dtype), _numbers(cache.values[index], q.dtype)
        # One product per block: the layout of what was gathered fits it as it is.
        rows = jnp.broadcast_to(q.reshape(-1, 1, G * R, H), (each, m, G * R, H))
        scores = jnp.einsum("xmrh,xmhs->xmrs", rows, keys).reshape(each, m, G, R, block)
        place = (blocks[:, :, None] * block + _ints(block)[None, None])[:, :, None, :]  # [x, m, 1, s]
        meet = (place >= low[tile].transpose(0, 2, 1)[..., None]) & (place <= high[tile].transpose(0, 2, 1)[..., None])
        meet &= (blocks >= 0)[:, :, None, None]
        scores = jnp.where(meet[:, :, None], scores, -jnp.inf)
        top = scores.max((1, 4), keepdims=True)
        top = jnp.where(top == -jnp.inf, 0, top)
        weights = jnp.exp(scores - top)
        total = weights.sum((1, 4))  # [x, G, R]
        out = jnp.einsum("xmrs,xmsh->xmrh", weights.reshape(each, m, G * R, block), values).sum(1)
        out = out.reshape(each, G, R, H) / jnp.where(total == 0, 1, total)[..., None]
        return out, top[:, 0, ..., 0] + jnp.log(total), meet.sum((1, 2, 3), dtype=jnp.int32)

    out, lse, read = lax.map(batch, tuple(map(batched, (flat_q, flat_blocks, tile, head))))
    out, lse = (x.reshape(batches * each, *x.shape[2:])[: count * K] for x in (out, lse))
    out, lse = out.reshape(count, K, G, R, H), lse.reshape(count, K, G, R)
    read = read.reshape(-1)[: count * K].reshape(count, K).sum(0).astype(jnp.float32)
    return (tiles.collect(out), tiles.collect(lse[..., None])[..., 0]), read


def _attend_keys(cache: SparseCache, layer, b, tiles: _Tiles, listed: Array):
    """Attention of tiles to lists of single keys, [tiles, K, r]; results as `_attend_lists`."""
    block = cache.keys.shape[5]
    edge = tiles.positions - cache.geometry.local

    def tile(inputs):
        q, keys_of, edge = inputs  # [K, G, R, H], [K, r], [R]
        K, G, R, H = q.shape
        index, offset = jnp.maximum(keys_of, 0) // block, jnp.maximum(keys_of, 0) % block
        keys = _numbers(cache.keys[layer, b, _ints(K)[:, None], index, :, offset], q.dtype)
        values = _numbers(cache.values[layer, b, _ints(K)[:, None], index, offset], q.dtype)
        meet = (keys_of >= cache.geometry.anchors)[:, None] & (keys_of[:, None] <= edge[None, :, None])  # [K, R, r]
        scores = jnp.einsum("kxh,ksh->kxs", q.reshape(K, G * R, H), keys).reshape(K, G, R, -1)
        out, lse = _softmax(scores, meet[:, None])
        out = jnp.einsum("kxs,ksh->kxh", out.reshape(K, G * R, -1), values)
        return out.reshape(K, G, R, H), lse, meet.sum((1, 2), dtype=jnp.int32)

    out, lse, read = lax.map(tile, (tiles.q, listed, edge))
    return (tiles.collect(out), tiles.collect(lse[..., None])[..., 0]), read.sum(0).astype(jnp.float32)


def _softmax(scores: Array, meet: Array) -> tuple[Array, Array]:
    """Weights over the last axis and their lse; 0 and −inf where nothing meets."""
    scores = jnp.where(meet, scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total), (top + jnp.log(total))[..., 0]


def _per_head(blocks: Array, K: int) -> Array:
    """[tiles, m] -> [tiles, K, m], int32."""
    return jnp.broadcast_to(blocks.astype(jnp.int32)[:, None], (blocks.shape[0], K, blocks.shape[1]))
