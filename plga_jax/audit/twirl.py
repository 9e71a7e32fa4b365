"""What averaging over rotated positions does to a second moment: the twirl, its rates and what is left to measure.

A Gram of rotated queries is a sum of R(n) M R(n)ᵀ over positions. In the eigenbasis of the rotations, entry (j, k) of M
turns at the frequency ω_j − ω_k, so an average over S positions multiplies it by a Dirichlet kernel: 1 at frequency 0,
which is the commutant, and at most 1 / (S |sin(ω/2)|) elsewhere. That holds for one fixed M; real queries change with
the position, so suppression is measured as well.
"""

import dataclasses

import numpy as np

from plga_jax.ops import rope
from plga_jax.ops.rope import Layout


def frequencies(width: int, *, base: float = 10_000.0) -> np.ndarray:
    """*Measured*: the frequencies at which the entries (j, k), j < k, of a second moment turn, none of them zero.

    Args:
        width: H, even.
        base: Θ of the rotary embedding.

    Returns:
        float64 [H(H − 1)/2], radians per position: 2θ_a, then θ_a − θ_b and θ_a + θ_b for a < b, each of these twice.

    Raises:
        ValueError: if `width` is odd or not positive.
    """
    theta = _theta(width, base)
    first, second = np.triu_indices(len(theta), 1)
    between = [theta[first] - theta[second], theta[first] + theta[second]]
    return np.concatenate([2 * theta, *between, *between])


def twirl_constant(width: int, *, base: float = 10_000.0) -> float:
    """*Bound*: C_Θ = max 1 / |sin(ω/2)|, so that averages over S positions keep at most C_Θ / S off the commutant.

    Args:
        width: H, even.
        base: Θ of the rotary embedding.

    Returns:
        C_Θ; 44968.277 for H = 64, Θ = 10,000: no bound at all before S is that long.

    Raises:
        ValueError: if `width` is odd or not positive.
    """
    return float(np.max(1 / np.abs(np.sin(frequencies(width, base=base) / 2))))


def multipliers(width: int, length: int, *, base: float = 10_000.0) -> np.ndarray:
    """*Bound*: what an average over positions 0 … S − 1 leaves of an entry of each frequency.

    Args:
        width: H, even.
        length: S.
        base: Θ of the rotary embedding.

    Returns:
        |sin(Sω/2)| / (S |sin(ω/2)|) in the order of `frequencies`, float64 in [0, 1].

    Raises:
        ValueError: if `width` is odd or not positive, or `length` < 1.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    half = frequencies(width, base=base) / 2
    return np.abs(np.sin(length * half)) / (length * np.abs(np.sin(half)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twirl:
    """Second moments of queries before and after rotation, per instance [...]; float64.

    Energies are squared moduli in the eigenbasis of the rotations, relative to the unrotated moment's largest entry.
    """

    commutant_before: np.ndarray
    """Share of the unrotated moment's energy at frequency 0, in [0, 1]."""
    commutant_after: np.ndarray
    """The same after rotation."""
    off_before: np.ndarray
    """Energy off the commutant before rotation."""
    off_after: np.ndarray
    """The same after."""
    stationarity: np.ndarray
    """‖M₁ − M₂‖ / ‖½(M₁ + M₂)‖ of the first and second half's unrotated moments: 0 if queries do not drift."""

    @property
    def suppression(self) -> np.ndarray:
        """1 − off_after / off_before per instance: 1 is a full twirl, 0 none, negative the opposite."""
        return 1 - _share(self.off_after, self.off_before)

    def pooled_suppression(self, axis=None) -> np.ndarray:
        """The same of summed energies, another statistic than any mean of `suppression`.

        Args:
            axis: axes over which energies are summed, None for all of them.
        """
        return 1 - _share(self.off_after.sum(axis=axis), self.off_before.sum(axis=axis))


def measure_twirl(rotated_queries, positions=None, *, base: float = 10_000.0, layout: Layout = "interleaved") -> Twirl:
    """*Measured*: how much of the queries' second moment lies in the commutant before and after rotation.

    Args:
        rotated_queries: q̂ of each row, [..., T, H]; they are turned back for the moment before rotation.
        positions: [T] that they were rotated by; None counts from 0.
        base: Θ of the rotary embedding.
        layout: which entries form a rotary plane.

    Returns:
        A `Twirl` of [...] arrays.

    Raises:
        ValueError: fewer than two rows, odd H, an unknown layout, or an entry that is not finite.
    """
    after = np.asarray(rotated_queries, np.float64)
    if after.ndim < 2 or after.shape[-2] < 2:
        raise ValueError(f"queries must be [..., at least 2 rows, H], got {after.shape}: halves are compared")
    if layout not in rope.LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(rope.LAYOUTS)}")
    if not np.isfinite(after).all():
        raise ValueError(f"{np.sum(~np.isfinite(after))} of {after.size} queries' entries are not finite")
    T, H = after.shape[-2:]
    positions = np.arange(T) if positions is None else np.asarray(positions)
    planes = _planes(after, layout)
    turned_back = planes * np.exp(-1j * positions[:, None] * _theta(H, base))
    before, after = _moment(turned_back), _moment(planes)
    first, second = _moment(turned_back[..., : T // 2, :]), _moment(turned_back[..., T // 2 :, :])
    scale = np.abs(before).max(axis=(-2, -1), keepdims=True)
    scale = np.where(scale == 0, 1.0, scale)
    zero = _at_rest(H)

    def energies(moment):
        energy = np.abs(moment / scale) ** 2
        return np.where(zero, energy, 0).sum(axis=(-2, -1)), np.where(zero, 0, energy).sum(axis=(-2, -1))

    (kept_before, off_before), (kept_after, off_after) = energies(before), energies(after)
    return Twirl(
        commutant_before=_share(kept_before, kept_before + off_before),
        commutant_after=_share(kept_after, kept_after + off_after),
        off_before=off_before,
        off_after=off_after,
        stationarity=_share(
            np.linalg.norm(first - second, axis=(-2, -1)), np.linalg.norm((first + second) / 2, axis=(-2, -1))
        ),
    )


def _theta(width: int, base: float) -> np.ndarray:
    rope.frequencies(width)  # refuses widths that have no planes
    return base ** (-np.arange(0, width, 2) / width)


def _planes(vectors: np.ndarray, layout: Layout) -> np.ndarray:
    """Each rotary plane as a complex number, [..., H/2]; rotation by nθ multiplies it by exp(i n θ)."""
    if layout == "interleaved":
        return vectors[..., 0::2] + 1j * vectors[..., 1::2]
    half = vectors.shape[-1] // 2
    return vectors[..., :half] + 1j * vectors[..., half:]


def _moment(planes: np.ndarray) -> np.ndarray:
    """Mean of x xᴴ over rows in the eigenbasis of the rotations, x = (z, z̄)/√2, [..., H, H]."""
    x = np.concatenate([planes, planes.conj()], axis=-1) / np.sqrt(2)
    return np.einsum("...ti,...tj->...ij", x, x.conj()) / planes.shape[-2]


def _at_rest(width: int) -> np.ndarray:
    """Entries of `_moment` that no rotation turns, bool [H, H]: its diagonal, since all frequencies differ."""
    return np.eye(width, dtype=bool)


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole; 0 of nothing."""
    return np.where(whole == 0, 0.0, part / np.where(whole == 0, 1.0, whole))
