"""Which experts a token goes to: scores, the k best, capacity, and what is counted about it.

    s = scores of x·W_router;   chosen = the k largest of s + bias;   weights = s of the chosen, renormalised or not

Beyond the letters of `array_types`: R is the rank of a choice, 0…k−1, the highest score first. Scores, weights and all
sums are float32 or better whatever the tokens are. Tokens that are not `valid` (padding) go nowhere, take no place and
are counted nowhere.
"""

import dataclasses
import fractions
import math
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax

from plga_jax.array_types import Array, statistics_dtype

SCORES = ("softmax", "sigmoid")
IMPLEMENTATIONS = ("ragged", "dense", "dispatch", "gather")
PER = ("choice", "token")

LIMIT_OF_ONE = 0.5
LIMIT_OF_DROPPED = 0.05
LIMIT_OF_IMBALANCE = 2.0
"""Alarms: share of the tokens that one expert gets, of the choices that find no place, of loss/α (1 when uniform)."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Sizes and choices of a mixture of experts; validated, hashable and static.

    Attributes:
        num_experts: X.
        num_chosen: k, experts per token, at most X.
        hidden_width: F of one expert.
        scores: "softmax" over all experts, or "sigmoid" of each.
        renormalise: the weights of the chosen sum to 1. With "softmax" this is the softmax of the chosen logits alone,
            so it does not matter whether that comes before the top k or after.
        scale: multiplies the weights.
        capacity_factor: an expert takes ⌈factor·k·tokens/X⌉ tokens of each row of a batch and drops later ones; None
            drops none. Taken as the nearest fraction with a denominator of at most 64.
        biased: a bias per expert takes part in the choice, not in the weights, and is moved by `updated_bias`.
        shared_width: F of the shared expert, which every token goes to; None is no shared expert. Several shared
            experts of width F are one of their width together.
        shared_gate: the shared expert is scaled by sigmoid(x·w).
        balance_weight: α of the load-balancing loss.
        z_weight: of the z-loss.
        implementation: how experts are computed, see `ops.experts`; None chooses.
    """

    num_experts: int
    num_chosen: int
    hidden_width: int
    scores: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    capacity_factor: float | None = None
    biased: bool = False
    shared_width: int | None = None
    shared_gate: bool = False
    balance_weight: float = 0.001
    z_weight: float = 0.0
    implementation: str | None = None

    def __post_init__(self):
        """Checks sizes and choices.

        Raises:
            ValueError: a size below 1, more chosen experts than there are, a number out of range, an unknown choice.
        """
        sizes = {name: getattr(self, name) for name in ("num_experts", "num_chosen", "hidden_width")}
        if self.shared_width is not None:
            sizes["shared_width"] = self.shared_width
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} = {value!r} must be a whole number of at least 1.")
        if self.num_chosen > self.num_experts:
            raise ValueError(
                f"num_chosen = {self.num_chosen} exceeds num_experts = {self.num_experts}: "
                f"a token can go to 1…{self.num_experts} of them."
            )
        for name, known in (("scores", SCORES), ("implementation", (None, *IMPLEMENTATIONS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} = {getattr(self, name)!r} is unknown; choose one of {known}.")
        if self.shared_gate and self.shared_width is None:
            raise ValueError("shared_gate = True needs a shared expert: set shared_width.")
        if self.capacity_factor is not None and not 0.05 <= self.capacity_factor <= 100:
            raise ValueError(
                f"capacity_factor = {self.capacity_factor!r} must be within [0.05, 100]; 1 to 2 is usual, "
                "None drops no token."
            )
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale = {self.scale!r} must be a positive number; 1 leaves the weights alone.")
        for name in ("balance_weight", "z_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be at least 0; 0 switches the loss off.")

    def fine_grained(self, pieces: int) -> Self:
        """As many parameters and as much compute in experts `pieces` times narrower, that many times more chosen.

        Args:
            pieces: divides `hidden_width`.

        Returns:
            The config with pieces·X experts of width F/pieces, pieces·k of them chosen.

        Raises:
            ValueError: the width cannot be cut into so many.

        Source: Dai et al. 2024 (DeepSeekMoE), section 3.1.
        """
        check_pieces(pieces, self.hidden_width)
        return dataclasses.replace(
            self,
            num_experts=self.num_experts * pieces,
            num_chosen=self.num_chosen * pieces,
            hidden_width=self.hidden_width // pieces,
        )

    def capacity(self, tokens: int | Array) -> int | Array:
        """⌈factor·k·tokens/X⌉, in whole numbers throughout: rounding must not depend on where it is computed.

        Args:
            tokens: how many, a number or int32 array.

        Returns:
            Places per expert, in kind; `tokens` itself without a capacity factor.
        """
        if self.capacity_factor is None:
            return tokens
        share = fractions.Fraction(self.capacity_factor).limit_denominator(64)
        # No token chooses an expert twice. The products below fit 32 bits for up to 700 experts.
        share = min(share * fractions.Fraction(self.num_chosen, self.num_experts), fractions.Fraction(1))
        many, rest = tokens // share.denominator, tokens % share.denominator
        return many * share.numerator - (-rest * share.numerator) // share.denominator


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """Where tokens go. Leading axes are those of the tokens, [B, T].

    Attributes:
        logits: of the router, [B, T, X].
        probabilities: scores that sum to 1 over all experts, [B, T, X].
        experts: int32 [B, T, R], the chosen ones.
        weights: of their results, [B, T, R]; 0 where a choice was dropped, and at padding.
        slots: int32 [B, T, R], how many earlier tokens of the row chose that expert.
        kept: bool [B, T, R], False where a choice was dropped, and at padding.
        valid: bool [B, T], False at padding.
    """

    logits: Array
    probabilities: Array
    experts: Array
    weights: Array
    slots: Array
    kept: Array
    valid: Array


def check_pieces(pieces: int, width: int) -> None:
    """Refuses fine-grained experts whose pieces do not divide the width F."""
    if pieces < 1 or width % pieces:
        raise ValueError(f"{pieces} pieces do not divide the experts' width of {width}; choose a divisor.")


def router_logits(x: Array, kernel: Array) -> Array:
    """x·W in float32 or better: in bfloat16 the order of close logits, and so the choice, would be noise.

    Args:
        x: [..., D].
        kernel: W, [D, X].

    Returns:
        [..., X].
    """
    dtype = statistics_dtype(x.dtype)
    return jnp.matmul(x.astype(dtype), kernel.astype(dtype), precision=lax.Precision.HIGHEST)


def route(logits: Array, config: ExpertsConfig, *, bias: Array | None = None, valid: Array | None = None) -> Routing:
    """Chooses experts for every token.

    A full expert drops the tokens that come later in their row, all choices of one token standing before those of the
    next: what a token gets depends on the tokens before it, and on nothing of other rows.

    Args:
        logits: [B, T, X].
        config: how scores, weights and capacity are made.
        bias: [X], added to the scores for the choice only; None is 0.
        valid: bool [B, T], False at padding; None: every token is real. Capacity is counted from a row's real tokens.

    Returns:
        The routing.

    Raises:
        ValueError: logits of another number of experts.

    Source: Shazeer et al. 2017; Fedus et al. 2022 (Switch) for capacity; Wang et al. 2024 (arXiv:2408.15664) for the
        bias.
    """
    if logits.ndim != 3 or logits.shape[-1] != config.num_experts:
        raise ValueError(f"logits must be [B, T, {config.num_experts}] for that many experts; got {logits.shape}.")
    valid = jnp.ones(logits.shape[:2], bool) if valid is None else valid
    logits = logits.astype(statistics_dtype(logits.dtype))
    known = jnp.where(valid[..., None], logits, 0)  # Gradients of NaN in padding would be NaN, however masked later.
    # The logarithm of the scores: sigmoids may all underflow, and a quotient of them then be 0/0.
    log_scores = jax.nn.log_softmax(known) if config.scores == "softmax" else jax.nn.log_sigmoid(known)
    # The order is that of the logits: distinct logits may have equal scores, 0 or 1.
    preference = known if bias is None else jnp.exp(log_scores) + bias.astype(known.dtype)[None, None]
    experts = lax.top_k(lax.stop_gradient(preference), config.num_chosen)[1]
    chosen = jnp.take_along_axis(log_scores, experts, axis=-1)
    weights = config.scale * (jax.nn.softmax(chosen) if config.renormalise else jnp.exp(chosen))
    slots, kept = _places(experts, valid, config)
    return Routing(
        logits=logits,
        probabilities=jax.nn.softmax(log_scores),
        experts=experts,
        weights=jnp.where(kept, weights, 0),
        slots=slots,
        kept=kept,
        valid=valid,
    )


def _places(experts: Array, valid: Array, config: ExpertsConfig) -> tuple[Array, Array]:
    """Each choice's place in the queue of its expert, and whether that is within the capacity."""
    wanted = jnp.sum(jax.nn.one_hot(experts, config.num_experts, dtype=jnp.int32), axis=2, dtype=jnp.int32)
    wanted = jnp.where(valid[..., None], wanted, 0)
    before = jnp.cumsum(wanted, axis=1, dtype=jnp.int32) - wanted  # [B, T, X]
    slots = jnp.take_along_axis(before, experts, axis=-1)
    capacity = config.capacity(jnp.sum(valid, axis=1, dtype=jnp.int32))
    return slots, valid[..., None] & (slots < capacity[:, None, None])


def updated_bias(bias: Array, counts: Array, *, rate: float = 0.001) -> Array:
    """The bias after one step of balancing without a loss: b + rate·sign(mean count − count).

    Args:
        bias: [..., X].
        counts: choices of each expert in the batch, [..., X], `RouterTally.counts`.
        rate: u, the step.

    Returns:
        [..., X].

    Source: Wang et al. 2024 (arXiv:2408.15664), algorithm 1.
    """
    counts = counts.astype(bias.dtype)
    return bias + rate * jnp.sign(jnp.mean(counts, axis=-1, keepdims=True) - counts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterTally:
    """Sums over tokens from which all losses and statistics are made.

    Tallies of layers, microbatches and devices add up (`+`, `lax.psum`); their losses do not.

    Attributes:
        tokens: int32 [], real ones.
        counts: int32 [X], choices of each expert, dropped ones included.
        dropped: int32 [], choices that found no place.
        unserved: int32 [], tokens all of whose choices were dropped.
        probabilities: [X], sums.
        squared_normalisers: [], sum of (log Σ exp logits)².
    """

    tokens: Array
    counts: Array
    dropped: Array
    unserved: Array
    probabilities: Array
    squared_normalisers: Array

    def __add__(self, other: "RouterTally") -> "RouterTally":
        """The tally of both."""
        return jax.tree.map(jnp.add, self, other)


def tally(routing: Routing) -> RouterTally:
    """Counts a routing, or a stack of routings along leading axes, such as layers.

    Args:
        routing: of [..., B, T] tokens.

    Returns:
        Sums over all tokens of all of them.
    """
    valid, num_experts = routing.valid, routing.logits.shape[-1]
    normaliser = jax.nn.logsumexp(jnp.where(valid[..., None], routing.logits, 0), axis=-1)
    chosen = jnp.where(valid[..., None], routing.experts, num_experts)
    return RouterTally(
        tokens=jnp.sum(valid, dtype=jnp.int32),
        counts=jnp.zeros(num_experts, jnp.int32).at[chosen.reshape(-1)].add(1, mode="drop"),
        dropped=jnp.sum(valid[..., None] & ~routing.kept, dtype=jnp.int32),
        unserved=jnp.sum(valid & ~jnp.any(routing.kept, axis=-1), dtype=jnp.int32),
        probabilities=jnp.sum(_where(valid, routing.probabilities).reshape(-1, num_experts), axis=0),
        squared_normalisers=jnp.sum(_where(valid, jnp.square(normaliser))),
    )


def _where(valid: Array, x: Array) -> Array:
    return jnp.where(jnp.expand_dims(valid, range(valid.ndim, x.ndim)), x, 0)


def _shares(counted: RouterTally) -> tuple[Array, Array]:
    """f, of the choices, and P, both summing to 1; 0 without tokens."""
    dtype = counted.probabilities.dtype
    choices = jnp.maximum(jnp.sum(counted.counts), 1).astype(dtype)
    tokens = jnp.maximum(counted.tokens, 1).astype(dtype)
    return counted.counts.astype(dtype) / choices, counted.probabilities / tokens


def load_balancing_loss(counted: RouterTally, alpha: float = 1.0, *, per: str = "choice") -> Array:
    """α·X·Σ f_x·P_x, with f the share an expert has and P its mean probability. Gradients flow through P.

    Args:
        counted: what to balance; the tally of several layers pools them before the product.
        alpha: α.
        per: "choice": f is the share of all choices and sums to 1, so the loss is α when all experts have the same.
            "token": f is choices over tokens and sums to k, so it is k·α then, as in the published training programs.

    Returns:
        A scalar.

    Raises:
        ValueError: an unknown `per`.

    Source: Fedus et al. 2022 (Switch), eqs. 4 to 6.
    """
    if per not in PER:
        raise ValueError(f"per = {per!r} is unknown; choose one of {PER}.")
    f, P = _shares(counted)
    if per == "token":
        f *= _chosen_per_token(counted)
    return alpha * f.size * jnp.sum(f * P)


def _chosen_per_token(counted: RouterTally) -> Array:
    dtype = counted.probabilities.dtype
    return jnp.sum(counted.counts).astype(dtype) / jnp.maximum(counted.tokens, 1).astype(dtype)


def router_z_loss(counted: RouterTally) -> Array:
    """The mean of (log Σ exp logits)²: keeps logits small. A scalar.

    Source: Zoph et al. 2022 (ST-MoE), eq. 5.
    """
    return counted.squared_normalisers / jnp.maximum(counted.tokens, 1).astype(counted.squared_normalisers.dtype)


def router_loss(counted: RouterTally, config: ExpertsConfig) -> Array:
    """What a training step adds to its loss: both losses with the weights of the config. A scalar."""
    return load_balancing_loss(counted, config.balance_weight) + config.z_weight * router_z_loss(counted)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterStatistics:
    """How evenly experts are used.

    Attributes:
        counts: int32 [X], choices of each expert.
        share: [X], of the choices; sums to 1.
        token_share: [X], of the tokens; sums to k.
        dropped_share: [], choices that found no place, of all choices.
        unserved_share: [], tokens without any expert, of all tokens.
        entropy: [], of `share` in nats, at most log X.
        imbalance: [], the load-balancing loss over α: 1 when uniform, X when one expert gets all.
        overloaded: bool [X], experts with more than half of the tokens (where each gets half even when balanced: more
            than half way from there to all).
        dropping: bool [], more than 5 % of the choices are dropped.
        unbalanced: bool [], the imbalance is over 2.
    """

    counts: Array
    share: Array
    token_share: Array
    dropped_share: Array
    unserved_share: Array
    entropy: Array
    imbalance: Array
    overloaded: Array
    dropping: Array
    unbalanced: Array

    def alarms(self) -> list[str]:
        """What is wrong, in words; outside of `jax.jit`."""
        found = [
            f"expert {expert} gets {float(self.token_share[expert]):.0%} of the tokens"
            for expert in range(self.counts.size)
            if self.overloaded[expert]
        ]
        if self.dropping:
            found.append(f"{float(self.dropped_share):.1%} of the choices are dropped")
        if self.unbalanced:
            found.append(f"the load-balancing loss is {float(self.imbalance):.2f} times that of a uniform router")
        return found


def router_statistics(counted: RouterTally) -> RouterStatistics:
    """Shares, entropy and alarms of a tally.

    Args:
        counted: the sums.

    Returns:
        The statistics; all shares are 0 without tokens.
    """
    f, _ = _shares(counted)
    dtype = f.dtype
    token_share = f * _chosen_per_token(counted)
    dropped = counted.dropped.astype(dtype) / jnp.maximum(jnp.sum(counted.counts), 1).astype(dtype)
    imbalance = load_balancing_loss(counted)
    balanced = _chosen_per_token(counted) / f.size
    limit = jnp.where(balanced < LIMIT_OF_ONE, LIMIT_OF_ONE, (1 + balanced) / 2)
    return RouterStatistics(
        counts=counted.counts,
        share=f,
        token_share=token_share,
        dropped_share=dropped,
        unserved_share=counted.unserved.astype(dtype) / jnp.maximum(counted.tokens, 1).astype(dtype),
        entropy=jnp.sum(jax.scipy.special.entr(f)),
        imbalance=imbalance,
        overloaded=token_share > limit,
        dropping=dropped > LIMIT_OF_DROPPED,
        unbalanced=imbalance > LIMIT_OF_IMBALANCE,
    )
