"""Certificates for the G-cache: can a token that frozen operators chose differ from the one all new operators choose?

Write F(x; G) for the last logits of a prefix x when every layer uses given operators G. Decoding from a cache is
F(x; G⁰) with the prompt's G⁰; recomputing everything is F(x; Gˣ) with the prefix's own. So what the cache can do to a
token is the change of F along ΔG = Gˣ − G⁰, hidden states, keys and values of all earlier rows included. Each token
gets a bound B on |F(x; Gˣ) − F(x; G⁰)| in every logit, and is certified if 2B < its margin.

    linear     B = |∂F(G⁰)ΔG| + |∂F(Gˣ)ΔG − ∂F(G⁰)ΔG|. The second term is the *checked* remainder: twice what it is when
               the slope changes evenly between the two ends. A slope that swings in between would be missed.
    ball       B from balls around the visited states, through which ΔG is propagated (`audit.ball`). Proved, in exact
               arithmetic, for this prefix and its two sets of operators.
    lipschitz  B = Σ_l (gain of layer l) ‖ΔG_l‖, with gains that hold for all inputs of the model: LayerNorm bounds
               every hidden state before anything is run. Proved, in exact arithmetic; useful only at ΔG = 0 or nearly.

All add `ROUNDINGS` float32 roundings of the largest logit, since the two ways of decoding sum in another order. That
allowance is measured, not proved. And ΔG is the actual difference: to have it, the operators of the prefix are made,
which costs as much as recomputing. A certificate says why a cache may be trusted; it does not make decoding cheaper.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array
from plga_jax.audit.ball import WeightNorms, logits_ball
from plga_jax.audit.budget import silu_slope
from plga_jax.audit.spectra import singular_values
from plga_jax.models.pldr import PLDR

Mode = Literal["linear", "ball", "lipschitz"]
MODES: tuple[Mode, ...] = ("linear", "ball", "lipschitz")

ROUNDINGS = 64
"""Roundings of the largest logit by which equal operators may differ in logits: the most measured is 16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificates:
    """Of each token of a continuation, [C]."""

    tokens: np.ndarray
    """int64: what the frozen operators choose after the prompt and the continuation up to there."""
    margin: np.ndarray
    """float64: best less second logit of that choice."""
    bound: np.ndarray
    """float64: B, rounding included."""
    remainder: np.ndarray
    """float64: the part of B that is the checked remainder; 0 in the proved modes."""
    mode: Mode
    """How B was found."""

    @property
    def certified(self) -> np.ndarray:
        """bool [C]: 2B < margin."""
        return 2 * self.bound < self.margin


def certify(
    model: PLDR,
    prompt,
    continuation,
    *,
    operators=None,
    mode: Mode = "linear",
    constants: "WeightNorms | Gains | None" = None,
    batch: int = 8,
    width: int | None = None,
) -> Certificates:
    """*Bound*: a certificate for every token of a continuation; for what it rests on see the module.

    Args:
        model: of learned operators that are made once per call.
        prompt: int [P].
        continuation: int [C], forced: row i is the choice after the prompt and i of its tokens.
        operators: G⁰, [L, N, H, H]; None takes the prompt's own, as a cache does.
        mode: "linear", "ball" or "lipschitz".
        constants: what `mode_constants` found for the mode; None finds it anew, which takes a while in a large model.
        batch: prefixes at a time.
        width: tokens that every call is padded to, so that calls on growing prompts share a program; None is the
            length of the longest prefix.

    Returns:
        `Certificates`.

    Raises:
        ValueError: constant operators or ones made anew within a call, an empty prompt or continuation, an unknown
            mode, or logits that are not finite.
    """
    prompt, continuation = np.asarray(prompt, np.int32), np.asarray(continuation, np.int32)
    if model.config.operator != "learned":
        raise ValueError("the model has constant operators: its cache is exact, and there is nothing to certify")
    if prompt.ndim != 1 or continuation.ndim != 1 or not prompt.size or not continuation.size:
        raise ValueError(f"prompt {prompt.shape} and continuation {continuation.shape} must each be a row of tokens")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; choose one of {', '.join(MODES)}")
    width = max(width or 0, prompt.size + continuation.size - 1)
    if operators is None:
        operators = own_operators(model, prompt, batch=batch, width=width)
    tokens = np.concatenate([prompt, continuation[:-1]])
    ends = prompt.size + np.arange(continuation.size)
    constants = mode_constants(model, mode) if constants is None else constants
    visit = {"linear": _along, "ball": functools.partial(_around, constants), "lipschitz": _apart}[mode]
    found = []
    for start in range(0, ends.size, batch):
        some = np.resize(ends[start : start + batch], batch)  # the last call repeats: one shape, one program
        rows = _padded(model, tokens, some, width)
        part = visit(model, *rows, operators, _own(model, *rows))
        count = min(batch, ends.size - start)
        found.append([np.asarray(x[:count], np.float64) for x in part])
    logits, *rest = (np.concatenate(parts) for parts in zip(*found))
    if not np.isfinite(logits).all():
        raise ValueError("logits are not finite; audit the last finite checkpoint")
    rounding = ROUNDINGS * np.finfo(np.float32).eps * np.abs(logits).max(axis=-1)
    if mode == "linear":
        first, last = rest
        remainder = np.abs(last - first).max(axis=-1)
        bound = (np.abs(first) + np.abs(last - first)).max(axis=-1)
    else:
        remainder = np.zeros(len(logits))
        bound = rest[0] if mode == "ball" else np.array([constants.bound(*one) for one in zip(*rest)])
    best = np.partition(logits, -2, axis=-1)
    return Certificates(
        tokens=logits.argmax(axis=-1),
        margin=best[:, -1] - best[:, -2],
        bound=bound + rounding,
        remainder=remainder,
        mode=mode,
    )


