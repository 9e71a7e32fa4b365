"""How well two ways of decoding agree: tokens, logits, and the margins that decide."""

import dataclasses

import numpy as np


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
            f"logits {logits.shape} and reference {reference.shape} differ in shape; "
            "decode both for the same steps"
        )
    if logits.size == 0 or logits.shape[-1] < 2:
        raise ValueError(f"need at least one step and two ids, got shape {logits.shape}")
    tokens = logits.argmax(axis=-1) if tokens is None else np.asarray(tokens)
    reference_tokens = (
        reference.argmax(axis=-1) if reference_tokens is None else np.asarray(reference_tokens)
    )
    if tokens.shape != reference_tokens.shape or tokens.size == 0:
        raise ValueError(
            f"tokens {tokens.shape} and reference_tokens {reference_tokens.shape} "
            "must be of one shape and not empty"
        )
    best_two = np.partition(logits, -2, axis=-1)[..., -2:]
    return Agreement(
        token_agreement=float(np.mean(tokens == reference_tokens)),
        largest_deviation=float(np.max(np.abs(logits - reference))),
        smallest_margin=float(np.min(best_two[..., 1] - best_two[..., 0])),
    )
