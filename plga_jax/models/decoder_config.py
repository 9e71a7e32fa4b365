"""Sizes and choices of a pre-norm decoder of the Llama kind."""

import dataclasses

from plga_jax.models.config import ModelConfig, float_name
from plga_jax.ops.attention import IMPLEMENTATIONS
from plga_jax.ops.rope_scaling import RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Sizes and choices of a Llama, Qwen2, Qwen3 or Mistral; validated, hashable, with a JSON round trip.

    Attributes:
        vocab_size: V.
        num_layers: L.
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads; divides N.
        head_width: H, even. N·H need not be D.
        model_width: D.
        hidden_width: F of the feed-forward.
        context: the longest input the positions were made for, after scaling.
        rope: rotary positions and their scaling.
        norm_epsilon: of every RMSNorm.
        tied: the head is the embedding.
        qkv_bias: q, k and v have biases.
        out_bias: the attention's output map has a bias.
        mlp_bias: the three maps of the feed-forward have biases.
        qk_norm: q and k are normalised per head before they are turned (Qwen3).
        window: keys that a windowed layer sees, the query included; None when no layer is windowed.
        windowed_layers: indices of the windowed layers.
        attention: implementation of `ops.attention`; None chooses.
        bos_id: token that begins a text; None when the tokenizer adds none.
        eos_ids: tokens that end a text.
        pad_id: token that marks padding.
        compute_dtype: of matrix products; statistics stay in float32 or better.
        param_dtype: of the stored weights.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    model_width: int
    hidden_width: int
    context: int
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    norm_epsilon: float = 1e-6
    tied: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    attention: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int = 0
    compute_dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self):
        """Checks sizes and choices.

        Raises:
            ValueError: a size below 1, heads that do not divide, an odd head width, or a choice that does not exist.
        """
        if isinstance(self.rope, dict):
            object.__setattr__(self, "rope", RopeConfig(**self.rope))
        for name in ("windowed_layers", "eos_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("compute_dtype", "param_dtype"):
            object.__setattr__(self, name, float_name(name, getattr(self, name)))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < (0 if field.name == "pad_id" else 1):
                raise ValueError(f"{field.name} = {value} must be at least {0 if field.name == 'pad_id' else 1}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}.")
        if self.head_width % 2:
            raise ValueError(f"head_width = {self.head_width} must be even: RoPE turns pairs.")
        if self.windowed_layers and (self.window is None or self.window < 1):
            raise ValueError(
                f"window = {self.window} must be at least 1 for the windowed layers {self.windowed_layers}."
            )
        if any(not 0 <= layer < self.num_layers for layer in self.windowed_layers):
            raise ValueError(f"windowed_layers {self.windowed_layers} must be within 0…{self.num_layers - 1}.")
        if self.attention not in (None, *IMPLEMENTATIONS):
            raise ValueError(f"attention = {self.attention!r} is unknown; choose one of {IMPLEMENTATIONS} or None.")
        for name, ids in (("pad_id", (self.pad_id,)), ("eos_ids", self.eos_ids)):
            if any(not 0 <= token < self.vocab_size for token in ids):
                raise ValueError(f"{name} {ids} must be within the vocabulary 0…{self.vocab_size - 1}.")
