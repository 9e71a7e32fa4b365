"""A walk along the rows of the published geometry, with its random generators alive between chunks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ris_jax.packed import mark_fixed, pack_rows
from ris_jax.streams import Stream, outputs_per_integer

if TYPE_CHECKING:
    from ris_jax.geometry import PublishedGeometry


class MaskStream:
    """Walks along the rows of a `PublishedGeometry` with its S generators alive. Mutable.

    It holds 2.5 KB per seed and, in the structural mode, 8 bytes per seed and position, whatever the number of rows.
    """

    def __init__(self, geometry: PublishedGeometry, row: int = 0):
        """Seeds the generators and skips to a row.

        Args:
            geometry: what to walk along.
            row: where to begin, 0 … T.

        Raises:
            ValueError: a row outside of 0 … T.
        """
        self.geometry = geometry
        self._cliques = _cliques(geometry.base_seed, geometry.seeds, geometry.length, geometry.block_size)
        self._restart()
        self.seek(row)

    @property
    def row(self) -> int:
        """The row that comes next."""
        return self._row

    def seek(self, row: int) -> None:
        """Goes to a row: forward by skipping, backward by seeding anew.

        Args:
            row: 0 … T.

        Raises:
            ValueError: a row outside of 0 … T.
        """
        if not 0 <= row <= self.geometry.length:
            raise ValueError(f"row = {row} must be within 0 … {self.geometry.length}.")
        if row < self._row:
            self._restart()
        outputs = (row - self._row) * self.geometry.num_samples * outputs_per_integer(self.geometry.length)
        for stream in self._streams:
            stream.skip(outputs)
        self._row = row

    def take(self, rows: int) -> np.ndarray:
        """The mask of the next rows.

        Args:
            rows: how many.

        Returns:
            uint8 [rows, ceil(T/8)].

        Raises:
            ValueError: more rows than are left.
        """
        self._check_left(rows)
        return pack_rows(self.geometry.length, self._row, self._row + rows, self.fill)

    def samples(self, rows: int) -> np.ndarray:
        """What the seeds give the next rows, as it is drawn: unsorted, with repetition, later keys included.

        Args:
            rows: how many.

        Returns:
            int32 [rows, S·(B+n)]: seed by seed, the members of the clique, then the samples; -1 where the last clique
            has no member.

        Raises:
            ValueError: more rows than are left.
        """
        self._check_left(rows)
        keys = np.concatenate(list(self._draw(rows)), axis=1)
        return np.where(keys == self.geometry.length, -1, keys).astype(np.int32)

    def fill(self, allowed: np.ndarray, start: int) -> None:
        """Marks the keys of the next rows, later ones included.

        Args:
            allowed: bool [rows, T], all False; changed in place.
            start: the first of the rows; must be the row that comes next.
        """
        geometry = self.geometry
        # One column more, for the members that the last clique lacks.
        width = geometry.length + 1
        marked = np.zeros((len(allowed), width), bool)
        offsets = (np.arange(len(allowed)) * width)[:, None]
        for keys in self._draw(len(allowed)):
            marked.reshape(-1)[(keys + offsets).reshape(-1)] = True
        np.copyto(allowed, marked[:, :-1])
        mark_fixed(allowed, start, local=geometry.local + 1, anchors=geometry.anchors)

    def _draw(self, rows: int) -> Iterator[np.ndarray]:
        """Keys [rows, count], a clique and a draw for each seed in turn; key T stands for none."""
        T, n = self.geometry.length, self.geometry.num_samples
        span = slice(self._row, self._row + rows)
        self._row += rows
        for stream, (block_of, members) in zip(self._streams, self._cliques):
            if members.size:
                yield members[block_of[span]]
            yield stream.integers(T, rows * n).reshape(rows, n)

    def _restart(self) -> None:
        geometry = self.geometry
        self._row = 0
        self._streams = [Stream(geometry.base_seed + seed) for seed in range(geometry.seeds)]
        if geometry.block_size:
            for stream in self._streams:
                stream.skip(geometry.length - 1)  # the permutation, which `_cliques` holds

    def _check_left(self, rows: int) -> None:
        left = self.geometry.length - self._row
        if not 0 <= rows <= left:
            raise ValueError(f"{rows} rows were asked for, but {left} are left after row {self._row}; seek first.")


@functools.lru_cache(maxsize=2)
def _cliques(base_seed: int, seeds: int, length: int, block: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """For each seed: the block of each position, int32 [T], and the members of each block, int32 [blocks, B]."""
    if not block:
        return ((np.empty(0, np.int32), np.empty((0, 0), np.int32)),) * seeds
    blocks = -(-length // block)
    cliques = []
    for seed in range(base_seed, base_seed + seeds):
        order = Stream(seed).permutation(length)
        block_of = np.empty(length, np.int32)
        block_of[order] = np.arange(length, dtype=np.int32) // np.int32(block)
        members = np.full(blocks * block, length, np.int32)
        members[:length] = order
        cliques.append((block_of, members.reshape(blocks, block)))
    return tuple(cliques)
