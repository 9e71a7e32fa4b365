"""The query-aware geometry: sampled queries rank key blocks, later queries read the best ones.

Every `stride`-th query of a sequence is a probe. It scores all keys before it, each block of `block` keys is ranked by
its best score, and the next `stride` queries, the probe first, attend to window, anchors and the best blocks in one
softmax. A ranking serves the queries after it only, so what a query reads depends on positions up to its own.

A few key/value heads carry nearly all verbatim recall: the heads that continue a repetition (induction heads). They are
found by a measurement on the model, `ris_jax.recall.recall_heads`, and probed at every `recall_stride`-th query; the
others are probed seldom, or never look far. So ranking costs little: with r probes per query and head its q·k products
are a share r of the causal pairs, averaged over heads.

Source: ours; the blocks follow Quest (Tang et al. 2024) and NSA (Yuan et al. 2025), the heads Olsson et al. 2022.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from ris_jax import density
from ris_jax.geometry import Geometry

RANKINGS = ("best", "mass", "pooled")
"""How blocks are ranked: by a probe's best score in the block, by the attention that the block would get, or by the
probe's score with the block's mean key."""


_RANKED_PER_TOKEN = 4096
"""Keys per recall head that may be ranked for a token of an answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeGeometry(Geometry):
    """Window, anchors, and for each tile of queries and each key/value head the blocks that its probe ranks best.

    Row t sees key c <= t if t - c < local, c < anchors, or c is in a chosen block. Which those are is known only when
    the model runs: there are no `rows` ahead of it.

    Attributes:
        local: keys of the window, the row itself included; at least 1.
        anchors: keys at the start that every row sees.
        block: keys of a block.
        blocks: the most blocks that are chosen for a row.
        density: keys of a row, window and anchors included, over the keys before it: rows whose `blocks` would exceed
            it get fewer, but always `least`. 1: no such limit.
        least: blocks that a row gets at least, where there are so many.
        stride: queries that share a ranking.
        recall: (layer, key/value head) pairs of the heads that recall; see `ris_jax.recall`.
        recall_stride: `stride` of those heads.
        random: further blocks per tile and head, drawn at random from those not chosen.
        ranking: one of `RANKINGS`. Recall heads always rank by the best score: they look for one key.
        seed: of the random blocks.
    """

    kind: ClassVar[str] = "probe"

    local: int = 128
    anchors: int = 32
    block: int = 32
    blocks: int = 7
    density: float = 1.0
    least: int = 1
    stride: int = 64
    recall: tuple[tuple[int, int], ...] = ()
    recall_stride: int = 1
    random: int = 0
    ranking: str = "mass"
    seed: int = 0

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ValueError: a field out of range.
        """
        super().__post_init__()
        for name, low in (("local", 1), ("anchors", 0), ("block", 1), ("blocks", 0), ("least", 0), ("random", 0)):
            self._check_whole(name, low)
        for name in ("stride", "recall_stride"):
            self._check_whole(name, 1)
        self._check_whole("seed", 0, 2**32 - 1)
        if not 0 < self.density <= 1:
            raise ValueError(f"density = {self.density} must be within 0 … 1, above 0; ten percent is 0.1.")
        if self.ranking not in RANKINGS:
            raise ValueError(f"ranking = {self.ranking!r} is unknown; choose one of {', '.join(RANKINGS)}.")
        pairs = tuple(sorted((int(layer), int(head)) for layer, head in self.recall))
        if len(set(pairs)) != len(pairs) or any(min(pair) < 0 for pair in pairs):
            raise ValueError(f"recall = {self.recall} must name each (layer, key/value head) once, from 0 on.")
        object.__setattr__(self, "recall", pairs)

    def to_config(self) -> dict:
        """A JSON-able description, for `from_config`."""
        return super().to_config() | {"recall": [list(pair) for pair in self.recall]}

    def chosen(self, row):
        """How many blocks are chosen for a row; works on NumPy and JAX arrays alike.

        Args:
            row: integers.

        Returns:
            As many integers, `least` to `blocks`.
        """
        if self.density == 1:
            return 0 * row + self.blocks
        # In integers, so that a row's budget is the same on every machine.
        budget = (row + 1) * round(self.density * 2**10) // 2**10 - self.local - self.anchors
        return (budget // self.block).clip(min(self.least, self.blocks), self.blocks)

    def share(self) -> float:
        """Real density, at most: chosen blocks may overlap with the window. The cache counts what was read."""
        rows = np.arange(self.length, dtype=np.int64)
        probes = rows - rows % self.stride
        fixed = density.fixed_keys(rows, local=self.local, anchors=self.anchors)
        picked = (self.chosen(probes) + self.random) * self.block
        return float(np.minimum(fixed + picked, rows + 1).sum() / density.causal_pairs(self.length))

    def ranking_share(self, layers: int, heads: int) -> float:
        """Scores that are made to rank only, over those of dense attention.

        Args:
            layers: L of the model.
            heads: K of the model.

        Returns:
            The mean over heads, as a part of the causal pairs; each costs a q·k product, half of what dense attention
            does for a pair.
        """
        recall = len(self.recall) / (layers * heads)
        share = recall / self.recall_stride + (1 - recall) / self.stride
        return share / self.block if self.ranking == "pooled" else share

    def thinned(self, native: int = 16_384) -> "ProbeGeometry":
        """The same with probes that thin out as the window grows, so that ranking stays linear in it.

        Args:
            native: length below twice which strides stay as they are.

        Returns:
            A geometry with strides multiplied by the window over `native`, rounded down to a power of two.
        """
        factor = 1 << max((self.length // native).bit_length() - 1, 0)
        return self.replace(stride=self.stride * factor, recall_stride=self.recall_stride * factor)

    def answering(self) -> "ProbeGeometry":
        """The same for tokens read one at a time, where a ranking reads keys instead of multiplying with them.

        Returns:
            A geometry whose recall heads are ranked no more often than keeps that under a tenth of a token's time on
            CPU: at each token below 8k, at each 16th at 64k (measured on SmolLM2-135M).
        """
        return self.replace(recall_stride=max(self.recall_stride, self.length // _RANKED_PER_TOKEN))

    def _fill(self, allowed: np.ndarray, start: int) -> None:
        raise ValueError(
            "A probe-selected geometry has no mask ahead of the model: which blocks are read depends on the queries. "
            "Run it through ris_jax.sparse, or take WindowGeometry for its fixed part."
        )
