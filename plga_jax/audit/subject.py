"""What an audit is of: a model and prompts, how they are measured, and what the model deduces from them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array
from plga_jax.models.pldr import PLDR, DeductiveOutputs
from plga_jax.models.pldr_layers import OPERATORS

EVERY_HEAD = ("layer", "prompt", "head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What decides the numbers of an audit beside the model and its prompts.

    Attributes:
        seed: of sampled tokens, Gram rows and token pairs.
        sampled: tokens drawn after each prompt, twice, for the order parameters.
        top_p: probability mass they are drawn from.
        decoded: tokens decoded after each prompt to compare cached with recomputed decoding.
        decode_prompts: how many of the prompts are decoded.
        jacobian_rows: Gram rows per prompt and layer at which the row map is differentiated.
        prefix_pairs: pairs of sequences for the historical rows.
        prefix_shared: tokens that the two of a pair share.
        prefix_length: their tokens.
        batch: sequences of one call.
    """

    seed: int = 0
    sampled: int = 48
    top_p: float = 0.8
    decoded: int = 48
    decode_prompts: int = 4
    jacobian_rows: int = 16
    prefix_pairs: int = 16
    prefix_shared: int = 4
    prefix_length: int = 12
    batch: int = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is audited: a model, prompts of one length, and how."""

    model: PLDR
    prompts: np.ndarray
    """int32 [P, T], without padding."""
    settings: AuditSettings = AuditSettings()

    def __post_init__(self):
        prompts, config = np.asarray(self.prompts), self.model.config
        if prompts.ndim != 2 or prompts.shape[0] < 1 or prompts.shape[1] < 2:
            raise ValueError(f"prompts must be [at least 1, at least 2 tokens] of one length, got {prompts.shape}")
        if prompts.min() < 0 or prompts.max() >= config.vocab_size or (prompts == config.pad_id).any():
            raise ValueError(
                f"prompt ids {prompts.min()}…{prompts.max()} must be in 0…{config.vocab_size - 1} and none of them "
                f"the pad id {config.pad_id}; use the model's tokenizer"
            )
        room = config.context - prompts.shape[1]
        if room < max(self.settings.sampled, self.settings.decoded):
            raise ValueError(
                f"prompts of {prompts.shape[1]} tokens leave {room} of a context of {config.context}, but "
                f"{max(self.settings.sampled, self.settings.decoded)} are to be added: shorten the prompts"
            )
        object.__setattr__(self, "prompts", prompts.astype(np.int32))

    @functools.cached_property
    def deduced(self) -> dict[str, np.ndarray]:
        """Deductive outputs and rotated queries of one call on all prompts: [L, P, N, H, H] and q [L, P, T, N, H]."""
        learned = self.model.config.operator == "learned"
        names = (*OPERATORS, "q") if learned else ("G_LM", "q")
        out = deduce(self.model, jnp.asarray(self.prompts), names)
        return {name: np.asarray(getattr(out, name)) for name in names}


@functools.partial(jax.jit, static_argnames="names")
def deduce(model: PLDR, tokens, names: tuple[str, ...]) -> DeductiveOutputs:
    """The deductive outputs named, of one call on int32 [B, T]."""
    return model(tokens, collect=names, last_only=True)[1]


@jax.jit
def logits(model: PLDR, tokens) -> Array:
    """Logits [B, T, V] of one call on int32 [B, T]."""
    return model(tokens)[0]


NO_LEARNER = "the model has constant operators and makes no such tensor"
ONE_HEAD = "one head: there is none to compare it with"
ONE_PROMPT = "one prompt: give at least two"
