"""Fixed and block-random patterns to compare a sampled geometry with, at equal real density."""

import dataclasses
from typing import ClassVar

import numpy as np

from ris_jax import density
from ris_jax.geometry import Geometry
from ris_jax.packed import mark_fixed


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseGeometry(Geometry):
    """Causal attention to everything."""

    kind: ClassVar[str] = "dense"

    def share(self) -> float:
        """Real density: 1."""
        return 1.0

    def _fill(self, allowed: np.ndarray, start: int) -> None:
        allowed[:] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowGeometry(Geometry):
    """A sliding window and sinks.

    Attributes:
        local: keys of the window, the row itself included; at least 1.
        anchors: keys at the start that every row sees.
    """

    kind: ClassVar[str] = "window"

    local: int = 1024
    anchors: int = 256

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ValueError: a field out of range.
        """
        super().__post_init__()
        self._check_whole("local", 1)
        self._check_whole("anchors", 0)

    def share(self) -> float:
        """Real density, exact."""
        fixed = density.fixed_pairs(self.length, local=self.local, anchors=self.anchors)
        return (fixed + self._expected_rest()) / density.causal_pairs(self.length)

    def _expected_rest(self) -> float:
        """Pairs beyond window and anchors, expected."""
        return 0.0

    def _free(self) -> tuple[np.ndarray, np.ndarray]:
        """For each row, the span [first, end) of keys that are neither anchors nor local; int64 [T] each."""
        end = np.maximum(np.arange(1, self.length + 1) - self.local, 0)
        return np.minimum(self.anchors, end), end

    def _fill(self, allowed: np.ndarray, start: int) -> None:
        mark_fixed(allowed, start, local=self.local, anchors=self.anchors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StridedGeometry(WindowGeometry):
    """A window, sinks, and every `stride`-th key counted back from the row (Child et al. 2019, strided).

    Attributes:
        stride: distance of the far keys; at least 1.
    """

    kind: ClassVar[str] = "strided"

    stride: int

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ValueError: a field out of range.
        """
        super().__post_init__()
        self._check_whole("stride", 1)

    def _expected_rest(self) -> float:
        first, end = self._free()
        phase = np.arange(self.length) % self.stride
        counts = [np.maximum(-(-(limit - phase) // self.stride), 0) for limit in (first, end)]
        return float((counts[1] - counts[0]).sum())

    def _fill(self, allowed: np.ndarray, start: int) -> None:
        super()._fill(allowed, start)
        for row, line in enumerate(allowed, start):
            line[row % self.stride :: self.stride] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomBlockGeometry(WindowGeometry):
    """A window, sinks, and for each block of queries some random earlier blocks of keys (Zaheer et al. 2020, BigBird).

    Attributes:
        block: rows and keys of a block; at least 1.
        blocks: key blocks that a query block draws, without repetition, from those wholly before it.
        seed: of the draws, 0 … 2**32 - 1.
    """

    kind: ClassVar[str] = "random_block"

    block: int = 64
    blocks: int
    seed: int = 0

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ValueError: a field out of range.
        """
        super().__post_init__()
        self._check_whole("block", 1)
        self._check_whole("blocks", 0)
        self._check_whole("seed", 0, 2**32 - 1)

    def key_blocks(self, query_block: int) -> np.ndarray:
        """The key blocks that a block of queries draws.

        Args:
            query_block: its index.

        Returns:
            int64 [min(blocks, query_block)], without repetition.
        """
        # RandomState's streams are frozen: the same draws with every version of NumPy.
        return np.random.RandomState((self.seed, query_block)).permutation(query_block)[: self.blocks]

    def _expected_rest(self) -> float:
        first, end = self._free()
        query_block = np.arange(self.length) // self.block
        reachable = np.maximum(np.minimum(end, query_block * self.block) - first, 0)
        return float((reachable * np.minimum(self.blocks / np.maximum(query_block, 1), 1)).sum())

    def _fill(self, allowed: np.ndarray, start: int) -> None:
        super()._fill(allowed, start)
        query_blocks = np.arange(start, start + len(allowed)) // self.block
        for query_block in np.unique(query_blocks).tolist():
            rows = np.flatnonzero(query_blocks == query_block)
            for key_block in self.key_blocks(query_block).tolist():
                keys = slice(key_block * self.block, (key_block + 1) * self.block)
                allowed[rows[0] : rows[-1] + 1, keys] = True
