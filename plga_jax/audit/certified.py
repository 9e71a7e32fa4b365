"""Greedy decoding from a G-cache that checks itself: tokens it cannot vouch for are chosen by new operators."""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plga_jax.array_types import Array
from plga_jax.audit.ball import WeightNorms
from plga_jax.audit.certificate import Gains, Mode, certify, mode_constants, own_operators
from plga_jax.models.pldr import PLDR


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertifiedToken:
    """One token, and why it may be trusted."""

    token: int
    certified: bool
    """Whether the frozen operators chose it under a certificate. Else the operators were made anew before it, and it is
    their choice: what no cache at all would choose."""
    margin: float
    """Best less second logit of the frozen operators."""
    bound: float
    """B of the certificate."""


def decode_certified(
    model: PLDR,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    mode: Mode = "linear",
    every: int = 8,
    stop_ids: Collection[int] = (),
) -> Iterator[CertifiedToken]:
    """Continues a prompt greedily. As far as the certificates hold, it says what recomputing everything says.

    Tokens are proposed with frozen operators, a few at a time, and certified together. At the first that is not, the
    operators are made anew from all tokens up to there, choose that token, and are frozen in their turn.

    Args:
        model: of learned operators that are made once per call.
        prompt: token ids, at least one.
        max_new_tokens: the most to add.
        mode: of the certificates, see `audit.certificate`.
        every: tokens proposed at a time.
        stop_ids: ends after one of these.

    Yields:
        The tokens. Arguments are checked at the call, not at the first token.

    Raises:
        ValueError: constant operators, an empty prompt, or more tokens than the context holds.
    """
    prompt = np.asarray(prompt, np.int32)
    if model.config.operator != "learned":
        raise ValueError("the model has constant operators: its cache is exact, and there is nothing to certify")
    if prompt.ndim != 1 or not prompt.size or max_new_tokens < 1 or every < 1:
        raise ValueError(
            f"need a prompt of tokens, max_new_tokens ≥ 1 and every ≥ 1; got {prompt.shape}, {max_new_tokens}, {every}"
        )
    if prompt.size + max_new_tokens > model.config.context:
        raise ValueError(
            f"{prompt.size} tokens and {max_new_tokens} new ones exceed the context of {model.config.context}: shorten "
            "the prompt or ask for fewer"
        )
    constants = mode_constants(model, mode)
    width = min(-(-(prompt.size + max_new_tokens + every) // 64) * 64, model.config.context)
    return _decode(model, prompt.tolist(), max_new_tokens, mode, constants, every, frozenset(stop_ids), width)


def _decode(
    model: PLDR,
    tokens: list[int],
    new: int,
    mode: Mode,
    constants: WeightNorms | Gains | None,
    every: int,
    stop_ids: frozenset[int],
    width: int,
) -> Iterator[CertifiedToken]:
    def padded() -> tuple[Array, Array]:
        row = np.zeros((2, 1, width), np.int32)
        row[0, 0, : len(tokens)], row[1, 0, : len(tokens)] = tokens, 1
        return jnp.asarray(row[0]), jnp.asarray(row[1])

    def freeze() -> Array:
        return own_operators(model, tokens, batch=every, width=width)

    end, operators = len(tokens) + new, freeze()
    while len(tokens) < end:
        count = min(every, end - len(tokens))
        # The last proposals are made for a shorter run, too, and dropped: one program.
        proposed = np.asarray(_propose(model, *padded(), operators, min(every, width - len(tokens))))[:count]
        found = certify(
            model, tokens, proposed, operators=operators, mode=mode, constants=constants, batch=every, width=width
        )
        for index, token in enumerate(proposed.tolist()):
            certified = bool(found.certified[index] and found.tokens[index] == token)
            if not certified:
                operators = freeze()
                token = int(_recompute(model, *padded()))
            tokens.append(token)
            yield CertifiedToken(
                token=token,
                certified=certified,
                margin=float(found.margin[index]),
                bound=float(found.bound[index]),
            )
            if token in stop_ids:
                return
            if not certified:
                break


@jax.jit
def _recompute(model: PLDR, tokens: Array, segments: Array) -> Array:
    """The token that everything up to here makes likeliest."""
    return jnp.argmax(model(tokens, segment_ids=segments, num_segments=1, last_only=True)[0][0, 0])


@functools.partial(jax.jit, static_argnames="count")
def _propose(model: PLDR, tokens: Array, segments: Array, operators: Array, count: int) -> Array:
    """`count` greedy tokens from a cache of given operators."""
    held = model.init_cache(1, tokens.shape[1], kind="kv_g")
    logits, held = model.prefill(tokens, held, segment_ids=segments, operators=operators, last_only=True)
    first = jnp.argmax(logits[0, 0]).astype(jnp.int32)

    def step(carry, _):
        token, held = carry
        logits, held = model.extend(token[None, None], held, segment_ids=jnp.ones((1, 1), jnp.int32))
        following = jnp.argmax(logits[0, 0]).astype(jnp.int32)
        return (following, held), token

    return lax.scan(step, (first, held), None, length=count)[1]
