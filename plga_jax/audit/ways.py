"""The four ways a PLDR-LLM decodes, side by side on the same prompts: tokens, logits, margins and speed.

    none        everything again for every token: the reference
    kv          keys, values and the metric tensor A of the prompt are kept
    kv_g        keys, values and the operator G of the prompt are kept
    constant_g  another model, v510G: the operator of the *first* prompt serves every prompt

The first three differ only in when G is made; the last asks whether G is a constant of the model at all.
"""

import dataclasses
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from plga_jax.audit.decoding import Agreement, agreement, forced_logits
from plga_jax.generate import generate
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_transforms import constant_operator_model, operators_of

WAYS = ("none", "kv", "kv_g", "constant_g")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    """One way of decoding, on all prompts."""

    tokens: np.ndarray
    """[P, C] what it generates greedily, running freely."""
    tokens_per_s: float
    """New tokens by wall time, one prompt at a time, prefill included, compilation not."""
    free: float
    """The share of steps at which the free run has the token of the free run without cache."""
    forced: Agreement
    """Against no cache, on prefixes forced on both: prompt and what no cache generated."""


def decode_four_ways(
    model: PLDR, prompts: Sequence[Sequence[int]], *, new_tokens: int, repeats: int = 1, progress: bool = False
) -> dict[str, Decode]:
    """*Measured*: decodes greedily in each of the four ways and compares each with no cache.

    Args:
        model: of learned operators.
        prompts: token ids of each prompt, all of one length.
        new_tokens: tokens to add to each.
        repeats: times all prompts are decoded for the speed; the fastest counts, since other work on the machine can
            only slow a pass down.
        progress: whether to show a bar.

    Returns:
        From each of `WAYS` to its `Decode`.

    Raises:
        ValueError: prompts of different lengths, or none; `generate`'s errors.
    """
    if len({len(prompt) for prompt in prompts}) != 1:
        raise ValueError(f"need prompts of one length, got lengths {sorted({len(p) for p in prompts})}")
    # Frozen as kv_g freezes it: from the prompt alone.
    constant = constant_operator_model(model, operators_of(model, jnp.asarray(prompts[0], jnp.int32)))
    programs = {way: (constant, "kv_g") if way == "constant_g" else (model, way) for way in WAYS}

    tokens, seconds, logits = {}, {}, {}
    with tqdm(total=len(WAYS) * len(prompts) * repeats, desc="decode", disable=not progress, leave=False) as bar:
        for way, (decoder, cache) in programs.items():

            def run(prompt, decoder=decoder, cache=cache):
                return generate(decoder, [prompt], max_new_tokens=new_tokens, cache=cache).tokens[0]

            bar.set_postfix_str(way)
            run(prompts[0])
            passes = []
            for _ in range(repeats):
                began, rows = time.perf_counter(), []
                for prompt in prompts:
                    rows.append(run(prompt))
                    bar.update()
                passes.append(time.perf_counter() - began)
            tokens[way], seconds[way] = np.asarray(rows), min(passes)
            reference = tokens["none"]
            logits[way] = np.stack(
                [forced_logits(decoder, *pair, cache=cache) for pair in zip(prompts, reference, strict=True)]
            )
    return {
        way: Decode(
            tokens=tokens[way],
            tokens_per_s=tokens[way].size / seconds[way],
            free=float(np.mean(tokens[way] == tokens["none"])),
            forced=agreement(logits[way], logits["none"]),
        )
        for way in WAYS
    }
