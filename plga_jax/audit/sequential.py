"""Block loss against sequential loss: what one call per block gains from later tokens.

The Gram of power-law graph attention sums over all rows of a call, so row t of a block call has
seen later tokens, its own label among them. At deployment it has not. The two losses agree exactly
in a prefix-consistent model, and in a collapsed one up to rounding.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from tqdm import tqdm


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSequential:
    """Negative log-likelihoods of the same tokens under the two protocols, in nats, float64.

    Column t scores token t+1 of a window of S tokens.
    """

    block: np.ndarray
    """[B, S-1]; one call on the window."""
    sequential: np.ndarray
    """[B, S-1]; one call on each prefix."""

    @property
    def gap(self) -> float:
        """Mean block loss less mean sequential loss: negative where later tokens help."""
        return float(np.mean(self.block - self.sequential))

    @property
    def largest_gap(self) -> float:
        """The largest |block − sequential| of one token."""
        return float(np.max(np.abs(self.block - self.sequential)))


def block_against_sequential(
    logits_fn: Callable[[np.ndarray], np.ndarray],
    tokens,
    *,
    pad_id: int = 0,
    batch: int = 16,
    progress: bool = False,
) -> BlockSequential:
    """*Measured*: scores every token in one call per window and in one call per prefix.

    All calls have one shape, [batch, S-1], so a jitted `logits_fn` is traced once: prefixes are
    right-padded with `pad_id`, and the longest prefix *is* the block call. This is exact for
    functions in which padding on the right changes no real row.

    Args:
        logits_fn: [batch, S-1] int32 token ids to [batch, S-1, V] logits.
        tokens: [B, S] token ids, S ≥ 2, without padding.
        pad_id: the id that `logits_fn` takes for padding.
        batch: rows of one call.
        progress: whether to show a bar.

    Returns:
        A `BlockSequential` of [B, S-1] arrays.

    Raises:
        ValueError: if the windows are too short or hold `pad_id`, or `batch` < 1.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(f"tokens must be [windows, at least 2 ids], got shape {tokens.shape}")
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1")
    if (tokens == pad_id).any():
        raise ValueError(
            f"the windows hold {int((tokens == pad_id).sum())} ids equal to pad_id={pad_id}; "
            "cut windows without padding"
        )
    windows, width = tokens.shape[0], tokens.shape[1] - 1
    lengths = np.tile(np.arange(1, width + 1), windows)
    prefixes = np.repeat(tokens[:, :-1], width, axis=0)
    prefixes = np.where(np.arange(width) < lengths[:, None], prefixes, pad_id).astype(np.int32)

    block, sequential = np.empty((windows, width)), np.empty((windows, width))
    for row, logits in enumerate(logits_of_rows(logits_fn, prefixes, batch=batch, progress=progress)):
        window, last = divmod(row, width)
        sequential[window, last] = negative_log_likelihood(logits[last], tokens[window, last + 1])
        if last == width - 1:
            block[window] = negative_log_likelihood(logits, tokens[window, 1:])
    return BlockSequential(block=block, sequential=sequential)


def logits_of_rows(
    logits_fn: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, *, batch: int, progress: bool = False
) -> Iterator[np.ndarray]:
    """*Measured*: the logits of many rows, from calls of one shape.

    Args:
        logits_fn: [batch, T] int32 token ids to [batch, T, V] logits.
        rows: [R, T] int32 token ids, padded.
        batch: rows of one call; the last call repeats rows to fill up.
        progress: whether to show a bar.

    Yields:
        [T, V] for each row, in order.
    """
    for start in tqdm(range(0, len(rows), batch), desc="prefixes", unit="call", disable=not progress, leave=False):
        held = rows[start : start + batch]
        yield from np.asarray(logits_fn(np.resize(held, (batch, rows.shape[1]))))[: len(held)]


def negative_log_likelihood(logits, labels) -> np.ndarray:
    """*Measured*: cross entropy of tokens in float64, whatever the precision of the logits.

    Args:
        logits: [..., V].
        labels: [...] token ids.

    Returns:
        [...] float64, in nats.
    """
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    picked = np.take_along_axis(shifted, np.asarray(labels)[..., None], axis=-1)[..., 0]
    return np.log(np.exp(shifted).sum(axis=-1)) - picked
