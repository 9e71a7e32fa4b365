"""The linear recurrence that all recurrent mixers share, in three schedules that agree.

    h_t = a_t ⊙ h_{t−1} + b_t

"sequential" is the definition, one step after another. "associative" composes steps pairwise, (a, b)∘(a′, b′) =
(aa′, a′b + b′), in log T rounds. "chunked" does so within chunks and hands the state from one to the next. States are
float32 or better whatever goes in: at a = 0.999 a bfloat16 state stops growing at a quarter of its limit.

`scan` returns all states, which are as large as what goes in. Where a state is larger than its input, `scan_fused`
makes a and b of one chunk at a time, reads the states out, and forgets them: memory is that of the inputs and outputs
and one state for each chunk, also in the pass back, which makes each chunk again.

Source: Blelloch 1990 (prefix sums), Martin and Cundy 2018; chunks as in Dao and Gu 2024.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from plga_jax.array_types import Array, DType, statistics_dtype

Method = Literal["sequential", "chunked", "associative"]
METHODS: tuple[Method, ...] = ("sequential", "chunked", "associative")

CHUNK = 64
"""Steps of a chunk where nothing else is said."""

_UNROLL = 4
"""Sequential steps in a row before XLA's loop comes round; more compile longer and gain nothing on CPU."""


class States(NamedTuple):
    """What `scan` returns.

    Attributes:
        states: h_1 … h_T, [B, T, …], float32 or better.
        last: the state after the last step (the first one with `reverse`), [B, …].
        decay: Π a up to and including each step, resets included, [B, T, …] in the shape of `a`: a state that came in
            contributes decay_t ⊙ h_0 to h_t, by which pieces of a sequence are joined.
    """

    states: Array
    last: Array
    decay: Array


def scan(
    a: Array,
    b: Array,
    h0: Array | None = None,
    *,
    reset: Array | None = None,
    valid: Array | None = None,
    reverse: bool = False,
    method: Method | None = None,
    chunk: int = CHUNK,
) -> States:
    """h_t = a_t ⊙ h_{t−1} + b_t along axis 1.

    Args:
        a: decays, [B, T, …], real or complex, of b's shape or 1 along any axis after the second.
        b: inputs, [B, T, …].
        h0: the state before the first step, [B, …]; None is 0.
        reset: bool [B, T], steps that begin a document: nothing before them is seen. With `reverse`, steps that end
            one.
        valid: bool [B, T], False for padding, which leaves the state as it is, whatever stands there.
        reverse: from the last step to the first, h_t = a_t ⊙ h_{t+1} + b_t.
        method: "sequential", "chunked" or "associative"; None takes the first on CPU and the second elsewhere.
        chunk: steps of a chunk, for "chunked".

    Returns:
        `States`.

    Raises:
        ValueError: shapes that do not fit, no step at all, an unknown method, or a chunk below 1.
    """
    _check(a, b, h0, reset, valid, method, chunk)
    dtype = _state_dtype(jnp.result_type(a, b))
    a, b = _masked(a.astype(dtype), b.astype(dtype), reset, valid)
    h0 = jnp.zeros((b.shape[0], *b.shape[2:]), dtype) if h0 is None else h0.astype(dtype)
    if reverse:
        a, b = jnp.flip(a, 1), jnp.flip(b, 1)
    states = _states(_choose(method), chunk, a, b, h0)
    last, decay = states[:, -1], lax.cumprod(a, axis=1)
    if reverse:
        states, decay = jnp.flip(states, 1), jnp.flip(decay, 1)
    return States(states, last, decay)


def scan_fused(
    make: Callable[[Any], tuple[Array, Array]],
    read: Callable[[Array, Any], Any],
    inputs: Any,
    h0: Array,
    *,
    reset: Array | None = None,
    valid: Array | None = None,
    method: Method | None = None,
    chunk: int = CHUNK,
) -> tuple[Any, Array]:
    """The recurrence with a and b made, and states read out, chunk by chunk.

    Args:
        make: of a chunk of `inputs`: a and b, [B, C, …].
        read: of a chunk's states [B, C, …] and inputs: outputs, any pytree of [B, C, …].
        inputs: a pytree of arrays [B, T, …].
        h0: the state before the first step, [B, …]; its dtype is that of all states.
        reset: bool [B, T]; see `scan`.
        valid: bool [B, T]; see `scan`. What `read` makes of padding is returned as it is.
        method: of the steps within a chunk; None chooses.
        chunk: C, steps of a chunk.

    Returns:
        What `read` returned, [B, T, …], and the last state [B, …].

    Raises:
        ValueError: an unknown method, or a chunk below 1.
    """
    leaves = jax.tree.leaves(inputs)
    B, T = leaves[0].shape[:2]
    _check_method(method, chunk)
    chunk = min(chunk, T)
    count = -(-T // chunk)
    reset = jnp.zeros((B, T), bool) if reset is None else reset
    valid = jnp.ones((B, T), bool) if valid is None else valid

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, count * chunk - T)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, count, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(h, piece):
        inputs, reset, valid = piece
        a, b = make(inputs)
        a, b = _masked(a.astype(h.dtype), b.astype(h.dtype), reset, valid)
        states = _states(_choose(method), chunk, a, b, h)
        return states[:, -1], read(states, inputs)

    last, out = lax.scan(step, h0, jax.tree.map(split, (inputs, reset, valid)))

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(B, count * chunk, *x.shape[3:])[:, :T]

    return jax.tree.map(join, out), last


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _states(method: Method, chunk: int, a: Array, b: Array, h0: Array) -> Array:
    """All states. Its own rule keeps a and the states, and nothing of how they came about."""
    return {"sequential": _sequential, "chunked": functools.partial(_chunked, chunk), "associative": _associative}[
        method
    ](a, b, h0)


