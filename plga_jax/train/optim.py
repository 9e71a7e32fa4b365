"""The published recipe: clip by value, AdamW with decay on everything, warm-up and cosine, and skipped steps."""

import dataclasses
import json
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from plga_jax.array_types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Settings of the optimizer; the defaults are those of the published training program.

    Attributes:
        learning_rate: η_max, the largest rate, reached after `warmup_steps` updates.
        warmup_steps: T_w, updates over which the rate rises from 0. The first update has rate 0.
        total_steps: T, the update at which the cosine ends; later ones keep the last rate.
        final_ratio: α, the last rate over the largest.
        b1: decay of Adam's first moment.
        b2: decay of Adam's second moment.
        epsilon: added to the root of the second moment.
        weight_decay: decoupled decay of *all* parameters, biases and norms too, times the rate.
        clip_value: every entry of a gradient is clipped to [-clip_value, clip_value]; None does not
            clip.
        max_consecutive_skips: non-finite steps in a row after which the training loop gives up.
    """

    learning_rate: float
    warmup_steps: int
    total_steps: int
    final_ratio: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-5
    weight_decay: float = 0.1
    clip_value: float | None = 1.0
    max_consecutive_skips: int = 100

    def __post_init__(self):
        def check(name: str, valid: bool, wanted: str):
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

        def number(name: str, low: float, high: float, wanted: str):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            check(name, is_number and math.isfinite(value) and low <= value <= high, wanted)

        def whole(name: str, low: int, wanted: str):
            value = getattr(self, name)
            check(name, isinstance(value, int) and not isinstance(value, bool) and value >= low, wanted)

        number("learning_rate", 0, math.inf, "a finite rate >= 0, for example 1e-3")
        whole("warmup_steps", 0, "a whole number of updates >= 0")
        whole("total_steps", 1, "a whole number of updates >= 1")
        check(
            "warmup_steps",
            self.warmup_steps < self.total_steps,
            f"below total_steps ({self.total_steps}); shorten the warm-up or train for longer",
        )
        number("final_ratio", 0, 1, "within [0, 1]")
        number("b1", 0, 1 - 1e-12, "within [0, 1)")
        number("b2", 0, 1 - 1e-12, "within [0, 1)")
        number("epsilon", 1e-30, math.inf, "above 0; the published value is 1e-5")
        number("weight_decay", 0, math.inf, "finite and >= 0; 0 switches decay off")
        if self.clip_value is not None:
            number("clip_value", 1e-30, math.inf, "above 0, or None to leave gradients unclipped")
        whole("max_consecutive_skips", 0, "a whole number >= 0")

    def to_json(self) -> str:
        """The settings as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "OptimConfig":
        """The inverse of `to_json`.

        Raises:
            ValueError: when a setting is unknown, missing or out of range.
        """
        settings = json.loads(text)
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(settings) - names)
        missing = sorted({"learning_rate", "warmup_steps", "total_steps"} - set(settings))
        if unknown or missing:
            raise ValueError(f"optimizer settings: unknown {unknown}, missing {missing}; known are {sorted(names)}")
        return cls(**settings)


def learning_rate(count, config: OptimConfig, *, largest=None, warmup=None) -> Array:
    """The learning rate after a number of updates.

    With s updates made: η_max s/T_w while s <= T_w, then η_max ((1 - α) ½ (1 + cos π(s - T_w)/(T -
    T_w)) + α), with s held at T. The very first update therefore has rate 0 (moments move,
    parameters do not).

    Args:
        count: s, int or int array of any shape.
        config: the settings.
        largest: η_max, may be traced; None takes the config's.
        warmup: T_w below T, may be traced; None takes the config's.

    Returns:
        The rate in the default float dtype.

    Source: the schedule of the published PLDR-LLM training program.
    """
    # optax's schedules mix int counters with floats, which strict dtype promotion refuses.
    real = jnp.result_type(float)
    largest = config.learning_rate if largest is None else largest
    warmup = jnp.asarray(config.warmup_steps if warmup is None else warmup, real)
    steps = jnp.minimum(jnp.asarray(count), config.total_steps).astype(real)
    rising = steps / jnp.maximum(warmup, 1)
    turned = jnp.pi * (steps - warmup) / (config.total_steps - warmup)
    falling = (1 - config.final_ratio) * 0.5 * (1 + jnp.cos(turned)) + config.final_ratio
    return largest * jnp.where(steps < warmup, rising, falling)


