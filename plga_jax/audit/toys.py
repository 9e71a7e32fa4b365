"""Toy decoders whose answer is known: oracles for the code that scores candidates and moves suffixes.

    RunningMean   row t is a mean over rows 0…t: prefix consistent, so block and sequential calls agree, bit for bit
    GlobalSum     every row sees the sum over all rows of the call, as a Gram does: as long as its input, and not
                  prefix consistent

Both map tokens to logits, in float64 on the host. Padding enters the global sum or not, as it does a PLDR-LLM's Gram.
"""

import dataclasses
import functools
from typing import get_args

import numpy as np

from plga_jax.models.pldr_config import GramRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Toy:
    vocab_size: int
    """V."""
    seed: int = 0
    """Of the table of logits, one row per token."""

    def __post_init__(self):
        if self.vocab_size < 2:
            raise ValueError(f"vocab_size={self.vocab_size} must be at least 2")

    @functools.cached_property
    def table(self) -> np.ndarray:
        """float64 [V, V], what each token says on the next."""
        return np.random.default_rng(self.seed).normal(size=(self.vocab_size, self.vocab_size))


class RunningMean(_Toy):
    """Row t is the mean of the table's rows of tokens 0…t, padding like any token: on the right it changes nothing."""

    def __call__(self, tokens, valid=None) -> np.ndarray:
        """Runs a block.

        Args:
            tokens: int [B, T].
            valid: bool [B, T]; not read, since no real row sees padding on its right.

        Returns:
            Logits, float64 [B, T, V].
        """
        del valid
        tokens = np.asarray(tokens)
        # Summed one row after the other: a pairwise sum would round by the length of the call.
        return np.cumsum(self.table[tokens], axis=1) / np.arange(1, tokens.shape[1] + 1)[None, :, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalSum(_Toy):
    """Row t is the table's row of token t plus the sum of those of all rows of the call."""

    gram_rows: GramRows = "valid"
    """Which rows enter the sum: "valid" keeps padding out, "all" lets it in."""
    pad_id: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.gram_rows not in get_args(GramRows):
            raise ValueError(f"gram_rows={self.gram_rows!r} is unknown; choose one of {', '.join(get_args(GramRows))}")

    def __call__(self, tokens, valid=None) -> np.ndarray:
        """Runs a block.

        Args:
            tokens: int [B, T].
            valid: bool [B, T], False for padding; None takes it from `pad_id`.

        Returns:
            Logits, float64 [B, T, V].
        """
        tokens = np.asarray(tokens)
        if self.gram_rows == "all":
            counted = np.ones_like(tokens, bool)
        else:
            counted = tokens != self.pad_id if valid is None else np.asarray(valid, bool)
        rows = self.table[tokens]
        return rows + np.cumsum(rows * counted[..., None], axis=1)[:, -1:]
