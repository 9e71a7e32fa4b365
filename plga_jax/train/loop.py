"""The training loop: steps, validation, samples, probes, checkpoints, and a clean end to every run.

It knows no model: a loss function, an optimizer and an iterator of batches come from outside.
A run that is stopped or killed and started again goes on from its last checkpoint and writes, bit
for bit, the losses it would have written.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from absl import logging
from jax.sharding import Mesh
from tqdm import tqdm

from plga_jax.parallel.sharding import (
    DATA_PARALLEL,
    ShardingRules,
    batch_sharding,
    batch_ways,
    param_shardings,
    replicated,
)
from plga_jax.train.checkpoint import Checkpoints
from plga_jax.train.config import TrainConfig, differences
from plga_jax.train.journal import Journal, TrainingDiverged
from plga_jax.train.optim import OptimConfig, rate_factor, scale_rate, schedule, skipped
from plga_jax.train.records import Records
from plga_jax.train.signals import stop_on_signal
from plga_jax.train.step import (
    Batch,
    LossFn,
    TrainState,
    evaluate,
    make_eval_step,
    make_train_step,
)

__all__ = ["FitResult", "Hooks", "Steering", "TrainConfig", "TrainState", "TrainingDiverged", "evaluate", "fit"]

_MARKED = 100
"""Marked checkpoints that are kept."""

Callback = Callable[[int, TrainState], Mapping[str, float] | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steering:
    """What is done after a step because of what its probes found.

    Attributes:
        values: for the step's line.
        note: told to people; with `stop`, why the run ended.
        stop: save and end the run here.
        mark: keep a checkpoint of this step in marked/, where later ones do not displace it.
        rate_factor: multiplies the learning rate from now on; needs an optimizer with `adjustable_rate`.
    """

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str | None = None
    stop: bool = False
    mark: bool = False
    rate_factor: float = 1.0


def optimizer_scalars(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """The skip counters of `make_optimizer`'s state, and the factor of its rate if that may change, as metrics."""
    total, consecutive = skipped(opt_state)
    found = {"total_skipped": total, "consecutive_skipped": consecutive}
    factor = rate_factor(opt_state)
    return found if factor is None else found | {"rate_factor": factor}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the loop calls besides the step; everything is optional.

    Attributes:
        validation: makes a fresh iterable over the validation batches, the same ones every time.
        sample: text samples of a state.
        callbacks: probes `(step, state) -> values for that step's line, or None`, called before
            the first step and after every step; the state is valid only during the call.
        steer: decides after each step what follows from its probes, `(step, values) -> Steering` or None. All it knows
            must follow from the values it was given: a resumed run gives it the lines of the steps before again.
        schedule: learning rate of the update that follows a number of updates, for the log.
        monitor: scalars of the optimizer state to log, computed inside the step.
        max_consecutive_skips: bound on the monitor's "consecutive_skipped"; None says that the
            optimizer does not skip, and the first step that is not finite ends the run.
    """

    validation: Callable[[], Iterable[Batch]] | None = None
    sample: Callable[[TrainState], Sequence[str]] | None = None
    callbacks: Sequence[Callback] = ()
    steer: Callable[[int, Mapping[str, Any]], Steering | None] | None = None
    schedule: Callable[[Any], Any] | None = None
    monitor: Callable[[Any], Mapping[str, Any]] | None = None
    max_consecutive_skips: int | None = None

    @classmethod
    def of(cls, config: OptimConfig, **others) -> "Hooks":
        """The hooks that go with `make_optimizer(config)`: rate, skip counters and their limit.

        Args:
            config: of the optimizer.
            **others: further fields.

        Returns:
            The hooks.
        """
        return cls(
            schedule=schedule(config),
            monitor=optimizer_scalars,
            max_consecutive_skips=config.max_consecutive_skips,
            **others,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
    """How a run ended.

    Attributes:
        state: after the last step.
        step: the number of updates made.
        resumed_from: the step it went on from; None for a fresh run.
        interrupted: the signal, or the note of the steering, that stopped it before its last step; None for none.
        metrics: the newest value of everything that was logged.
        first_step_seconds: wall time of the first step, compilation included; None if none was made.
        seconds: wall time in all.
    """

    state: TrainState
    step: int
    resumed_from: int | None
    interrupted: str | None
    metrics: dict[str, float]
    first_step_seconds: float | None
    seconds: float


def fit(
    state: TrainState,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    batches: Iterator[Batch],
    config: TrainConfig,
    *,
    hooks: Hooks | None = None,
    workdir: str | os.PathLike | None = None,
    run_config: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    rules: ShardingRules = DATA_PARALLEL,
    allow_fallback: bool = False,
    progress: bool = True,
) -> FitResult:
    """Trains to `config.steps`, going on from the last checkpoint in `workdir` when there is one.

    `metrics.jsonl` gets one line per step ("step" is the number of updates made), `samples.jsonl`
    the text samples. The first SIGTERM or SIGINT finishes the step, saves and returns. One process.

    Args:
        state: before the first step, from `TrainState.init` with the same mesh and rules; consumed.
        loss_fn: the objective.
        tx: the optimizer that made `state`.
        batches: dicts of arrays; with `get_state` and `set_state` it is resumed too.
        config: lengths and intervals.
        hooks: validation, samples, probes, logs.
        workdir: for checkpoints/ and the files above; None writes nothing.
        run_config: JSON saved with every checkpoint, e.g. "kind", "model", "optim"; "train" is
            added. A resumed run must have the same, except for `config.MAY_CHANGE`.
        mesh: devices; None is the default device.
        rules: how the mesh splits state and batch.
        allow_fallback: pass over a damaged checkpoint to the one before, loudly.
        progress: show a progress bar.

    Returns:
        How it ended.

    Raises:
        TrainingDiverged: see `Hooks.max_consecutive_skips`; nothing is saved then.
        ValueError: a config that differs from that of the run in `workdir`; a batch size that the
            devices cannot share; data that end before the last step (after saving).
    """
    began = time.perf_counter()
    hooks = hooks or Hooks()
    run_config = dict(run_config or {}) | {"train": dataclasses.asdict(config)}
    shardings, place = _placement(state, config, mesh, rules)
    step_fn = make_train_step(
        loss_fn,
        tx,
        accumulation=config.accumulation,
        monitor=hooks.monitor,
        shardings=shardings,
    )
    eval_step = make_eval_step(loss_fn)
    root = None if workdir is None else pathlib.Path(workdir)
    records = root and Records(root / "metrics.jsonl")
    texts = root and Records(root / "samples.jsonl")
    checkpoints = root and Checkpoints(root / "checkpoints", keep=config.keep)

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signal())
        resumed_from = None
        if checkpoints:
            stack.enter_context(checkpoints)
            if checkpoints.latest_step is not None:
                state, resumed_from = _resume(state, batches, checkpoints, run_config, allow_fallback)
            records.rewind(-1 if resumed_from is None else resumed_from)
            texts.rewind(-1 if resumed_from is None else resumed_from)
        journal = Journal(
            records,
            schedule=hooks.schedule,
            max_consecutive_skips=hooks.max_consecutive_skips,
            last_saved=lambda: checkpoints.latest_step if checkpoints else None,
        )
        step = int(state.step)
        bar = stack.enter_context(tqdm(total=config.steps, initial=step, unit="step", disable=not progress))

        def say(text: str) -> None:
            if progress:
                bar.write(text)
                sys.stdout.flush()  # A log file should not lag behind.

        if resumed_from is not None:
            say(f"going on from step {step}")
            lines = list(records)
            for line in lines if hooks.steer else ():
                hooks.steer(line["step"], line)  # It has been done; only remembered here.
            line = lines[-1] if lines else {}
            journal.last |= {name: value for name, value in line.items() if value is not None}

        def probe() -> dict[str, float]:
            values = {}
            for callback in hooks.callbacks:
                values |= callback(step, state) or {}
            return values

        def steer(values: dict[str, float]) -> Steering:
            found = (hooks.steer(step, values) if hooks.steer else None) or Steering()
            values |= found.values
            if found.note:
                say(found.note)
            return found

        def mark() -> None:
            journal.flush()
            if root:
                with Checkpoints(root / "marked", keep=_MARKED) as marked:
                    marked.save(state, config=run_config)

        def validate() -> dict[str, float]:
            placed = (place(batch) for batch in hooks.validation())
            return evaluate(eval_step, state, placed)

        def sample() -> None:
            for text in hooks.sample(state):
                say(f"[step {step}] {text}")
                if texts:
                    texts.append({"step": step, "text": text})

        def save() -> None:
            journal.flush()  # Raises when training diverged: nothing bad is ever saved.
            if checkpoints and checkpoints.latest_step != step:
                data = batches.get_state() if hasattr(batches, "get_state") else None
                loss = journal.last.get("val_loss", math.nan) if due["eval"] else math.nan
                ranked = {"val_loss": loss} if math.isfinite(loss) else None
                checkpoints.save(state, config=run_config, data=data, metrics=ranked)

        due = _due(step, config, hooks)
        if step == 0 and resumed_from is None:
            extra = validate() if due["eval"] else {}
            extra |= probe()
            steer(extra)
            journal.add(0, {}, extra)
            journal.flush()
        metrics, first_step_seconds, last, ended = {}, None, step >= config.steps, None
        while not last:
            batch = next(batches, None)
            if batch is None:
                save()
                raise ValueError(
                    f"the data ended after {step} of {config.steps} steps (saved): let the loader "
                    "repeat, or ask for fewer steps"
                )
            before, started = metrics, time.perf_counter()
            state, metrics = step_fn(state, place(batch))
            step += 1
            # Waiting for the step before keeps the device busy with this one, and the queue short.
            jax.block_until_ready(before)
            last = step >= config.steps or stop.requested
            due = _due(step, config, hooks)
            extra = probe()
            steering = steer(extra)
            if steering.rate_factor != 1.0:
                state = dataclasses.replace(state, opt_state=scale_rate(state.opt_state, steering.rate_factor))
            ended = steering.note if steering.stop else None
            last |= steering.stop
            journal.add(step, metrics, extra)
            if first_step_seconds is None:
                jax.block_until_ready(metrics)
                first_step_seconds = extra["first_step_s"] = time.perf_counter() - started
                say(f"first step, compilation included: {first_step_seconds:.1f} s")
                journal.restart()
            bar.update()
            if due["eval"]:
                with journal.paused():
                    extra |= validate()
            if due["log"] or last:
                journal.flush()
                bar.set_postfix(_shown(journal.last), refresh=False)
            if due["sample"]:
                with journal.paused():
                    sample()
            if steering.mark:
                with journal.paused():
                    mark()
            if due["save"] or last:
                with journal.paused():
                    save()
        if stop.requested and step < config.steps:
            say(f"{stop.by}: stopped after step {step}; the same command goes on from there")
    return FitResult(
        state=state,
        step=step,
        resumed_from=resumed_from,
        interrupted=(stop.by or ended) if step < config.steps else None,
        metrics=dict(journal.last),
        first_step_seconds=first_step_seconds,
        seconds=time.perf_counter() - began,
    )


def _due(step: int, config: TrainConfig, hooks: Hooks) -> dict[str, bool]:
    """What else happens after a step."""

    def every(interval, *, wanted=True, at_end=True):
        end = at_end and step == config.steps
        return bool(wanted and interval and (step % interval == 0 or end))

    return {
        "log": every(config.log_every),
        "eval": every(config.eval_every, wanted=hooks.validation),
        "sample": every(config.sample_every, wanted=hooks.sample and step),
        "save": every(config.save_every),
    }


def _shown(metrics: Mapping[str, float]) -> dict[str, str]:
    """The few numbers beside the progress bar."""
    formats = {
        "loss": ".4f",
        "lr": ".2e",
        "val_loss": ".4f",
        "tokens_per_s": ",.0f",
        "total_skipped": "d",
    }
    shown = {name: f"{metrics[name]:{form}}" for name, form in formats.items() if name in metrics}
    if shown.get("total_skipped") == "0":
        del shown["total_skipped"]
    return shown


def _placement(
    state: TrainState, config: TrainConfig, mesh: Mesh | None, rules: ShardingRules
) -> tuple[TrainState | None, Callable[[Batch], Batch]]:
    """The shardings of the state, and the function that puts a batch on the devices."""
    if mesh is None:
        return None, jax.device_put
    ways = batch_ways(mesh, rules)
    if config.batch_size % (config.accumulation * ways):
        raise ValueError(
            f"batch_size={config.batch_size} in {config.accumulation} microbatch(es) cannot be "
            f"shared by {ways} devices: make it a multiple of {config.accumulation * ways}"
        )
    for sentence in replicated(state.params, mesh, rules):
        logging.info("%s", sentence)
    sharding = batch_sharding(mesh, rules)
    return param_shardings(state, mesh, rules), lambda batch: jax.device_put(batch, sharding)


def _resume(
    state: TrainState,
    batches: Iterator[Batch],
    checkpoints: Checkpoints,
    run_config: Mapping[str, Any],
    allow_fallback: bool,
) -> tuple[TrainState, int]:
    """The newest checkpoint, if this run may go on from it."""
    saved = checkpoints.config()
    if changed := differences(saved, run_config):
        more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ValueError(
            f"{checkpoints.directory.parent} holds a run with another configuration: "
            f"{'; '.join(changed[:3])}{more}. Use another workdir, or the configuration it had"
        )
    restored = checkpoints.restore(state, allow_fallback=allow_fallback)
    if restored.data is not None:
        batches.set_state(restored.data)
    return restored.state, restored.step
