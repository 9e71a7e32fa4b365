"""PLDR-LLM: a decoder whose attention makes its own bilinear form, by power-law graph attention.

    e = LN₀(E[x]·√D);  per layer  o = LN₁(MHA(y) + y),  y = LN₂(GLU(o) + o);  logits = y·W_f + b_f

Post-LayerNorm, biases everywhere, rotary positions on q and k, embedding not tied. A `PLDR` is a Flax NNX module and a
pytree: pass it through `jax.jit`, `jax.grad` and `lax.scan` as an argument. Variants of the published programs:

    v510    `operator="learned"`; the DAG-loss variant is the same map with another loss
    v510G   `operator="constant"`: G is given, not trained (`PLDR.with_operators`)
    v510Gi  a trained v510 with the operators of its empty prompt: `pldr_transforms.constant_operator_model`
    causal  `gram_refresh=c`: operators from the past only, made anew every c tokens (not published)
    v51/v52 interleaved / half-split rotary planes: `rope_layout`; `pldr_transforms.convert_rope_layout`

Source: "Power law graph attention: exact generalization of SDPA, empirical collapse at inference" and the PLDR-LLM
programs.
"""

import dataclasses
from collections.abc import Collection
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from plga_jax.array_types import Array, DType, statistics_dtype
from plga_jax.caches import KVCache
from plga_jax.models.language_model import LanguageModel, last_real
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.models.pldr_layers import Constant, DecoderLayer, Rows, Running
from plga_jax.models.stacking import over_layers
from plga_jax.modules.linear import LayerNorm, Linear
from plga_jax.ops.cumulative_gram import Refreshes
from plga_jax.ops.masks import Mask
from plga_jax.ops.power_law import fold_operator


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeductiveOutputs:
    """What the model deduced on the way, stacked over layers. Fields not collected are None.

    Attributes:
        A: metric tensor, [L, B, N, H, H] (with segments [L, B, X, N, H, H], with a cumulative Gram [L, B, R, N, H, H]
            for R refreshes, the r-th made at a document's row c·r; likewise below).
        A_LM: positive tensor, [L, B, N, H, H].
        A_P: A_LM to the power P, [L, B, N, H, H].
        G_LM: the operator, [L, B, N, H, H].
        E_pre: scaled scores before the mask, [L, B, N, T, T].
        E: attention weights, [L, B, N, T, T]; rows that see nothing are 0.
        q: rotated queries before G is folded in, [L, B, T, N, H].
        k: rotated keys, [L, B, T, N, H].
        v: values, [L, B, T, N, H].
    """

    A: Array | None = None
    A_LM: Array | None = None
    A_P: Array | None = None
    G_LM: Array | None = None
    E_pre: Array | None = None
    E: Array | None = None
    q: Array | None = None
    k: Array | None = None
    v: Array | None = None


COLLECTABLE = tuple(field.name for field in dataclasses.fields(DeductiveOutputs))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PLDRCache:
    """Keys, values and operators of a running generation.

    The operators are those of the prompt: they are made by `prefill` and never refreshed, unless the Gram is cumulative
    (`gram_refresh`). Then the cache carries it on, and the operators are those of the last refresh. "kv" keeps A and
    makes G from it at every step, as the published KV-cache does; "kv_g" keeps G. Both give the same logits, bit for
    bit.

    Attributes:
        kv: keys and values.
        operators: A or G, [L, B, N, H, H]; None for a model of constant operators.
        kind: which of the two.
        gram: a cumulative Gram of all tokens held, [L, B, N, H, H] in float32 or better; None for any other.
    """

    kv: KVCache
    operators: Array | None
    kind: str = dataclasses.field(metadata={"static": True})
    gram: Array | None = None

    @property
    def keeps(self) -> str:
        """The deductive output that `operators` holds."""
        return "A" if self.kind == "kv" else "G_LM"

    @property
    def length(self) -> Array:
        """int32 [B], tokens held per row."""
        return self.kv.length

    @property
    def overflowed(self) -> Array:
        """bool [B]: rows given more tokens than they can hold."""
        return self.kv.overflowed


