"""Checkpoints of a run: saved atomically, verified before they are read, never overwritten.

    <directory>/<step>/model     parameters and other variables: all that inference needs
    <directory>/<step>/train     optimizer state, step, key
    <directory>/<step>/_CHECKPOINT_METADATA    JSON, with the configs and the data iterator's state

Orbax writes a step under a temporary name and renames it.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging
from flax import nnx
from orbax.checkpoint import v1 as ocp

from plga_jax.models.registry import MODELS
from plga_jax.train.checkpoint_files import (
    BrokenCheckpoint,
    is_whole,
    load_parts,
    missing,
    read_config,
    saved_steps,
    set_aside,
    verify,
    write_checksums,
)
from plga_jax.train.step import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What came back from disk.

    state: on the devices and with the shardings of the state given to `restore`.
    step: it was saved after.
    config: the JSON that was saved with it.
    data: state of the data iterator, for its `set_state`; None if none was saved.
    refused: steps that were tried first and are broken, newest first.
    """

    state: TrainState
    step: int
    config: dict[str, Any]
    data: Any
    refused: tuple[int, ...] = ()


def _parts(state: TrainState) -> dict[str, Any]:
    return {
        "model": {"params": state.params, "rest": state.rest},
        "train": {"opt_state": state.opt_state, "step": state.step, "key": state.key},
    }


class Checkpoints:
    """The checkpoints of one run; a context manager that closes itself."""

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int = 3,
        best: int = 1,
        best_metric: str = "val_loss",
        permanent_every: int | None = None,
    ):
        """Opens a directory, which is made when the first step is saved.

        Args:
            directory: of the run's checkpoints.
            keep: how many of the latest steps to keep.
            best: how many of the best steps to keep besides.
            best_metric: name of the metric, lower is better, that tells the best.
            permanent_every: steps that are multiples of it are kept for ever; None: none.

        Raises:
            ValueError: keep below 1, best below 0 or permanent_every below 1.
        """
        if keep < 1 or best < 0 or (permanent_every is not None and permanent_every < 1):
            raise ValueError(
                f"keep={keep}, best={best}, permanent_every={permanent_every}: keep at least one "
                "step, best is 0 or more, permanent_every is None or 1 or more"
            )
        self.directory = pathlib.Path(directory).absolute()
        policies = ocp.training.preservation_policies
        kept = [policies.LatestN(keep)]
        if best:
            kept.append(
                policies.BestN(
                    n=best,
                    get_metric_fn=lambda metrics: metrics[best_metric],
                    reverse=True,
                    keep_checkpoints_without_metrics=False,
                )
            )
        if permanent_every is not None:
            kept.append(policies.EveryNSteps(permanent_every))
        self._policy = policies.AnyPreservationPolicy(kept)
        self._best_metric = best_metric
        self._broken: set[int] = set()
        self._checkpointer: ocp.training.Checkpointer | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Releases what Orbax holds."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    @property
    def steps(self) -> tuple[int, ...]:
        """The saved steps, in order. A step that was being written when the run died is not one."""
        return saved_steps(self.directory)

    @property
    def latest_step(self) -> int | None:
        """The newest saved step; None when there is none."""
        return max(self.steps, default=None)

    def config(self) -> dict[str, Any]:
        """The JSON saved with the newest step whose metadata can be read.

        Raises:
            FileNotFoundError: nothing was saved.
            ValueError: no step has metadata that can be read.
        """
        if not self.steps:
            raise FileNotFoundError(missing(self.directory, None))
        for step in reversed(self.steps):
            try:
                return read_config(self.directory / str(step))
            except BrokenCheckpoint as error:
                newest_failure = error
        raise newest_failure

    def save(
        self,
        state: TrainState,
        *,
        config: Mapping[str, Any],
        data: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> int:
        """Saves a state under its own step, and waits until it is on disk.

        Args:
            state: to save; its step names the checkpoint.
            config: JSON to save beside it; `load_model` needs "model" in it.
            data: state of the data iterator, JSON.
            metrics: of the model at this step, for the choice of the best.

        Returns:
            The step.

        Raises:
            FileExistsError: a sound checkpoint of this step is there already.
        """
        step = int(state.step)
        self._set_broken_aside()
        # Only the metric that ranks: Orbax reads every metrics file when it opens a directory.
        ranked = {k: float(v) for k, v in (metrics or {}).items() if k == self._best_metric}
        self._open().save_checkpointables(
            step,
            _parts(state),
            force=True,
            metrics=ranked or None,
            custom_metadata={"config": dict(config), "data": data},
        )
        if jax.process_index() == 0:
            write_checksums(self.directory / str(step))
        return step

    def restore(
        self,
        like: TrainState,
        step: int | None = None,
        *,
        allow_fallback: bool = False,
    ) -> Restored:
        """Reads a step onto the devices of a given state.

        Args:
            like: a state with the wanted structure, shapes and placement: arrays, or
                `ShapeDtypeStruct`s with shardings. The mesh may differ from the one that saved.
            step: which; None is the newest.
            allow_fallback: go on to the step before when one is broken, and say so in the log.

        Returns:
            The state and what was saved with it.

        Raises:
            FileNotFoundError: no such step.
            ValueError: the step is broken, or its shapes are not those of `like`.
        """
        steps = [s for s in self.steps if step is None or s <= step]
        if not steps or (step is not None and steps[-1] != step):
            raise FileNotFoundError(missing(self.directory, step))
        refused = []
        for candidate in reversed(steps):
            try:
                verify(self.directory, candidate)
                return dataclasses.replace(self._read(like, candidate), refused=tuple(refused))
            except BrokenCheckpoint as error:
                self._broken.add(candidate)
                if not allow_fallback or candidate == steps[0]:
                    raise
                refused.append(candidate)
                logging.error("%s. Falling back to the step before.", error)
        raise AssertionError("unreachable: the loop returns or raises")

    def _read(self, like: TrainState, step: int) -> Restored:
        path = self.directory / str(step)
        wanted = _parts(like)
        metadata, parts = load_parts(
            path,
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted),
        )
        state = dataclasses.replace(like, **parts["model"], **parts["train"])
        return Restored(state=state, step=step, config=metadata.get("config", {}), data=metadata.get("data"))

    def _open(self) -> ocp.training.Checkpointer:
        if self._checkpointer is None:
            try:
                self._checkpointer = self._new()
            except Exception:  # One damaged metrics file keeps Orbax from opening the directory.
                self._broken.update(step for step in self.steps if not is_whole(self.directory, step))
                if not self._broken:
                    raise
                self._set_broken_aside()
                self._checkpointer = self._new()
        return self._checkpointer

    def _new(self) -> ocp.training.Checkpointer:
        return ocp.training.Checkpointer(self.directory, preservation_policy=self._policy)

    def _set_broken_aside(self) -> None:
        """Renames broken steps, so that they neither block a step nor count as one that is kept."""
        for step in sorted(self._broken):
            set_aside(self.directory, step)
        if self._broken and self._checkpointer is not None:
            self._checkpointer.reload()
        self._broken.clear()


