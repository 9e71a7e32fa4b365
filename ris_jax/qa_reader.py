"""A `Decoder` under any geometry as the `Reader` of the multiple-choice benchmark."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import DType
from plga_jax.models.decoder import Decoder
from ris_jax.attend import StreamedCache, open_cache
from ris_jax.density import causal_pairs
from ris_jax.geometry import Geometry
from ris_jax.qa import RESERVE

STEP = 64
"""Questions are padded to a multiple of this many tokens, so that few programs are compiled."""


class State(NamedTuple):
    """What was read."""

    cache: Any
    length: int
    """Tokens."""
    share: float | None = None
    """Pairs read over the causal ones; None where nobody counted."""


class CacheReader:
    """Reads by `Decoder.extend`, into the cache that `open_cache` has for a geometry."""

    def __init__(
        self,
        model: Decoder,
        geometry: Geometry,
        *,
        kv_dtype: DType | None = None,
        chunk: int = 1024,
        reserve: int = RESERVE,
    ):
        """Compiles nothing yet.

        Args:
            model: the language model.
            geometry: which earlier tokens a token attends to.
            kv_dtype: of keys and values; None takes the compute dtype.
            chunk: tokens of a prefill step.
            reserve: tokens that a question may take.
        """
        self._model, self._geometry, self._kv_dtype = model, geometry, kv_dtype
        self._chunk, self._reserve = chunk, reserve

    def prefill(self, ids: np.ndarray) -> State:
        """The cache after the documents; see `Reader`.

        Raises:
            ValueError: if documents and reserve exceed the model's context.
        """
        capacity, config = len(ids) + self._reserve, self._model.config
        if capacity > config.context:
            raise ValueError(
                f"{len(ids)} tokens and {self._reserve} for a question exceed the model's context of {config.context}: "
                "read less, or stretch its positions"
            )
        cache = open_cache(self._geometry, config, capacity=capacity, dtype=self._kv_dtype)
        step, pairs = min(self._chunk, capacity), 0
        for start in range(0, len(ids), step):
            piece = ids[start : start + step]
            cache = cache.ready(start, start + len(piece))
            pairs += row_pairs(cache)
            cache = _read(self._model, *_padded(piece, step), cache)
        cache = jax.block_until_ready(cache)
        return State(cache, len(ids), read_share(cache, len(ids), pairs))

    def real_density(self, state: State) -> float:
        """Share of the causal pairs that were read, counted; see `Reader`."""
        return state.share

    def logits(self, state: State, ids: np.ndarray, rows: int = 1) -> np.ndarray:
        """Predictions after a question, of which the cache keeps nothing; see `Reader`.

        Raises:
            ValueError: if the question exceeds the reserve.
        """
        out = _predict(self._model, *self._question(state, ids), last_only=rows == 1)[0]
        return np.asarray(out if rows == 1 else out[len(ids) - rows : len(ids)])

    def follow(self, state: State, ids: np.ndarray) -> tuple[np.ndarray, Any]:
        """Predictions after a question, and a cache that holds it, for an answer; the state stays as it is.

        Args:
            state: of `prefill`.
            ids: int32 [T].

        Returns:
            Float [V], and the cache, which shares nothing with the state's.

        Raises:
            ValueError: if the question exceeds the reserve.
        """
        out, cache = _follow(self._model, *self._question(state, ids))
        return np.asarray(out[0, -1]), cache

    def _question(self, state: State, ids: np.ndarray) -> tuple[jax.Array, jax.Array, Any]:
        """A question, padded, and the cache that is to read it."""
        if len(ids) > self._reserve:
            raise ValueError(f"the question has {len(ids)} tokens, {self._reserve} are kept for it: shorten it")
        cache = state.cache.ready(state.length, state.length + len(ids))
        return *_padded(ids, min(-(-len(ids) // STEP) * STEP, cache.capacity)), cache


def row_pairs(cache: Any) -> int:
    """Pairs that the rows held by a cache allow; 0 if it is none that is given rows."""
    return int(np.bitwise_count(np.asarray(cache.rows)).sum(dtype=np.int64)) if isinstance(cache, StreamedCache) else 0


def read_share(cache: Any, length: int, pairs: int) -> float:
    """Pairs read over the causal ones.

    Args:
        cache: of one sequence; what it has counted itself is taken.
        length: tokens that were read.
        pairs: the sum of `row_pairs` over the chunks, for caches that are given rows.

    Returns:
        The share, 0 … 1.
    """
    if isinstance(cache, StreamedCache):
        return pairs / causal_pairs(length)
    return float(cache.real_share()[0]) if hasattr(cache, "real_share") else 1.0


def _padded(ids: np.ndarray, length: int) -> tuple[jax.Array, jax.Array]:
    """Tokens [1, length] and 1 where they are real."""
    missing = (0, length - len(ids))
    return jnp.asarray(np.pad(ids, missing)[None]), jnp.asarray(np.pad(np.ones(len(ids), np.int32), missing)[None])


@jax.jit(donate_argnames="cache")
def _read(model, tokens, real, cache):
    return model.extend(tokens, cache, segment_ids=real, need_logits=False)[1]


@jax.jit(static_argnames="last_only")
def _predict(model, tokens, real, cache, last_only):
    return model.extend(tokens, cache, segment_ids=real, last_only=last_only)[0]


@jax.jit
def _follow(model, tokens, real, cache):
    return model.extend(tokens, cache, segment_ids=real, last_only=True)
