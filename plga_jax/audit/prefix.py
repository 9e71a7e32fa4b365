"""Does the past stay as it was? Rows of a call before a changed suffix, beside padding, and in a repeated call.

A decoder is prefix consistent when what it says on the first K tokens does not depend on the tokens after them. A Gram
over all rows of a call breaks that: change the suffix, and the operators move every earlier row but the first, whose
attention has one key to choose from. After a collapse the operators hardly move, and how little is measured here.

What is audited is a function (tokens, valid) -> logits: `pldr_decoder(model)`, or one of `audit.toys`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array
from plga_jax.models.pldr import PLDR, DeductiveOutputs
from plga_jax.models.pldr_layers import OPERATORS

Decoder: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(int32 tokens [B, T], bool valid [B, T], False for padding) -> logits [B, T, V]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movement:
    """How far something moved between the two calls of a pair; the entries compared are equal when none is moved."""

    largest: np.ndarray
    """float64, the largest |difference|: [P, K] for rows of logits, [L, P] for operators."""
    changed: np.ndarray
    """int64, how many entries differ at all, of the same shape."""
    entries: int
    """Entries compared in each place of the two arrays: V logits, or all entries of a layer's operators."""

    @property
    def fraction(self) -> float:
        """The share of all entries that differ."""
        return float(self.changed.sum() / (self.changed.size * self.entries))

    @property
    def first_row(self) -> "Movement":
        """Of rows of logits: row 0 by itself. It never moves in a PLDR-LLM, and thins the others' fraction."""
        return dataclasses.replace(self, largest=self.largest[:, :1], changed=self.changed[:, :1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddingEffect:
    """What masked tokens at the end of a call do to its last real row, one entry per sequence."""

    largest: np.ndarray
    """float64 [B], the largest |difference| of the row's logits. Where padding takes no part it is rounding: the calls
    differ in length, so their sums are made in another order."""
    restored: bool
    """Whether a call without the masked tokens, made afterwards, is the first one bit for bit."""


def pldr_decoder(model: PLDR) -> Decoder:
    """*Measured*: a PLDR-LLM as a function of tokens and of which of them are real.

    Args:
        model: `config.gram_rows` says whether padding enters the Gram, as in the published programs.

    Returns:
        A jitted decoder, traced once per shape.
    """
    return lambda tokens, valid: np.asarray(_run(model, jnp.asarray(tokens), jnp.asarray(valid), ())[0])


def suffix_pairs(
    vocab_size: int, *, pairs: int = 16, length: int = 12, shared: int = 4, seed: int = 0, pad_id: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """*Measured*: random pairs of sequences that begin alike and differ in every token after that.

    Args:
        vocab_size: V, at least 3.
        pairs: P.
        length: S, tokens of a sequence.
        shared: K < S, tokens that the two of a pair share.
        seed: of the draws.
        pad_id: the one id that does not occur.

    Returns:
        The first and the second of each pair, int32 [P, S]. Suffix tokens differ by a uniform nonzero offset, modulo
        the V − 1 ids that are not padding.

    Raises:
        ValueError: if a size is out of range.
    """
    if vocab_size < 3 or pairs < 1 or not 1 <= shared < length:
        raise ValueError(
            f"need a vocabulary of at least 3, at least one pair and 1 ≤ shared < length; got vocab_size={vocab_size}, "
            f"pairs={pairs}, shared={shared}, length={length}"
        )
    rng, real = np.random.default_rng(seed), vocab_size - 1
    first = rng.integers(real, size=(pairs, length))
    offset = rng.integers(1, real, size=(pairs, length))
    offset[:, :shared] = 0
    return tuple((pad_id + 1 + ranks % real) % vocab_size for ranks in (first, first + offset))


def historical_rows(decoder: Decoder, first, second, *, shared: int, suffix_is_padding: bool = False) -> Movement:
    """*Measured*: how many logits of the shared rows change with the suffix, and how far.

    Both sequences of a pair stand at the same place of calls of one shape, so a difference is the decoder's.

    Args:
        decoder: (tokens, valid) -> logits.
        first: int [P, S], the first of each pair.
        second: int [P, S], with the same first K tokens.
        shared: K.
        suffix_is_padding: whether the suffixes, different as they are, are marked as padding. Nothing may move then,
            unless padding enters a Gram.

    Returns:
        A `Movement` of [P, K].

    Raises:
        ValueError: if the pairs do not share K tokens, or logits are not finite.
    """
    first, second, valid = _pair(first, second, shared, suffix_is_padding)
    before, after = (np.asarray(decoder(tokens, valid))[:, :shared] for tokens in (first, second))
    return _movement(before, after, kept=2)


def operator_movement(
    model: PLDR, first, second, *, shared: int, suffix_is_padding: bool = False
) -> dict[str, Movement]:
    """*Measured*: how far A, A_LM, A_P and G_LM of each layer move with the suffix.

    Args:
        model: of learned operators.
        first: int [P, S], the first of each pair.
        second: int [P, S], with the same first K tokens.
        shared: K.
        suffix_is_padding: as in `historical_rows`.

    Returns:
        From the tensor's name to a `Movement` of [L, P].

    Raises:
        ValueError: if the pairs do not share K tokens, or a tensor is not finite.
    """
    *pair, valid = _pair(first, second, shared, suffix_is_padding)
    before, after = (_run(model, jnp.asarray(tokens), jnp.asarray(valid), OPERATORS)[1] for tokens in pair)
    return {
        name: _movement(np.asarray(getattr(before, name)), np.asarray(getattr(after, name)), kept=2)
        for name in OPERATORS
    }


def padding_effect(decoder: Decoder, tokens, *, count: int = 4, pad_id: int = 0) -> PaddingEffect:
    """*Measured*: how far masked tokens behind a sequence move the logits of its last row.

    Args:
        decoder: (tokens, valid) -> logits.
        tokens: int [B, T], without padding.
        count: masked tokens to append.
        pad_id: their id.

    Returns:
        A `PaddingEffect`.

    Raises:
        ValueError: if `count` < 1 or logits are not finite.
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    tokens = np.asarray(tokens, np.int32)
    behind = [(0, 0), (0, count)]
    valid = np.ones(tokens.shape, bool)
    plain = np.asarray(decoder(tokens, valid))
    padded = np.asarray(decoder(np.pad(tokens, behind, constant_values=pad_id), np.pad(valid, behind)))
    again = np.asarray(decoder(tokens, valid))
    moved = _movement(plain[:, -1], padded[:, tokens.shape[1] - 1], kept=1)
    return PaddingEffect(largest=moved.largest, restored=plain.tobytes() == again.tobytes())


def repeats_bitwise(decoder: Decoder, tokens, *, calls: int = 2) -> bool:
    """*Measured*: whether calls on the same tokens give the same logits bit for bit.

    Args:
        decoder: (tokens, valid) -> logits.
        tokens: int [B, T], without padding.
        calls: how many, at least 2.

    Returns:
        True if all are equal; only then is a change of any size the suffix's doing.

    Raises:
        ValueError: if `calls` < 2.
    """
    if calls < 2:
        raise ValueError(f"calls={calls} must be at least 2")
    tokens = np.asarray(tokens, np.int32)
    valid = np.ones(tokens.shape, bool)
    return len({np.asarray(decoder(tokens, valid)).tobytes() for _ in range(calls)}) == 1


@functools.partial(jax.jit, static_argnames="collect")
def _run(model: PLDR, tokens: Array, valid: Array, collect: tuple[str, ...]) -> tuple[Array, DeductiveOutputs]:
    """A call whose padding is where `valid` says, whatever the token."""
    return model(tokens, valid=valid, collect=collect)


def _pair(first, second, shared: int, suffix_is_padding: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two as int32 [P, S], and which tokens are real."""
    first, second = np.asarray(first, np.int32), np.asarray(second, np.int32)
    if first.ndim != 2 or first.shape != second.shape or not 1 <= shared <= first.shape[-1]:
        raise ValueError(f"pairs {first.shape} and {second.shape} must be [P, S] with 1 ≤ shared={shared} ≤ S")
    if (first[:, :shared] != second[:, :shared]).any():
        raise ValueError(f"the sequences of a pair must share their first {shared} tokens; see suffix_pairs")
    real = np.arange(first.shape[1]) < shared if suffix_is_padding else np.ones(first.shape[1], bool)
    return first, second, np.broadcast_to(real, first.shape)


def _movement(before: np.ndarray, after: np.ndarray, *, kept: int) -> Movement:
    """The movement over all axes but the first `kept`."""
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        raise ValueError("an entry is not finite; audit the last finite checkpoint")
    flat = (*before.shape[:kept], -1)
    before, after = before.reshape(flat), after.reshape(flat)
    return Movement(
        largest=np.abs(before.astype(np.float64) - after.astype(np.float64)).max(axis=-1),
        changed=np.sum(before != after, axis=-1),
        entries=before.shape[-1],
    )
