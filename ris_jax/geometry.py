"""Which earlier tokens a token attends to.

A `Geometry` is a value: frozen, hashable, JSON-able, without an array in it. Masks come from it by chunks of packed
rows, so the whole T×T table is never held. What every geometry has:

    length                  T, the window it is made for
    rows(start, stop)       uint8 [stop - start, ceil(T/8)], bit c of row r (`np.packbits` order): query r sees key c
    chunks(size)            the same, consecutively; where rows are drawn in order this is the fast way
    share()                 real density expected: pairs over the T(T+1)/2 causal ones
    union(rows)             for single rows, the sorted keys
    to_config, from_config, fingerprint

No geometry lets a query see a later key, and none leaves it without one: it sees itself. `PublishedGeometry` is the
published one, bit for bit; `patterns.py` holds patterns to compare with, `block_shared.py` our own sampled one.

A window of `local` keys counts the query itself, here as everywhere in this project. The published geometry alone
keeps its own convention: `local` keys *before* the query, so one key more.
"""

import abc
import dataclasses
import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Self

import numpy as np

from ris_jax.density import ExpectedUnion, expected_union, fixed_keys, union_probability
from ris_jax.mask_stream import MaskStream
from ris_jax.packed import pack_rows, unpack_rows
from ris_jax.streams import MAX_PERMUTATION

_LARGEST_MASK = 2**14
"""Longest window whose whole mask is handed out as one array (256 MiB)."""