class PLDR(LanguageModel):
    """The language model."""

    def __init__(self, config: PLDRConfig, *, rngs: nnx.Rngs):
        """Makes a model by the initialisation law of `config`.

        Args:
            config: sizes and choices.
            rngs: source of keys, `nnx.Rngs(seed)`.
        """
        V, D, dtype = config.vocab_size, config.model_width, config.param_dtype
        table = jax.random.normal(rngs.params(), (V, D), dtype)
        self.embedding = nnx.Param(table, axes=("V", "D"))
        self.norm = LayerNorm(D, epsilon=config.norm_epsilon, dtype=dtype)
        stack = nnx.vmap(lambda r: DecoderLayer(config, rngs=r), in_axes=0, out_axes=0)
        self.layers = stack(rngs.split(config.num_layers))
        self.head = Linear(D, V, axes=("D", "V"), dtype=dtype, compute_dtype=config.compute_dtype, rngs=rngs)
        self.config = config

    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        num_segments: int | None = None,
        valid: Array | None = None,
        operators: Array | None = None,
        collect: Collection[str] = (),
        last_only: bool = False,
    ) -> tuple[Array, DeductiveOutputs]:
        """Runs a block of tokens.

        Args:
            tokens: int [B, T]. Without `segment_ids`, `config.pad_id` marks padding, wherever it stands.
            positions: int [B, T] for the rotary embedding and causality. None counts a row's real tokens (with
                segments: of each segment) from 0, so padding changes nothing.
            segment_ids: int [B, T] for packed rows: 1…X names a document, 0 is padding. Documents do not see each other
                and each makes its own operators.
            num_segments: X, the most documents in a row, static. None finds it, outside of jit only.
            valid: bool [B, T], which tokens are real, whatever their id; instead of `segment_ids`.
            operators: G of shape [L, B, N, H, H] or [L, N, H, H], used instead of the model's own.
            collect: names of deductive outputs to return.
            last_only: compute the logits of each row's last real token only.

        Returns:
            Logits [B, T, V] ([B, 1, V] with `last_only`) in float32 or better, and the deductive outputs named in
            `collect`.

        Raises:
            ValueError: more tokens than the context, an unknown name in `collect`, operators of a wrong shape,
                segments whose number is not known, or both `segment_ids` and `valid`.

        Note:
            G is made from all rows of the call, so row t depends on later tokens, as in the paper; constant or given
            operators, or a cumulative Gram, make the model causal.
        """
        self._check(tokens, operators, collect)
        rows = self._rows(tokens, positions, segment_ids, num_segments, valid)
        x, _, deduced = self._run(tokens, rows, operators, tuple(collect), None)
        x = last_real(x, rows.valid) if last_only else x
        return self._logits(x), DeductiveOutputs(**deduced)

    def init_cache(self, batch: int, capacity: int, *, kind: str = "kv_g", dtype: DType | None = None) -> PLDRCache:
        """An empty cache for `prefill`.

        Args:
            batch: B.
            capacity: tokens per row, prompt and continuation, at most `config.context`.
            kind: "kv" or "kv_g", see `PLDRCache`.
            dtype: of keys and values; None takes the compute dtype.

        Returns:
            A cache of length 0.

        Raises:
            ValueError: unknown kind, or a capacity outside 1…context.
        """
        config = self.config
        if kind not in ("kv", "kv_g"):
            raise ValueError(f"Cache kind {kind!r} is unknown; choose 'kv' or 'kv_g'.")
        if capacity > config.context:
            raise ValueError(
                f"Capacity {capacity} exceeds the model's context of {config.context} tokens; "
                "ask for fewer new tokens or shorten the prompt."
            )
        N, H = config.num_heads, config.head_width
        kv = KVCache.init(config.num_layers, batch, capacity, N, H, dtype or config.compute_dtype)
        operators = gram = None
        per_layer = (config.num_layers, batch, N, H, H)
        if config.operator == "learned":
            operators = jnp.zeros(per_layer, config.param_dtype)
        if config.gram_refresh is not None:
            gram = jnp.zeros(per_layer, statistics_dtype(config.compute_dtype))
        return PLDRCache(kv=kv, operators=operators, kind=kind, gram=gram)

    def prefill(
        self,
        tokens: Array,
        cache: PLDRCache,
        *,
        segment_ids: Array | None = None,
        operators: Array | None = None,
        last_only: bool = False,
    ) -> tuple[Array, PLDRCache]:
        """Reads prompts, of unequal lengths if need be, into a cache, and keeps their operators there.

        Args:
            tokens: int [B, T], padded with `config.pad_id` anywhere.
            cache: of `init_cache`; whatever it held is forgotten.
            segment_ids: int [B, T], 0 for padding and 1 elsewhere; None takes padding from `tokens`.
            operators: G [L, B, N, H, H] or [L, N, H, H] to freeze instead of the prompt's own; needs kind "kv_g".
            last_only: compute the logits of each row's last real token only.

        Returns:
            Logits [B, T, V] ([B, 1, V] with `last_only`), and the cache.

        Raises:
            ValueError: the prompt is longer than the cache, or operators for a cache that keeps A or makes them anew.
        """
        self._check(tokens, operators, ())
        if tokens.shape[1] > cache.kv.capacity:
            raise ValueError(
                f"A prompt of {tokens.shape[1]} tokens does not fit a cache of {cache.kv.capacity}; "
                "make it larger with init_cache, or shorten the prompt."
            )
        if operators is not None and cache.kind != "kv_g":
            raise ValueError(f"A cache of kind {cache.kind!r} keeps A, not operators; use 'kv_g'.")
        if operators is not None and cache.gram is not None:
            raise ValueError(
                "A cumulative Gram makes operators anew as it reads, so given ones cannot be frozen; "
                "constant_operator_model makes a model of them."
            )
        rows = self._rows(tokens, None, segment_ids, 1)
        rows = dataclasses.replace(rows, segment_ids=None)
        kv = dataclasses.replace(cache.kv, length=jnp.zeros_like(cache.kv.length))
        collect = () if cache.operators is None else (cache.keeps,)
        running = None
        if cache.gram is not None:
            running = jax.tree.map(jnp.zeros_like, Running(gram=cache.gram, held=cache.operators))
        x, kv, deduced = self._run(tokens, rows, operators, collect, kv, running)
        held = deduced[cache.keeps].astype(cache.operators.dtype) if collect else None
        x = last_real(x, rows.valid) if last_only else x
        return self._logits(x), dataclasses.replace(cache, kv=kv, operators=held, gram=deduced.get("gram"))

    def extend(self, tokens: Array, cache: PLDRCache, *, segment_ids: Array | None = None) -> tuple[Array, PLDRCache]:
        """Reads one or more further tokens per row with the operators held, or those that a cumulative Gram makes anew.

        Args:
            tokens: int [B, T], padded with `config.pad_id` anywhere.
            cache: as left by `prefill` or `extend`.
            segment_ids: int [B, T], 0 for padding and 1 elsewhere; None takes padding from `tokens`.

        Returns:
            Logits [B, T, V], and the cache. Rows that no longer fit are flagged by `cache.overflowed`.

        Raises:
            ValueError: more tokens than the whole cache can hold.
        """
        self._check(tokens, None, ())
        if tokens.shape[1] > cache.kv.capacity:
            raise ValueError(
                f"{tokens.shape[1]} tokens do not fit a cache of {cache.kv.capacity}; make it larger with init_cache."
            )
        valid = tokens != self.config.pad_id if segment_ids is None else segment_ids > 0
        slots = cache.kv.slots(valid)
        refreshes = None
        if cache.gram is not None:
            every = self.config.gram_refresh
            refreshes = Refreshes.of_continuation(slots, valid, cache.kv.length, every=every)

        def step(carry, inputs):
            x, kv = carry
            index, layer, running = inputs
            gram, held = running
            q, k, v = layer.attention.project(x, slots)
            kv = kv.append(index, k, v, slots, valid)
            if held is None:
                q = fold_operator(q, layer.attention.G[...])
            elif gram is None:
                G = held if cache.kind == "kv_g" else layer.attention.metric.power_law(held).G_LM
                q = fold_operator(q, G)
            else:
                q, running = layer.attention.resume(q, refreshes, valid, running, keep=cache.keeps)
            attended, kv = kv.attend(index, q, slots, valid, self._attention, scale=self._scale)
            return (layer.finish(x, attended), kv), None if gram is None else running

        running = Running(gram=cache.gram, held=cache.operators)
        (x, kv), after = over_layers(step, (self._embed(tokens), cache.kv), self.layers, running)
        after = running if after is None else after
        return self._logits(x), dataclasses.replace(cache, kv=kv.advance(valid), gram=after.gram, operators=after.held)

    def with_operators(self, operators: Array) -> Self:
        """A v510G model with these constant operators (sharing all other arrays).

        Args:
            operators: G, [L, N, H, H].

        Returns:
            The model.

        Raises:
            ValueError: this model learns its operators (use `constant_operator_model`), or a wrong shape.
        """
        config = self.config
        if config.operator != "constant":
            raise ValueError("This model learns its operators; `constant_operator_model` makes a v510G of it.")
        self._check(jnp.zeros((1, 1), jnp.int32), operators, ())
        graphdef, constant, rest = nnx.split(self, Constant, ...)
        replaced = [
            (path, variable.replace(operators.astype(config.param_dtype)))
            for path, variable in nnx.to_flat_state(constant)
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(replaced), rest)

    def _embed(self, tokens: Array) -> Array:
        # √D matters only through the ε of the norm that follows.
        return self.norm(self.embedding[...][tokens] * self.config.model_width**0.5)

    def _logits(self, x: Array) -> Array:
        logits = self.head(x)
        return logits.astype(statistics_dtype(logits.dtype))

    def _rows(
        self,
        tokens: Array,
        positions: Array | None,
        segment_ids: Array | None,
        num_segments: int | None,
        valid: Array | None = None,
    ) -> Rows:
        """Positions, masks, Gram rows and refreshes of a block."""
        everything = self.config.gram_rows == "all"
        if segment_ids is not None and valid is not None:
            raise ValueError("segment_ids already say which tokens are valid; give one of the two.")
        if segment_ids is None:
            valid = tokens != self.config.pad_id if valid is None else valid
            gram = None if everything else valid
            if positions is None and everything:
                positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
            elif positions is None:
                positions = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
        else:
            valid = segment_ids > 0
            if num_segments is None:
                num_segments = _count_segments(segment_ids)
            names = jnp.arange(1, num_segments + 1, dtype=segment_ids.dtype)
            member = segment_ids[:, None, :] == names[None, :, None]
            gram = member if num_segments > 1 else valid
            if positions is None:
                order = jnp.cumsum(member, axis=2, dtype=jnp.int32) - 1
                positions = jnp.sum(jnp.where(member, order, 0), axis=1)
        mask = Mask(
            q_positions=positions,
            k_positions=positions,
            q_segments=segment_ids,
            k_segments=segment_ids,
            k_valid=valid,
        )
        packed = segment_ids if gram is not None and gram.ndim == 3 else None
        refreshes = None
        if self.config.gram_refresh is not None:
            if segment_ids is None:
                member = (jnp.ones_like(valid) if everything else valid)[:, None]
            refreshes = Refreshes.of_documents(member, positions, valid, every=self.config.gram_refresh)
        return Rows(positions=positions, mask=mask, gram=gram, segment_ids=packed, valid=valid, refreshes=refreshes)

    def _run(
        self,
        tokens,
        rows: Rows,
        operators,
        collect: tuple[str, ...],
        kv: KVCache | None,
        running: Running | None = None,
    ):
        """Scans the layers over a block; writes keys and values into `kv`, and a cumulative Gram, where there are."""

        def step(carry, inputs):
            x, kv = carry
            index, layer, given, running = inputs
            q, k, v = layer.attention.project(x, rows.positions)
            if kv is not None:
                kv = kv.append(index, k, v, rows.positions, rows.valid)
            with jax.named_scope("operator"):
                kept = {name: value for name, value in (("q", q), ("k", k), ("v", v)) if name in collect}
                if running is None:
                    q, deduced = layer.attention.fold(q, rows, given, collect)
                else:
                    q, after = layer.attention.resume(q, rows.refreshes, rows.valid, running, keep=collect[0])
                    deduced = {"gram": after.gram, collect[0]: after.held}
            with jax.named_scope("attention"):
                attended = self._attention(q, k, v, rows.mask, scale=self._scale)
            kept |= deduced | self._scores(q, k, rows.mask, collect)
            return (layer.finish(x, attended), kv), kept

        if self.config.remat:
            step = jax.checkpoint(step, prevent_cse=False)
        (x, kv), deduced = over_layers(step, (self._embed(tokens), kv), self.layers, operators, running)
        return x, None if kv is None else kv.advance(rows.valid), deduced

    def _scores(self, q, k, mask: Mask, collect) -> dict[str, Array]:
        """E_pre and E, when asked for. They need the whole [T, T] table, which the kernel never makes."""
        if "E" not in collect and "E_pre" not in collect:
            return {}
        dtype = statistics_dtype(q.dtype)
        scores = jnp.einsum("BTNH,BSNH->BNTS", q.astype(dtype), k.astype(dtype)) * self._scale
        meets = mask.as_array(*scores.shape[-2:])
        weights = jax.nn.softmax(scores, axis=-1, where=jnp.broadcast_to(meets, scores.shape))
        kept = {"E_pre": scores, "E": weights}
        return {name: value for name, value in kept.items() if name in collect}

    def _check(self, tokens: Array, operators: Array | None, collect: Collection[str]) -> None:
        config = self.config
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must be [B, T] with at least one token; got shape {tokens.shape}.")
        if tokens.shape[1] > config.context:
            raise ValueError(
                f"{tokens.shape[1]} tokens exceed the context of {config.context}; "
                "shorten the input or make a config with a larger context."
            )
        unknown = set(collect) - set(COLLECTABLE)
        if unknown:
            raise ValueError(f"Unknown deductive outputs {sorted(unknown)}; choose from {', '.join(COLLECTABLE)}.")
        made = set(collect) & {"A", "A_LM", "A_P"}
        if made and (operators is not None or config.operator == "constant"):
            raise ValueError(
                f"{', '.join(sorted(made))}: given or constant operators make no such tensor; collect others of "
                f"{', '.join(COLLECTABLE)}."
            )
        if operators is None:
            return
        per_layer = (config.num_heads, config.head_width, config.head_width)
        allowed = [
            (config.num_layers, *per_layer),
            (config.num_layers, tokens.shape[0], *per_layer),
        ]
        if operators.shape not in allowed:
            raise ValueError(
                f"Operators of shape {operators.shape} do not fit; expected [L, N, H, H] = "
                f"{allowed[0]} or [L, B, N, H, H] = {allowed[1]}."
            )


def _count_segments(segment_ids: Array) -> int:
    try:
        return max(int(jnp.max(segment_ids)), 1)
    except jax.errors.ConcretizationTypeError:
        raise ValueError("Under jit the number of segments must be static: pass num_segments.") from None