def mode_constants(model: PLDR, mode: Mode) -> "WeightNorms | Gains | None":
    """*Measured*: what a mode needs to know of the weights, once for all certificates of a model.

    Args:
        model: a PLDR.
        mode: of the certificates.

    Returns:
        `audit.ball.WeightNorms`, `Gains`, or None where nothing is needed.
    """
    return {"linear": lambda model: None, "ball": WeightNorms.of, "lipschitz": model_gains}[mode](model)


def own_operators(model: PLDR, prompt, *, batch: int = 8, width: int | None = None) -> Array:
    """*Measured*: the operators of a prompt, by the very program that makes those of its continuations.

    Another program would sum in another order, and after a collapse that is all the difference there is.

    Args:
        model: of learned operators.
        prompt: int [P].
        batch: as in `certify`.
        width: as in `certify`.

    Returns:
        G⁰, [L, N, H, H].
    """
    prompt = np.asarray(prompt, np.int32)
    return _own(model, *_padded(model, prompt, np.full(batch, prompt.size), width or prompt.size))[:, 0]


def _padded(model: PLDR, tokens: np.ndarray, ends: np.ndarray, width: int) -> tuple[Array, Array]:
    """The first `ends` of the tokens in rows [B, width], and which of them are real."""
    inside = np.arange(width)[None] < ends[:, None]
    row = np.resize(tokens, width)  # what is beyond the tokens is beyond every end, too
    return jnp.asarray(np.where(inside, row[None], model.config.pad_id)), jnp.asarray(inside.astype(np.int32))


@jax.jit
def _own(model: PLDR, tokens: Array, segments: Array) -> Array:
    """G of rows [B, T] whose segments are 1 for tokens and 0 for padding, [L, B, N, H, H]."""
    return model(tokens, segment_ids=segments, num_segments=1, collect=("G_LM",), last_only=True)[1].G_LM


def _last(model: PLDR, tokens: Array, segments: Array, operators: Array) -> Array:
    """F: the last logits of each row, [B, V], under given operators [L, B, N, H, H]."""
    return model(tokens, segment_ids=segments, num_segments=1, operators=operators, last_only=True)[0][:, 0]


@jax.jit
def _along(model: PLDR, tokens: Array, segments: Array, frozen: Array, own: Array) -> tuple[Array, Array, Array]:
    """Logits under the frozen operators, and the slope along ΔG at both ends, each [B, V]."""
    frozen = jnp.broadcast_to(frozen[:, None], own.shape)
    follow = functools.partial(_last, model, tokens, segments)
    logits, first = jax.jvp(follow, (frozen,), (own - frozen,))
    _, last = jax.jvp(follow, (own,), (own - frozen,))
    return logits, first, last


def _around(norms: WeightNorms, model: PLDR, tokens: Array, segments: Array, frozen: Array, own: Array):
    """Logits under the frozen operators [B, V], and the bound [B]."""
    return logits_ball(model, norms, tokens, segments, frozen, own)


