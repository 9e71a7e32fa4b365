"""A model that reads into one cache: chunk by chunk, undone exactly, kept on disk, and drawing tokens from it.

The cache is passed from program to program and its memory reused; the `Reader` alone holds it. Whatever interrupts a
reader leaves it either at the end of a whole chunk or token, or, should the running program itself fail, empty.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array, DType, PRNGKey
from plga_jax.generate import for_decoding
from plga_jax.models.decoder import Decoder
from plga_jax.ops.sampling import SamplingConfig, sample
from plga_jax.train.signals import stop_on_signal
from ris_jax import anchor, attend
from ris_jax.geometry import Geometry
from ris_jax.store import Layers

_SMALLEST_PIECE = 64
_EVERY = 64
"""Tokens between two choices of far keys, where neither caller nor geometry says."""
_ANY_BLOCK = 1 << 20
"""More tokens than any block of keys that a cache is made of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A state of a reader to return to; small.

    Attributes:
        length: tokens read.
        cache: the cache's own mark.
    """

    length: int
    cache: Any


class CacheLost(ValueError):
    """The cache is gone, since the program that was given it failed."""

    def __init__(self):
        super().__init__("The cache was lost when an earlier step failed; read the document again.")


class Reader:
    """A model, a geometry, and one cache."""

    def __init__(
        self, model: Decoder, geometry: Geometry, *, capacity: int, chunk: int = 1024, kv_dtype: DType | None = None
    ):
        """Makes an empty cache.

        Args:
            model: reads; stacked.
            geometry: which earlier tokens a token attends to.
            capacity: the most tokens to hold, at most the model's context.
            chunk: tokens read at once, at least 1.
            kv_dtype: of keys and values; None takes the compute dtype.

        Raises:
            ValueError: a chunk or capacity out of range.
        """
        if chunk < 1:
            raise ValueError(f"chunk = {chunk} must be at least 1 token.")
        if not 1 <= capacity <= model.config.context:
            raise ValueError(f"capacity = {capacity} must be within 1 … {model.config.context}, the model's context.")
        self.capacity, self.chunk, self.geometry = capacity, chunk, geometry
        self.kv_dtype = jnp.dtype(kv_dtype or model.config.compute_dtype)
        self._model = model
        self.clear()

    def clear(self) -> None:
        """Empties the cache."""
        self._cache, self._length = None, 0  # The old memory is free before the new is asked for.
        self._cache = self._opened(self.capacity)

    @property
    def length(self) -> int:
        """Tokens read."""
        return self._length

    @property
    def room(self) -> int:
        """Tokens that can still be read."""
        return self.capacity - self._length

    @property
    def lost(self) -> bool:
        """Whether a program that was given the cache failed; `clear` makes a new one."""
        return self._cache is None

    def real_share(self) -> float | None:
        """Pairs read so far over the causal ones, where the cache counts them; None where it does not.

        Raises:
            CacheLost: see there.
        """
        return float(self._held.real_share()[0]) if hasattr(self._held, "real_share") else None

    def mark(self) -> Mark:
        """The present state, to `rewind` to.

        Raises:
            CacheLost: see there.
        """
        return Mark(length=self._length, cache=self._held.mark())

    def rewind(self, mark: Mark) -> None:
        """Forgets everything read since a mark was made.

        Args:
            mark: of this reader, made at a state that the present one continues.

        Raises:
            CacheLost: see there.
        """
        self._cache, self._length = self._held.rewind(mark.cache), mark.length

    def read(
        self, tokens: np.ndarray, *, logits: bool = False, progress: Callable[[int], Any] | None = None
    ) -> Array | None:
        """Reads tokens, chunk by chunk.

        Ctrl-C and SIGTERM take effect between two chunks (a second one at once): `length` then tells how many tokens
        have been read, and reading may go on from there.

        Args:
            tokens: int [T], T at least 1.
            logits: whether the predictions after the last token are wanted.
            progress: told the size of each chunk when it has been read.

        Returns:
            float32 [V], or None.

        Raises:
            ValueError: more tokens than there is room for, or none.
            CacheLost: see there.
        """
        tokens = np.asarray(tokens, np.int32)
        if not 1 <= tokens.size <= self.room:
            raise ValueError(f"{tokens.size} tokens cannot be read: there is room for 1 … {self.room}.")
        found = None
        with _whole_steps() as check:
            for start in range(0, tokens.size, self.chunk):
                piece = tokens[start : start + self.chunk]
                last = start + piece.size == tokens.size
                self._cache = self._held.ready(self._length, self._length + piece.size)
                with self._lent() as lent:
                    found, lent.cache = _read(self._model, *self._padded(piece), lent.cache, logits=logits and last)
                self._length += piece.size
                if progress is not None:
                    # Waiting costs nothing on a device that is busy anyway, and makes the rate shown a true one.
                    jax.block_until_ready(self._cache)
                    progress(piece.size)
                check()
        return None if found is None else found[0, -1]

    def draw(
        self,
        logits: Array,
        *,
        sampling: SamplingConfig,
        key: PRNGKey,
        seen: np.ndarray,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        policy: str | None = None,
        every: int | None = None,
    ) -> Iterator[int]:
        """Continues what was read, token by token.

        Args:
            logits: float32 [V], what `read` predicted.
            sampling: how tokens are drawn.
            key: of the draws.
            seen: bool [V], tokens that a repetition penalty applies to; those drawn are added.
            max_new_tokens: the most tokens to draw, at most `room`.
            stop_ids: drawing one of these is the end.
            policy: when far keys are chosen, one of `anchor.POLICIES`. None is "refresh" at the geometry's own strides
                where it has such, else "frozen", as published.
            every: tokens from one choice to the next, for "refresh"; None is the geometry's strides, or 64.

        Yields:
            Token ids, a stop id included. Once the next one is asked for, a token is in the cache, the last one too,
            unless it is a stop id. Closing the iterator keeps what was read until then.

        Raises:
            ValueError: more tokens than there is room for.
            CacheLost: see there.
        """
        if not 1 <= max_new_tokens <= self.room:
            raise ValueError(f"max_new_tokens = {max_new_tokens} must be within 1 … {self.room}, the room left.")
        lent = _Lent(cache=self._responding(policy, every, max_new_tokens))
        self._cache = None
        try:
            seen = jnp.asarray(seen)[None]
            token, seen = _draw(logits[None], seen, jax.random.fold_in(key, 0), sampling)
            for index in range(1, max_new_tokens + 1):
                yield (drawn := int(token[0]))
                if drawn in stop_ids:
                    return
                with _whole_steps():
                    cache, lent.cache = lent.cache, None
                    token, seen, lent.cache = _next(
                        self._decoder, token, seen, jax.random.fold_in(key, index), cache, sampling
                    )
                    self._length += 1
        finally:
            if lent.cache is not None:
                self._cache = lent.cache.close()

    def save(self) -> dict[str, np.ndarray | Layers]:
        """The cache as arrays for a store, cut to what is filled and fetched layer by layer.

        Raises:
            CacheLost: see there.
        """
        held = self._held
        arrays = {f"mark/{name}": np.asarray(leaf) for name, leaf in _named(held.mark()).items()}
        for name, axis in self._growing().items():
            leaf = _named(held)[name]
            count = -(-self._length * leaf.shape[axis] // self.capacity)
            shape = (*leaf.shape[:axis], count, *leaf.shape[axis + 1 :])
            cut = (slice(None),) * (axis - 1) + (slice(count),)
            read = functools.partial(lambda leaf, cut, layer: np.asarray(_layer(leaf, layer))[cut], leaf, cut)
            arrays[f"cache/{name}"] = Layers(shape=shape, dtype=np.dtype(leaf.dtype), read=read)
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray], length: int) -> None:
        """Puts back what `save` gave, layer by layer.

        Args:
            arrays: of a reader with this model, geometry and capacity.
            length: tokens it had read.

        Raises:
            ValueError: arrays of another cache.
        """
        self.clear()
        leaves, structure = jax.tree.flatten(self._taken())
        names = list(_named(structure.unflatten(leaves)))
        try:
            for name in self._growing():
                index, stored = names.index(name), arrays[f"cache/{name}"]
                for layer in range(len(stored)):
                    leaves[index] = _put(leaves[index], stored[layer], layer)
            cache = structure.unflatten(leaves)
            mark = cache.mark()
            stored = [jnp.array(arrays[f"mark/{name}"]) for name in _named(mark)]
            if [(x.shape, x.dtype) for x in stored] != [(x.shape, x.dtype) for x in jax.tree.leaves(mark)]:
                raise ValueError("other shapes")
            self._cache = cache.rewind(jax.tree.unflatten(jax.tree.structure(mark), stored))
        except (KeyError, TypeError, ValueError) as error:
            self.clear()
            raise ValueError(f"The stored arrays are not of this cache ({error}); read the document again.") from None
        self._length = length

    @functools.cached_property
    def _decoder(self) -> Decoder:
        return for_decoding(self._model)

    @property
    def _held(self):
        if self._cache is None:
            raise CacheLost
        return self._cache

    def _taken(self):
        """The cache, which the reader then no longer has."""
        cache, self._cache = self._held, None
        return cache

    @contextlib.contextmanager
    def _lent(self) -> Iterator["_Lent"]:
        """Lends the cache to a program that reuses its memory; what raises in between loses it."""
        lent = _Lent(cache=self._taken())
        yield lent
        self._cache = lent.cache

    def _responding(self, policy: str | None, every: int | None, room: int):
        cache = self._held
        if hasattr(cache, "respond"):
            return cache.respond(policy=policy or "refresh", every=every)
        return anchor.respond(cache, policy=policy or "frozen", every=every or _EVERY, room=room)

    def _opened(self, capacity: int):
        return attend.open_cache(self.geometry, self._model.config, capacity=capacity, dtype=self.kv_dtype)

    def _growing(self) -> dict[str, int]:
        """Names of a fresh cache's arrays that grow with its capacity -> the axis that does."""
        capacities = self.capacity, self.capacity + _ANY_BLOCK
        small, large = (_named(jax.eval_shape(lambda c=capacity: self._opened(c))) for capacity in capacities)
        axes = {name: [a != b for a, b in zip(small[name].shape, large[name].shape)] for name in small}
        return {name: differs.index(True) for name, differs in axes.items() if any(differs)}

    def _padded(self, piece: np.ndarray) -> tuple[Array, Array | None]:
        """Tokens and validity [1, T], T the chunk or a power of two: few lengths, few programs to compile."""
        size = min(1 << max(piece.size - 1, _SMALLEST_PIECE - 1).bit_length(), self.chunk, self.capacity)
        if size == piece.size:
            return jnp.asarray(piece[None]), None
        tokens, valid = np.zeros((2, 1, size), np.int32)
        tokens[0, : piece.size], valid[0, : piece.size] = piece, 1
        return jnp.asarray(tokens), jnp.asarray(valid)


