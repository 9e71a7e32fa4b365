"""Runs of PLDR-LLM by name: the sizes of the model, the recipe and the data that go together."""

import dataclasses
from collections.abc import Iterable

from experiments.configs.overrides import parse_overrides
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.train.config import TrainConfig
from plga_jax.train.losses import DagCoefficients
from plga_jax.train.optim import OptimConfig
from plga_jax.train.pldr import DataConfig, PLDRRun

_RUNS = {
    # A laptop's: minutes on two cores with the byte tokenizer.
    "tiny": {
        "optim": {"learning_rate": 1e-3, "warmup_steps": 100},
        "train": {"steps": 600, "batch_size": 16, "eval_every": 100, "save_every": 200},
        "data": {"context": 128},
    },
    "small": {
        "optim": {"learning_rate": 1e-3, "warmup_steps": 500},
        "train": {"steps": 5_000, "batch_size": 32, "eval_every": 500, "save_every": 500},
        "data": {"context": 256},
    },
    "medium": {
        "optim": {"learning_rate": 1e-3, "warmup_steps": 1_000},
        "train": {"steps": 20_000, "batch_size": 32, "eval_every": 1_000, "save_every": 1_000},
        "data": {"context": 512},
    },
    # PLDR-LLM-SOC-110M-2: η_max 1e-3, 1,000 steps of warm-up, 32 rows of 1,024 tokens, 8.2B tokens.
    "110m": {
        "optim": {"learning_rate": 1e-3, "warmup_steps": 1_000},
        "train": {
            "steps": 250_000,
            "batch_size": 32,
            "log_every": 100,
            "eval_every": 12_000,
            "eval_batches": 2_000,
            "save_every": 2_000,
        },
        "data": {"context": 1_024},
    },
}
NAMES = tuple(_RUNS)
_SECTIONS = {
    "model": PLDRConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
    "data": DataConfig,
    "dag": DagCoefficients,
}


def make_run(name: str, overrides: Iterable[str] = (), *, vocab_size: int) -> PLDRRun:
    """A run by name, changed as asked.

    Args:
        name: one of `NAMES`.
        overrides: "section.field=value", see `parse_overrides`. What follows from a changed value
            follows: widths from head sizes, the schedule's length and the last sample from steps.
        vocab_size: of the tokenizer.

    Returns:
        The configuration of the run.

    Raises:
        ValueError: an unknown name, key or value.
    """
    if name not in _RUNS:
        raise ValueError(f"there is no run {name!r}; choose {', '.join(NAMES)}")
    changes = parse_overrides(overrides, _SECTIONS)
    parts = {key: _RUNS[name].get(key, {}) | changes[key] for key in _SECTIONS}
    steps = parts["train"]["steps"]
    parts["train"] = {"sample_every": steps} | parts["train"]
    # A short trial of a long run keeps the shape of its schedule.
    warmup = min(parts["optim"]["warmup_steps"], max(steps // 2, 0))
    if "warmup_steps" not in changes["optim"]:
        parts["optim"] = parts["optim"] | {"warmup_steps": warmup}
    return PLDRRun(
        model=PLDRConfig.preset(name, **{"vocab_size": vocab_size} | changes["model"]),
        optim=OptimConfig(**{"total_steps": steps} | parts["optim"]),
        train=TrainConfig(**parts["train"]),
        data=DataConfig(**parts["data"]),
        dag=DagCoefficients(**parts["dag"]),
    )


def describe(run: PLDRRun) -> str:
    """One line for people."""
    fields = dataclasses.asdict(run)
    model, train = fields["model"], fields["train"]
    return (
        f"L={model['num_layers']} N={model['num_heads']} H={model['head_width']} "
        f"V={model['vocab_size']}, {train['steps']} steps of {train['batch_size']} × "
        f"{fields['data']['context']} tokens, η_max {fields['optim']['learning_rate']:g}"
    )
