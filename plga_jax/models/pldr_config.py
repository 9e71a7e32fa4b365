"""Sizes and choices of a PLDR-LLM."""

import dataclasses
from typing import Literal, Self, get_args

from plga_jax.models.config import ModelConfig, float_name
from plga_jax.modules.initializers import INIT_LAWS, InitLaw
from plga_jax.ops.attention import IMPLEMENTATIONS
from plga_jax.ops.rope import LAYOUTS, Layout

Operator = Literal["learned", "constant"]
GramRows = Literal["valid", "all"]
PRESETS = ("tiny", "small", "medium", "110m")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PLDRConfig(ModelConfig):
    """Sizes and choices of a PLDR-LLM; validated, hashable, with a JSON round trip.

    Attributes:
        vocab_size: V.
        num_layers: L.
        num_heads: N.
        head_width: H, even.
        hidden_width: F of the feed-forward; None is ⌊8D/3⌋.
        metric_width: hidden width of a metric learner's gated block; None is ⌊8H/3⌋.
        residual_units: U, residual units of a metric learner.
        blocks_per_unit: J, gated blocks in one unit.
        context: the most tokens of one call or cache.
        rope_base: Θ.
        rope_layout: "interleaved" (v51) or "half" (v52).
        operator: "learned" (v510) or "constant" (v510G).
        init: initialisation law, see `modules.initializers`.
        norm_epsilon: of every LayerNorm.
        gram_rows: "valid" keeps padding out of the Gram, so it changes nothing; "all" lets it in, as the published
            programs do.
        gram_refresh: None makes one Gram of all rows of a call, as in the paper, so a row depends on later ones. c ≥ 1
            makes it causal: row t uses the operator of rows up to c·⌊t/c⌋ of its document, and a block of tokens gives
            what its tokens give one by one. c = 1 sees the whole past. The metric learner, row map included, then runs
            on ⌈T/c⌉·N·H rows per sequence and layer instead of N·H.
        attention: implementation of `ops.attention`; None chooses.
        remat: recompute each layer in the backward pass instead of keeping its activations.
        pad_id: token that marks padding.
        compute_dtype: of matrix products; statistics and the power-law chain stay in float32 or better.
        param_dtype: of the stored weights and the residual stream.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    head_width: int
    hidden_width: int | None = None
    metric_width: int | None = None
    residual_units: int = 8
    blocks_per_unit: int = 2
    context: int = 1024
    rope_base: float = 10_000.0
    rope_layout: Layout = "interleaved"
    operator: Operator = "learned"
    init: InitLaw = "soc"
    norm_epsilon: float = 1e-6
    gram_rows: GramRows = "valid"
    gram_refresh: int | None = None
    attention: str | None = None
    remat: bool = False
    pad_id: int = 0
    compute_dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self):
        """Fills in the widths left open and checks the rest.

        Raises:
            ValueError: a size below 1, an odd head width, a choice that does not exist, or one that means nothing.
        """
        if self.hidden_width is None:
            object.__setattr__(self, "hidden_width", self.model_width * 8 // 3)
        if self.metric_width is None:
            object.__setattr__(self, "metric_width", self.head_width * 8 // 3)
        for name in ("compute_dtype", "param_dtype"):
            object.__setattr__(self, name, float_name(name, getattr(self, name)))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (field.type == (int | None) or field.type is int):
                least = 0 if field.name == "pad_id" else 1
                if value < least:
                    raise ValueError(f"{field.name} = {value} must be at least {least}.")
        if self.head_width % 2:
            raise ValueError(f"head_width = {self.head_width} must be even: RoPE turns pairs.")
        choices = {
            "rope_layout": LAYOUTS,
            "operator": get_args(Operator),
            "init": INIT_LAWS,
            "gram_rows": get_args(GramRows),
            "attention": (None, *IMPLEMENTATIONS),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                listed = ", ".join(map(str, allowed))
                raise ValueError(f"{name} = {getattr(self, name)!r} is unknown; choose {listed}.")
        if self.gram_refresh is not None and self.operator == "constant":
            raise ValueError(
                f"gram_refresh = {self.gram_refresh}: constant operators are made from no Gram; leave it None."
            )
        if self.pad_id >= self.vocab_size:
            raise ValueError(f"pad_id = {self.pad_id} is outside a vocabulary of {self.vocab_size}.")

    @property
    def model_width(self) -> int:
        """D = N·H."""
        return self.num_heads * self.head_width

    @classmethod
    def tiny(cls, **overrides) -> Self:
        """A byte-level model that trains on a laptop in a minute; what the quickstart trains.

        Its gated blocks are as wide as the published models' (170): at ⌊8H/3⌋ = 42 the first layer seldom collapses.
        """
        sizes = {"vocab_size": 262, "num_layers": 2, "num_heads": 4, "head_width": 16, "metric_width": 170}
        return cls(**sizes | {"context": 512} | overrides)

    @classmethod
    def small(cls, **overrides) -> Self:
        """About 4 million parameters."""
        return cls(**{"vocab_size": 262, "num_layers": 4, "num_heads": 8, "head_width": 32} | overrides)

    @classmethod
    def medium(cls, **overrides) -> Self:
        """About 40 million parameters with the published vocabulary."""
        return cls(**{"vocab_size": 32_000, "num_layers": 4, "num_heads": 8, "head_width": 56} | overrides)

    @classmethod
    def base_110m(cls, **overrides) -> Self:
        """The published 110M model: 109,689,362 parameters."""
        return cls(**{"vocab_size": 32_000, "num_layers": 5, "num_heads": 14, "head_width": 64} | overrides)

    @classmethod
    def preset(cls, name: str, **overrides) -> Self:
        """A preset by name.

        Args:
            name: one of `PRESETS`.
            **overrides: fields to change.

        Returns:
            The config.

        Raises:
            ValueError: unknown name.
        """
        if name not in PRESETS:
            raise ValueError(f"Preset {name!r} is unknown; choose one of {', '.join(PRESETS)}.")
        return getattr(cls, "base_110m" if name == "110m" else name)(**overrides)
