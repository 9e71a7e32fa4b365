"""Choosing the next token: filters on logits, the sampler, and the two meanings of top-p.

Every filter maps [..., V] logits to [..., V] logits with the dropped tokens at -inf; at least one token of a row is
always kept, and tokens that tie with the last one kept are kept as well. Logits below float32 are raised to it first.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from plga_jax.array_types import Array, PRNGKey, statistics_dtype

TOP_P_RULES = ("standard", "native")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a token is drawn. Hashable and static: pass it through `jax.jit` as it is.

    Attributes:
        temperature: logits are divided by it, > 0; 1 leaves them alone.
        top_k: how many of the most likely tokens remain; 0, or the vocabulary size and above, keeps all.
        top_p: probability mass that remains, (0, 1]; 1 keeps all.
        top_p_rule: "standard" keeps the token whose probability crosses `top_p`; "native", the published programs'
            rule, does not.
        min_p: tokens less likely than `min_p` times the likeliest are dropped, [0, 1]; 0 keeps all.
        repetition_penalty: > 0; tokens seen before lose by it when above 1; 1 leaves them alone.
        greedy: take the likeliest token; all but `repetition_penalty` is then without effect.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_rule: str = "standard"
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    greedy: bool = False

    def __post_init__(self):
        _check_temperature(self.temperature)
        _check_top_k(self.top_k)
        _check_top_p(self.top_p, self.top_p_rule)
        _check_min_p(self.min_p)
        _check_repetition_penalty(self.repetition_penalty)
        if not isinstance(self.greedy, bool):
            raise ValueError(f"greedy is {self.greedy!r}; it must be True or False")


def _check_number(name: str, value: float, valid: bool, wanted: str):
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and valid):
        raise ValueError(f"{name} is {value!r}; it must be {wanted}")


def _check_temperature(value: float):
    wanted = "above 0; for the likeliest token each time set greedy=True"
    _check_number("temperature", value, not isinstance(value, str) and value > 0, wanted)


def _check_top_k(value: int):
    valid = isinstance(value, int) and value >= 0
    _check_number("top_k", value, valid, "a whole number >= 0; 0 keeps all tokens, 1 the likeliest only")


def _check_top_p(value: float, rule: str):
    wanted = "within (0, 1]; 1 keeps all tokens, greedy=True the likeliest only"
    _check_number("top_p", value, not isinstance(value, str) and 0 < value <= 1, wanted)
    if rule not in TOP_P_RULES:
        raise ValueError(f"top_p_rule is {rule!r}; it must be one of {TOP_P_RULES}")


def _check_min_p(value: float):
    valid = not isinstance(value, str) and 0 <= value <= 1
    _check_number("min_p", value, valid, "within [0, 1]; 0 keeps all tokens")


def _check_repetition_penalty(value: float):
    valid = not isinstance(value, str) and value > 0
    _check_number("repetition_penalty", value, valid, "above 0; 1 switches it off, 1.1 to 1.3 is usual")


def _raise(logits: Array) -> Array:
    return logits.astype(statistics_dtype(logits.dtype))


def _keep(logits: Array, kept: Array) -> Array:
    return jnp.where(kept, logits, -jnp.inf)


def repetition_penalty(logits: Array, seen: Array, penalty: float) -> Array:
    """Makes tokens that were seen less likely: positive logits are divided by the penalty, negative multiplied.

    Args:
        logits: [..., V].
        seen: [..., V], bool, or counts of which any above 0 means seen (how often does not matter).
        penalty: > 0; below 1 repetition is encouraged.

    Returns:
        [..., V] in float32 or better.

    Source: Keskar et al. 2019 (CTRL), as commonly implemented (without the sign cases a penalty would favour negative
        logits).
    """
    _check_repetition_penalty(penalty)
    logits = _raise(logits)
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen > 0 if seen.dtype != bool else seen, penalised, logits)


def temperature(logits: Array, value: float) -> Array:
    """Divides logits by a temperature above 0: below 1 sharpens, above 1 flattens.

    Args:
        logits: [..., V].
        value: the temperature; 1 leaves them as they are.

    Returns:
        [..., V] in float32 or better.
    """
    _check_temperature(value)
    logits = _raise(logits)
    return logits if value == 1 else logits / value


def top_p(logits: Array, p: float, *, rule: str = "standard") -> Array:
    """Keeps the most likely tokens that hold probability mass `p` together.

    With tokens sorted and c their cumulated probabilities, "standard" (nucleus sampling) keeps a token while the mass
    *before* it is below p, so the crossing token stays. "native" keeps max(#(c <= p), 1) tokens, so the crossing token
    goes.

    Args:
        logits: [..., V].
        p: (0, 1]; 1 keeps all.
        rule: "standard" or "native".

    Returns:
        [..., V] in float32 or better, dropped tokens at -inf.

    Source: Holtzman et al. 2020; the published PLDR-LLM sampler for the native rule.
    """
    _check_top_p(p, rule)
    logits = _raise(logits)
    if p == 1:
        return logits
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    mass = jnp.cumsum(probabilities, axis=-1)
    inside = mass <= p if rule == "native" else mass - probabilities < p
    last = jnp.maximum(jnp.sum(inside, axis=-1, keepdims=True) - 1, 0)
    return _keep(logits, logits >= jnp.take_along_axis(ordered, last, axis=-1))


def top_k(logits: Array, k: int) -> Array:
    """Keeps the k most likely tokens, and those that tie with the k-th.

    Args:
        logits: [..., V].
        k: 0, or anything from V on, keeps all.

    Returns:
        [..., V] in float32 or better, dropped tokens at -inf.
    """
    _check_top_k(k)
    logits = _raise(logits)
    if k == 0 or k >= logits.shape[-1]:
        return logits
    return _keep(logits, logits >= jax.lax.top_k(logits, k)[0][..., -1:])


def min_p(logits: Array, p: float) -> Array:
    """Keeps the tokens at least `p` times as likely as the likeliest.

    Args:
        logits: [..., V].
        p: [0, 1]; 0 keeps all.

    Returns:
        [..., V] in float32 or better, dropped tokens at -inf.

    Source: Nguyen et al. 2024 (arXiv:2407.01082).
    """
    _check_min_p(p)
    logits = _raise(logits)
    if p == 0:
        return logits
    return _keep(logits, logits >= jnp.max(logits, axis=-1, keepdims=True) + math.log(p))


def filter_logits(logits: Array, config: SamplingConfig, seen: Array | None = None) -> Array:
    """All filters of a config in the native order: repetition penalty, temperature, top-p, top-k, min-p.

    Args:
        logits: [..., V].
        config: which filters.
        seen: [..., V] for the repetition penalty; may be None when that is 1.

    Returns:
        [..., V] in float32 or better: the logits of the distribution that `sample` draws from (when not greedy).

    Raises:
        ValueError: when the penalty is not 1 and `seen` is None.

    Source: the published PLDR-LLM sampler for the order of temperature, top-p and top-k.
    """
    logits = _penalise(logits, config, seen)
    logits = temperature(logits, config.temperature)
    logits = top_p(logits, config.top_p, rule=config.top_p_rule)
    logits = top_k(logits, config.top_k)
    return min_p(logits, config.min_p)


def _penalise(logits: Array, config: SamplingConfig, seen: Array | None) -> Array:
    if config.repetition_penalty == 1:
        return _raise(logits)
    if seen is None:
        raise ValueError(
            f"repetition_penalty is {config.repetition_penalty!r}, but the tokens seen so far were not given; "
            "pass seen=[..., V], or set repetition_penalty=1"
        )
    return repetition_penalty(logits, seen, config.repetition_penalty)


def greedy(logits: Array) -> Array:
    """The likeliest token, the lowest id among equals: [..., V] -> [...] int32."""
    return jax.lax.argmax(logits, logits.ndim - 1, jnp.int32)


def sample(
    key: PRNGKey | None, logits: Array, config: SamplingConfig | None = None, seen: Array | None = None
) -> Array:
    """Draws one token for each row.

    Rows do not know of each other: row i of a batch with keys `keys` is what row i alone gives with `keys[i]`.

    Args:
        key: one typed key for each row (the shape of `logits` without V), or a single key, which is split among the
            rows when there are several axes. May be None when greedy.
        logits: [..., V].
        config: the filters; None draws from the logits as they are.
        seen: [..., V], for the repetition penalty.

    Returns:
        [...] int32 token ids.

    Raises:
        ValueError: when keys and rows do not go together, or the key or `seen` is missing.
    """
    config = SamplingConfig() if config is None else config
    if config.greedy:
        return greedy(_penalise(logits, config, seen))
    rows = logits.shape[:-1]
    if key is None:
        raise ValueError("sampling needs a key: pass jax.random.key(seed), or set greedy=True")
    if key.shape not in ((), rows):
        raise ValueError(f"keys have shape {key.shape}, rows {rows}; give one key, or one for each row")
    filtered = filter_logits(logits, config, seen)
    keys = jax.random.split(key, rows) if key.shape != rows else key
    draw = jax.random.categorical
    for _ in rows:
        draw = jax.vmap(draw)
    return draw(keys, filtered).astype(jnp.int32)
