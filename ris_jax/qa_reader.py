"""A `Decoder` with any cache as the `Reader` of the multiple-choice benchmark."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.models.decoder import Decoder
from ris_jax.qa import RESERVE

STEP = 64
"""Questions are padded to a multiple of this many tokens, so that few programs are compiled."""


class CacheReader:
    """Reads by `Decoder.extend`; what its cache attends to is the geometry."""

    def __init__(
        self,
        model: Decoder,
        make_cache: Callable[[int], Any],
        share: Callable[[int], float],
        *,
        ready: Callable[[Any, int, int], Any] = lambda cache, start, stop: cache,
        chunk: int = 1024,
        reserve: int = RESERVE,
    ):
        """Compiles nothing yet.

        Args:
            model: the language model.
            make_cache: an empty cache of one row from its capacity, `functools.partial(model.init_cache, 1)` for dense.
            share: real density of a number of tokens.
            ready: prepares a cache for reading the tokens from `start` to `stop`, such as their rows of a mask.
            chunk: tokens of a prefill step.
            reserve: tokens that a question may take.
        """
        self._model, self._make_cache, self.real_density = model, make_cache, share
        self._ready, self._chunk, self._reserve = ready, chunk, reserve

    def prefill(self, ids: np.ndarray) -> Any:
        """The cache after the documents, and their number; see `Reader`.

        Raises:
            ValueError: if documents and reserve exceed the model's context.
        """
        capacity = len(ids) + self._reserve
        cache = self._make_cache(capacity)
        step = min(self._chunk, capacity)
        for start in range(0, len(ids), step):
            piece = ids[start : start + step]
            cache = _read(self._model, *_padded(piece, step), self._ready(cache, start, start + len(piece)))
        return jax.block_until_ready((cache, len(ids)))

    def logits(self, state: Any, ids: np.ndarray, rows: int = 1) -> np.ndarray:
        """Predictions after a question, of which the cache keeps nothing; see `Reader`.

        Raises:
            ValueError: if the question exceeds the reserve.
        """
        if len(ids) > self._reserve:
            raise ValueError(f"the question has {len(ids)} tokens, {self._reserve} are kept for it: shorten it")
        cache, length = state
        cache = self._ready(cache, length, length + len(ids))
        padded = _padded(ids, min(-(-len(ids) // STEP) * STEP, cache.capacity))
        out = _predict(self._model, *padded, cache, last_only=rows == 1)[0]
        return np.asarray(out if rows == 1 else out[len(ids) - rows : len(ids)])


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