def schedule(config: OptimConfig) -> optax.Schedule:
    """`learning_rate` as a function of the number of updates made so far."""
    return lambda count: learning_rate(count, config)


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`: [] int32 counters, and the state of what it guards."""

    total_skipped: Array
    consecutive_skipped: Array
    inner: optax.OptState


def skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes `inner` pass over a step any of whose incoming gradients is infinite or NaN.

    Such a step gives updates of zero and leaves the state of `inner` (moments, bias-correction
    count) as it was; what is chained after it still counts the step. That is what the reference's
    gradient scaler does, and what keeps it alive: its schedule advances over skipped steps. Unlike
    `optax.apply_if_finite` this never gives in: the limit is the training loop's business, which
    can stop and say so.

    The choice is a select, not a branch, so that it fuses with the update and donated buffers are
    reused.

    Args:
        inner: the transformation to guard.

    Returns:
        A transformation with state `SkipNonfiniteState`.

    Source: the GradScaler of the published program, which drops such steps.
    """

    def init(params):
        return SkipNonfiniteState(
            total_skipped=jnp.zeros((), jnp.int32),
            consecutive_skipped=jnp.zeros((), jnp.int32),
            inner=inner.init(params),
        )

    def update(gradients, state, params=None):
        leaves = jax.tree.leaves(gradients)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
        updates, new_inner = inner.update(gradients, state.inner, params)
        skipped = 1 - finite.astype(jnp.int32)
        return (
            jax.tree.map(lambda new: jnp.where(finite, new, 0), updates),
            SkipNonfiniteState(
                total_skipped=state.total_skipped + skipped,
                consecutive_skipped=(state.consecutive_skipped + 1) * skipped,
                inner=jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_inner, state.inner),
            ),
        )

    return optax.GradientTransformation(init, update)


def skipped(opt_state: optax.OptState) -> tuple[Array, Array]:
    """The counters of `skip_nonfinite` anywhere within an optimizer state.

    Args:
        opt_state: the state of `make_optimizer`, or of a chain around it.

    Returns:
        [] int32 steps skipped in all, and [] int32 skipped in a row up to now.

    Raises:
        ValueError: when no `skip_nonfinite` is in the chain.
    """
    is_state = lambda node: isinstance(node, SkipNonfiniteState)  # noqa: E731
    for node in jax.tree.leaves(opt_state, is_leaf=is_state):
        if is_state(node):
            return node.total_skipped, node.consecutive_skipped
    raise ValueError(
        "this optimizer state counts no skipped steps; make the optimizer with make_optimizer, "
        "or wrap yours in skip_nonfinite"
    )


def _with_standard_promotion(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Lets optax, which raises Python floats to int32 counts, run under strict dtype promotion."""

    def update(gradients, state, params=None):
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(gradients, state, params)

    return optax.GradientTransformation(inner.init, update)


class RateFactorState(NamedTuple):
    """State of `adjustable_rate`: [] float32, what updates are multiplied by."""

    factor: Array


def adjustable_rate() -> optax.GradientTransformation:
    """Multiplies updates by a factor that lies in the state, 1 at first: see `scale_rate`.

    In the state, so that checkpoints keep it.

    Returns:
        A transformation with state `RateFactorState`.
    """

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda x: x * state.factor.astype(x.dtype), updates), state

    return optax.GradientTransformation(lambda params: RateFactorState(jnp.ones((), jnp.float32)), update)


def scale_rate(opt_state: optax.OptState, factor: float) -> optax.OptState:
    """The state with a learning rate that is `factor` times as large from now on.

    Args:
        opt_state: of an optimizer with `adjustable_rate`.
        factor: multiplies the rate.

    Returns:
        The state.

    Raises:
        ValueError: when no `adjustable_rate` is in the chain.
    """
    is_state = lambda node: isinstance(node, RateFactorState)  # noqa: E731
    if not any(map(is_state, jax.tree.leaves(opt_state, is_leaf=is_state))):
        raise ValueError(
            "the learning rate of this optimizer is fixed: make it with make_optimizer(…, adjustable=True)"
        )

    def scaled(node):
        return RateFactorState(node.factor * factor) if is_state(node) else node

    return jax.tree.map(scaled, opt_state, is_leaf=is_state)


def rate_factor(opt_state: optax.OptState) -> Array | None:
    """The factor of `adjustable_rate` anywhere within an optimizer state; None where there is none."""
    is_state = lambda node: isinstance(node, RateFactorState)  # noqa: E731
    found = [node.factor for node in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(node)]
    return found[0] if found else None


def make_optimizer(
    config: OptimConfig, rate: optax.Schedule | None = None, *, adjustable: bool = False
) -> optax.GradientTransformation:
    """AdamW as published: clip by value, Adam, decoupled decay on all parameters, schedule; bad steps skipped.

    Keep master parameters in float32: the moments take their dtype.

    Args:
        config: the settings.
        rate: another schedule than the config's.
        adjustable: whether `scale_rate` may change the learning rate later.

    Returns:
        An optax transformation, to be followed by `optax.apply_updates`. Its update needs `params`.

    Source: the published PLDR-LLM training program; Loshchilov & Hutter 2019 for AdamW.
    """
    adamw = optax.chain(
        optax.identity() if config.clip_value is None else optax.clip(config.clip_value),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.epsilon),
        optax.add_decayed_weights(config.weight_decay),
    )
    return optax.chain(
        skip_nonfinite(_with_standard_promotion(adamw)),
        optax.scale_by_learning_rate(rate or schedule(config)),
        *([adjustable_rate()] if adjustable else []),
    )
