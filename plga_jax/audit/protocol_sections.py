"""Sections of an audit that run the model as it is used: decoding, prefixes, losses, multiple choice."""

import functools

import numpy as np

from plga_jax.audit import budget, decoding, prefix, scoring, sequential
from plga_jax.audit.quantities import Quantity
from plga_jax.audit.subject import EVERY_HEAD, NO_LEARNER, ONE_PROMPT, Subject, logits
from plga_jax.generate import generate


def cached_decoding(subject: Subject) -> list[Quantity]:
    """Greedy decoding with the frozen operators of the prompt against recomputing everything for every token."""
    model, settings = subject.model, subject.settings
    prompts = subject.prompts[: settings.decode_prompts]
    deviations, margins, agree, eps, largest, repeated = [], [], [], [], [], []
    for prompt in prompts:
        cached = generate(model, [prompt.tolist()], max_new_tokens=settings.decoded, cache="kv_g").tokens[0]
        kept = decoding.forced_logits(model, prompt, cached, cache="kv_g").astype(np.float64)
        reference = decoding.forced_logits(model, prompt, cached, cache="none").astype(np.float64)
        best = np.partition(kept, -2, axis=-1)
        deviations.append(np.abs(kept - reference).max(axis=-1))
        margins.append(best[:, -1] - best[:, -2])
        agree.append(kept.argmax(axis=-1) == reference.argmax(axis=-1))
        repeated.append(_repeated(cached))
        if model.config.operator == "learned":
            drift = decoding.operator_drift(model, prompt, cached)
            eps.append(drift.relative_rms)
            largest.append(drift.largest)
    axes, compared = ("prompt", "step"), decoding.agreement
    deviations, margins = np.stack(deviations), np.stack(margins)
    found = [
        Quantity.of("decode.logit_deviation", compared, deviations, axes, "max over the vocabulary"),
        Quantity.of("decode.margin", compared, margins, axes, "best less second logit of the cached decode"),
        Quantity.of("decode.argmax_agrees", compared, np.stack(agree).astype(np.int64), axes),
        Quantity.of(
            "decode.below_half_margin",
            compared,
            (2 * deviations < margins).astype(np.int64),
            axes,
            "1: twice the deviation is below the margin, so no argmax could differ",
        ),
        Quantity(
            name="decode.repeated_4grams",
            label="measured",
            values=np.asarray(repeated),
            axes=("prompt",),
            note="share of 4-grams of the continuation that occurred before in it: what agreement is worth",
        ),
    ]
    if not eps:
        return [*found, Quantity.omitted("decode.epsilon_G", decoding.operator_drift, NO_LEARNER)]
    axes = ("prompt", "layer", "step")
    return [
        *found,
        Quantity.of("decode.epsilon_G", decoding.operator_drift, np.stack(eps), axes, "against the *prompt's* G"),
        Quantity.of("decode.largest_G_change", decoding.operator_drift, np.stack(largest), axes),
    ]


def _repeated(tokens: list[int]) -> float:
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else float("nan")


def losses(subject: Subject) -> list[Quantity]:
    """One call per prompt against one call per prefix: what later tokens are worth to a block."""
    scored = sequential.block_against_sequential(
        functools.partial(logits, subject.model),
        subject.prompts,
        pad_id=subject.model.config.pad_id,
        batch=subject.settings.batch,
    )
    compared, axes = sequential.block_against_sequential, ("prompt", "position")
    return [
        Quantity.of("loss.block", compared, scored.block, axes, "nats"),
        Quantity.of("loss.sequential", compared, scored.sequential, axes, "nats"),
        Quantity.of("loss.gap", compared, scored.block - scored.sequential, axes, "block less sequential"),
        Quantity.of("loss.mean_gap", compared, scored.gap, (), "over all scored tokens"),
    ]


def prefixes(subject: Subject) -> list[Quantity]:
    """Whether rows before a changed suffix move, what padding does, and whether repeated calls agree bit for bit."""
    model, settings = subject.model, subject.settings
    decoder, shared = prefix.pldr_decoder(model), settings.prefix_shared
    pairs = prefix.suffix_pairs(
        model.config.vocab_size,
        pairs=settings.prefix_pairs,
        length=settings.prefix_length,
        shared=shared,
        seed=settings.seed,
        pad_id=model.config.pad_id,
    )
    rows, found = prefix.historical_rows, []
    for suffix, padded in (("", False), ("_as_padding", True)):
        moved = rows(decoder, *pairs, shared=shared, suffix_is_padding=padded)
        found += [
            Quantity.of(
                f"prefix.changed_fraction{suffix}", rows, moved.fraction, (), "share of all logits of shared rows"
            ),
            Quantity.of(f"prefix.first_row_fraction{suffix}", rows, moved.first_row.fraction, (), "row 0 has one key"),
            Quantity.of(f"prefix.largest_change{suffix}", rows, moved.largest, ("pair", "row")),
        ]
        if model.config.operator == "learned":
            operators = prefix.operator_movement(model, *pairs, shared=shared, suffix_is_padding=padded)
            found += [
                Quantity.of(f"prefix.{name}_change{suffix}", prefix.operator_movement, moved.largest, ("layer", "pair"))
                for name, moved in operators.items()
            ]
    effect = prefix.padding_effect(decoder, subject.prompts, pad_id=model.config.pad_id)
    padding = prefix.padding_effect
    return [
        *found,
        Quantity.of("padding.last_row_change", padding, effect.largest, ("prompt",), "four masked tokens appended"),
        Quantity.of("padding.restored", padding, int(effect.restored), (), "1: bit for bit without them again"),
        Quantity.of(
            "repeat.bitwise",
            prefix.repeats_bitwise,
            int(prefix.repeats_bitwise(decoder, subject.prompts)),
            (),
            "1: two calls agree bit for bit",
        ),
    ]


