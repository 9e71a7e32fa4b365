"""How well two ways of decoding agree: tokens, logits, and the margins that decide."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plga_jax.array_types import Array
from plga_jax.audit import order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Two decodes side by side; the reference is the one that recomputes everything."""

    token_agreement: float
    """The share of steps, in [0, 1], at which both have the same token."""
    largest_deviation: float
    """max |logit − reference logit| over all steps and ids."""
    smallest_margin: float
    """The smallest best-less-second logit of the decode under test, over all steps."""

    @property
    def certified(self) -> bool:
        """Whether 2 · deviation < margin, so that no argmax can differ on these prefixes."""
        return 2 * self.largest_deviation < self.smallest_margin


def agreement(logits, reference, tokens=None, reference_tokens=None) -> Agreement:
    """*Measured*: compares the logits of two decodes *of the same prefixes*, step by step.

    Two greedy decodes that run freely read different prefixes after their first disagreement, and
    their logits can no longer be compared: force one token sequence on both for the logits. The
    tokens may come from free runs, since a share of equal tokens has a meaning there too.

    Args:
        logits: [..., T, V] logits of the decode under test.
        reference: [..., T, V] logits of the reference on the same prefixes.
        tokens: [..., T] ids chosen by the decode under test, None for the argmax of `logits`.
        reference_tokens: [..., T] ids chosen by the reference, None for the argmax of `reference`.

    Returns:
        An `Agreement`.

    Raises:
        ValueError: if shapes do not match, there are no steps, or V < 2.
    """
    logits, reference = np.asarray(logits, np.float64), np.asarray(reference, np.float64)
    if logits.shape != reference.shape:
        raise ValueError(
            f"logits {logits.shape} and reference {reference.shape} differ in shape; decode both for the same steps"
        )
    if logits.size == 0 or logits.shape[-1] < 2:
        raise ValueError(f"need at least one step and two ids, got shape {logits.shape}")
    tokens = logits.argmax(axis=-1) if tokens is None else np.asarray(tokens)
    reference_tokens = reference.argmax(axis=-1) if reference_tokens is None else np.asarray(reference_tokens)
    if tokens.shape != reference_tokens.shape or tokens.size == 0:
        raise ValueError(
            f"tokens {tokens.shape} and reference_tokens {reference_tokens.shape} must be of one shape and not empty"
        )
    best_two = np.partition(logits, -2, axis=-1)[..., -2:]
    return Agreement(
        token_agreement=float(np.mean(tokens == reference_tokens)),
        largest_deviation=float(np.max(np.abs(logits - reference))),
        smallest_margin=float(np.min(best_two[..., 1] - best_two[..., 0])),
    )


def forced_logits(model, prompt, continuation, *, cache: str) -> np.ndarray:
    """*Measured*: the logits a way of decoding gives along a continuation that is forced on it.

    Args:
        model: with `prefill`, `extend` and `init_cache`, called as `model(tokens, segment_ids=)`.
        prompt: [P] token ids, without padding.
        continuation: [C] token ids.
        cache: "none" recomputes the whole prefix for every token; "kv" and "kv_g" prefill the
            prompt, then take one token at a time with its frozen operators.

    Returns:
        [C, V] float32: row i is after the prompt and i tokens, so it predicts `continuation[i]`.

    Raises:
        ValueError: if the prompt or the continuation is empty, or `cache` is unknown.
    """
    prompt, continuation = _two_rows(prompt, continuation)
    if cache not in ("none", "kv", "kv_g"):
        raise ValueError(f"cache={cache!r} is unknown; choose 'none', 'kv' or 'kv_g'")
    follow = _recomputed if cache == "none" else functools.partial(_cached, kind=cache)
    return np.asarray(follow(model, jnp.asarray(prompt), jnp.asarray(continuation)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drift:
    """How far the operators of growing prefixes are from the prompt's, which a cache keeps; float64."""

    relative_rms: np.ndarray
    """[L, C]: ε_G = RMS(G_t − G_prompt) / RMS(G_t) over all heads; row i is after the prompt and i + 1 tokens."""
    largest: np.ndarray
    """[L, C]: max |G_t − G_prompt|."""


def operator_drift(model, prompt, continuation) -> Drift:
    """*Measured*: the operators of every prefix of a continuation against the frozen ones of the prompt.

    Args:
        model: a PLDR of learned operators.
        prompt: [P] token ids, without padding.
        continuation: [C] token ids.

    Returns:
        A `Drift`.

    Raises:
        ValueError: if the prompt or the continuation is empty, or the operators are not finite.
    """
    prompt, continuation = _two_rows(prompt, continuation)
    G = np.asarray(_prefix_operators(model, jnp.asarray(prompt), jnp.asarray(continuation)), np.float64)
    if not np.isfinite(G).all():
        raise ValueError(f"{np.sum(~np.isfinite(G))} of {G.size} entries of G are not finite; audit a sound checkpoint")
    frozen, grown, axes = G[:, :1], G[:, 1:], (2, 3, 4)
    return Drift(
        relative_rms=order.quotient(order.rms(grown - frozen, axes), order.rms(grown, axes)),
        largest=np.max(np.abs(grown - frozen), axis=axes),
    )


def _two_rows(prompt, continuation) -> tuple[np.ndarray, np.ndarray]:
    prompt, continuation = np.asarray(prompt, np.int32), np.asarray(continuation, np.int32)
    if prompt.ndim != 1 or continuation.ndim != 1 or not len(prompt) or not len(continuation):
        raise ValueError(
            f"prompt {prompt.shape} and continuation {continuation.shape} must each be one row of at least one token"
        )
    return prompt, continuation


@jax.jit
def _prefix_operators(model, prompt: Array, continuation: Array) -> Array:
    """G of the prompt and of each longer prefix, [L, 1 + C, N, H, H]."""
    tokens = jnp.concatenate([prompt, continuation])
    ends = prompt.shape[0] + jnp.arange(1 + continuation.shape[0])
    inside = jnp.arange(tokens.shape[0])[None] < ends[:, None]
    _, out = model(
        jnp.broadcast_to(tokens[None], inside.shape),
        segment_ids=inside.astype(jnp.int32),
        num_segments=1,
        collect=("G_LM",),
        last_only=True,
    )
    return out.G_LM


@jax.jit
def _recomputed(model, prompt: Array, continuation: Array) -> Array:
    tokens = jnp.concatenate([prompt, continuation[:-1]])
    ends = prompt.shape[0] + jnp.arange(continuation.shape[0])
    inside = jnp.arange(tokens.shape[0])[None] < ends[:, None]
    # Said by segments, not by tokens: the pad id can be generated, and is a real token then.
    logits, _ = model(
        jnp.broadcast_to(tokens[None], inside.shape), segment_ids=inside.astype(jnp.int32), num_segments=1
    )
    return jnp.take_along_axis(logits, (ends - 1)[:, None, None], axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames="kind")
def _cached(model, prompt: Array, continuation: Array, kind: str) -> Array:
    held = model.init_cache(1, prompt.shape[0] + continuation.shape[0], kind=kind)
    real = jnp.ones((1, prompt.shape[0]), jnp.int32)
    logits, held = model.prefill(prompt[None], held, segment_ids=real, last_only=True)

    def step(held, token):
        logits, held = model.extend(token[None, None], held, segment_ids=real[:, :1])
        return held, logits[0, 0]

    _, further = lax.scan(step, held, continuation[:-1])
    return jnp.concatenate([logits[0], further])
