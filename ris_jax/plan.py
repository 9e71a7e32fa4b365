"""What reading documents will take, known before it is begun."""

import dataclasses
from typing import Any

from ris_jax.cost import Cost, advice
from ris_jax.documents import File


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be computed.

    Attributes:
        files: what is kept of each, and what is cut.
        num_tokens: of the document part: files, rules, reminder.
        window: tokens that the cache holds.
        native_context: tokens that the model was trained for.
        rope: how positions are scaled.
        geometry: its config.
        cost: of reading.
        dense: of reading with dense attention.
        cache_bytes: of the whole cache.
        weights_bytes: of the model.
    """

    files: tuple[File, ...]
    num_tokens: int
    window: int
    native_context: int
    rope: str
    geometry: dict[str, Any]
    cost: Cost
    dense: Cost
    cache_bytes: int
    weights_bytes: int

    @property
    def lost(self) -> int:
        """Tokens of documents that are cut."""
        return sum(file.lost for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """The numbers, for a log."""
        return dataclasses.asdict(self) | {"flops": self.cost.flops, "dense_flops": self.dense.flops}

    def text(self) -> str:
        """The plan for a person, several lines."""
        lines = [f"  {file.name}: {_tokens(file)}" for file in self.files]
        lines += [
            f"reads {self.num_tokens} tokens in a window of {self.window}: {self.window - self.num_tokens} are left",
            f"geometry {_describe(self.geometry)}: {self.cost.share:.1%} of the causal pairs",
            f"about {self.cost.flops:.2g} FLOPs (dense: {self.dense.flops:.2g}); {advice(self.cost, self.dense)}",
            f"memory: {self.weights_bytes / 1e6:.0f} MB of weights, {self.cache_bytes / 1e6:.0f} MB of keys and values",
        ]
        if self.window > self.native_context:
            lines.append(
                f"the model was trained on {self.native_context} tokens; positions are stretched ({self.rope})"
            )
        return "\n".join(lines)


def _tokens(file: File) -> str:
    kept = file.end - file.start
    return f"{kept} tokens" if not file.lost else f"{kept} of {kept + file.lost} tokens, {file.lost} cut from the end"


def _describe(config: dict[str, Any]) -> str:
    told = {name: value for name, value in config.items() if name not in ("kind", "length", "seed") and value}
    return ", ".join((config["kind"], *(f"{name} {value}" for name, value in told.items())))