def protocols(subject: Subject) -> list[Quantity]:
    """Multiple choice by block and by sequential scores: each prompt's second half among those of the others."""
    prompts, scored = subject.prompts, scoring.score_candidates
    if len(prompts) < 2:
        return [Quantity.omitted("choice.gap", scored, ONE_PROMPT)]
    middle = prompts.shape[1] // 2
    endings = prompts[:, middle:].tolist()
    items = [
        scoring.Item(
            context=prompts[row, :middle].tolist(),
            candidates=[endings[(row + shift) % len(prompts)] for shift in range(min(len(prompts), 4))],
            true=[0],
        )
        for row in range(len(prompts))
    ]
    scores = scored(
        functools.partial(logits, subject.model),
        items,
        pad_id=subject.model.config.pad_id,
        batch=subject.settings.batch,
    )
    chosen, (sequential_mc2, block_mc2) = scores.choices(), scores.mc2()
    right = np.array([row == 0 for row in chosen.sequential])
    return [
        Quantity.of("choice.gap", scored, scores.gap, ("candidate",), "block less sequential, nats"),
        Quantity.of("choice.margin", scored, chosen.margin, ("item",)),
        Quantity.of("choice.flip", scored, chosen.flip.astype(np.int64), ("item",), "1: another candidate wins"),
        Quantity.of("choice.tie", scored, chosen.tie.astype(np.int64), ("item",), "1: no choice to compare"),
        Quantity.of("choice.close", scored, chosen.close.astype(np.int64), ("item",), "1: 2·gap ≥ margin"),
        Quantity.of("choice.discordant_pairs", scored, chosen.discordant, ("item",), f"of {chosen.pairs[0]} each"),
        Quantity.of("choice.mc2_sequential", scored, sequential_mc2, ("item",)),
        Quantity.of("choice.mc2_block", scored, block_mc2, ("item",)),
        Quantity.of("choice.right", scored, right.astype(np.int64), ("item",), "accuracy, by sequential scores"),
    ]


def perturbation(subject: Subject) -> list[Quantity]:
    """The worst-case chain from an error of the operators to the logits, at each prompt."""
    whole = budget.perturbation_budget
    if subject.model.config.operator != "learned":
        return [Quantity.omitted("budget.deviation", whole, NO_LEARNER)]
    found = [whole(subject.model, prompt) for prompt in subject.prompts]

    def heads(name: str) -> np.ndarray:
        return np.stack([getattr(one, name) for one in found], axis=1)

    def prompts(name: str) -> np.ndarray:
        return np.array([getattr(one, name) for one in found])

    decided = np.array([one.decides() for one in found], np.int64)
    return [
        Quantity.of(
            "budget.operator_gain", budget.operator_gain, heads("operator_gain"), EVERY_HEAD, "C_G, observed range"
        ),
        Quantity.of(
            "budget.operator_gain_floor", budget.operator_gain, heads("operator_gain_floor"), EVERY_HEAD, "C_G from ε_A"
        ),
        Quantity.of(
            "budget.operator_gain_certified",
            budget.certified_operator_gain,
            heads("operator_gain_certified"),
            EVERY_HEAD,
            "of any error of A up to a float32 rounding",
        ),
        Quantity.of("budget.head_factor", budget.head_factor, heads("head_factor"), EVERY_HEAD),
        Quantity.of("budget.layer_gain", whole, heads("layer_gain"), ("layer", "prompt")),
        Quantity.of("budget.end_to_end", whole, prompts("end_to_end"), ("prompt",)),
        Quantity.of("budget.radius", whole, prompts("radius"), ("prompt",), "a float32 rounding of the largest G"),
        Quantity.of("budget.deviation", whole, prompts("deviation"), ("prompt",), "B: what the chain allows a logit"),
        Quantity.of("budget.margin", decoding.agreement, prompts("margin"), ("prompt",), "best less second logit"),
        Quantity.of("budget.decides", budget.Budget.decides, decided, ("prompt",), "1: 2·B < margin"),
    ]