@dataclasses.dataclass
class _Lent:
    cache: Any


@functools.partial(jax.jit, static_argnames=("logits",), donate_argnames=("cache",))
def _read(model: Decoder, tokens: Array, valid: Array | None, cache, logits: bool):
    return model.extend(tokens, cache, segment_ids=valid, last_only=True, need_logits=logits)


@functools.partial(jax.jit, static_argnames=("sampling",), donate_argnames=("seen", "cache"))
def _next(model: Decoder, token: Array, seen: Array, key: PRNGKey, cache, sampling: SamplingConfig):
    logits, cache = model.extend(token[:, None], cache)
    return *_draw(logits[:, 0], seen, key, sampling), cache


@functools.partial(jax.jit, static_argnames=("sampling",))
def _draw(logits: Array, seen: Array, key: PRNGKey, sampling: SamplingConfig) -> tuple[Array, Array]:
    token = sample(key[None], logits, sampling, seen=seen)
    return token, seen.at[0, token].set(True)


@jax.jit
def _layer(array: Array, layer: int) -> Array:
    return jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)


@functools.partial(jax.jit, donate_argnames=("array",))
def _put(array: Array, filled: Array, layer: int) -> Array:
    """Writes the filled part of one layer at its beginning."""
    start = (layer, *(0,) * filled.ndim)
    return jax.lax.dynamic_update_slice(array, filled[None], start)


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@contextlib.contextmanager
def _whole_steps() -> Iterator[Callable[[], None]]:
    """Puts Ctrl-C and SIGTERM off until the end, or until the yielded function is called where nothing can be lost."""
    with stop_on_signal() as stop:

        def check() -> None:
            if stop.by == "SIGTERM":
                raise SystemExit(143)
            if stop.requested:
                raise KeyboardInterrupt

        yield check
        check()
