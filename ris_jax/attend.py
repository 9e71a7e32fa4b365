"""Attention to what a geometry allows: caches that are read into chunk by chunk, and one for whole sequences.

Where a geometry can say its rows ahead of the model, the host makes the mask of one chunk of queries, packed as bits,
and the device unpacks it for blockwise attention: exactly the published pairs in memory O(chunk · S), never T×T. It is
a masked dense product, so it costs dense time whatever the density; `sparse.py` is where pairs left out save work.

Every cache here can do what `Decoder.extend` asks for, and on the host

    ready(start, stop)     the cache with what the queries at positions start … stop-1 will need
    mark(), rewind(mark)   returns to an earlier length; keys beyond it are seen by nobody

`anchor.respond` turns one into a cache for the tokens of an answer, whose `close()` gives it back.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plga_jax.array_types import Array, AttentionFn, DType
from plga_jax.caches import KVCache
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.ops.attention import attention
from plga_jax.ops.masks import Mask
from ris_jax.block_shared import BlockSharedGeometry
from ris_jax.geometry import Geometry, PublishedGeometry
from ris_jax.mask_stream import MaskStream
from ris_jax.patterns import DenseGeometry
from ris_jax.probe import ProbeGeometry
from ris_jax.sparse import SparseCache

_SMALLEST_CHUNK = 64
_LARGEST_TABLE = 2**14
"""Longest sequence whose packed rows may be a constant of a program (32 MiB)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A length to return to. It holds copies, so it outlives caches that were donated.

    Attributes:
        length: int32 [B].
    """

    length: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseCache(KVCache):
    """Every query sees every earlier key."""

    def ready(self, start: int, stop: int) -> Self:
        """The cache for queries at positions start … stop-1; nothing is needed here."""
        return self

    def mark(self) -> Mark:
        """The present length, to `rewind` to."""
        return Mark(length=jnp.array(self.length, copy=True))

    def rewind(self, mark: Mark) -> Self:
        """The cache as it was at a mark."""
        return dataclasses.replace(self, length=jnp.array(mark.length, copy=True))

    def close(self) -> Self:
        """The cache for further text: itself."""
        return self


class StoredCache:
    """What caches around a `store: KVCache` have in common: they keep everything, and attend to parts of it."""

    store: KVCache

    @property
    def length(self) -> Array:
        """int32 [B], tokens held per row."""
        return self.store.length

    @property
    def capacity(self) -> int:
        """S, tokens per row."""
        return self.store.capacity

    @property
    def overflowed(self) -> Array:
        """bool [B]: rows that were given more tokens than they can hold."""
        return self.store.overflowed

    def slots(self, valid: Array) -> Array:
        """Positions of new tokens; see `KVCache.slots`."""
        return self.store.slots(valid)

    def append(self, layer: Array, k: Array, v: Array, slots: Array, valid: Array) -> Self:
        """Writes new keys and values into one layer; see `KVCache.append`."""
        return dataclasses.replace(self, store=self.store.append(layer, k, v, slots, valid))

    def advance(self, valid: Array) -> Self:
        """Counts the tokens just appended to every layer; see `KVCache.advance`."""
        return dataclasses.replace(self, store=self.store.advance(valid))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedCache(StoredCache):
    """Queries see what the rows of a geometry's mask say, one chunk of which is held.

    Attributes:
        store: keys and values.
        rows: uint8 [R, ceil(S/8)], bits in the order of `np.packbits`; None before `ready`.
        count: int32 [2], position of the first of the rows, and how many of them are filled.
        geometry: which earlier tokens a token attends to.
    """

    store: KVCache
    rows: Array | None
    count: Array
    geometry: Geometry = dataclasses.field(metadata={"static": True})

    @classmethod
    def around(cls, store: KVCache, geometry: Geometry) -> Self:
        """A cache around a store, without rows.

        Args:
            store: keys and values.
            geometry: one with `rows`.

        Returns:
            The cache.
        """
        return cls(store=store, rows=None, count=jnp.zeros((2,), jnp.int32), geometry=geometry)

    def ready(self, start: int, stop: int) -> Self:
        """Fetches the rows of some queries, for one call of a model or several.

        Where sequences of a batch stand at different positions, the rows are to cover all of them.

        Args:
            start: position of the first.
            stop: exclusive end.

        Returns:
            The cache with these rows. Their number is rounded up to a power of two, so that few programs are compiled.

        Raises:
            ValueError: rows beyond the geometry.
        """
        if not 0 <= start < stop <= self.geometry.length:
            raise ValueError(
                f"Positions {start} … {stop} leave the geometry's 0 … {self.geometry.length}; make the geometry for "
                "a longer window, or read less. Only answers may run past it, see `anchor.respond`."
            )
        packed = _packed(self.geometry, start, stop)
        rows = np.zeros((_round_up(stop - start), -(-self.capacity // 8)), np.uint8)
        # Keys that the cache cannot hold are cut; past the end of the geometry there are none.
        width = min(rows.shape[1], packed.shape[1])
        rows[: stop - start, :width] = packed[:, :width]
        count = jnp.asarray([start, stop - start], jnp.int32)
        return dataclasses.replace(self, rows=jnp.asarray(rows), count=count)

    def mark(self) -> Mark:
        """The present length, to `rewind` to."""
        return Mark(length=jnp.array(self.length, copy=True))

    def rewind(self, mark: Mark) -> Self:
        """The cache as it was at a mark."""
        length = jnp.array(mark.length, copy=True)
        return dataclasses.replace(self, store=dataclasses.replace(self.store, length=length))

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
        """Attention of the queries just appended to the keys that their rows allow; arguments as `KVCache.attend`.

        Returns:
            [B, T, N, H], NaN for a real query whose row is not held, and the cache.

        Raises:
            ValueError: there are no rows.
        """
        if self.rows is None:
            raise ValueError("This cache has no rows of its geometry yet; call ready(start, stop) before the model.")
        k = lax.dynamic_index_in_dim(self.store.k, layer, keepdims=False).astype(q.dtype)
        v = lax.dynamic_index_in_dim(self.store.v, layer, keepdims=False).astype(q.dtype)
        row = slots - self.count[0]
        pairs = _unpack(jnp.take(self.rows, row, axis=0, mode="clip"), self.capacity)
        out = attention(q, k, v, Mask(q_positions=slots, window=window, pairs=pairs[:, None]), scale=scale)
        missing = valid & ((row < 0) | (row >= self.count[1]))
        return jnp.where(missing[:, :, None, None], jnp.asarray(jnp.nan, out.dtype), out), self


def open_cache(
    geometry: Geometry, config: DecoderConfig, *, batch: int = 1, capacity: int, dtype: DType | None = None
) -> Any:
    """An empty cache for a geometry.

    Args:
        geometry: which earlier tokens a token attends to.
        config: of the model.
        batch: B.
        capacity: tokens per row, questions and answers included.
        dtype: of keys and values; None takes the compute dtype.

    Returns:
        `DenseCache`, `SparseCache` for geometries that are read by blocks, else `StreamedCache`.

    Raises:
        ValueError: a capacity below 1.
    """
    if isinstance(geometry, ProbeGeometry | BlockSharedGeometry):
        return SparseCache.open(geometry, config, batch=batch, capacity=capacity, dtype=dtype)
    sizes = config.num_layers, batch, capacity, config.num_kv_heads, config.head_width
    dtype = dtype or config.compute_dtype
    if isinstance(geometry, DenseGeometry):
        return DenseCache.init(*sizes, dtype)
    return StreamedCache.around(KVCache.init(*sizes, dtype), geometry)


def geometry_attention(geometry: Geometry, *, chunk: int = 1024) -> AttentionFn:
    """Attention of a whole sequence to itself, for tests, training and measurements of some thousands of tokens.

    The packed rows, T²/8 bytes, become a constant of the program, hence the limit; read longer texts through
    `open_cache`. Rows are unpacked one chunk at a time. Gradients are those of the attention underneath.

    Args:
        geometry: one with `rows`; its row t is for query t.
        chunk: queries whose rows are unpacked at a time.

    Returns:
        An `AttentionFn` for T = S queries and keys; a mask narrows further.
    """

    @functools.lru_cache(maxsize=1)
    def packed(length: int) -> np.ndarray:
        return geometry.rows(0, length)

    def attend(q, k, v, mask=None, *, scale=None, return_lse=False):
        (B, T, N, H), S = q.shape, k.shape[1]
        limit = min(geometry.length, _LARGEST_TABLE)
        if T != S or limit < T:
            raise ValueError(
                f"{T} queries and {S} keys: this takes whole sequences of up to {limit} tokens; read longer ones in "
                "chunks through open_cache."
            )
        mask = Mask() if mask is None else mask
        mask.validate(T, S, B, N)
        size = min(chunk, T)
        starts = jnp.arange(0, T, size, dtype=jnp.int32)
        rows = np.zeros((starts.size * size, -(-geometry.length // 8)), np.uint8)
        rows[:T] = packed(T)
        padded = jnp.pad(q, ((0, 0), (0, starts.size * size - T), (0, 0), (0, 0)))

        def part(inputs):
            start, rows, q = inputs
            index = start + jnp.arange(size, dtype=jnp.int32)
            meet = mask.block(index, jnp.arange(S, dtype=jnp.int32), T, S) & _unpack(rows, S)[None, None]
            return attention(q, k, v, Mask(causal=False, pairs=meet), scale=scale, return_lse=True)

        queries = padded.reshape(B, starts.size, size, N, H).swapaxes(0, 1)
        found = lax.map(part, (starts, jnp.asarray(rows).reshape(starts.size, size, -1), queries))
        out, lse = (x.swapaxes(0, 1).reshape(B, -1, *x.shape[3:])[:, :T] for x in found)
        return (out, lse) if return_lse else out

    return attend


class _Walks:
    """Streams left where the last chunk ended, so that whoever reads on from there skips nothing."""

    def __init__(self, most: int):
        self._most, self._lock, self._streams = most, threading.Lock(), []

    @contextlib.contextmanager
    def at(self, geometry: PublishedGeometry, row: int) -> Iterator[MaskStream]:
        with self._lock:
            before = [stream for stream in self._streams if stream.geometry == geometry and stream.row <= row]
            stream = max(before, key=lambda stream: stream.row, default=None)
            if stream is not None:
                self._streams.remove(stream)
        if stream is None:
            stream = MaskStream(geometry)
        stream.seek(row)
        yield stream
        with self._lock:
            self._streams = [*self._streams, stream][-self._most :]


_WALKS = _Walks(most=4)


def stream_at(geometry: PublishedGeometry, row: int) -> contextlib.AbstractContextManager[MaskStream]:
    """Lends a stream that stands at a row, and keeps it where it is left.

    Args:
        geometry: what to walk along.
        row: 0 … T.

    Returns:
        A context manager.
    """
    return _WALKS.at(geometry, row)


def _packed(geometry: Geometry, start: int, stop: int) -> np.ndarray:
    if not isinstance(geometry, PublishedGeometry):
        return geometry.rows(start, stop)
    with stream_at(geometry, start) as stream:
        return stream.take(stop - start)


def _round_up(rows: int) -> int:
    return 1 << max(rows - 1, _SMALLEST_CHUNK - 1).bit_length()


def _unpack(rows: Array, length: int) -> Array:
    """uint8 [..., ceil(S/8)] -> bool [..., S]."""
    return jnp.unpackbits(rows, axis=-1)[..., :length].astype(bool)