CLIQUE_SHARE = 0.01
"""What the papers' sweeps give to the clique before the samples get any, of a total nominal density."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry(abc.ABC):
    """What all geometries have; see the module.

    Attributes:
        length: T, at least 1.
    """

    kind: ClassVar[str]
    """Its name in configs."""

    length: int

    _kinds: ClassVar[dict[str, type["Geometry"]]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Geometry._kinds[cls.kind] = cls

    def __post_init__(self):
        """Checks the length.

        Raises:
            ValueError: a length below 1.
        """
        self._check_whole("length", 1)

    @abc.abstractmethod
    def _fill(self, allowed: np.ndarray, start: int) -> None:
        """Marks the keys of some rows, causal or not: later ones are taken out again.

        Args:
            allowed: bool [rows, T], all False; changed in place.
            start: the first of the rows.
        """

    @abc.abstractmethod
    def share(self) -> float:
        """Real density: pairs over the T(T+1)/2 causal ones; expected over seeds where there is chance in it."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The mask of some consecutive rows.

        Args:
            start: first row.
            stop: exclusive end.

        Returns:
            uint8 [stop - start, ceil(T/8)], bits in the order of `np.packbits`.

        Raises:
            ValueError: rows outside of 0 … T.
        """
        self._check_rows(start, stop)
        return pack_rows(self.length, start, stop, self._fill)

    def chunks(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """The mask by consecutive chunks of rows.

        Args:
            size: rows of a chunk; the last may have fewer.
            start: first row.
            stop: exclusive end; None means T.

        Yields:
            uint8 [rows, ceil(T/8)], as `rows` gives them.

        Raises:
            ValueError: size below 1, or rows outside of 0 … T.
        """
        for first, end in self._spans(size, start, stop):
            yield self.rows(first, end)

    def union(self, rows: Sequence[int] | np.ndarray, width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The keys of single rows as sorted lists.

        Args:
            rows: R rows, in any order.
            width: columns of the result; None means as many as the longest list needs.

        Returns:
            Keys int32 [R, width], each row ascending and filled up with -1, and their counts int32 [R].

        Raises:
            ValueError: a row outside of 0 … T-1, or a list longer than `width`.
        """
        rows = np.asarray(rows, np.int64).reshape(-1)
        lists = self._key_lists(rows)
        counts = np.array([len(keys) for keys in lists], np.int32)
        longest = int(counts.max(initial=0))
        width = longest if width is None else width
        if longest > width:
            raise ValueError(f"width = {width} is too small: row {rows[counts.argmax()]} sees {longest} keys.")
        indices = np.full((len(rows), width), -1, np.int32)
        for line, keys in zip(indices, lists):
            line[: len(keys)] = keys
        return indices, counts

    def mask(self) -> np.ndarray:
        """The whole mask, for tests and pictures of small windows.

        Returns:
            bool [T, T].

        Raises:
            ValueError: a window beyond 16384, whose mask no longer is small.
        """
        if self.length > _LARGEST_MASK:
            raise ValueError(
                f"A mask of {self.length}² pairs is too large; take rows or chunks beyond {_LARGEST_MASK}."
            )
        return unpack_rows(np.concatenate(list(self.chunks(256))), self.length)

    def to_config(self) -> dict:
        """A JSON-able description, for `from_config`."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @classmethod
    def from_config(cls, config: dict) -> "Geometry":
        """The geometry that a config describes.

        Args:
            config: what `to_config` gave, of any kind of geometry (their modules must have been imported).

        Returns:
            The geometry.

        Raises:
            ValueError: not a config, an unknown kind, unknown or missing fields, or fields out of range.
        """
        kind = config.get("kind") if isinstance(config, dict) else None
        if kind not in cls._kinds:
            raise ValueError(f"Not a geometry: kind {kind!r}; known kinds are {', '.join(sorted(cls._kinds))}.")
        fields = {name: value for name, value in config.items() if name != "kind"}
        try:
            return cls._kinds[kind](**fields)
        except TypeError as error:
            raise ValueError(f"Not a geometry of kind {kind!r}: {error}.") from None

    def fingerprint(self) -> str:
        """What a cache on disk is keyed by: the SHA-256 of the config in canonical JSON, 64 hex digits."""
        text = json.dumps(self.to_config(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def replace(self, **changes) -> Self:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def _key_lists(self, rows: np.ndarray) -> list[np.ndarray]:
        self._check_each(rows)
        return [np.flatnonzero(unpack_rows(self.rows(r, r + 1), self.length)[0]) for r in rows.tolist()]

    def _spans(self, size: int, start: int, stop: int | None) -> Iterator[tuple[int, int]]:
        stop = self.length if stop is None else stop
        self._check_rows(start, stop)
        if size < 1:
            raise ValueError(f"size = {size} must be at least 1 row.")
        return ((first, min(first + size, stop)) for first in range(start, stop, size))

    def _check_rows(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"Rows {start} … {stop} must be within 0 … {self.length}, start first.")

    def _check_each(self, rows: np.ndarray) -> None:
        if rows.size and not 0 <= rows.min() <= rows.max() < self.length:
            raise ValueError(f"Rows {rows.min()} … {rows.max()} must be within 0 … {self.length - 1}.")

    def _check_whole(self, name: str, low: int, high: int | None = None) -> None:
        """Makes a field a Python integer, so that configs are equal whatever kind of integer came in."""
        given = getattr(self, name)
        try:
            value = operator.index(given)
        except TypeError:
            raise ValueError(f"{name} = {given!r} must be an integer.") from None
        if isinstance(given, bool) or value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"within {low} … {high}"
            raise ValueError(f"{name} = {given!r} must be {limits}.")
        object.__setattr__(self, name, value)


def fit_share(make: Callable[[int], Geometry], share: float, *, low: int, high: int) -> Geometry:
    """The densest of a family of geometries that stays within a real density.

    Args:
        make: the geometry for an integer; the more, the denser.
        share: real density that may be spent, 0 … 1.
        low: smallest integer.
        high: largest integer.

    Returns:
        `make(i)` for the largest i within low … high with `make(i).share() <= share`.

    Raises:
        ValueError: a share outside of 0 … 1, or one that even `make(low)` exceeds.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share = {share} must be within 0 … 1; it is a part of the causal pairs.")
    geometry = make(low)
    if geometry.share() > share:
        raise ValueError(
            f"A real share of {share:.2%} is too little: window, anchors and the least of the rest take "
            f"{geometry.share():.2%} of the causal pairs. Ask for more, or make window or anchors smaller."
        )
    while low < high:
        middle = (low + high + 1) // 2
        candidate = make(middle)
        if candidate.share() <= share:
            low, geometry = middle, candidate
        else:
            high = middle - 1
    return geometry


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedGeometry(Geometry):
    """The published geometry: row r sees key c <= r if c is in its window, an anchor, or drawn by one of S seeds.

    Seed i has its own stream, `Stream(base_seed + i)`. Each row draws n keys from all T with repetition, later keys
    included; these are dropped, so that row r keeps about (r+1)/T of them. In the structural mode the stream first
    gives a permutation of the positions, cut into blocks of B; a row then also sees its whole block. These cliques are
    random classes over the whole window: nothing about them is local.

    To leave parts out: `local=0` (the row itself stays), `anchors=0`, `block_max=0` (cliques of one).

    Attributes:
        mode: "stochastic" or "structural".
        seeds: S, at least 1.
        density: d, nominal, 0 … 1: n = max(1, trunc(T·d)), so that even 0 draws one key.
        local: keys before the row; with itself it sees local + 1.
        anchors: keys at the start; cut to T.
        base_seed: of the first stream, modulo 2**32.
        block_max: the clique's size is min(trunc(T/10), block_max), at least 1. None means 2048, or what `budget`
            decides.
        budget: of the structural mode. "additive": cliques come on top of d, as the published program has it. "total":
            they are a part of d, as the papers' sweeps have it: up to 1 % of T goes to the clique, the rest is drawn.
    """

    kind: ClassVar[str] = "published"

    mode: str = "stochastic"
    seeds: int = 1
    density: float = 0.01
    local: int = 1024
    anchors: int = 256
    base_seed: int = 42
    block_max: int | None = None
    budget: str = "additive"

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ValueError: a field out of range, or a `block_max` where the budget decides it.
        """
        super().__post_init__()
        self._check_whole("length", 1, MAX_PERMUTATION - 1)
        self._check_whole("seeds", 1)
        self._check_whole("local", 0)
        self._check_whole("anchors", 0)
        self._check_whole("base_seed", -(2**63), 2**64 - 1)
        if self.mode not in ("stochastic", "structural"):
            raise ValueError(f"mode = {self.mode!r} is unknown; choose 'stochastic' or 'structural'.")
        if self.budget not in ("additive", "total"):
            raise ValueError(f"budget = {self.budget!r} is unknown; choose 'additive' or 'total'.")
        if isinstance(self.density, bool) or not isinstance(self.density, (int, float, np.integer, np.floating)):
            raise ValueError(f"density = {self.density!r} must be a number.")
        object.__setattr__(self, "density", float(self.density))
        if not 0 <= self.density <= 1:
            raise ValueError(f"density = {self.density} must be within 0 … 1; one percent is 0.01.")
        if self.block_max is not None:
            self._check_whole("block_max", 0)
            if self.budget == "total":
                raise ValueError(f"block_max = {self.block_max} has no use: budget='total' decides the clique's size.")

    @property
    def num_samples(self) -> int:
        """n, keys that one seed draws for one row."""
        drawn = self.density
        if self.mode == "structural" and self.budget == "total":
            # Rounded: 0.03 - 0.01 must give the 0.02 that the sweeps wrote down.
            drawn = max(0.0, round(self.density - CLIQUE_SHARE, 12))
        return max(1, int(self.length * drawn))

    @property
    def block_size(self) -> int:
        """B, positions of a clique; 0 in the stochastic mode."""
        if self.mode == "stochastic":
            return 0
        largest = 2048 if self.block_max is None else self.block_max
        if self.budget == "total":
            largest = round(min(self.density, CLIQUE_SHARE) * self.length)
        return max(1, min(int(self.length * 0.1), largest))

    def expected(self) -> ExpectedUnion:
        """Sizes of the rows' key sets, expected over seeds."""
        probability = union_probability(self.length, samples=self.num_samples, clique=self.block_size, seeds=self.seeds)
        return expected_union(self.length, local=self.local + 1, anchors=self.anchors, probability=probability)

    def share(self) -> float:
        """Real density, expected over seeds."""
        return self.expected().share

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The mask of some rows. Each call skips its way to `start`; `chunks` and `MaskStream` do so once.

        Args:
            start: first row.
            stop: exclusive end.

        Returns:
            uint8 [stop - start, ceil(T/8)].

        Raises:
            ValueError: rows outside of 0 … T.
        """
        self._check_rows(start, stop)
        return MaskStream(self, start).take(stop - start)

    def chunks(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """The mask by consecutive chunks of rows, from streams that are kept alive between them.

        Args:
            size: rows of a chunk; the last may have fewer.
            start: first row.
            stop: exclusive end; None means T.

        Yields:
            uint8 [rows, ceil(T/8)].

        Raises:
            ValueError: size below 1, or rows outside of 0 … T.
        """
        spans = self._spans(size, start, stop)
        stream = MaskStream(self, start)
        for first, end in spans:
            yield stream.take(end - first)

    def samples(self, row: int) -> np.ndarray:
        """The keys that a row owes to its seeds.

        Args:
            row: 0 … T-1.

        Returns:
            int32 [count], ascending, causal; some may be local, anchors or the row itself.

        Raises:
            ValueError: a row outside of the geometry.
        """
        self._check_each(np.array([row]))
        keys = np.unique(MaskStream(self, row).samples(1))
        return keys[(keys >= 0) & (keys <= row)].astype(np.int32)

    def anchor_row(self, row: int) -> np.ndarray:
        """The keys that decoding keeps from its first row on: anchors, samples and the row itself, not the window.

        Args:
            row: the position of the first query; beyond the window the last row stands in, as published.

        Returns:
            int32 [count], ascending.

        Raises:
            ValueError: a negative row.
        """
        if row < 0:
            raise ValueError(f"row = {row} must be at least 0.")
        row = min(row, self.length - 1)
        anchors = np.arange(min(self.anchors, row + 1), dtype=np.int32)
        return np.union1d(np.append(anchors, np.int32(row)), self.samples(row)).astype(np.int32)

    def fixed_count(self, row: int) -> int:
        """How many keys a row has by window and anchors.

        Args:
            row: 0 … T-1.

        Returns:
            A count of keys, the row itself included.
        """
        return int(fixed_keys(row, local=self.local + 1, anchors=self.anchors))

    def _fill(self, allowed: np.ndarray, start: int) -> None:
        MaskStream(self, start).fill(allowed, start)

    def _key_lists(self, rows: np.ndarray) -> list[np.ndarray]:
        self._check_each(rows)
        lists, stream = {}, MaskStream(self)
        for row in sorted(set(rows.tolist())):  # ascending: one walk along the streams
            stream.seek(row)
            lists[row] = np.flatnonzero(unpack_rows(stream.take(1), self.length)[0])
        return [lists[row] for row in rows.tolist()]
