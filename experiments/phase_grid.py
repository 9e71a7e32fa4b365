"""A grid of small PLDR-LLMs over η_max, T_w and seeds, each trained and measured alike; kept on disk point by point."""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from experiments.phases import Interrupted, Probes, Study
from plga_jax.audit import order, prefix, spectra
from plga_jax.audit.collapse import COLLAPSED_BELOW, measure_collapse
from plga_jax.audit.quantities import Quantity, load, store
from plga_jax.audit.report import write_json
from plga_jax.audit.subject import deduce
from plga_jax.models.pldr import PLDR
from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.data import Corpus, TokenDataset, make_loader
from plga_jax.train.ensemble import Ensemble, make_ensemble_steps, member_batches
from plga_jax.train.objectives import next_token_objective
from plga_jax.train.signals import stop_on_signal
from plga_jax.train.step import TrainState, evaluate, make_eval_step

LABELS = ("collapsed", "mixed", "uncollapsed", "diverged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Criterion:
    """What makes a run count as collapsed; fixed before any run, and part of every result.

    Attributes:
        below: a layer has collapsed when m(A) of its median pair of probes is below this. A run is collapsed when all
            of its layers have, uncollapsed when none has, mixed otherwise, and diverged without a finite loss.
    """

    below: float = COLLAPSED_BELOW

    def label(self, m_A: Sequence[float], loss: float) -> str:
        """The phase of one run.

        Args:
            m_A: of each layer.
            loss: held-out loss after the last step.

        Returns:
            One of `LABELS`.
        """
        if not math.isfinite(loss) or not np.isfinite(m_A).all():
            return "diverged"
        fallen = np.asarray(m_A) < self.below
        return "collapsed" if fallen.all() else "mixed" if fallen.any() else "uncollapsed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """What is run.

    Attributes:
        study: sizes, recipe, data and probes of every run; its two learning rates are not used.
        rates: η_max of each column.
        warmups: T_w of each row, updates.
        seeds: of weights and of the order of data, trained side by side.
        criterion: of the phases.
        prefix_pairs: pairs of sequences in which historical rows are looked for.
        steps_per_call: updates between two looks at the progress bar and at signals.
    """

    study: Study
    rates: tuple[float, ...] = (1e-3, 5e-3, 1e-2, 2e-2)
    warmups: tuple[int, ...] = (20, 60, 150)
    seeds: tuple[int, ...] = (0, 1, 2)
    criterion: Criterion = Criterion()
    prefix_pairs: int = 8
    steps_per_call: int = 10

    def __post_init__(self):
        steps = self.study.run.train.steps
        for name, allowed in (
            ("rates", lambda x: x > 0),
            ("warmups", lambda x: 0 <= x < steps),
            ("seeds", lambda _: True),
        ):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values) or not all(map(allowed, values)):
                raise ValueError(
                    f"{name}={list(values)} must be different values: rates above 0, warm-ups from 0 to below the "
                    f"{steps} steps, any seeds"
                )
        if steps % self.steps_per_call:
            raise ValueError(f"{steps} steps must be whole calls of {self.steps_per_call}: choose another number")

    @property
    def points(self) -> list[tuple[float, int]]:
        """(η_max, T_w), the largest rates last."""
        return [(rate, warmup) for rate in self.rates for warmup in self.warmups]


def setting(grid: Grid, corpus: Corpus, tokens: np.ndarray) -> dict:
    """What every number depends on beside its point: runs of another setting are not mixed with these.

    Args:
        grid: what is run; its rates and warm-ups may grow later.
        corpus: the text.
        tokens: of the training part.

    Returns:
        JSON values.
    """
    fields = dataclasses.asdict(grid)
    for name in ("rates", "warmups"):
        del fields[name]
    fields |= {"corpus": corpus.name, "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest()}
    return json.loads(json.dumps(fields, default=str))


def digest(setting: dict) -> str:
    """SHA-256 of a setting, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()


def run_grid(
    grid: Grid, corpus: Corpus, tokenizer: ByteTokenizer, out: str | os.PathLike, *, progress: bool = True
) -> list[dict]:
    """Trains and measures every point that is not on disk yet.

    Args:
        grid: what is run.
        corpus: the text.
        tokenizer: its tokenizer.
        out: folder; each point becomes `points/NAME.npz` in it, all instances, and then `points/NAME.json`.
        progress: whether to show a bar.

    Returns:
        The points in the grid's order, as they are on disk.

    Raises:
        Interrupted: a signal came; finished points are kept.
        ValueError: `out` holds points of another setting; too little text.
    """
    run = grid.study.run
    train, held_out = (
        TokenDataset.from_documents(part.documents, tokenizer, context=run.data.context, mode="pack", progress=False)
        for part in corpus.split(run.data.validation)
    )
    folder = pathlib.Path(out) / "points"
    folder.mkdir(parents=True, exist_ok=True)
    here = setting(grid, corpus, train.tokens)
    kept = {point: _read(folder / _name(*point), here) for point in grid.points}
    probes = Probes.cut(grid.study, corpus, tokenizer)
    steps = make_ensemble_steps(next_token_objective(run.dag, pad_id=run.model.pad_id), run.optim)
    measure = functools.partial(
        _measure, grid, held_out, probes, make_eval_step(next_token_objective(pad_id=run.model.pad_id))
    )
    left = [point for point in grid.points if kept[point] is None]
    # Kept steps are the bar's start, not progress: they would make the time to go look short.
    counted = {"total": run.train.steps * len(kept), "initial": run.train.steps * (len(kept) - len(left))}
    with tqdm(**counted, unit="step", disable=not progress, ncols=100) as bar, stop_on_signal() as stop:
        for point in left:
            rate, warmup = point
            bar.set_description(f"η {rate:g}, T_w {warmup}")
            members = Ensemble.init(_maker(run.model), run.optim, grid.seeds)
            loaders = [make_loader(train, run.train.batch_size, seed=seed) for seed in grid.seeds]
            state, losses = members.state, []
            for _ in range(run.train.steps // grid.steps_per_call):
                batches = member_batches(loaders, grid.steps_per_call)
                state, metrics = steps(state, batches, jnp.float32(rate), jnp.float32(warmup))
                losses.append(np.asarray(metrics["nll"]))
                bar.update(grid.steps_per_call)
                if stop.requested:
                    raise Interrupted(f"{stop.by} at η {rate:g}, T_w {warmup}: the same command goes on at this point")
            members = dataclasses.replace(members, state=state)
            train_loss = np.concatenate(losses).T.astype(np.float64)
            told, instances = zip(*(measure(members.member(i)) for i in range(members.size)))
            path = folder / _name(*point)
            store(path.with_suffix(".npz"), digest(here), _quantities(train_loss, instances))
            kept[point] = _writable(
                {
                    "learning_rate": rate,
                    "warmup": warmup,
                    "setting": here,
                    "train_loss": train_loss.tolist(),
                    "members": list(told),
                }
            )
            # Last: a point that has its JSON is finished.
            write_json(path, kept[point])
    return [kept[point] for point in grid.points]


def _maker(config):
    return lambda seed: PLDR(config, rngs=nnx.Rngs(seed))


def _measure(
    grid: Grid, held_out: TokenDataset, probes: Probes, eval_step, state: TrainState
) -> tuple[dict, dict[str, np.ndarray]]:
    """Everything that is told of one run, and the instances behind it; of a diverged run there are none."""
    run, model = grid.study.run, state.model
    rows = min(run.train.batch_size, len(held_out))
    batches = (
        batch
        for batch, _ in zip(make_loader(held_out, rows, shuffle=False, repeat=False), range(run.train.eval_batches))
    )
    loss = evaluate(eval_step, state, batches)["val_loss"]
    out = deduce(model, jnp.asarray(probes.inputs), ("A", "G_LM"))
    A, G = np.asarray(out.A), np.asarray(out.G_LM)
    if not (math.isfinite(loss) and np.isfinite(A).all() and np.isfinite(G).all()):
        return {"val_loss": loss, "label": "diverged"}, {}
    collapse = measure_collapse(A, G)
    pairs = prefix.suffix_pairs(
        run.model.vocab_size, pairs=grid.prefix_pairs, length=12, shared=4, seed=0, pad_id=run.model.pad_id
    )
    moved = prefix.historical_rows(prefix.pldr_decoder(model), *pairs, shared=4)
    told = {
        "val_loss": loss,
        "label": grid.criterion.label(collapse.m_A, loss),
        "historical_fraction": moved.fraction,
        "historical_largest": float(moved.largest.max()),
        **collapse.as_dict(),
    }
    A = A.astype(np.float64)
    instances = {
        "m_A": order.relative_rms(A[:, 0::2], A[:, 1::2], axis=(2, 3, 4)),
        "rank_one_ratio": spectra.rank_one_ratio(A),
        "historical_changed": moved.changed,
        "historical_largest": moved.largest,
    }
    return told, instances


_INSTANCES = {
    "m_A": (order.relative_rms, ("run", "layer", "pair")),
    "rank_one_ratio": (spectra.rank_one_ratio, ("run", "layer", "input", "head")),
    "historical_changed": (prefix.historical_rows, ("run", "pair", "row")),
    "historical_largest": (prefix.historical_rows, ("run", "pair", "row")),
}
"""By name: what computed it, and the axes."""


def _quantities(train_loss: np.ndarray, instances: Sequence[dict[str, np.ndarray]]) -> list[Quantity]:
    """All instances of a point, diverged runs left out where they have none."""
    sound = [index for index, found in enumerate(instances) if found]
    found = [
        Quantity(name="train_loss", label="measured", values=train_loss, axes=("seed", "step")),
        Quantity(name="runs", label="measured", values=np.array(sound, np.int64), axes=("run",), note="of the seeds"),
    ]
    for name, (function, axes) in _INSTANCES.items():
        if sound:
            found.append(Quantity.of(name, function, np.stack([instances[index][name] for index in sound]), axes))
        else:
            found.append(Quantity.omitted(name, function, "every run diverged"))
    return found


def _name(rate: float, warmup: int) -> str:
    return f"eta_{rate:g}_warmup_{warmup}.json"


def _read(path: pathlib.Path, here: dict) -> dict | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    theirs = found.get("setting", {})
    if theirs != here:
        differ = sorted(name for name in {*theirs, *here} if theirs.get(name) != here.get(name))
        raise ValueError(f"{path} was made with another {', '.join(differ)}: choose another --out, or remove it")
    return None if load(path.with_suffix(".npz"), digest(here)) is None else found


def _writable(value):
    """JSON has no NaN: a loss that is none becomes null."""
    if isinstance(value, dict):
        return {name: _writable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_writable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
