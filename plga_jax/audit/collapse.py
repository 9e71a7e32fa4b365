"""The state of the collapse, from the deductive tensors of a few fixed pairs of inputs.

Collapse is three things at once: A stops depending on the input (m(A) falls), its rows become one
row (σ2/σ1 falls) and its heads one head (cross-head RMS falls). They are measured side by side,
since each can be had without the others.
"""

import dataclasses

import numpy as np

from plga_jax.audit import order, spectra

COLLAPSED_BELOW = 1e-2
"""A layer counts as collapsed when its m(A) is below this; a fresh model is between 0.1 and 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collapse:
    """One probe of a model: per layer, [L] float64, medians over pairs or over inputs and heads."""

    m_A: np.ndarray
    """Relative RMS between the A of the two inputs of a pair."""
    m_G: np.ndarray
    """The same of the operator G_LM."""
    rank_one_ratio: np.ndarray
    """σ2/σ1 of A."""
    cross_head_rms: np.ndarray
    """RMS distance of the A of the other heads from head 0's, relative to it."""
    m_A_least: np.ndarray
    """m(A) of the pair that differs least."""
    m_A_most: np.ndarray
    """m(A) of the pair that differs most."""

    @property
    def collapsed(self) -> np.ndarray:
        """[L] bool: m(A) of the median pair is below `COLLAPSED_BELOW`."""
        return self.m_A < COLLAPSED_BELOW

    def as_dict(self) -> dict[str, list[float]]:
        """The numbers as lists, for JSON."""
        return {name: value.tolist() for name, value in dataclasses.asdict(self).items()}


def measure_collapse(A, G) -> Collapse:
    """*Measured*: the order parameters, rank-one ratio and cross-head distance of a batch of pairs.

    Args:
        A: metric tensors of a call on 2P inputs of one length, [L, 2P, N, H, H]; rows 2i and 2i+1
            are a pair.
        G: operators of the same call, [L, 2P, N, H, H].

    Returns:
        A `Collapse`.

    Raises:
        ValueError: if the batch is odd or empty, or an entry is not finite.
    """
    A, G = np.asarray(A, np.float64), np.asarray(G, np.float64)
    if A.ndim != 5 or A.shape[1] % 2 or A.shape[1] == 0 or A.shape != G.shape:
        raise ValueError(
            f"A {A.shape} and G {G.shape} must both be [layers, 2 × pairs, heads, width, width]; "
            "probe an even number of inputs"
        )
    m_A = _between_pairs(A)
    return Collapse(
        m_A=np.median(m_A, axis=1),
        m_G=np.median(_between_pairs(G), axis=1),
        rank_one_ratio=np.median(spectra.rank_one_ratio(A), axis=(1, 2)),
        cross_head_rms=np.median(spectra.cross_head_rms(A), axis=(1, 2)),
        m_A_least=m_A.min(axis=1),
        m_A_most=m_A.max(axis=1),
    )


def _between_pairs(tensors: np.ndarray) -> np.ndarray:
    """m of every layer and pair, [L, P]."""
    return order.relative_rms(tensors[:, 0::2], tensors[:, 1::2], axis=(2, 3, 4))
