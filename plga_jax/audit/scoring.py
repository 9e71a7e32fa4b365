"""Multiple choice under two protocols: does one call per candidate choose as one call per token would?

    sequential   Σᵢ log p(yᵢ | x, y₁…yᵢ₋₁), each from the last row of a call on its prefix: what a decoder would say
    block        the same labels from one call on x and y without its last token: what evaluation programs compute

In a prefix-consistent model both are one number. In a PLDR-LLM row t of the block call has seen later tokens, its own
label among them, and only the last token's row is the same in both; so a candidate of one token scores the same by
construction, which makes it the control.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from plga_jax.audit.sequential import logits_of_rows, negative_log_likelihood


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One question."""

    context: Sequence[int]
    """Token ids of x, at least one."""
    candidates: Sequence[Sequence[int]]
    """Token ids of each continuation y, at least two of at least one token."""
    true: Sequence[int]
    """Which candidates are right, at least one: places in `candidates`."""
    characters: Sequence[int] | None = None
    """Length of each candidate's text; None leaves the scores per character out."""

    def __post_init__(self):
        if not len(self.context) or len(self.candidates) < 2 or not all(map(len, self.candidates)):
            raise ValueError(
                f"an item needs a context and at least two candidates of at least one token, got {len(self.context)} "
                f"tokens and candidates of {[len(y) for y in self.candidates]}"
            )
        if not len(self.true) or not set(self.true) <= set(range(len(self.candidates))):
            raise ValueError(f"true={list(self.true)} must name at least one of {len(self.candidates)} candidates")
        if self.characters is not None and (len(self.characters) != len(self.candidates) or min(self.characters) < 1):
            raise ValueError(
                f"characters={list(self.characters)} must give a length of at least 1 for each of "
                f"{len(self.candidates)} candidates"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """What the two protocols choose, one entry per item. Every item is of exactly one class: tie, flip or neither."""

    sequential: np.ndarray
    """int64, the place of the best candidate; the first of equals."""
    block: np.ndarray
    """The same by the block scores."""
    margin: np.ndarray
    """float64, best less second block score."""
    gap: np.ndarray
    """float64, the largest |block − sequential| of the item's candidates."""
    tie: np.ndarray
    """bool: the best two scores are equal under one protocol or both, so that there is no choice to compare."""
    flip: np.ndarray
    """bool: no tie, and another best candidate."""
    close: np.ndarray
    """bool: no tie, and 2 · gap ≥ margin. Elsewhere a flip is impossible."""
    pairs: np.ndarray
    """int64, pairs of candidates."""
    discordant: np.ndarray
    """int64, pairs that the protocols put in strictly opposite orders."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-likelihoods of all candidates of all items under both protocols, one entry per candidate, in order."""

    item: np.ndarray
    """int64, the candidate's item."""
    true: np.ndarray
    """bool, whether it is right."""
    tokens: np.ndarray
    """int64, its length."""
    characters: np.ndarray | None
    """int64, the length of its text; None unless every item has it."""
    sequential: np.ndarray
    """float64, nats."""
    block: np.ndarray
    """float64, nats."""

    @property
    def gap(self) -> np.ndarray:
        """Block less sequential: positive where later tokens help."""
        return self.block - self.sequential

    def choices(self, *, per_character: bool = False) -> Choices:
        """*Measured*: which candidates the protocols choose, and by how much.

        Args:
            per_character: whether scores are divided by the length of the text.

        Returns:
            `Choices`, one entry per item.

        Raises:
            ValueError: if the items do not have the lengths.
        """
        if per_character and self.characters is None:
            raise ValueError("scores per character need `characters` of every item")
        scale = self.characters if per_character else 1
        protocols = (self._by_item(scores / scale) for scores in (self.sequential, self.block))
        rows = [_compare(*pair) for pair in zip(*protocols)]
        return Choices(**{name: np.array([row[name] for row in rows]) for name in rows[0]})

    def mc2(self) -> tuple[np.ndarray, np.ndarray]:
        """*Measured*: the probability of the right candidates among all of an item, Σ_true e^ll / Σ_all e^ll.

        Returns:
            By the sequential and by the block scores, each float64 in [0, 1], one entry per item.
        """
        true = self._by_item(self.true)
        return tuple(
            np.array([_softmax(scores)[right].sum() for scores, right in zip(self._by_item(protocol), true)])
            for protocol in (self.sequential, self.block)
        )

    def summary(self) -> dict[str, int | float]:
        """*Measured*: the counts and sizes that say whether the protocols can be exchanged.

        Returns:
            Numbers by name, for JSON; those per character only if the items have the lengths.
        """
        mc2, chosen = self.mc2(), self.choices()
        found = {
            "items": int(self.item[-1] + 1),
            "candidates": len(self.item),
            "tokens": int(self.tokens.sum()),
            "pairs": int(chosen.pairs.sum()),
            "largest_gap": float(np.abs(self.gap).max()),
            "mc2_sequential": float(mc2[0].mean()),
            "mc2_block": float(mc2[1].mean()),
            "mc2_largest_gap": float(np.abs(mc2[1] - mc2[0]).max()),
        }
        found |= self._counts(chosen, "")
        if self.characters is not None:
            found |= self._counts(self.choices(per_character=True), "_per_character")
        return found

    def _counts(self, chosen: Choices, suffix: str) -> dict[str, int | float]:
        true = self._by_item(self.true)
        names = {"flips": "flip", "ties": "tie", "close": "close", "discordant": "discordant"}
        found = {name: int(getattr(chosen, field).sum()) for name, field in names.items()}
        for protocol in ("sequential", "block"):
            hits = [right[best] for right, best in zip(true, getattr(chosen, protocol))]
            found[f"accuracy_{protocol}"] = float(np.mean(hits))
        return {name + suffix: value for name, value in found.items()}

    def _by_item(self, values: np.ndarray) -> list[np.ndarray]:
        return np.split(values, np.flatnonzero(np.diff(self.item)) + 1)


def score_candidates(
    logits_fn: Callable[[np.ndarray], np.ndarray],
    items: Sequence[Item],
    *,
    pad_id: int = 0,
    batch: int = 16,
    progress: bool = False,
) -> Scores:
    """*Measured*: log-likelihoods of candidates under both protocols.

    All calls have one shape, [batch, most tokens of a prefix], so a jitted `logits_fn` is traced once and a gap is
    never that of two programs. Prefixes that candidates share are run once. Padding on the right must change no real
    row, as in a PLDR-LLM of `gram_rows="valid"`.

    Args:
        logits_fn: [batch, T] int32 token ids to [batch, T, V] logits.
        items: at least one.
        pad_id: the id that `logits_fn` takes for padding.
        batch: rows of one call.
        progress: whether to show a bar.

    Returns:
        `Scores`, one entry per candidate.

    Raises:
        ValueError: if there is no item, an id is negative, outside the vocabulary or `pad_id`, `batch` < 1, or a
            score is not finite.
    """
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1")
    pairs = [(tuple(item.context), tuple(y)) for item in items for y in item.candidates]
    ids = np.array([token for pair in pairs for part in pair for token in part])
    if not ids.size or ids.min() < 0 or (ids == pad_id).any():
        raise ValueError(
            f"{len(items)} items hold {np.sum(ids == pad_id)} ids equal to pad_id={pad_id} and {np.sum(ids < 0)} "
            "negative ones; give at least one item, without padding"
        )

    readers: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for candidate, (x, y) in enumerate(pairs):
        for i in range(len(y)):
            readers.setdefault(x + y[:i], []).append((candidate, i))
    rows = np.full((len(readers), max(map(len, readers))), pad_id, np.int32)
    for row, prefix in zip(rows, readers):
        row[: len(prefix)] = prefix

    # Per token first: both protocols then add up the same numbers in the same order.
    sequential, block = ([np.empty(len(y)) for _, y in pairs] for _ in range(2))
    calls = logits_of_rows(logits_fn, rows, batch=batch, progress=progress)
    for logits, reading in zip(calls, readers.values(), strict=True):
        if ids.max() >= logits.shape[-1]:
            raise ValueError(f"id {ids.max()} is outside a vocabulary of {logits.shape[-1]}; use the model's tokenizer")
        for candidate, i in reading:
            x, y = pairs[candidate]
            first, row = len(x) - 1, len(x) - 1 + i
            sequential[candidate][i] = -negative_log_likelihood(logits[row], y[i])
            if i == len(y) - 1:
                block[candidate][:] = -negative_log_likelihood(logits[first : row + 1], y)
    sequential, block = (np.array([scores.sum() for scores in protocol]) for protocol in (sequential, block))
    if not (np.isfinite(sequential).all() and np.isfinite(block).all()):
        raise ValueError("a score is not finite; audit the last finite checkpoint")
    known = all(item.characters is not None for item in items)
    return Scores(
        item=np.repeat(np.arange(len(items)), [len(item.candidates) for item in items]),
        true=np.array([place in item.true for item in items for place in range(len(item.candidates))]),
        tokens=np.array([len(y) for _, y in pairs]),
        characters=np.array([length for item in items for length in item.characters]) if known else None,
        sequential=sequential,
        block=block,
    )


def _compare(sequential: np.ndarray, block: np.ndarray) -> dict:
    """The entries of `Choices` of one item."""
    best, margins = zip(*((int(scores.argmax()), _margin(scores)) for scores in (sequential, block)))
    gap, tie = np.abs(block - sequential).max(), min(margins) == 0
    first, second = np.triu_indices(len(block), 1)
    orders = np.sign(sequential[first] - sequential[second]) * np.sign(block[first] - block[second])
    return {
        "sequential": best[0],
        "block": best[1],
        "margin": margins[1],
        "gap": gap,
        "tie": tie,
        "flip": not tie and best[0] != best[1],
        "close": not tie and 2 * gap >= margins[1],
        "pairs": len(orders),
        "discordant": int(np.sum(orders < 0)),
    }


def _margin(scores: np.ndarray) -> float:
    second, best = np.sort(scores)[-2:]
    return best - second


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
