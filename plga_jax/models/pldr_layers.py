"""The parts of a PLDR-LLM: power-law graph attention, and the decoder layer around it."""

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from plga_jax.array_types import Array
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.modules.linear import GatedLinear, LayerNorm, Linear
from plga_jax.modules.power_law import MetricLearner
from plga_jax.ops.cumulative_gram import Refreshes, fold_cumulative
from plga_jax.ops.masks import Mask
from plga_jax.ops.power_law import density_operator, fold_operator
from plga_jax.ops.rope import rope

OPERATORS = ("A", "A_LM", "A_P", "G_LM")
"""The deductive outputs that make an operator, in the order they are made."""


class Constant(nnx.Variable):
    """An array that belongs to the model and is neither trained nor decayed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Where the rows of one call stand and what they may see."""

    positions: Array  # int32 [B, T]
    mask: Mask
    gram: Array | None  # rows of the Gram: bool [B, T], or [B, X, T] per segment; None: all
    segment_ids: Array | None  # int32 [B, T]
    valid: Array  # bool [B, T]
    refreshes: Refreshes | None = None  # of a cumulative Gram


class Running(NamedTuple):
    """What a cumulative Gram carries from call to call."""

    gram: Array  # D̂ of all rows so far, [B, N, H, H]
    held: Array  # A or G of the last refresh, [B, N, H, H]


class PowerLawAttention(nnx.Module):
    """Multi-head attention with a bilinear form per head."""

    def __init__(self, config: PLDRConfig, *, rngs: nnx.Rngs):
        D, N, H = config.model_width, config.num_heads, config.head_width
        common = {"dtype": config.param_dtype, "compute_dtype": config.compute_dtype, "rngs": rngs}
        self.query = Linear(D, D, axes=("D", "NH"), **common)
        self.key = Linear(D, D, axes=("D", "NH"), **common)
        self.value = Linear(D, D, axes=("D", "NH"), torch_default=config.init == "kvg", **common)
        self.out = Linear(D, D, axes=("NH", "D"), **common)
        if config.operator == "learned":
            self.metric = MetricLearner(
                N,
                H,
                config.metric_width,
                units=config.residual_units,
                blocks=config.blocks_per_unit,
                epsilon=config.norm_epsilon,
                law=config.init,
                dtype=config.param_dtype,
                rngs=rngs,
            )
        else:
            identity = jnp.broadcast_to(jnp.eye(H, dtype=config.param_dtype), (N, H, H))
            self.G = Constant(identity, axes=("N", "H", "J"))
        self.config = config

    def project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """x [B, T, D] -> rotated q, rotated k and v, each [B, T, N, H]."""
        config = self.config
        heads = (*x.shape[:2], config.num_heads, config.head_width)
        if hasattr(self, "query_key_value"):
            parts = jnp.split(self.query_key_value(x), 3, axis=-1)
        else:
            parts = [part(x) for part in (self.query, self.key, self.value)]
        q, k, v = (part.reshape(heads) for part in parts)
        turn = {"base": config.rope_base, "layout": config.rope_layout}
        return rope(q, positions, **turn), rope(k, positions, **turn), v

    def join(self) -> None:
        """Puts W_Q, W_K and W_V side by side, for one product of three; see `Linear.joined`."""
        self.query_key_value = Linear.joined([self.query, self.key, self.value])
        del self.query, self.key, self.value

    def fold(
        self, q: Array, rows: Rows, given: Array | None, collect: Collection[str]
    ) -> tuple[Array, dict[str, Array]]:
        """Rotated queries [B, T, N, H] with their operators folded in, and the tensors asked for on the way."""
        if given is not None or rows.refreshes is None:
            G, kept = self.deduce(q, rows, given, collect)
            return fold_operator(q, G, rows.segment_ids), kept

        def make(gram):
            chain = self.metric.power_law(self.metric.metric_of(gram), collect)
            return chain.G_LM, {name: getattr(chain, name) for name in OPERATORS if name in collect}

        folded, _, kept = fold_cumulative(q, rows.refreshes, make)
        return folded, kept

    def resume(
        self, q: Array, refreshes: Refreshes, valid: Array, running: Running, *, keep: str
    ) -> tuple[Array, Running]:
        """`fold` for rows that go on with a document under a cumulative Gram; `keep` is what is held, "A" or "G_LM"."""

        def make(gram):
            A = self.metric.metric_of(gram)
            G = self.metric.power_law(A).G_LM
            return G, A if keep == "A" else G

        held = running.held
        earlier = refreshes.place < 0
        folded = fold_operator(q, self.metric.power_law(held).G_LM if keep == "A" else held)
        gram = running.gram + density_operator(q, valid & earlier)

        def renew(folded, gram, held):
            new, gram, held = fold_cumulative(q, refreshes, make, gram=gram, last=held)
            return jnp.where(earlier[:, :, None, None], folded, new), gram, held

        # Most single tokens meet no refresh, and the metric learner is most of such a step.
        due = ~jnp.all(earlier)
        folded, gram, held = jax.lax.cond(due, renew, lambda *same: same, folded, gram, held)
        return folded, Running(gram, held)

    def deduce(
        self, q: Array, rows: Rows, given: Array | None, collect: Collection[str]
    ) -> tuple[Array, dict[str, Array]]:
        """The operator for rotated queries, and the tensors asked for on the way to it."""
        if given is None and self.config.operator == "learned":
            chain = self.metric.power_law(self.metric.metric(q, rows.gram), collect)
            kept = {name: getattr(chain, name) for name in OPERATORS if name in collect}
            return chain.G_LM, kept
        G = self.G[...] if given is None else given
        if "G_LM" not in collect:
            return G, {}
        shape = (q.shape[0], *G.shape[-3:])
        return G, {"G_LM": G if G.ndim > 3 else jnp.broadcast_to(G, shape)}


class DecoderLayer(nnx.Module):
    """o = LN₁(MHA(y) + y);  y = LN₂(GLU(o) + o)."""

    def __init__(self, config: PLDRConfig, *, rngs: nnx.Rngs):
        D, dtype = config.model_width, config.param_dtype
        self.attention = PowerLawAttention(config, rngs=rngs)
        self.attention_norm = LayerNorm(D, epsilon=config.norm_epsilon, dtype=dtype)
        self.ffn = GatedLinear(D, config.hidden_width, dtype=dtype, compute_dtype=config.compute_dtype, rngs=rngs)
        self.ffn_norm = LayerNorm(D, epsilon=config.norm_epsilon, dtype=dtype)

    def join(self) -> None:
        """Joins maps of one input, for decoding."""
        self.attention.join()
        self.ffn.join()

    def finish(self, x: Array, attended: Array) -> Array:
        """Everything after the attention kernel: x [B, T, D], attended [B, T, N, H] -> [B, T, D]."""
        # The residual stream stays in the parameters' dtype; only products run in the compute dtype.
        mixed = self.attention.out(attended.reshape(x.shape)).astype(x.dtype)
        x = self.attention_norm(mixed + x)
        return self.ffn_norm(self.ffn(x).astype(x.dtype) + x)
