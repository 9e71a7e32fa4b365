"""What a geometry costs in quality: the protocol, its texts and questions, and the geometries that are compared.

A long text is read in chunks. It gives the loss by position and the divergence from dense attention; passages hidden in
it are begun again after it, and a second and third text hide keys that are asked for. What separates geometries is
recall at a distance (copying, passkeys) and the divergence; the plain loss hardly moves. `quality_meter` runs it.

Geometries are compared at equal *real density* on what is read: each family is the densest of its kind that stays
within a share of the causal pairs. At one share all of them have the same window and anchors; what whole blocks or
seeds leave over goes to the window, and one family spends everything there.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable

import numpy as np

from plga_jax.tokenizers import Tokenizer
from plga_jax.train.data import Corpus
from ris_jax.block_shared import BlockSharedGeometry
from ris_jax.density import causal_pairs, fixed_pairs
from ris_jax.documents import long_text
from ris_jax.geometry import Geometry, PublishedGeometry, fit_share
from ris_jax.patterns import DenseGeometry, RandomBlockGeometry, StridedGeometry
from ris_jax.probe import ProbeGeometry
from ris_jax.tasks import Task, copy_probes, key_table, passkey, spread

Recall = tuple[tuple[int, int], ...]

_BLOCK = 64
"""Keys of a block of those geometries that draw or share blocks."""

_MOST_SEEDS = 1000

_FIXED_PART = 0.6
"""Of what may be spent, the most that goes to window and anchors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """Sizes of the measurement; the defaults are those of a model of 8192 tokens.

    Attributes:
        length: tokens of the window that geometries are made for; questions and answers are beyond the context.
        context: tokens of each text, whole chunks.
        chunk: tokens read at once.
        passages: how many are hidden in the text.
        passage: tokens of each.
        prompt: tokens of a passage that are given again.
        keys: in the table of the second text.
        draws: texts with a passkey.
        choices: numbers that a passkey is told from, itself included.
        positions: queries at which predictions are compared with those of dense attention.
        bins: least positions of the losses that are told apart; the first is where compared positions begin, too.
    """

    length: int = 8192
    context: int = 7168
    chunk: int = 1024
    passages: int = 6
    passage: int = 96
    prompt: int = 16
    keys: int = 12
    draws: int = 2
    choices: int = 16
    positions: int = 640
    bins: tuple[int, ...] = (2048, 4096)

    def __post_init__(self):
        """Checks that texts fit.

        Raises:
            ValueError: a context that is not of whole chunks or leaves no room for questions, or bins beyond it.
        """
        if self.chunk < 1 or self.context < self.chunk or self.context % self.chunk:
            raise ValueError(f"context = {self.context} must be whole chunks of {self.chunk} tokens, one at least.")
        if self.context + self.passage > self.length:
            raise ValueError(
                f"length = {self.length} has no room for {self.context} tokens of text and {self.passage} of a "
                "question: widen the window, or shorten the text."
            )
        if not self.bins or list(self.bins) != sorted(set(self.bins)) or not 0 < self.bins[0] <= self.bins[-1]:
            raise ValueError(f"bins = {self.bins} must be increasing positions above 0.")
        if self.bins[-1] >= self.context - 1 or not 1 <= self.positions < self.context - self.bins[0]:
            raise ValueError(
                f"bins = {self.bins} and positions = {self.positions} must leave queries among the {self.context}."
            )

    def compared(self) -> np.ndarray:
        """The queries at which predictions are compared: int64 [positions], ascending, the same for every text."""
        return np.sort(
            np.random.default_rng(9).permutation(np.arange(self.bins[0], self.context - 1))[: self.positions]
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """The texts and questions of one seed.

    Attributes:
        copy: passages hidden in a text.
        table: named keys hidden in it instead.
        passkeys: one number hidden in the middle of it instead, one task a draw.
    """

    copy: Task
    table: Task
    passkeys: tuple[Task, ...]


def episode(tokenizer: Tokenizer, protocol: Protocol, seed: int, corpus: Corpus | None = None) -> Episode:
    """Makes the texts and questions of one seed.

    Args:
        tokenizer: makes the ids.
        protocol: sizes.
        seed: of the order of texts, of passages, keys and names.
        corpus: the texts; None takes the one that `load_corpus` finds by itself.

    Returns:
        The tasks; their contexts are `protocol.context` tokens each.

    Raises:
        ValueError: too little text.
    """
    filler = long_text(tokenizer, protocol.context, seed, corpus=corpus)
    apart = 4 * protocol.passage
    # What follows the text in the same order, so that no passage is in it; far apart, so that none helps another.
    other = long_text(tokenizer, protocol.passages * apart, seed, skip=protocol.context, corpus=corpus)
    passages = [other[apart * i + protocol.passage :][: protocol.passage] for i in range(protocol.passages)]
    distances = spread(protocol.context, protocol.passages, protocol.passage)
    return Episode(
        copy=copy_probes(filler, passages, distances, prompt=protocol.prompt),
        table=key_table(tokenizer.encode, filler, keys=protocol.keys, seed=seed),
        passkeys=tuple(
            passkey(tokenizer.encode, filler, protocol.context // 2, 1000 * seed + i, choices=protocol.choices)
            for i in range(protocol.draws)
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
    """A geometry that is measured.

    Attributes:
        family: what it is called.
        target: the share of causal pairs that it may spend; 1 for dense.
        geometry: made for the window.
        mix: how answers that are read token by token put window and far keys together, one of `anchor.MIXES`; None
            reads answers as text, like all else.
    """

    family: str
    target: float
    geometry: Geometry
    mix: str | None = None


def fixed_part(share: float, length: int) -> dict[str, int]:
    """The window and the anchors, a quarter of it, of every geometry at a share of the causal pairs.

    Args:
        share: that may be spent.
        length: tokens that are read.

    Returns:
        Fields: the largest `local` out of 16, 32 … 1024 that leaves two fifths of the share to the rest, and `anchors`.
    """
    sizes = [{"local": 1 << power, "anchors": 1 << (power - 2)} for power in range(10, 3, -1)]
    most = _FIXED_PART * share * causal_pairs(length)
    return next((fields for fields in sizes if fixed_pairs(length, **fields) <= most), sizes[-1])


def probe_at(share: float, length: int, recall: Recall, **changes) -> ProbeGeometry:
    """The probe-selected geometry for a share of the causal pairs: the best one known.

    Args:
        share: that may be spent; what is read of it is counted by the cache.
        length: tokens that are read.
        recall: (layer, key/value head) pairs, of `recall.recall_heads`.
        **changes: fields to set otherwise; the number of blocks then follows.

    Returns:
        The geometry with as many blocks as the share allows.

    Raises:
        ValueError: window and anchors alone take more.
    """
    fields = fixed_part(share, length) | {"recall": recall} | changes

    def make(blocks: int) -> ProbeGeometry:
        return ProbeGeometry(length=length, blocks=blocks, **fields)

    return fit_share(make, share, low=0, high=-(-length // make(0).block))


def _fitted(make: Callable[..., Geometry], share: float, *, low: int, high: int) -> Geometry:
    """The densest that `make` gives for an integer; the rest of the share goes to its window."""
    geometry = fit_share(make, share, low=low, high=high)
    widest = max(geometry.length, geometry.local)
    return fit_share(lambda local: geometry.replace(local=local), share, low=geometry.local, high=widest)


def _window(share: float, length: int) -> Geometry:
    # As a list of no blocks, which is read without touching what is left out; `WindowGeometry` is a mask.
    fields = {"budget": 0, "block": _BLOCK, "tile": _BLOCK, **fixed_part(share, length)}
    return _fitted(lambda _: BlockSharedGeometry(length=length, **fields), share, low=0, high=0)


def _strided(share: float, length: int) -> Geometry:
    # By the number of far keys of the last row: an integer that makes it denser.
    def make(count: int) -> StridedGeometry:
        return StridedGeometry(length=length, stride=-(-length // count), **fixed_part(share, length))

    return _fitted(make, share, low=1, high=length)


def _random_block(share: float, length: int) -> Geometry:
    def make(blocks: int) -> RandomBlockGeometry:
        return RandomBlockGeometry(length=length, block=_BLOCK, blocks=blocks, **fixed_part(share, length))

    return _fitted(make, share, low=0, high=-(-length // _BLOCK))


def _block_shared(share: float, length: int) -> Geometry:
    fields = {"block": _BLOCK, "tile": _BLOCK, **fixed_part(share, length)}

    def make(blocks: int) -> BlockSharedGeometry:
        return BlockSharedGeometry(length=length, budget=blocks * _BLOCK, **fields)

    return _fitted(make, share, low=0, high=-(-length // _BLOCK))


def _stochastic(share: float, length: int) -> Geometry:
    """One percent nominal density, as published, by as many seeds as fit."""

    def make(seeds: int) -> PublishedGeometry:
        return PublishedGeometry(length=length, seeds=seeds, **fixed_part(share, length))

    return _fitted(make, share, low=1, high=_MOST_SEEDS)


def _structural(share: float, length: int) -> Geometry:
    """One percent nominal density by the fewest seeds that reach the share, their cliques cut to fit it."""

    def make(seeds: int, size: int | None = None) -> PublishedGeometry:
        fields = {"mode": "structural", "block_max": size, **fixed_part(share, length)}
        return PublishedGeometry(length=length, seeds=seeds, **fields)

    full = next(whole for whole in map(make, range(1, _MOST_SEEDS)) if whole.share() >= share)
    return _fitted(functools.partial(make, full.seeds), share, low=0, high=full.block_size)


FAMILIES: dict[str, Callable[[float, int], Geometry] | None] = {
    "window": _window,
    "strided": _strided,
    "random_block": _random_block,
    "stochastic": _stochastic,
    "structural": _structural,
    "block_shared": _block_shared,
    "probe": None,  # needs the model's heads: `probe_at`
}
"""Families beside "dense". What "stochastic" lacks of "structural" is the clique."""

ABLATIONS: dict[str, dict] = {
    "probe, no window": {"local": 1},
    "probe, no anchors": {"anchors": 0},
    "probe, no recall heads": {"recall": ()},
    "probe, pooled ranking": {"ranking": "pooled"},
    "probe, best-score ranking": {"ranking": "best"},
    "probe, oracle": {"stride": 1, "recall_stride": 1},
}
"""Changes to `probe_at`; each has its blocks fitted anew, so that all spend the same share. "oracle" has every query of
every head rank by itself."""

MIXES: dict[str, str] = {"stochastic, one softmax": "exact", "stochastic, half and half": "half"}
"""Ways of putting the window and the far keys of "stochastic" together where answers are read token by token, as they
are made: by one softmax over the union (PFUS), or the mean of both results, which is PFUS left out. Texts and prompts
are read alike; only what is asked tells the two apart."""


def contestants(
    protocol: Protocol,
    shares: Iterable[float],
    recall: Recall,
    *,
    families: Collection[str] = ("dense", *FAMILIES),
    ablations: Collection[str] = (),
) -> list[Contestant | str]:
    """Geometries at matched real density.

    Args:
        protocol: sizes.
        shares: of the causal pairs of the context, each for every family.
        recall: heads that recall; see `probe_at`.
        families: names out of `FAMILIES`, and "dense".
        ablations: names out of `ABLATIONS` and `MIXES`.

    Returns:
        Dense first, then share by share; a sentence where a family has nothing within a share.

    Raises:
        ValueError: unknown names.
    """
    if unknown := ({*families} - {"dense", *FAMILIES}) | ({*ablations} - {*ABLATIONS, *MIXES}):
        known = ", ".join(("dense", *FAMILIES, *ABLATIONS, *MIXES))
        raise ValueError(f"geometries {sorted(unknown)} are unknown; choose from {known}")
    found: list[Contestant | str] = []
    if "dense" in families:
        found.append(Contestant(family="dense", target=1.0, geometry=DenseGeometry(length=protocol.length)))
    for share in shares:
        for name in (*(n for n in FAMILIES if n in families), *(n for n in (*ABLATIONS, *MIXES) if n in ablations)):
            mix = MIXES.get(name)
            make = FAMILIES.get("stochastic" if mix else name) or functools.partial(probe_at, recall=recall)
            try:
                geometry = make(share, protocol.context, **ABLATIONS.get(name, {}))
            except ValueError as error:
                found.append(f"{name} at {share:.1%}: {error}")
                continue
            # Fitted to what is read, then made for the whole window: counts and densities stay what they are.
            geometry = geometry.replace(length=protocol.length)
            found.append(Contestant(family=name, target=share, geometry=geometry, mix=mix))
    return found
