"""The pre-norm decoder of Llama, Qwen2, Qwen3 and Mistral.

    x ← x + out(attention(rope(q), rope(k), v)),  q, k, v = maps of RMS(x);   x ← x + GLU(RMS(x));   logits = RMS(x)·Eᵀ

Grouped query heads, half-split rotary planes, optional biases, per-head norms of q and k, windowed layers. A `Decoder`
is a Flax NNX module and a pytree: pass it through `jax.jit`, `jax.grad` and `lax.scan` as an argument. It does not know
where its pairs are computed nor what its cache keeps: `extend` takes any cache that can be appended and attended to.

Source: Touvron et al. 2023 (Llama), Bai et al. 2023 (Qwen), Jiang et al. 2023 (Mistral), Yang et al. 2025 (Qwen3).
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from plga_jax.array_types import Array, DType, statistics_dtype
from plga_jax.caches import Int8KVCache, KVCache
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.models.language_model import LanguageModel, last_real
from plga_jax.models.stacking import over_layers
from plga_jax.modules.linear import GatedLinear, Linear, RMSNorm
from plga_jax.ops.masks import Mask
from plga_jax.ops.rope import rope


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOutputs:
    """Intermediates of a call. Fields not collected are None.

    Attributes:
        hidden: the residual stream before the first layer and after each, [L + 1, B, T, D].
        final: after the last norm, [B, T, D].
    """

    hidden: Array | None = None
    final: Array | None = None


COLLECTABLE = tuple(field.name for field in dataclasses.fields(DecoderOutputs))


class GroupedAttention(nnx.Module):
    """The maps around an attention kernel: q of N heads, k and v of K."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, N, K, H = config.model_width, config.num_heads, config.num_kv_heads, config.head_width
        common = {"dtype": config.param_dtype, "compute_dtype": config.compute_dtype, "rngs": rngs}
        self.query = Linear(D, N * H, axes=("D", "NH"), use_bias=config.qkv_bias, **common)
        self.key = Linear(D, K * H, axes=("D", "KH"), use_bias=config.qkv_bias, **common)
        self.value = Linear(D, K * H, axes=("D", "KH"), use_bias=config.qkv_bias, **common)
        self.out = Linear(N * H, D, axes=("NH", "D"), use_bias=config.out_bias, **common)
        if config.qk_norm:
            norm = {"axes": ("H",), "epsilon": config.norm_epsilon, "dtype": config.param_dtype}
            self.query_norm, self.key_norm = RMSNorm(H, **norm), RMSNorm(H, **norm)
        self.config = config

    def project(self, x: Array, positions: Array, theta: np.ndarray, factor: float) -> tuple[Array, Array, Array]:
        """Rotated queries and keys, and values: [B, T, N, H], [B, T, K, H], [B, T, K, H]."""
        N, K, H = self.config.num_heads, self.config.num_kv_heads, self.config.head_width
        if hasattr(self, "joined"):
            q, k, v = jnp.split(self.joined(x), [N * H, (N + K) * H], axis=-1)
        else:
            q, k, v = self.query(x), self.key(x), self.value(x)
        q, k, v = (array.reshape(*array.shape[:-1], -1, H) for array in (q, k, v))
        if self.config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        turn = {"layout": "half", "frequencies": theta, "scale": factor}
        return rope(q, positions, **turn), rope(k, positions, **turn), v

    def join(self) -> None:
        """Puts the maps of q, k and v side by side, for one product of three; see `Linear.joined`."""
        self.joined = Linear.joined([self.query, self.key, self.value])
        del self.query, self.key, self.value


