"""How a collapse comes about: its symptoms measured along a training, on the same probes every time.

    m_A, m_G               how far A and G of two inputs differ
    rank_one_ratio         σ2/σ1 of A
    cross_head_rms         how far the heads' A differ
    row_map_sigma_max      the row map's Jacobian at sampled Gram rows
    commutant_residual     how far G is from commuting with the rotary embedding
    historical_fraction    share of logits of earlier rows that a changed suffix moves
    block_less_sequential  what later tokens are worth to a block, nats

The first six have a value per layer, named "m_A.0" and so on. A quantity has *fallen* at the first probe from which on
it stays below a fraction of its first value; the fraction is fixed before the run.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from plga_jax.audit import commutant, prefix, row_map
from plga_jax.audit.collapse import measure_collapse
from plga_jax.audit.sequential import block_against_sequential
from plga_jax.audit.subject import deduce, logits
from plga_jax.models.pldr import PLDR

BY_LAYER = ("m_A", "m_G", "rank_one_ratio", "cross_head_rms", "row_map_sigma_max", "commutant_residual")
WHOLE = ("historical_fraction", "block_less_sequential")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmergenceConfig:
    """What is measured, and when.

    Attributes:
        every: updates between two probes.
        pairs: pairs of inputs for the order parameters.
        length: tokens of each.
        rows: Gram rows per input at which the row map is differentiated, of the first two inputs.
        scored: tokens of the two windows that are scored in a block and by prefixes.
        prefix_pairs: pairs of sequences for the historical rows.
        fallen: the fraction of its first value below which a quantity has fallen.
        seed: of the pairs of sequences and of the choice of rows.
    """

    every: int = 100
    pairs: int = 4
    length: int = 64
    rows: int = 4
    scored: int = 16
    prefix_pairs: int = 4
    fallen: float = 0.1
    seed: int = 0

    def __post_init__(self):
        for name in ("every", "pairs", "length", "rows", "prefix_pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 2 <= self.scored <= self.length:
            raise ValueError(f"scored={self.scored} must be from 2 to length={self.length}")
        if not 0 < self.fallen < 1:
            raise ValueError(f"fallen={self.fallen} must be within (0, 1), for example 0.1")


class Emergence:
    """A probe for `train.loop.Hooks.callbacks`.

    Attributes:
        seconds: spent in probes so far, compilation included; the first probe's apart.
        first_seconds: of the first probe, which compiles.
        probes: how many there were.
    """

    def __init__(self, config: EmergenceConfig, tokens, *, steps: int | None = None):
        """Cuts the probes.

        Args:
            config: what is measured.
            tokens: int32 [n], held-out text without padding; inputs are spread over all of it.
            steps: of the whole run: its last step is probed, too. None: only every so many.

        Raises:
            ValueError: too little text.
        """
        tokens = np.asarray(tokens, np.int32)
        if tokens.ndim != 1 or len(tokens) < config.length:
            raise ValueError(f"probes need {config.length} tokens of held-out text, there are {tokens.size}: give more")
        starts = np.linspace(0, len(tokens) - config.length, 2 * config.pairs).astype(int)
        self.config, self.steps = config, steps
        self.inputs = np.stack([tokens[start : start + config.length] for start in starts])
        self.seconds = self.first_seconds = 0.0
        self.probes = 0

    def __call__(self, step: int, state) -> dict[str, float] | None:
        """The values for a step's line, or None where it is not due."""
        if step % self.config.every and step != self.steps:
            return None
        began = time.perf_counter()
        values = self.measure(state.model)
        if self.probes == 0:
            self.first_seconds = time.perf_counter() - began
        else:
            self.seconds += time.perf_counter() - began
        self.probes += 1
        return values

    def share(self, train_seconds: float) -> float:
        """The probes' share of the time of training, the first of each left out.

        Args:
            train_seconds: wall time of the training without probes.

        Returns:
            A number ≥ 0.
        """
        return self.seconds / train_seconds if train_seconds > 0 else 0.0

    def measure(self, model: PLDR) -> dict[str, float]:
        """*Measured*: all quantities of a model.

        Args:
            model: of learned operators.

        Returns:
            From "NAME.LAYER" or "NAME" to its value; {} for a model that is not finite any more.
        """
        config, settings = model.config, self.config
        out = deduce(model, jnp.asarray(self.inputs), ("A", "G_LM", "q"))
        A, G, q = (np.asarray(x, np.float64) for x in (out.A, out.G_LM, out.q))
        if not (np.isfinite(A).all() and np.isfinite(G).all()):
            return {}
        found = measure_collapse(A, G)
        residual = np.median(commutant.residual(G, layout=config.rope_layout), axis=(1, 2))
        jacobian = []
        for layer in range(config.num_layers):
            learner = row_map.metric_learner(model, layer)
            rows = row_map.normalised_rows(learner, q[layer, :2]).reshape(2, -1, config.head_width)
            picked = np.random.default_rng(settings.seed).permutation(rows.shape[1])[: settings.rows]
            largest = row_map.contraction(learner, rows[:, np.sort(picked)].reshape(-1, config.head_width)).largest
            jacobian.append(np.median(largest))
        layers = {
            "m_A": found.m_A,
            "m_G": found.m_G,
            "rank_one_ratio": found.rank_one_ratio,
            "cross_head_rms": found.cross_head_rms,
            "row_map_sigma_max": np.array(jacobian),
            "commutant_residual": residual,
        }
        pairs = prefix.suffix_pairs(
            config.vocab_size, pairs=settings.prefix_pairs, seed=settings.seed, pad_id=config.pad_id
        )
        moved = prefix.historical_rows(prefix.pldr_decoder(model), *pairs, shared=4)
        scored = block_against_sequential(
            lambda tokens: logits(model, tokens),
            self.inputs[:2, : settings.scored],
            pad_id=config.pad_id,
            batch=2 * (settings.scored - 1),
        )
        values = {f"{name}.{layer}": float(value) for name, row in layers.items() for layer, value in enumerate(row)}
        return values | {"historical_fraction": moved.fraction, "block_less_sequential": scored.gap}


def series(lines: Sequence[Mapping]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """*Measured*: the probes of a run, from its metrics.

    Args:
        lines: of metrics.jsonl.

    Returns:
        Steps [p], and from a quantity's name to its values [p, layers], one column for those of the whole model.

    Raises:
        ValueError: if no line has a probe.
    """
    probed = [line for line in lines if "row_map_sigma_max.0" in line]
    if not probed:
        raise ValueError("no line has a probe: train with the emergence callback")
    depth = sum(name.startswith("m_A.") for name in probed[0])
    values = {name: np.array([[line[f"{name}.{i}"] for i in range(depth)] for line in probed]) for name in BY_LAYER}
    values |= {name: np.array([[line[name]] for line in probed]) for name in WHOLE}
    return np.array([line["step"] for line in probed]), values


def falls(steps, values: Mapping[str, np.ndarray], *, below: float) -> dict[str, list[int | None]]:
    """*Measured*: the step from which each quantity stays below a fraction of its first size.

    Args:
        steps: [p].
        values: of `series`.
        below: the fraction.

    Returns:
        From a name to a step per layer; None where it never falls for good.
    """
    found = {}
    for name, rows in values.items():
        low = np.abs(rows) < below * np.abs(rows[:1])
        # From the end: the last probe that is not low ends all runs of low ones before it.
        since = [len(column) - np.argmin(column[::-1]) if not column.all() else 0 for column in low.T]
        found[name] = [int(steps[first]) if first < len(steps) else None for first in since]
    return found
