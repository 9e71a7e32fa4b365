"""Caches: things that can be appended to and attended to, with static shapes."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax

from plga_jax.array_types import Array, AttentionFn, DType
from plga_jax.ops.masks import Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer, at positions 0 … length−1 of each row.

    One call of a model appends to each layer at the same `slots`, then moves `length` on once with `advance`. Layers
    share one array, so that a scan over layers carries the cache and writes in place instead of copying it.

    Attributes:
        k: rotated keys, [L, B, S, K, H], S the capacity.
        v: values, [L, B, S, K, H].
        length: int32 [B], tokens held per row. Beyond S the row has overflowed: see `overflowed`.
    """

    k: Array
    v: Array
    length: Array

    @classmethod
    def init(cls, layers: int, batch: int, capacity: int, heads: int, width: int, dtype: DType) -> Self:
        """An empty cache.

        Args:
            layers: L.
            batch: B.
            capacity: S, tokens per row; 1 or more.
            heads: K.
            width: H.
            dtype: of keys and values.

        Returns:
            A cache of length 0.

        Raises:
            ValueError: the capacity is below 1.
        """
        if capacity < 1:
            raise ValueError(f"A cache needs room: capacity {capacity} must be at least 1.")
        shape = (layers, batch, capacity, heads, width)
        return cls(
            k=jnp.zeros(shape, dtype),
            v=jnp.zeros(shape, dtype),
            length=jnp.zeros((batch,), jnp.int32),
        )

    @classmethod
    def abstract(cls, *args, **kwargs) -> Self:
        """The shapes of `init(*args, **kwargs)`, without memory."""
        return jax.eval_shape(lambda: cls.init(*args, **kwargs))

    @property
    def capacity(self) -> int:
        """S, tokens per row."""
        return self.k.shape[2]

    @property
    def overflowed(self) -> Array:
        """bool [B]: rows that were given more tokens than they can hold. What they attend to is incomplete."""
        return self.length > self.capacity

    def slots(self, valid: Array) -> Array:
        """Where new tokens go, which is also their position.

        Args:
            valid: bool [B, T], False for padding, wherever it stands.

        Returns:
            int32 [B, T]: consecutive from `length` over a row's valid tokens. Padding gets the position of the valid
            token before it; `append` needs `valid` as well, and drops it.
        """
        return self.length[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1

    def append(self, layer: Array, k: Array, v: Array, slots: Array, valid: Array) -> Self:
        """Writes new keys and values into one layer; `length` stays until `advance`.

        Args:
            layer: int, which layer.
            k: [B, T, K, H].
            v: [B, T, K, H].
            slots: int32 [B, T], from `slots`.
            valid: bool [B, T]; what is not valid is not written.

        Returns:
            The cache with those entries. Entries beyond the capacity are dropped, never clamped onto held ones.
        """
        return self._write(layer, slots, valid, k=k, v=v)

    def _write(self, layer: Array, slots: Array, valid: Array, **entries: Array) -> Self:
        """Replaces entries of the fields that are named."""
        slots = jnp.where(valid, slots, self.capacity)
        rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]

        def write(held, new):
            return held.at[layer, rows, slots].set(new.astype(held.dtype), mode="drop")

        return dataclasses.replace(self, **{name: write(getattr(self, name), new) for name, new in entries.items()})

    def held(self, layer: Array, dtype: DType) -> tuple[Array, Array]:
        """What one layer holds.

        Args:
            layer: int, which layer.
            dtype: wanted.

        Returns:
            Keys and values, [B, S, K, H].
        """
        k, v = (lax.dynamic_index_in_dim(array, layer, keepdims=False) for array in (self.k, self.v))
        return k.astype(dtype), v.astype(dtype)

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
        """Causal attention of the queries just appended over what one layer holds.

        Args:
            layer: int, which layer.
            q: rotated queries, with the operator folded in, [B, T, N, H].
            slots: int32 [B, T], from `slots`: each query sees keys up to its own.
            valid: bool [B, T], False for padding, whose results mean nothing.
            attention: computes it.
            scale: of the scores.
            window: keys that a query sees, itself included; None is all.

        Returns:
            [B, T, N, H], and the cache: other caches note what the queries asked for, this one is unchanged.
        """
        k, v = self.held(layer, q.dtype)
        return attention(q, k, v, Mask(q_positions=slots, window=window), scale=scale), self

    def advance(self, valid: Array) -> Self:
        """Counts the tokens just appended to every layer.

        Args:
            valid: bool [B, T].

        Returns:
            The cache with `length` moved on.
        """
        return dataclasses.replace(self, length=self.length + jnp.sum(valid, axis=1, dtype=jnp.int32))


_STEPS = 127
"""Steps of an int8 on either side of 0; −128 is not used, so that a row and its negative are kept alike."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8KVCache(KVCache):
    """Keys and values as int8, with a scale for each token and head.

    An entry x of a head is kept as round(127 x / m), m the largest magnitude of the head's H entries, so that it is off
    by m / 254 at most. With H = 64 and a float32 scale that is 68 bytes for 256 of float32, or for 128 of bfloat16.

    Attributes:
        k: int8 [L, B, S, K, H]; likewise `v`.
        k_scale: float32 m / 127, [L, B, S, K]; likewise `v_scale`.
    """

    k_scale: Array
    v_scale: Array

    @classmethod
    def init(cls, layers: int, batch: int, capacity: int, heads: int, width: int, dtype: DType = jnp.int8) -> Self:
        """An empty cache; arguments as `KVCache.init`, with `dtype` int8, the only one."""
        if dtype != jnp.int8:
            raise ValueError(f"An int8 cache keeps int8, not {jnp.dtype(dtype).name}; leave dtype out.")
        plain = KVCache.init(layers, batch, capacity, heads, width, dtype)
        ones = jnp.ones(plain.k.shape[:-1], jnp.float32)
        return cls(k=plain.k, v=plain.v, length=plain.length, k_scale=ones, v_scale=ones)

    def append(self, layer: Array, k: Array, v: Array, slots: Array, valid: Array) -> Self:
        """Rounds and writes new keys and values; see `KVCache.append`."""
        (k, k_scale), (v, v_scale) = _to_int8(k), _to_int8(v)
        return self._write(layer, slots, valid, k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    def held(self, layer: Array, dtype: DType) -> tuple[Array, Array]:
        """What one layer holds, up to the rounding; see `KVCache.held`."""
        k, v = super().held(layer, jnp.float32)
        scales = (lax.dynamic_index_in_dim(array, layer, keepdims=False) for array in (self.k_scale, self.v_scale))
        return tuple((x * scale[..., None]).astype(dtype) for x, scale in zip((k, v), scales))


def _to_int8(x: Array) -> tuple[Array, Array]:
    """Nearest int8 [..., H] and float32 scales [...]."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / _STEPS
    scale = jnp.where(scale > 0, scale, 1)
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale
