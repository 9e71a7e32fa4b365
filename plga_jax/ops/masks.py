"""Which pairs meet: a mask as a value, not as an array of -inf.

A `Mask` says which queries see which keys by rules (causality, window, segments, validity) over
positions, so it costs O(T + S) memory and can be asked for any block of pairs. Every rule narrows; a
pair meets when all of them let it through:

    causal      k_position <= q_position
    window w    k_position > q_position - w: a query sees w keys, itself included
    segments    q_segment == k_segment: packed documents do not see each other
    k_valid     the key is a real one, not padding or an empty cache slot
    pairs       an explicit table, for what no rule expresses

Causality is a matter of positions, never of array corners, so decoding against a cache needs no special case:

    Mask()                                    causal self-attention
    Mask(window=512)                          the same, 512 keys per query
    Mask(causal=False)                        everything meets
    Mask(q_positions=cache.length[:, None])   one new token per row against a cache whose slot s holds position s
    Mask.padding(valid)                       causal, right- or left-padded
    Mask.packed(segments)                     causal within each document of a packed row; segment 0 is padding
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array

_MAX_WINDOW = 2**31 - 1


def _static(default):
    return dataclasses.field(default=default, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """The set of (query, key) pairs that meet. A pytree: `causal` and `window` are static, the rest are arrays or None.

    Every array may have 1 where B (and N) stands; it then holds for the whole batch (for every head).

    Attributes:
        causal: whether a query sees only keys at its own position and before.
        window: how many keys a query sees at most, itself included; None means no limit. Needs `causal`.
        q_positions: integers [B, T]; None means 0 .. T-1.
        k_positions: integers [B, S]; None means 0 .. S-1.
        q_segments: integers [B, T]; None, together with `k_segments`, means one segment.
        k_segments: integers [B, S].
        k_valid: bool [B, S], False for keys nobody sees; None means all are real.
        pairs: bool [B, N, T, S], True where the pair may meet; None means no further limit. O(T·S) memory.

    Raises:
        ValueError: a window below 1, or a window without causality. Arrays are checked where the mask is used.
    """

    causal: bool = _static(True)
    window: int | None = _static(None)
    q_positions: Array | None = None
    k_positions: Array | None = None
    q_segments: Array | None = None
    k_segments: Array | None = None
    k_valid: Array | None = None
    pairs: Array | None = None

    def __post_init__(self):
        # Only the static fields: JAX rebuilds pytrees with placeholders where the arrays stand.
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal must be True or False (it is static), got {self.causal!r}")
        if self.window is None:
            return
        if not isinstance(self.window, (int, np.integer)) or not 1 <= self.window <= _MAX_WINDOW:
            raise ValueError(
                f"window must be an integer in 1..2**31-1 (keys per query, itself included) or None for no window, "
                f"got {self.window!r}"
            )
        if not self.causal:
            raise ValueError(
                f"window={self.window} needs causal=True: it counts the keys up to the query; "
                "express a two-sided band with pairs"
            )

    @classmethod
    def padding(cls, valid: Array, *, causal: bool = True, window: int | None = None) -> "Mask":
        """Hides the keys of padding.

        Args:
            valid: bool [B, S], True for real tokens.
            causal: as in the class.
            window: as in the class.
        """
        return cls(causal=causal, window=window, k_valid=valid)

    @classmethod
    def packed(cls, segments: Array, *, causal: bool = True, window: int | None = None) -> "Mask":
        """Keeps the documents of a packed row apart; rows of padding see nothing and are seen by nothing.

        Args:
            segments: integers [B, T], the document of each token; 0 is padding.
            causal: as in the class; by array order, which agrees with positions that restart.
            window: as in the class.
        """
        return cls(causal=causal, window=window, q_segments=segments, k_segments=segments, k_valid=segments != 0)

    def validate(self, T: int, S: int, B: int | None = None, N: int | None = None) -> None:
        """Checks every array against the lengths it will be used with.

        Args:
            T: number of queries.
            S: number of keys.
            B: batch size; None means any, as long as the arrays agree.
            N: number of query heads; None means any.

        Raises:
            ValueError: naming the field, its shape or dtype, and what would do.
        """
        if (self.q_segments is None) != (self.k_segments is None):
            given, absent = ("q", "k") if self.k_segments is None else ("k", "q")
            raise ValueError(f"{given}_segments is given but {absent}_segments is not: pass both or neither")
        expected = {
            "q_positions": ("BT", jnp.integer),
            "k_positions": ("BS", jnp.integer),
            "q_segments": ("BT", jnp.integer),
            "k_segments": ("BS", jnp.integer),
            "k_valid": ("BS", jnp.bool_),
            "pairs": ("BNTS", jnp.bool_),
        }
        sizes = {"T": T, "S": S, "B": B, "N": N}
        for name, (axes, kind) in expected.items():
            array = getattr(self, name)
            if array is None:
                continue
            if not jnp.issubdtype(array.dtype, kind):
                raise ValueError(f"{name} must hold {'bools' if kind is jnp.bool_ else 'integers'}, got {array.dtype}")
            fits = array.ndim == len(axes)
            for axis, size in zip(axes, array.shape):
                if axis in "BN" and size == 1:
                    continue
                if sizes[axis] is None:
                    sizes[axis] = size
                fits = fits and size == sizes[axis]
            if not fits:
                wanted = ", ".join(f"{a} or 1" if a in "BN" else f"{a}={sizes[a]}" for a in axes)
                known = ", ".join(f"{a}={sizes[a]}" for a in axes if a in "BN" and sizes[a] is not None)
                raise ValueError(
                    f"{name} must have shape [{wanted}]{' with ' + known if known else ''}, got {list(array.shape)}"
                )

    def as_array(self, T: int, S: int) -> Array:
        """The whole table of pairs.

        Args:
            T: number of queries.
            S: number of keys.

        Returns:
            bool [B|1, N|1, T, S], True where the pair meets.

        Raises:
            ValueError: arrays that do not fit T and S.
        """
        self.validate(T, S)
        indices = jnp.arange(T, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
        return self._meet(*indices, *self._arrays(), self.pairs)

    def block(self, q_index: Array, k_index: Array, T: int, S: int) -> Array:
        """The pairs of some rows with some columns; no other pair is ever formed.

        Args:
            q_index: integers [t], rows; may be traced. Those >= T are padding and meet nothing.
            k_index: integers [s], columns; likewise with S.
            T: number of queries.
            S: number of keys.

        Returns:
            bool [B|1, N|1, t, s]: `as_array(T, S)[:, :, q_index][..., k_index]` with False beyond the ends.
        """
        q_index, k_index = q_index.astype(jnp.int32), k_index.astype(jnp.int32)
        indices = (q_index, k_index, q_index, k_index, k_index)
        arrays = (None if a is None else jnp.take(a, i, axis=1, mode="clip") for a, i in zip(self._arrays(), indices))
        pairs = self.pairs
        if pairs is not None:
            pairs = jnp.take(jnp.take(pairs, q_index, axis=2, mode="clip"), k_index, axis=3, mode="clip")
        inside = (q_index < T)[:, None] & (k_index < S)[None, :]
        return self._meet(q_index, k_index, *arrays, pairs) & inside[None, None]

    def _arrays(self):
        return self.q_positions, self.k_positions, self.q_segments, self.k_segments, self.k_valid

    def _meet(self, q_index, k_index, q_positions, k_positions, q_segments, k_segments, k_valid, pairs) -> Array:
        """The rules, for arrays already cut to the rows and columns wanted."""
        meet = jnp.ones((1, 1, q_index.size, k_index.size), bool)
        # int32 whatever the caller's dtype: strict promotion refuses to compare int32 with int64, and
        # unsigned positions would wrap at the window.
        q = (q_index[None] if q_positions is None else q_positions).astype(jnp.int32)[:, None, :, None]
        k = (k_index[None] if k_positions is None else k_positions).astype(jnp.int32)[:, None, None, :]
        if self.causal:
            meet &= k <= q
        if self.window is not None:
            meet &= k > q - jnp.int32(self.window)
        if q_segments is not None:
            dtype = np.promote_types(q_segments.dtype, k_segments.dtype)
            meet &= q_segments.astype(dtype)[:, None, :, None] == k_segments.astype(dtype)[:, None, None, :]
        if k_valid is not None:
            meet &= k_valid[:, None, None, :]
        if pairs is not None:
            meet &= pairs
        return meet