def _states_fwd(method, chunk, a, b, h0):
    states = _states(method, chunk, a, b, h0)
    return states, (a, h0, states)


def _states_bwd(method, chunk, kept, given):
    # λ_t = g_t + a_{t+1} λ_{t+1}: the same recurrence from the other end. ∂b = λ, ∂a = λ h_{t−1}, ∂h_0 = a_1 λ_1.
    a, h0, states = kept
    later = jnp.concatenate([a[:, 1:], jnp.ones_like(a[:, :1])], axis=1)
    flipped = _states(method, chunk, jnp.flip(later, 1), jnp.flip(given, 1), jnp.zeros_like(h0))
    found = jnp.flip(flipped, 1)
    before = jnp.concatenate([h0[:, None], states[:, :-1]], axis=1)
    narrow = tuple(axis for axis, size in enumerate(a.shape) if size != states.shape[axis])
    return jnp.sum(found * before, axis=narrow, keepdims=True), found, a[:, 0] * found[:, 0]


_states.defvjp(_states_fwd, _states_bwd)


def _sequential(a: Array, b: Array, h0: Array) -> Array:
    def step(h, inputs):
        h = inputs[0] * h + inputs[1]
        return h, h

    _, states = lax.scan(step, h0, (jnp.moveaxis(a, 1, 0), jnp.moveaxis(b, 1, 0)), unroll=min(_UNROLL, b.shape[1]))
    return jnp.moveaxis(states, 0, 1)


def _associative(a: Array, b: Array, h0: Array) -> Array:
    def compose(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    b = b.at[:, 0].add(a[:, 0] * h0)
    return lax.associative_scan(compose, (a, b), axis=1)[1]


def _chunked(chunk: int, a: Array, b: Array, h0: Array) -> Array:
    B, T = b.shape[:2]
    chunk = min(chunk, T)
    count = -(-T // chunk)

    def split(x, fill):
        widths = [(0, 0), (0, count * chunk - T)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=fill)
        return jnp.moveaxis(x.reshape(B, count, chunk, *x.shape[2:]), 1, 0)

    def step(h, inputs):
        states = _associative(*inputs, h)
        return states[:, -1], states

    _, states = lax.scan(step, h0, (split(a, 1), split(b, 0)))
    return jnp.moveaxis(states, 0, 1).reshape(B, count * chunk, *b.shape[2:])[:, :T]


def _masked(a: Array, b: Array, reset: Array | None, valid: Array | None) -> tuple[Array, Array]:
    """Padding keeps the state, a reset drops it. By choosing, not multiplying: what stands at padding may be NaN."""

    def over(rows, x):
        return rows.reshape(*rows.shape, *[1] * (x.ndim - 2))

    if reset is not None:
        a = jnp.where(over(reset, a), 0, a)
    if valid is not None:
        # A document may begin with padding: its reset holds all the same.
        a = jnp.where(over(valid if reset is None else valid | reset, a), a, 1)
        b = jnp.where(over(valid, b), b, 0)
    return a, b


def _choose(method: Method | None) -> Method:
    if method is not None:
        return method
    return "sequential" if jax.default_backend() == "cpu" else "chunked"


def _state_dtype(dtype: DType) -> DType:
    return dtype if jnp.issubdtype(dtype, jnp.complexfloating) else statistics_dtype(dtype)


def _check_method(method: Method | None, chunk: int) -> None:
    if method not in (None, *METHODS):
        raise ValueError(f"method {method!r} is unknown; choose one of {METHODS} or None.")
    if chunk < 1:
        raise ValueError(f"chunk = {chunk} must be at least 1 step; {CHUNK} is usual.")


def _check(a, b, h0, reset, valid, method, chunk) -> None:
    _check_method(method, chunk)
    if b.ndim < 2 or b.shape[1] == 0:
        raise ValueError(f"b must be [B, T, …] with at least one step; got shape {b.shape}.")
    if a.ndim != b.ndim or a.shape[:2] != b.shape[:2] or any(m not in (1, n) for m, n in zip(a.shape, b.shape)):
        raise ValueError(f"a of shape {a.shape} must have b's shape {b.shape}, or 1 along axes after the second.")
    if h0 is not None and h0.shape != (b.shape[0], *b.shape[2:]):
        raise ValueError(f"h0 of shape {h0.shape} must be {(b.shape[0], *b.shape[2:])}: one state per row.")
    for name, rows in (("reset", reset), ("valid", valid)):
        if rows is not None and (rows.shape != b.shape[:2] or rows.dtype != bool):
            raise ValueError(f"{name} must be bool {b.shape[:2]}; got {rows.dtype} {rows.shape}.")
