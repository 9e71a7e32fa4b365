"""Our own sampled geometry: the rows of a tile share one list of samples, so that a tile is one dense product.

Samples of each row's own, as published, cannot make tiles empty: with probability p per pair, a 64×64 tile stays
untouched with probability (1-p)^4096, which is 0. Sharing the list among the rows of a tile costs nothing in density
and turns the sampled part into `[tile, H] @ [H, r]`.

The list of a tile is drawn from the keys before the tile that some row of it does not see anyway (by window or
anchors). That span is cut into r equal strata, and one key is drawn in each: distinct by construction, in order, in
O(r) work wherever the tile stands. Draws are counter-based: any tile of any layer on any device, in any order.
"""

import dataclasses
import functools
import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array, PRNGKey
from ris_jax.density import causal_pairs
from ris_jax.geometry import Geometry, fit_share
from ris_jax.packed import mark_fixed, pack_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSharedGeometry(Geometry):
    """Window, anchors, and for each tile of queries r distinct random keys before it.

    Row t sees key c <= t if t - c < local, c < anchors, or c is in the list of the tile of t.

    Attributes:
        budget: r, keys in the list of a tile; a multiple of `block`. Early tiles have fewer to choose from.
        local: keys of the window, the row itself included; at least 1.
        anchors: keys at the start that every row sees.
        tile: rows that share a list; a multiple of `block`. Should be a multiple of 8, or 128 on a GPU or TPU.
        block: 1 for single keys; more: aligned blocks of so many consecutive keys are drawn whole.
        per_layer: whether each layer has lists of its own, so that depth widens what is seen.
        seed: of the draws.
    """

    kind: ClassVar[str] = "block_shared"

    budget: int
    local: int = 1024
    anchors: int = 256
    tile: int = 128
    block: int = 1
    per_layer: bool = True
    seed: int = 0

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ValueError: a field out of range, or a tile or budget that is not of whole blocks.
        """
        super().__post_init__()
        self._check_whole("length", 1, 2**31 - 1)
        self._check_whole("budget", 0, 2**31 - 1)
        self._check_whole("local", 1)
        self._check_whole("anchors", 0)
        self._check_whole("tile", 1)
        self._check_whole("block", 1)
        self._check_whole("seed", 0, 2**32 - 1)
        if not isinstance(self.per_layer, bool):
            raise ValueError(f"per_layer = {self.per_layer!r} must be True or False.")
        for name in ("tile", "budget"):
            if getattr(self, name) % self.block:
                raise ValueError(f"{name} = {getattr(self, name)} must be a multiple of block = {self.block}.")

    @classmethod
    def with_log_budget(cls, length: int, *, factor: float, **fields) -> Self:
        """A budget that grows as the logarithm of the window: work O(T log T).

        Args:
            length: T.
            factor: c in r = c·log2(T), rounded to whole blocks.
            **fields: the others.

        Returns:
            The geometry.

        Raises:
            ValueError: a negative factor, or fields out of range.
        """
        return cls._rounded(length, _at_least_zero("factor", factor) * math.log2(length), fields)

    @classmethod
    def with_density(cls, length: int, *, density: float, **fields) -> Self:
        """A budget that is a part of the window, as the published density is: work O(T²), whatever the part.

        Args:
            length: T.
            density: d in r = d·T, 0 … 1, rounded to whole blocks.
            **fields: the others.

        Returns:
            The geometry.

        Raises:
            ValueError: a density outside of 0 … 1, or fields out of range.
        """
        if _at_least_zero("density", density) > 1:
            raise ValueError(f"density = {density} must be within 0 … 1; one percent is 0.01.")
        return cls._rounded(length, density * length, fields)

    @classmethod
    def with_share(cls, length: int, *, share: float, **fields) -> Self:
        """The largest budget whose real density stays within a given one: you name what you can afford.

        Args:
            length: T.
            share: of the causal pairs, 0 … 1.
            **fields: the others.

        Returns:
            The geometry.

        Raises:
            ValueError: window and anchors alone take more, or fields out of range.
        """
        block = fields.get("block", 1)
        return fit_share(
            lambda blocks: cls(length=length, budget=blocks * block, **fields),
            share,
            low=0,
            high=-(-length // max(block, 1)),
        )

    @property
    def num_tiles(self) -> int:
        """Tiles of the window; the last may be cut."""
        return -(-self.length // self.tile)

    def samples(self, tile_index: Array | int, layer: Array | int = 0) -> Array:
        """The keys that the rows of a tile share.

        Args:
            tile_index: int32 [], which tile; may be traced. Tiles at and beyond `num_tiles` continue the rule, for
                decoding past the window.
            layer: int32 [], which layer; may be traced. Any index that is to have lists of its own will do, such as
                layer·K + kv head. Ignored unless `per_layer`.

        Returns:
            int32 [r], ascending and distinct, all before the tile, filled up with -1 where there are fewer keys to
            choose from. Some rows may see some of them by window too, and anchors only when blocks cut into them.
        """
        return self._keys(self.sample_blocks(tile_index, layer))

    def sample_blocks(self, tile_index: Array | int, layer: Array | int = 0) -> Array:
        """The same as `samples`, by blocks.

        Args:
            tile_index: int32 [], as in `samples`.
            layer: int32 [], as in `samples`.

        Returns:
            int32 [r / block]: block i is keys i·block … (i+1)·block - 1; -1 where there are fewer to choose from.
        """
        return self._draw(jax.random.key(self.seed, impl="threefry2x32"), tile_index, layer)

    def expected_row(self, row: np.ndarray | int) -> np.ndarray:
        """How many keys a row sees, expected over the draws.

        Args:
            row: integers.

        Returns:
            float64, shaped as `row`; exact.
        """
        row = np.asarray(row, np.int64)
        high = np.maximum(row + 1 - self.local, 0)
        low = np.minimum(self.anchors, high)
        fixed = np.minimum(row + 1, self.local) + low
        if not self.budget:
            return fixed.astype(np.float64)
        first, total = self._candidates(row // self.tile)
        strata = np.minimum(total, self.budget // self.block)
        size, wider = np.divmod(total, np.maximum(strata, 1))

        def drawn_before(key):
            """Keys of the list expected below `key`: each stratum gives `block` keys, spread evenly over it."""
            x = np.clip(key / self.block - first, 0, total)
            within_wider = np.minimum(x, wider * (size + 1))
            return self.block * (within_wider / (size + 1) + (x - within_wider) / np.maximum(size, 1))

        return fixed + drawn_before(high) - drawn_before(low)

    def share(self) -> float:
        """Real density, expected over the draws; exact."""
        return float(self.expected_row(np.arange(self.length)).sum()) / causal_pairs(self.length)

    def rows(self, start: int, stop: int, layer: int = 0) -> np.ndarray:
        """The mask of some rows, on the host.

        Args:
            start: first row.
            stop: exclusive end.
            layer: which layer.

        Returns:
            uint8 [stop - start, ceil(T/8)].

        Raises:
            ValueError: rows outside of 0 … T.
        """
        self._check_rows(start, stop)
        return pack_rows(self.length, start, stop, functools.partial(self._fill, layer=layer))

    @classmethod
    def _rounded(cls, length: int, keys: float, fields: dict) -> Self:
        block = fields.get("block", 1)
        return cls(length=length, budget=round(keys / max(block, 1)) * block, **fields)

    def _candidates(self, tile_index):
        """The span of blocks that a tile draws from, (first, count), for NumPy and JAX integers alike."""
        # The last row of a tile does not see the keys below tile_end - local by window, and all rows come after the
        # keys below tile_start.
        end = tile_index * self.tile + min(0, self.tile - self.local)
        first = self.anchors // self.block
        return first, (-(-end // self.block) - first).clip(0)

    def _keys(self, blocks: Array) -> Array:
        first = blocks[:, None] * jnp.int32(self.block)
        keys = first + jnp.arange(self.block, dtype=jnp.int32)[None, :]
        return jnp.where(first < 0, jnp.int32(-1), keys).reshape(self.budget)

    def _draw(self, key: PRNGKey, tile_index: Array | int, layer: Array | int) -> Array:
        """`sample_blocks`, with the key of the geometry's seed given."""
        tile_index = jnp.asarray(tile_index, jnp.int32)
        layer = jnp.asarray(layer if self.per_layer else 0, jnp.int32)
        count = self.budget // self.block
        if not count:
            return jnp.zeros((0,), jnp.int32)
        first, total = self._candidates(tile_index)
        strata = jnp.minimum(total, jnp.int32(count))
        size, wider = jnp.divmod(total, jnp.maximum(strata, 1))
        # The first `wider` strata are one block wider than the others, which are `size` blocks each.
        index = jnp.arange(count, dtype=jnp.int32)
        start = index * size + jnp.minimum(index, wider)
        width = size + (index < wider).astype(jnp.int32)
        key = jax.random.fold_in(jax.random.fold_in(key, layer), tile_index)
        # The high half of a 64-bit product: exact integer arithmetic, so the same on every device and version, and
        # biased by width / 2**32 only.
        drawn = _multiply_high(jax.random.bits(key, (count,), jnp.uint32), width.astype(jnp.uint32))
        return jnp.where(index < strata, first + start + drawn.astype(jnp.int32), jnp.int32(-1))

    def _fill(self, allowed: np.ndarray, start: int, layer: int = 0) -> None:
        mark_fixed(allowed, start, local=self.local, anchors=self.anchors)
        key = jax.random.key(self.seed, impl="threefry2x32")
        for tile in range(start // self.tile, -(-(start + len(allowed)) // self.tile)):
            # Seeds differ in the key alone, so that all of them share one compiled program.
            keys = np.asarray(_list(self.replace(seed=0), key, np.int32(tile), np.int32(layer)))
            rows = slice(max(tile * self.tile - start, 0), (tile + 1) * self.tile - start)
            allowed[rows, keys[keys >= 0]] = True


@functools.partial(jax.jit, static_argnums=0)
def _list(geometry: BlockSharedGeometry, key: PRNGKey, tile_index: Array, layer: Array) -> Array:
    """The list of one tile, int32 [r]."""
    return geometry._keys(geometry._draw(key, tile_index, layer))


def _multiply_high(a: Array, b: Array) -> Array:
    """The high 32 bits of the 64-bit products of uint32 numbers, without 64-bit integers."""
    mask, shift = jnp.uint32(0xFFFF), jnp.uint32(16)
    a_high, a_low, b_high, b_low = a >> shift, a & mask, b >> shift, b & mask
    middle = a_high * b_low + ((a_low * b_low) >> shift)
    carry = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> shift) + (carry >> shift)


def _at_least_zero(name: str, value: float) -> float:
    if not value >= 0 or math.isinf(value):
        raise ValueError(f"{name} = {value} must be a finite number, at least 0.")
    return value
