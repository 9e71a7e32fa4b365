"""Generation: batches of unequal prompts, streamed or whole, with the cache of your choice.

Any model that offers `init_cache`, `prefill` and `extend` generates here. The modes answer the same prompt with ever
less work per token:

    none   the whole prefix again for every token, so operators always belong to the whole prefix
    kv     keys, values and the metric tensor A of the prompt are kept
    kv_int8  the same, keys and values rounded to int8 (`Decoder` only so far)
    kv_g   keys, values and the operator G of the prompt are kept: bit-identical to kv, and cheaper

Every row draws from its own random key, so a row of a batch generates what it would generate alone.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array
from plga_jax.ops.sampling import SamplingConfig, sample

CACHES = ("none", "kv", "kv_int8", "kv_g")

_UNSTACK_FROM = 3_000_000
"""Parameters from which `unstacked` pays: below, weights stay in the processor's caches and a scan compiles sooner."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenBuffer:
    """The cache of mode "none": it keeps the tokens and nothing made from them.

    Attributes:
        tokens: int32 [B, S].
        length: int32 [B].
    """

    tokens: Array
    length: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """What a running generation carries beside its cache."""

    keys: Array  # typed keys [B], one per row
    seen: Array  # bool [B, V]: tokens of the prompt and the continuation, for the repetition penalty
    active: Array  # bool [B]: rows that have not met a stop id
    step: Array  # int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One generated token per row.

    Attributes:
        tokens: int32 [B]; −1 in rows that have stopped.
        logits: float32 [B, V], before any filter, that the tokens were drawn from; left on the device.
    """

    tokens: np.ndarray
    logits: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What `generate` returns.

    Attributes:
        tokens: new tokens of each row, stop id included.
        logits: float32 [B, steps, V] when asked for; rows that have stopped hold meaningless numbers from there on.
    """

    tokens: list[list[int]]
    logits: np.ndarray | None = None


def generate(
    model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    seed: int | Sequence[int] = 0,
    cache: str = "kv_g",
    stop_ids: Sequence[int] = (),
    keep_logits: bool = False,
) -> Generation:
    """Continues a batch of prompts.

    Args:
        model: with `config.context`, `init_cache`, `prefill`, `extend` and a call on whole blocks.
        prompts: token ids of each row, of any lengths ≥ 1.
        max_new_tokens: the most tokens to add to each row.
        sampling: how tokens are drawn; None is greedy.
        seed: of the draws: one per row, or one number from which each row's is derived.
        cache: "none", "kv" or "kv_g".
        stop_ids: a row ends after drawing one of these.
        keep_logits: return the logits of every step.

    Returns:
        The new tokens (and logits).

    Raises:
        ValueError: an empty prompt, text instead of ids, ids outside the vocabulary, prompt and continuation longer
            than the context, or a bad choice.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    logits = []
    steps = stream(
        model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, cache=cache, stop_ids=stop_ids
    )
    for step in steps:
        for row, token in zip(tokens, step.tokens.tolist()):
            if token >= 0:
                row.append(token)
        if keep_logits:
            logits.append(step.logits)
    return Generation(tokens=tokens, logits=np.stack(logits, axis=1) if keep_logits else None)


def stream(
    model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    seed: int | Sequence[int] = 0,
    cache: str = "kv_g",
    stop_ids: Sequence[int] = (),
) -> Iterator[Step]:
    """Continues a batch of prompts, one `Step` at a time; arguments and errors as for `generate`.

    Arguments are checked at the call, not at the first step.
    """
    config = model.config
    model = for_decoding(model)
    prompts = [np.asarray(prompt) for prompt in prompts]
    lengths = _check(config, prompts, max_new_tokens, cache, seed)
    sampling = sampling or SamplingConfig(greedy=True)
    # Rounded up, so that prompts and continuations of similar lengths share one compiled program.
    capacity = min(_round_up(max(lengths) + max_new_tokens, 64), config.context)
    width = min(_power_of_two(max(lengths)), capacity)
    tokens = np.full((len(prompts), width), config.pad_id, np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    real = np.arange(width)[None] < np.asarray(lengths)[:, None]
    seeds = [(seed, row) for row in range(len(prompts))] if np.ndim(seed) == 0 else [(s, 0) for s in seed]
    seen = np.zeros((len(prompts), config.vocab_size), bool)
    for row, prompt in zip(seen, prompts):
        row[prompt] = True
    state = _Rows(
        keys=jnp.stack([jax.random.fold_in(jax.random.key(s), row) for s, row in seeds]),
        seen=jnp.asarray(seen),
        active=jnp.ones(len(prompts), bool),
        step=jnp.int32(0),
    )
    stop_ids = jnp.asarray(sorted(stop_ids), jnp.int32)

    def steps():
        nonlocal state
        drawn, logits, state, held = _start(
            model, jnp.asarray(tokens), jnp.asarray(real), stop_ids, state, cache, capacity, sampling
        )
        for index in range(max_new_tokens):
            step = Step(tokens=np.asarray(drawn), logits=logits)
            yield step
            stopped = step.tokens < 0
            if stop_ids.size:
                stopped |= np.isin(step.tokens, np.asarray(stop_ids))
            if stopped.all() or index + 1 == max_new_tokens:
                return
            drawn, logits, state, held = _next(model, drawn, stop_ids, state, held, sampling)

    return steps()


@functools.partial(jax.jit, static_argnames=("cache", "capacity", "sampling"))
def _start(model, tokens, real, stop_ids, rows: _Rows, cache: str, capacity: int, sampling: SamplingConfig):
    if cache == "none":
        buffer = jnp.full((tokens.shape[0], capacity), model.config.pad_id, jnp.int32)
        held = TokenBuffer(
            tokens=buffer.at[:, : tokens.shape[1]].set(tokens), length=jnp.sum(real, axis=1, dtype=jnp.int32)
        )
        logits = _recompute(model, held)
    else:
        held = model.init_cache(tokens.shape[0], capacity, kind=cache)
        logits, held = model.prefill(tokens, held, segment_ids=real.astype(jnp.int32), last_only=True)
        logits = logits[:, 0]
    return (*_draw(logits, stop_ids, rows, sampling), held)


@functools.partial(jax.jit, static_argnames=("sampling",), donate_argnames=("held",))
def _next(model, drawn, stop_ids, rows: _Rows, held, sampling: SamplingConfig):
    # A row that has stopped adds nothing: its token is padding.
    real = rows.active
    drawn = jnp.where(real, drawn, model.config.pad_id)
    if isinstance(held, TokenBuffer):
        row = jnp.arange(drawn.shape[0])
        slot = jnp.where(real, held.length, held.tokens.shape[1])
        held = TokenBuffer(
            tokens=held.tokens.at[row, slot].set(drawn, mode="drop"), length=held.length + real.astype(jnp.int32)
        )
        logits = _recompute(model, held)
    else:
        logits, held = model.extend(drawn[:, None], held, segment_ids=real[:, None].astype(jnp.int32))
        logits = logits[:, 0]
    return (*_draw(logits, stop_ids, rows, sampling), held)


def _recompute(model, buffer: TokenBuffer) -> Array:
    """Logits [B, V] of each row's last token, from the whole prefix."""
    real = jnp.arange(buffer.tokens.shape[1], dtype=jnp.int32)[None] < buffer.length[:, None]
    logits, _ = model(buffer.tokens, segment_ids=real.astype(jnp.int32), num_segments=1, last_only=True)
    return logits[:, 0]