@jax.jit
def _apart(model: PLDR, tokens: Array, segments: Array, frozen: Array, own: Array) -> tuple[Array, Array, Array]:
    """Logits under the frozen operators [B, V], ‖ΔG‖ and max(‖G⁰‖, ‖Gˣ‖) of each layer and head, [B, L, N]."""
    frozen = jnp.broadcast_to(frozen[:, None], own.shape)

    def norm(G):
        # Frobenius: never below the spectral norm, and its rounding is that of a sum of squares.
        return jnp.linalg.norm(G, axis=(-2, -1)).swapaxes(0, 1)

    return _last(model, tokens, segments, frozen), norm(own - frozen), jnp.maximum(norm(own), norm(frozen))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gains:
    """Constants of a model that hold for every input; float64. L layers, N heads."""

    query: np.ndarray
    """‖W_Q‖₂ of each head, [L, N]; likewise `key` and `value`."""
    key: np.ndarray
    value: np.ndarray
    query_size: np.ndarray
    """The longest q that any hidden state can make, [L, N]; likewise `key_size` and `value_size`."""
    key_size: np.ndarray
    value_size: np.ndarray
    out: np.ndarray
    """‖W_O‖₂, [L]."""
    attention_norm: np.ndarray
    """max |γ| / √ε of the LayerNorm after the attention, [L]; likewise `ffn_norm`."""
    ffn: np.ndarray
    """Of the gated feed-forward on all hidden states, [L]."""
    ffn_norm: np.ndarray
    head_width: int
    logits: float
    """The longest column of W_f: what a hidden state's change does to one logit."""

    def bound(self, change, size) -> float:
        """*Bound*: of every logit's change, by the operators' changes.

        Args:
            change: ‖ΔG‖₂ or more, [L, N].
            size: max(‖G⁰‖₂, ‖Gˣ‖₂) or more, [L, N].

        Returns:
            B ≥ 0; +inf where it overflows.
        """
        root, moved = np.sqrt(self.head_width), 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            for layer in range(len(self.out)):
                q, k, v = self.query_size[layer], self.key_size[layer], self.value_size[layer]
                # |δ(q̂ᵀGk̂)| / √H, then weights change by at most that in sum, then values.
                scores = (self.query[layer] * size[layer] * k + q * size[layer] * self.key[layer]) * moved + q * change[
                    layer
                ] * k
                heads = scores / root * v + self.value[layer] * moved
                mixed = moved + self.out[layer] * np.linalg.norm(heads)
                moved = self.ffn_norm[layer] * (1 + self.ffn[layer]) * self.attention_norm[layer] * mixed
            return float(np.nan_to_num(self.logits * moved, nan=np.inf, posinf=np.inf))


def model_gains(model: PLDR) -> Gains:
    """*Bound*: the constants of a model for all inputs, from the a-priori size of what a LayerNorm lets out.

    ‖LN(x)‖ ≤ √D max|γ| + ‖β‖ for every x, and its slope is at most max|γ| / √ε. Softmax changes its weights, summed, by
    no more than the largest change of a score.

    Args:
        model: a PLDR.

    Returns:
        The gains.
    """
    config, layers = model.config, model.layers
    L, N, D = config.num_layers, config.num_heads, config.model_width
    radius = np.concatenate([_radius(model.norm, D)[None], _radius(layers.ffn_norm, D)[:-1]])

    def projection(linear) -> tuple[np.ndarray, np.ndarray]:
        kernel = _wide(linear.kernel).reshape(L, D, N, -1).swapaxes(1, 2)
        bias = np.linalg.norm(_wide(linear.bias).reshape(L, N, -1), axis=-1)
        norms = singular_values(kernel)[..., 0]
        return norms, norms * radius[:, None] + bias

    attention, ffn = layers.attention, layers.ffn
    (query, q), (key, k), (value, v) = (projection(x) for x in (attention.query, attention.key, attention.value))
    middle = _radius(layers.attention_norm, D)
    up, gate, down = (singular_values(_wide(part.kernel))[..., 0] for part in (ffn.up, ffn.gate, ffn.down))
    # A single hidden unit is the product of a row with a column: its reach is that of the longest column.
    reach = {
        name: np.linalg.norm(_wide(part.kernel), axis=1).max(-1) * middle + np.abs(_wide(part.bias)).max(-1)
        for name, part in (("up", ffn.up), ("gate", ffn.gate))
    }
    return Gains(
        query=query,
        key=key,
        value=value,
        query_size=q,
        key_size=k,
        value_size=v,
        out=singular_values(_wide(attention.out.kernel))[..., 0],
        attention_norm=_slope(layers.attention_norm),
        # |silu(z)| ≤ |z|, and the product rule.
        ffn=down * (reach["up"] * silu_slope(reach["gate"]) * gate + reach["gate"] * up),
        ffn_norm=_slope(layers.ffn_norm),
        logits=float(np.linalg.norm(_wide(model.head.kernel), axis=0).max()),
        head_width=config.head_width,
    )


def _wide(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def _radius(norm, width: int) -> np.ndarray:
    """√D max|γ| + ‖β‖."""
    return np.sqrt(width) * np.abs(_wide(norm.scale)).max(axis=-1) + np.linalg.norm(_wide(norm.bias), axis=-1)


def _slope(norm) -> np.ndarray:
    """max|γ| / √ε."""
    return np.abs(_wide(norm.scale)).max(axis=-1) / np.sqrt(norm.epsilon)
