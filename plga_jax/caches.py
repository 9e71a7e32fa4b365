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
        slots = jnp.where(valid, slots, self.capacity)
        rows = jnp.arange(k.shape[0], dtype=jnp.int32)[:, None]

        def write(held, new):
            return held.at[layer, rows, slots].set(new.astype(held.dtype), mode="drop")

        return dataclasses.replace(self, k=write(self.k, k), v=write(self.v, v))

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
        k = lax.dynamic_index_in_dim(self.k, layer, keepdims=False).astype(q.dtype)
        v = lax.dynamic_index_in_dim(self.v, layer, keepdims=False).astype(q.dtype)
        return attention(q, k, v, Mask(q_positions=slots, window=window), scale=scale), self

    def advance(self, valid: Array) -> Self:
        """Counts the tokens just appended to every layer.

        Args:
            valid: bool [B, T].

        Returns:
            The cache with `length` moved on.
        """
        return dataclasses.replace(self, length=self.length + jnp.sum(valid, axis=1, dtype=jnp.int32))
