"""Sandpiles: text without meaning whose statistics are critical, on two lattices.

Grains fall on random sites of a lattice with open edges. A site that holds as many grains as it has neighbours topples,
one grain to each; what falls over an edge is gone. After a while the pile is critical by itself, and the sizes of its
avalanches (topplings per grain) follow a power law up to what the lattice can hold. With `lost` grains gone at each
toppling it is not critical: avalanches have a typical size. That is the control.

A size becomes one character, by its logarithm: a corpus is ordinary text, one character an avalanche.

Source: Bak, Tang and Wiesenfeld 1987, driven one grain at a time.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plga_jax.array_types import Array
from plga_jax.train.data import Corpus

LATTICES: dict[str, tuple[tuple[int, int], ...]] = {
    "square": ((0, 1), (0, -1), (1, 0), (-1, 0)),
    "triangular": ((0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1)),
}
"""Steps to the neighbours of a site."""

_FIRST = 48  # the character "0"
_PER_OCTAVE = 3


def avalanches(
    lattice: str, *, size: int, grains: int, burn_in: int | None = None, lost: int = 0, seed: int = 0
) -> np.ndarray:
    """Drives a sandpile and counts topplings.

    Args:
        lattice: one of `LATTICES`.
        size: sites along an edge.
        grains: dropped and counted, one by one.
        burn_in: dropped before; None is enough to fill the pile twice.
        lost: grains that vanish at each toppling beside those that are passed on; 0 is critical.
        seed: of the sites.

    Returns:
        int64 [grains]: topplings that followed each grain, 0 for most.

    Raises:
        ValueError: an unknown lattice or a number out of range.
    """
    if lattice not in LATTICES:
        raise ValueError(f"lattice={lattice!r} is unknown; choose one of {', '.join(LATTICES)}")
    for name, value, least in (("size", size, 2), ("grains", grains, 1), ("lost", lost, 0)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    neighbours = LATTICES[lattice]
    if burn_in is None:
        burn_in = 2 * (len(neighbours) + lost) * size * size
    sites = np.random.default_rng(seed).integers(size * size, size=burn_in + grains)
    counts = _drive(jnp.asarray(sites, jnp.int32), size, neighbours, lost)
    return np.asarray(counts, np.int64)[burn_in:]


@functools.partial(jax.jit, static_argnames=("size", "neighbours", "lost"))
def _drive(sites: Array, size: int, neighbours: tuple[tuple[int, int], ...], lost: int) -> Array:
    threshold = len(neighbours) + lost

    def spread(topples):
        # A border of one site catches what falls over the edges.
        wide = jnp.pad(topples, 1)
        return sum(lax.dynamic_slice(wide, (1 + dy, 1 + dx), (size, size)) for dy, dx in neighbours)

    def relax(state):
        pile, count = state
        topples = (pile >= threshold).astype(jnp.int32)
        return pile - threshold * topples + spread(topples), count + topples.sum()

    def drop(pile, site):
        pile = pile.reshape(-1).at[site].add(1).reshape(size, size)
        return lax.while_loop(lambda state: (state[0] >= threshold).any(), relax, (pile, jnp.int32(0)))

    return lax.scan(drop, jnp.zeros((size, size), jnp.int32), sites)[1]


def characters(sizes) -> str:
    """Avalanche sizes as text: "0" for none, then three characters to a factor of two.

    Args:
        sizes: topplings, int [n].

    Returns:
        n characters.
    """
    sizes = np.asarray(sizes)
    bins = np.where(sizes > 0, 1 + np.floor(_PER_OCTAVE * np.log2(np.maximum(sizes, 1))), 0).astype(int)
    return "".join(chr(_FIRST + bin) for bin in bins)


def smallest_size(character: str) -> int:
    """The least avalanche that is written as a character; the inverse of `characters`.

    Args:
        character: one.

    Returns:
        Topplings.

    Raises:
        ValueError: a character that no avalanche is written as.
    """
    bin = ord(character) - _FIRST
    if bin < 0:
        raise ValueError(f"{character!r} stands for no avalanche; the first character is {chr(_FIRST)!r}")
    return 0 if bin == 0 else math.ceil(2 ** ((bin - 1) / _PER_OCTAVE) - 1e-9)


def sandpile_corpus(
    lattice: str, *, size: int = 24, documents: int = 40, length: int = 4_000, lost: int = 0, seed: int = 0
) -> Corpus:
    """Text of one long run of a sandpile, cut into documents.

    Args:
        lattice: one of `LATTICES`.
        size: sites along an edge.
        documents: how many.
        length: characters of each.
        lost: see `avalanches`.
        seed: of the grains' places.

    Returns:
        The corpus.
    """
    text = characters(avalanches(lattice, size=size, grains=documents * length, lost=lost, seed=seed))
    kind = f"{lattice} sandpile of {size} × {size} sites" + (f", {lost} lost per toppling" if lost else "")
    return Corpus(name=kind, documents=[text[i * length : (i + 1) * length] for i in range(documents)])
