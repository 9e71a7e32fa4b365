"""What reading a document costs, counted before it is read, and whether dense attention would be cheaper.

A multiplication with its addition counts as two FLOPs. Only matrix products are counted: on real models the rest is
small, and it is the same for every geometry.
"""

import dataclasses
from typing import Protocol

from ris_jax.density import causal_pairs
from ris_jax.geometry import PublishedGeometry

WORTHWHILE = 0.5
"""Real density above which no sparse attention is worth its overhead: less than half of the pairs can be saved."""


class Sizes(Protocol):
    """What is asked of a model's config; `DecoderConfig` has it."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    model_width: int
    hidden_width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """FLOPs per second of each kind of work. The default, one for all, compares plain counts; measure your own."""

    linear: float = 1.0
    """Of matrix products with weights."""
    dense: float = 1.0
    """Of dense causal attention."""
    sparse: float = 1.0
    """Of gathered attention and of ranking."""

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ValueError: a speed that is not positive.
        """
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} = {value} must be a positive number of FLOPs per second.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What one prefill of one sequence takes."""

    share: float
    """Real density."""
    attention_flops: float
    """Scores and mixing of the allowed pairs, all layers and heads."""
    ranking_flops: float
    """Scores made only to choose keys."""
    linear_flops: float
    """Projections, feed-forward, head."""
    cache_bytes: int
    """Keys and values kept for decoding."""

    @property
    def flops(self) -> float:
        """All of them."""
        return self.attention_flops + self.ranking_flops + self.linear_flops

    def seconds(self, speed: Speed) -> float:
        """Time at given speeds.

        Args:
            speed: FLOPs per second.

        Returns:
            Seconds; attention counts as dense when no pair is left out.
        """
        attention = speed.dense if self.share >= 1 else speed.sparse
        return self.attention_flops / attention + self.ranking_flops / speed.sparse + self.linear_flops / speed.linear


def prefill_cost(
    sizes: Sizes,
    length: int,
    share: float = 1.0,
    *,
    ranking_share: float = 0.0,
    logits: int = 1,
    cache_itemsize: int = 4,
) -> Cost:
    """The cost of reading a document.

    Args:
        sizes: of the model. Layers with a window of their own are counted as the others.
        length: T, tokens.
        share: real density; 1 is dense causal attention.
        ranking_share: pairs whose scores are made only to choose keys, over the causal pairs.
        logits: positions whose logits are wanted.
        cache_itemsize: bytes of a number in the cache: 4 for float32, 2 for bfloat16, 1 for int8.

    Returns:
        The cost of one sequence.

    Raises:
        ValueError: shares outside of 0 … 1, or a length below 1.
    """
    if not (0 <= share <= 1 and 0 <= ranking_share <= 1):
        raise ValueError(f"share = {share} and ranking_share = {ranking_share} must be within 0 … 1.")
    if length < 1:
        raise ValueError(f"length = {length} must be at least 1 token.")
    queries = sizes.num_heads * sizes.head_width
    keys = sizes.num_kv_heads * sizes.head_width
    product = 2 * sizes.num_layers * queries * causal_pairs(length)  # q·k of all causal pairs; weights·v is as much
    weights = sizes.model_width * (2 * queries + 2 * keys + 3 * sizes.hidden_width)
    head = sizes.model_width * sizes.vocab_size
    return Cost(
        share=share,
        attention_flops=2 * product * share,
        ranking_flops=product * ranking_share,
        linear_flops=2 * (sizes.num_layers * weights * length + head * logits),
        cache_bytes=2 * sizes.num_layers * keys * length * cache_itemsize,
    )


def published_bytes(geometry: PublishedGeometry, num_heads: int) -> dict[str, int]:
    """Memory that the published program would take for a geometry, beyond model and cache.

    Args:
        geometry: the geometry.
        num_heads: N of the model.

    Returns:
        Bytes by purpose: the T×T "mask", the "index map" of keys and flags for every row and seed (int32 and bool), of
        which decoding reads one row, and the float32 "scores" of one layer's prefill in one piece.
    """
    T = geometry.length
    columns = geometry.anchors + geometry.block_size + geometry.num_samples + 1
    return {"mask": T * T, "index map": 5 * T * geometry.seeds * columns, "scores": 4 * num_heads * T * T}


def dense_is_cheaper(cost: Cost, dense: Cost, speed: Speed = Speed()) -> bool:
    """Whether to leave a geometry alone and attend densely.

    Args:
        cost: with the geometry.
        dense: without, for the same model and length.
        speed: FLOPs per second.

    Returns:
        True if more than half of the pairs are kept, or if the estimated time is not shorter.
    """
    return cost.share > WORTHWHILE or cost.seconds(speed) >= dense.seconds(speed)


def advice(cost: Cost, dense: Cost, speed: Speed = Speed()) -> str:
    """One sentence on whether a geometry pays, for a person to read before the run.

    Args:
        cost: with the geometry.
        dense: without, for the same model and length.
        speed: FLOPs per second.

    Returns:
        "dense is cheaper here: …" or "sparse is cheaper here: …", with the reason in numbers.
    """
    chosen = cost.attention_flops + cost.ranking_flops
    saved = f"attention takes {chosen / dense.attention_flops:.1%} of dense attention's FLOPs"
    if cost.ranking_flops:
        saved += f" ({cost.ranking_flops / dense.attention_flops:.1%} to choose keys)"
    time = f"the whole prefill {cost.seconds(speed) / dense.seconds(speed):.0%} of dense's estimated time"
    if not dense_is_cheaper(cost, dense, speed):
        return f"sparse is cheaper here: {saved}, {time}"
    if cost.share > WORTHWHILE:
        return (
            f"dense is cheaper here: {cost.share:.1%} of the causal pairs are kept, so attention can gain at most "
            f"{1 / cost.share:.2f}×, which no sparse attention keeps"
        )
    return f"dense is cheaper here: {saved}, but {time}"