def _draw(logits: Array, stop_ids: Array, rows: _Rows, sampling: SamplingConfig):
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(rows.keys, rows.step)
    drawn = sample(keys, logits, sampling, seen=rows.seen).astype(jnp.int32)
    index = jnp.arange(drawn.shape[0])
    stopped = (drawn[:, None] == stop_ids[None, :]).any(axis=1)
    after = _Rows(
        keys=rows.keys,
        seen=rows.seen.at[index, drawn].max(rows.active),
        active=rows.active & ~stopped,
        step=rows.step + 1,
    )
    return jnp.where(rows.active, drawn, -1), logits, after


def for_decoding(model):
    """The same model, on CPU with layers in arrays of their own where reading their weights is what a token costs.

    Args:
        model: any; one without `unstacked` is returned as it is.

    Returns:
        A model for single tokens.
    """
    if jax.default_backend() != "cpu" or not hasattr(model, "unstacked") or model.num_parameters < _UNSTACK_FROM:
        return model
    return model.unstacked()


def _check(config, prompts, max_new_tokens: int, cache: str, seed) -> list[int]:
    lengths = [prompt.size for prompt in prompts]
    if not lengths or min(lengths) == 0:
        where = f"prompt {lengths.index(0)} of {len(lengths)} is empty" if lengths else "there is no prompt"
        raise ValueError(f"Generation starts from at least one token per row: {where}; pass the end-of-text token.")
    for prompt in prompts:
        if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
            raise ValueError("Prompts are sequences of token ids, one per row; encode text with the model's tokenizer.")
        if prompt.min() < 0 or prompt.max() >= config.vocab_size:
            raise ValueError(
                f"Prompt ids {prompt.min()}…{prompt.max()} leave the vocabulary 0…{config.vocab_size - 1}; "
                "use the tokenizer the model was trained with."
            )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens} must be at least 1.")
    if max(lengths) + max_new_tokens > config.context:
        raise ValueError(
            f"A prompt of {max(lengths)} tokens and {max_new_tokens} new ones exceed the context of {config.context}; "
            f"shorten the prompt or ask for at most {max(config.context - max(lengths), 0)} new tokens."
        )
    if cache not in CACHES:
        raise ValueError(f"Cache mode {cache!r} is unknown; choose one of {', '.join(CACHES)}.")
    if np.ndim(seed) and len(seed) != len(lengths):
        raise ValueError(f"{len(seed)} seeds for {len(lengths)} prompts; pass one per prompt, or a single number.")
    return lengths


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 7).bit_length()


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