class Layer(nnx.Module):
    """x + attention, then x + gated unit, each of the normalised x."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, dtype = config.model_width, config.param_dtype
        self.attention_norm = RMSNorm(D, epsilon=config.norm_epsilon, dtype=dtype)
        self.attention = GroupedAttention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(D, epsilon=config.norm_epsilon, dtype=dtype)
        self.mlp = GatedLinear(
            D,
            config.hidden_width,
            dtype=dtype,
            compute_dtype=config.compute_dtype,
            use_bias=config.mlp_bias,
            rngs=rngs,
        )

    def join(self) -> None:
        """Joins maps of one input, for decoding."""
        self.attention.join()
        self.mlp.join()

    def finish(self, x: Array, attended: Array) -> Array:
        """Everything after the attention kernel: x [B, T, D], attended [B, T, N, H] -> [B, T, D]."""
        x = x + self.attention.out(attended.reshape(*x.shape[:-1], -1)).astype(x.dtype)
        return x + self.mlp(self.mlp_norm(x)).astype(x.dtype)


class Decoder(LanguageModel):
    """The language model."""

    cache_kinds = ("kv", "kv_int8")

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Makes a model with random weights.

        Args:
            config: sizes and choices.
            rngs: source of keys, `nnx.Rngs(seed)`.
        """
        V, D, dtype = config.vocab_size, config.model_width, config.param_dtype
        table = 0.02 * jax.random.normal(rngs.params(), (V, D), dtype)
        self.embedding = nnx.Param(table, axes=("V", "D"))
        stack = nnx.vmap(lambda r: Layer(config, rngs=r), in_axes=0, out_axes=0)
        self.layers = stack(rngs.split(config.num_layers))
        self.norm = RMSNorm(D, epsilon=config.norm_epsilon, dtype=dtype)
        if not config.tied:
            common = {"dtype": dtype, "compute_dtype": config.compute_dtype, "use_bias": False}
            self.head = Linear(D, V, axes=("D", "V"), rngs=rngs, **common)
        self.config = config

    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        num_segments: int | None = None,
        collect: Collection[str] = (),
        last_only: bool = False,
    ) -> tuple[Array, DecoderOutputs]:
        """Runs a block of tokens.

        Args:
            tokens: int [B, T].
            positions: int [B, T] for the rotary embedding and causality. None counts a row's real tokens (with
                segments: of each segment) from 0, so padding changes nothing.
            segment_ids: int [B, T] for packed rows: 1…X names a document, 0 is padding. None: every token is real.
            num_segments: not needed here; other models need it.
            collect: names of `DecoderOutputs` to return.
            last_only: compute the logits of each row's last real token only.

        Returns:
            Logits [B, T, V] ([B, 1, V] with `last_only`) in float32 or better, and what was collected.

        Raises:
            ValueError: tokens that are no block, more of them than the context, or an unknown name in `collect`.
        """
        self._check(tokens, collect)
        valid = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids > 0
        if positions is None:
            positions = _positions(valid, segment_ids)
        # Causality within a block is by array order, which positions that restart with a segment would not give.
        mask = Mask(q_segments=segment_ids, k_segments=segment_ids, k_valid=None if segment_ids is None else valid)
        theta, factor = self._planes(tokens.shape[1])

        def step(x, inputs):
            _, layer, windowed = inputs
            q, k, v = layer.attention.project(layer.attention_norm(x), positions, theta, factor)
            attended = self._windowed(
                windowed,
                lambda window: self._attention(q, k, v, dataclasses.replace(mask, window=window), scale=self._scale),
            )
            x = layer.finish(x, attended)
            return x, x if "hidden" in collect else None

        start = self._embed(tokens)
        x, hidden = over_layers(step, start, self.layers, self._windowed_layers())
        final = self.norm(x)
        outputs = {
            "hidden": jnp.concatenate([start[None], hidden]) if "hidden" in collect else None,
            "final": final if "final" in collect else None,
        }
        final = last_real(final, valid) if last_only else final
        return self._logits(final), DecoderOutputs(**outputs)

    def with_config(self, config: DecoderConfig) -> "Decoder":
        """The same weights under another config, such as one with other rotary positions and a longer context.

        Args:
            config: differs in what changes no shape.

        Returns:
            A model that shares the arrays; this one stays as it is.
        """
        copy = nnx.merge(*nnx.split(self))
        copy.config = config
        return copy

    def init_cache(self, batch: int, capacity: int, *, kind: str = "kv", dtype: DType | None = None) -> KVCache:
        """An empty cache that keeps every key and value, as they are or rounded.

        Args:
            batch: B.
            capacity: tokens per row, prompt and continuation, at most `config.context`.
            kind: "kv", or "kv_int8" for a quarter of the memory of float32; see `Int8KVCache` for what it costs.
            dtype: of keys and values with "kv"; None takes the compute dtype.

        Returns:
            A cache of length 0.

        Raises:
            ValueError: unknown kind, or a capacity outside 1…context.
        """
        config = self.config
        if kind not in self.cache_kinds:
            raise ValueError(f"Cache kind {kind!r} is unknown; this model has {', '.join(self.cache_kinds)}.")
        if capacity > config.context:
            raise ValueError(
                f"Capacity {capacity} exceeds the model's context of {config.context} tokens; "
                "shorten the input, or stretch its rotary positions (`RopeConfig.stretched`)."
            )
        heads = config.num_kv_heads, config.head_width
        if kind == "kv_int8":
            return Int8KVCache.init(config.num_layers, batch, capacity, *heads, dtype or jnp.int8)
        return KVCache.init(config.num_layers, batch, capacity, *heads, dtype or config.compute_dtype)

    def prefill(
        self, tokens: Array, cache: KVCache, *, segment_ids: Array | None = None, last_only: bool = False
    ) -> tuple[Array, KVCache]:
        """Reads prompts, of unequal lengths if need be, into an emptied cache; otherwise as `extend`."""
        emptied = dataclasses.replace(cache, length=jnp.zeros_like(cache.length))
        return self.extend(tokens, emptied, segment_ids=segment_ids, last_only=last_only)

    def extend(
        self,
        tokens: Array,
        cache: Any,
        *,
        segment_ids: Array | None = None,
        last_only: bool = False,
        need_logits: bool = True,
    ) -> tuple[Array | None, Any]:
        """Reads one or more further tokens per row.

        Args:
            tokens: int [B, T].
            cache: `KVCache`, or anything with its `slots`, `append`, `attend`, `advance`, `length` and `capacity`.
            segment_ids: int [B, T], 0 for padding, wherever it stands, and 1 elsewhere; None: every token is real.
            last_only: compute the logits of each row's last real token only.
            need_logits: whether to compute any.

        Returns:
            Logits [B, T, V] ([B, 1, V] with `last_only`, None without `need_logits`), and the cache. Rows that no
            longer fit are flagged by `cache.overflowed`.

        Raises:
            ValueError: tokens that are no block, or more of them than the whole cache can hold.
        """
        self._check(tokens, ())
        if tokens.shape[1] > cache.capacity:
            raise ValueError(
                f"{tokens.shape[1]} tokens do not fit a cache of {cache.capacity}; make it larger with init_cache."
            )
        valid = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids > 0
        slots = cache.slots(valid)
        theta, factor = self._planes(cache.capacity)

        def step(carry, inputs):
            x, cache = carry
            index, layer, windowed = inputs
            q, k, v = layer.attention.project(layer.attention_norm(x), slots, theta, factor)
            cache = cache.append(index, k, v, slots, valid)
            attended, cache = self._windowed(
                windowed,
                lambda window: cache.attend(index, q, slots, valid, self._attention, scale=self._scale, window=window),
            )
            return (layer.finish(x, attended), cache), None

        (x, cache), _ = over_layers(step, (self._embed(tokens), cache), self.layers, self._windowed_layers())
        cache = cache.advance(valid)
        if not need_logits:
            return None, cache
        x = self.norm(last_real(x, valid) if last_only else x)
        return self._logits(x), cache

    def _planes(self, length: int) -> tuple[np.ndarray, float]:
        """Angular frequencies and factor of rotary positions for inputs of some length."""
        return self.config.rope.frequencies(self.config.head_width, length=length)

    def _embed(self, tokens: Array) -> Array:
        x = self.embedding[...][tokens]
        # The residual stream is float32 or better whatever the weights are: sixty sums would be rounded in bfloat16.
        return x.astype(statistics_dtype(x.dtype))

    def _logits(self, x: Array) -> Array:
        dtype = statistics_dtype(x.dtype)
        if not self.config.tied:
            return self.head(x).astype(dtype)
        table = self.embedding[...].astype(self.config.compute_dtype)
        rows = x.reshape(-1, x.shape[-1]).astype(table.dtype)
        logits = lax.dot_general(rows, table, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
        return logits.reshape(*x.shape[:-1], -1)

    def _windowed_layers(self) -> Array | None:
        """bool [L] where some layers are windowed and some are not, else None."""
        config = self.config
        if len(config.windowed_layers) in (0, config.num_layers):
            return None
        return jnp.isin(jnp.arange(config.num_layers), jnp.asarray(config.windowed_layers))

    def _windowed(self, windowed: Array | None, attend):
        """`attend(window)` of one layer; which layers are windowed may be known to the scan only."""
        window = self.config.window if self.config.windowed_layers else None
        if windowed is None:
            return attend(window)
        return lax.cond(windowed, lambda: attend(window), lambda: attend(None))

    def _check(self, tokens: Array, collect: Collection[str]) -> None:
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must be [B, T] with at least one token; got shape {tokens.shape}.")
        if tokens.shape[1] > self.config.context:
            raise ValueError(
                f"{tokens.shape[1]} tokens exceed the context of {self.config.context}; "
                "shorten the input, or stretch its rotary positions (`RopeConfig.stretched`)."
            )
        if unknown := set(collect) - set(COLLECTABLE):
            raise ValueError(f"Unknown outputs {sorted(unknown)}; choose from {', '.join(COLLECTABLE)}.")


def _positions(valid: Array, segment_ids: Array | None) -> Array:
    """Positions of real tokens, counted from 0 in each segment, int32 [B, T]."""
    count = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    if segment_ids is None:
        return count
    # A segment begins where a real token's id differs from that of the real token before it, padding between or not.
    columns = jnp.arange(valid.shape[1], dtype=jnp.int32)[None]
    before = jnp.pad(lax.cummax(jnp.where(valid, columns, -1), axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    changed = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1) != segment_ids
    begins = valid & (changed | (before < 0))
    return count - lax.cummax(jnp.where(begins, count, 0), axis=1)
