"""Angular frequencies of rotary positions stretched beyond the length that a model was trained for."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

import numpy as np

from plga_jax.ops import rope

Kind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
KINDS: tuple[str, ...] = get_args(Kind)

# Beyond `kind`, `base`, `context` and `original_context`: what a kind must be given, and what it may be given.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "context"),
    "yarn": ("original_context",),
    "llama3": ("factor", "original_context", "low_freq_factor", "high_freq_factor"),
    "longrope": ("original_context", "short_factor", "long_factor"),
}
_OPTIONAL = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
_COMMON = ("kind", "base", "context", "original_context")

_PUBLISHED = {
    "rope_theta": "base",
    "original_max_position_embeddings": "original_context",
} | {
    name: name
    for name in (
        *("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
    )
}
"""Keys of published configs -> our fields."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How fast the planes of a head turn, in the half-split layout of pretrained decoders.

    Attributes:
        kind: "default" (unscaled), "linear", "dynamic", "yarn", "llama3" or "longrope".
        base: Θ; above 1.
        factor: F, by how much the length grows, at least 1; None (yarn, longrope) is context / original_context.
        original_context: O, tokens that the model was trained for before scaling.
        context: M, tokens that the positions are made for. "dynamic" grows beyond it; there it is the trained length.
        attention_factor: a, multiplies cos and sin, hence scores by a²; None follows from F (yarn, longrope).
        beta_fast: yarn; planes that turn more often than this within O keep their frequency.
        beta_slow: yarn; planes that turn less often than this within O are slowed by F.
        mscale: yarn; with `mscale_all_dim`, replaces the growth of a with ln F. None or 0 leaves it.
        mscale_all_dim: yarn; its divisor.
        truncate: yarn; the ramp's ends are whole plane indices.
        low_freq_factor: llama3; planes that turn less often than this within O are slowed by F.
        high_freq_factor: llama3; planes that turn more often than this within O keep their frequency.
        short_factor: longrope; H/2 divisors for lengths up to O.
        long_factor: longrope; H/2 divisors beyond O.
    """

    kind: Kind = "default"
    base: float = 10_000.0
    factor: float | None = None
    original_context: int | None = None
    context: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self):
        """Checks that the kind exists and has what it needs, and nothing that it would ignore.

        Raises:
            ValueError: otherwise; the field is named.
        """
        if self.kind not in KINDS:
            raise ValueError(f"RoPE kind {self.kind!r} is unknown; choose one of {', '.join(KINDS)}.")
        for name in ("short_factor", "long_factor"):
            if not isinstance(getattr(self, name), list | tuple):
                raise ValueError(f"{name} = {getattr(self, name)!r} must be a list of H/2 divisors.")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        needed = _REQUIRED[self.kind]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value in (None, ()) and field.name in needed:
                raise ValueError(f"RoPE kind {self.kind!r} needs {field.name}; take it from the model's config.")
            if value != field.default and field.name not in (*_COMMON, *needed, *_OPTIONAL.get(self.kind, ())):
                raise ValueError(f"RoPE kind {self.kind!r} has no use for {field.name} = {value!r}; leave it out.")
            if field.name not in ("kind", "truncate"):
                for number in value if isinstance(value, tuple) else (value,):
                    if number is not None:
                        _check_number(field.name, number)
        if not isinstance(self.truncate, bool):
            raise ValueError(f"truncate = {self.truncate!r} must be true or false.")
        if self.base <= 1:
            raise ValueError(f"base = {self.base} must be above 1.")
        if self.kind == "yarn" and self.factor is None and self.context is None:
            raise ValueError("RoPE kind 'yarn' needs factor, or context for factor = context / original_context.")
        if self.kind == "longrope" and self.attention_factor is None and self.factor is None and self.context is None:
            raise ValueError("RoPE kind 'longrope' needs attention_factor, factor or context for its scores.")
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast = {self.beta_fast} must be at least beta_slow = {self.beta_slow}.")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor} must be above low_freq_factor = {self.low_freq_factor}."
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads the fields of a published `config.json`.

        Args:
            config: its fields: `rope_parameters` as written today, or `rope_scaling` and `rope_theta` as before;
                `max_position_embeddings` is the context.

        Returns:
            The config. Where a scaling leaves out its original length, that is the context, as in the published loader.

        Raises:
            ValueError: an unknown kind or key, two settings that contradict each other, or a missing number.
        """
        tables = [table for name in ("rope_parameters", "rope_scaling") if (table := config.get(name)) is not None]
        for table in tables:
            if not isinstance(table, Mapping):
                raise ValueError(f"config.json: RoPE settings {table!r} must be an object, or null.")
        if len(tables) == 2 and tables[0] != tables[1]:
            raise ValueError("config.json: rope_parameters and rope_scaling differ; keep the one that is meant.")
        table = {name: value for name, value in (tables[0] if tables else {}).items() if value is not None}
        kinds = [table.pop(name) for name in ("rope_type", "type") if name in table]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"config.json: RoPE settings name two kinds, {kinds}; keep one.")
        kind = kinds[0] if kinds else "default"
        # "su" is the name under which longrope was first published.
        kind = "longrope" if kind == "su" else kind
        share = table.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
        if share not in (None, 1.0):
            raise ValueError(f"config.json: partial_rotary_factor = {share!r} is not implemented; only 1.0 is.")
        if unknown := sorted(set(table) - set(_PUBLISHED)):
            raise ValueError(
                f"config.json: RoPE settings {unknown} are not implemented; known are {', '.join(sorted(_PUBLISHED))}."
            )
        fields = {_PUBLISHED[name]: value for name, value in table.items()}
        base = config.get("rope_theta")
        if base is not None and fields.setdefault("base", base) != base:
            raise ValueError(f"config.json: rope_theta is {base} and {fields['base']}; keep the one that is meant.")
        fields["context"] = config.get("max_position_embeddings")
        if config.get("original_max_position_embeddings") is not None:
            fields["original_context"] = config["original_max_position_embeddings"]
        if kind in ("yarn", "llama3", "longrope"):
            fields.setdefault("original_context", fields["context"])
        return cls(kind=kind, **fields)

    def to_hf(self) -> dict[str, Any]:
        """The fields of a published `config.json`, in the style that every version of the loaders reads.

        Returns:
            `rope_theta`, and `rope_scaling` when there is any; the inverse of `from_hf`, the context aside.
        """
        if self.kind == "default":
            return {"rope_theta": self.base}
        table = {"rope_type": self.kind}
        for theirs, ours in _PUBLISHED.items():
            value = getattr(self, ours)
            if ours != "base" and value != _DEFAULTS[ours]:
                table[theirs] = list(value) if isinstance(value, tuple) else value
        return {"rope_theta": self.base, "rope_scaling": table}

    def stretched(
        self,
        window: int,
        *,
        kind: Kind = "yarn",
        original: Literal["native", "reference"] = "native",
        factor: float | None = None,
    ) -> Self:
        """The same positions for a longer window, without training.

        Args:
            window: tokens to make room for.
            kind: how: "yarn", "linear", "dynamic" or "llama3".
            original: "native" takes the length the model was trained for as O. "reference" takes the window itself, as
                the published program does for YaRN by oversight: its ramp then spans planes that turn too slowly.
            factor: F; None is window / native length.

        Returns:
            A config whose `original_context` is the native length; this one when the window fits into it and no factor
            is given.

        Raises:
            ValueError: the native length is unknown, the kind cannot be made from a window alone, or the model was
                trained with a scaling of its own.
        """
        native = self.context if self.kind in ("default", "dynamic") else self.original_context
        if self.kind in ("llama3", "longrope") or native is None:
            raise ValueError(
                f"RoPE of kind {self.kind!r} with a trained length of {native} cannot be stretched: start from an "
                "unscaled config whose context is the trained length, or use a window that fits the model."
            )
        if kind not in ("linear", "dynamic", "yarn", "llama3"):
            raise ValueError(f"kind = {kind!r} cannot be made from a window; choose linear, dynamic, yarn or llama3.")
        if original not in ("native", "reference"):
            raise ValueError(f"original = {original!r} must be 'native' or 'reference'.")
        if window < 1:
            raise ValueError(f"window = {window} must be at least 1 token.")
        if factor is None:
            if window <= native:
                return self
            factor = window / native
        assumed = native if original == "native" else window
        fields = {"kind": kind, "base": self.base, "factor": factor, "context": window, "original_context": assumed}
        if kind == "dynamic":
            fields["context"] = assumed
        if kind == "llama3":
            fields |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return type(self)(**fields)

    def frequencies(self, width: int, *, length: int | None = None) -> tuple[np.ndarray, float]:
        """Angular frequencies of the H/2 planes, and the factor of cos and sin.

        Args:
            width: head width H, even.
            length: the longest position in use, plus one, on which "dynamic" and "longrope" depend; None is `context`.

        Returns:
            float64 [H/2] in radians per position, and a.

        Raises:
            ValueError: odd width, a length below 1, or divisors that are not H/2.

        Source: Peng et al. 2023 (YaRN; eq. 17–23); Chen et al. 2023 (linear); Ding et al. 2024 (LongRoPE).
        """
        if length is not None and length < 1:
            raise ValueError(f"length = {length} must be at least 1.")
        length = self.context if length is None else length
        theta = rope.frequencies(width, base=self.base)
        if self.kind == "linear":
            return theta / self.factor, 1.0
        if self.kind == "dynamic":
            return rope.frequencies(width, base=self._grown_base(width, length)), 1.0
        if self.kind == "yarn":
            return self._yarn(theta, width), self._yarn_attention_factor()
        if self.kind == "llama3":
            turns = self.original_context * theta / (2 * math.pi)
            kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
            return kept * theta + (1 - kept) * theta / self.factor, 1.0
        if self.kind == "longrope":
            divisors = self.long_factor if length is not None and length > self.original_context else self.short_factor
            if len(divisors) != width // 2:
                raise ValueError(f"longrope has {len(divisors)} divisors; heads of width {width} need {width // 2}.")
            return theta / np.asarray(divisors, np.float64), self._longrope_attention_factor()
        return theta, 1.0

    @property
    def _growth(self) -> float:
        return self.context / self.original_context if self.factor is None else self.factor

    def _grown_base(self, width: int, length: int) -> float:
        # The exponent makes the slowest plane, width − 2, turn exactly F·L/M − (F − 1) times slower.
        stretch = self.factor * max(length, self.context) / self.context - (self.factor - 1)
        return self.base * stretch ** (width / (width - 2)) if width > 2 else self.base

    def _yarn(self, theta: np.ndarray, width: int) -> np.ndarray:
        def plane(turns: float) -> float:
            """Index of the plane that turns so often within the original length."""
            return width * math.log(self.original_context / (2 * math.pi * turns)) / (2 * math.log(self.base))

        low, high = plane(self.beta_fast), plane(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # Published models were tuned with the clamp at H − 1, not at the last plane H/2 − 1.
        low, high = max(low, 0), min(high, width - 1)
        if low == high:
            high += 0.001
        slowed = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
        return theta / self._growth * slowed + theta * (1 - slowed)

    def _yarn_attention_factor(self) -> float:
        def grown(rate: float) -> float:
            return 1.0 if self._growth <= 1 else 0.1 * rate * math.log(self._growth) + 1.0

        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return grown(self.mscale) / grown(self.mscale_all_dim)
        return grown(1.0)

    def _longrope_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self._growth <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self._growth) / math.log(self.original_context))


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(RopeConfig)}


def _check_number(name: str, value: Any) -> None:
    """Refuses what is not a finite number of the field's range; whole numbers only for lengths."""
    whole = name in ("context", "original_context")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not math.isfinite(value):
        raise ValueError(f"{name} = {value!r} must be a {'whole' if whole else 'finite'} number.")
    least = 1 if whole or name == "factor" else 0
    if value < least or (least == 0 and value == 0 and name not in ("mscale", "mscale_all_dim")):
        raise ValueError(f"{name} = {value} must be {f'at least {least}' if least else 'above 0'}.")