def load_model(
    directory: str | os.PathLike,
    step: int | None = None,
    *,
    registry: Mapping[str, tuple[Any, Callable[..., nnx.Module]]] = MODELS,
) -> tuple[nnx.Module, dict[str, Any]]:
    """Rebuilds a trained model from its checkpoint alone, without its optimizer.

    Args:
        directory: of the checkpoints, or a run's directory that has them in "checkpoints".
        step: which; None is the newest.
        registry: by the name in the saved config's "kind": the config class (with `from_json`) and
            the model class, called as `model(config, rngs=)`.

    Returns:
        The model, on the default device, and the JSON that was saved with it.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: it is damaged, of an unknown kind, or its shapes are not those of its config.
    """
    directory = pathlib.Path(directory).absolute()
    if not saved_steps(directory) and (directory / "checkpoints").is_dir():
        directory /= "checkpoints"
    steps = saved_steps(directory)
    if not steps or (step is not None and step not in steps):
        raise FileNotFoundError(missing(directory, step))
    step = steps[-1] if step is None else step
    verify(directory, step)
    path = directory / str(step)
    config = read_config(path)
    kind = config.get("kind")
    if kind not in registry:
        raise ValueError(f"{path} holds a model of kind {kind!r}, not of {sorted(registry)}")
    config_class, model_class = registry[kind]
    model_config = config_class.from_json(json.dumps(config["model"]))
    abstract = nnx.eval_shape(lambda: model_class(model_config, rngs=nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(abstract, nnx.Param, ...)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
        {"model": {"params": params, "rest": rest}},
    )
    _, parts = load_parts(path, wanted)
    return nnx.merge(graphdef, parts["model"]["params"], parts["model"]["rest"]), config
