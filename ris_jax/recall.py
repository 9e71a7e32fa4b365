"""Which key/value heads recall: those that, where a text repeats itself, attend to what followed the last time.

Measured on the model itself: a text is read, then its tokens in random order a few times, then the text again. For each
query of the second time, the attention to its earlier self and to what followed is noted. A few heads have nearly all
of it; they are the ones worth probing at every query. The shuffled tokens in between matter: without them, heads that
merely look for equal tokens come out as high, and those are lost at a distance. So do real words: on SmolLM2-135M,
random tokens miss a head of layer 7 whose loss costs 1.1 nats of copying.

Source: Olsson et al. 2022 (induction heads, prefix-matching score).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array, AttentionFn, statistics_dtype
from plga_jax.caches import KVCache
from plga_jax.models.decoder import Decoder

TEXT = (
    "The ferry to the northern islands leaves at a quarter past six, and whoever misses it waits until the next "
    "morning. Marta had packed the maps, two loaves of bread and the old brass compass that had belonged to her "
    "grandfather; her brother carried the tent and complained about its weight. By noon they could see the lighthouse, "
    "white against a line of dark cliffs, and above it a cloud of gulls that rose and settled like smoke. A fisherman "
    "named Tobias, mending nets beside the harbour wall, told them that the path along the shore was closed after the "
    "storm, but that a narrow track led over the hill, past three abandoned farms, to the village of Ostervik. There, "
    "he said, the baker would give them a room if they mentioned his name, and in return they should bring him news of "
    "the price of herring on the mainland, which nobody on the island had heard since the middle of September."
)
"""A text to measure with: ordinary, and without repetitions of its own."""

_SHUFFLES = 4
"""Times that the text's tokens stand in random order between its two readings."""

_OFFSETS = (0, 1, 2)
"""Keys after the earlier occurrence that count: the token itself (heads that find it), what followed, and the next."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Observer:
    """A dense cache that notes how much each query head attends to what followed the earlier occurrence.

    Attributes:
        kv: keys and values.
        mass: float32 [L, N], mean attention weight.
        again: the text's last tokens, as many as this, repeat its first ones.
    """

    kv: KVCache
    mass: Array
    again: int = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        return self.kv.capacity

    @property
    def length(self) -> Array:
        return self.kv.length

    def slots(self, valid: Array) -> Array:
        return self.kv.slots(valid)

    def append(self, layer, k: Array, v: Array, slots: Array, valid: Array) -> Self:
        return dataclasses.replace(self, kv=self.kv.append(layer, k, v, slots, valid))

    def attend(self, layer, q: Array, slots, valid, attention: AttentionFn, *, scale: float, window=None):
        observed = functools.partial(attention, return_lse=True)
        (out, lse), _ = self.kv.attend(layer, q, slots, valid, observed, scale=scale, window=window)
        n, (_, _, N, H) = self.again, q.shape
        keys = self.kv.k[layer]
        second = q[:, -n:].reshape(1, n, keys.shape[2], -1, H)

        def weights(offset: int):
            earlier = keys[:, offset : n + offset]
            scores = jnp.einsum("BTKGH,BTKH->BTKG", second, earlier, preferred_element_type=statistics_dtype(q.dtype))
            return jnp.exp(scale * scores.reshape(1, n, N) - lse[:, -n:])

        mass = sum(weights(offset) for offset in _OFFSETS).mean((0, 1)).astype(jnp.float32)
        return out, dataclasses.replace(self, mass=self.mass.at[layer].set(mass))

    def advance(self, valid: Array) -> Self:
        return dataclasses.replace(self, kv=self.kv.advance(valid))


def recall_scores(model: Decoder, text: Sequence[int]) -> np.ndarray:
    """How much each query head attends to an earlier occurrence, on a text read twice.

    Args:
        model: the model.
        text: ids, such as those of `TEXT`; cut to a sixth of the model's context.

    Returns:
        float32 [L, N], mean attention weights, 0 … 1.

    Raises:
        ValueError: a text, or a context, that is too short to say anything.
    """
    config = model.config
    text = list(text)[: config.context // (_SHUFFLES + 2)]
    n = len(text)
    if n < len(_OFFSETS):
        raise ValueError(f"A text of {n} tokens says nothing; at least {len(_OFFSETS)} are needed, six times in a row.")
    shuffle = np.random.default_rng(0).permutation
    ids = np.concatenate([text, *(shuffle(text) for _ in range(_SHUFFLES)), text]).astype(np.int32)
    mass = jnp.zeros((config.num_layers, config.num_heads), jnp.float32)
    observer = _Observer(kv=model.init_cache(1, len(ids)), mass=mass, again=n)
    return np.asarray(_observe(model, jnp.asarray(ids)[None], observer))


@jax.jit
def _observe(model: Decoder, tokens: Array, observer: _Observer) -> Array:
    return model.extend(tokens, observer, need_logits=False)[1].mass


def recall_heads(model: Decoder, text: Sequence[int], share: float = 1 / 9) -> tuple[tuple[int, int], ...]:
    """The key/value heads that recall most.

    Args:
        model: the model.
        text: as for `recall_scores`.
        share: of all key/value heads, rounded down, but one at least unless 0.

    Returns:
        (layer, key/value head) pairs, sorted; a head counts as much as the best of its query heads.

    Raises:
        ValueError: a share outside of 0 … 1, and as `recall_scores`.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share = {share} must be within 0 … 1.")
    scores, K = recall_scores(model, text), model.config.num_kv_heads
    best = scores.reshape(len(scores), K, -1).max(-1).ravel()
    count = max(int(best.size * share), 1) if share else 0
    return tuple(sorted((int(index // K), int(index % K)) for index in np.argsort(-best, kind="stable")[:count]))
