"""How long a run is and how often it does everything else, and whether two runs are the same."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Lengths and intervals, in steps; an interval of 0 is never.

    Attributes:
        steps: number of updates in all.
        batch_size: rows of a batch, over all devices and microbatches.
        accumulation: microbatches a batch is cut into.
        log_every: between two writes of the metrics (every step gets its line all the same).
        eval_every: between validations; with any at all there is one at the end too.
        eval_batches: batches of a validation.
        save_every: between checkpoints; there is always one at the end.
        sample_every: between text samples; with any at all there are some at the end too.
        keep: latest checkpoints kept, besides the best one.
        seed: of the initial weights, the order of the data and the keys of the steps.
    """

    steps: int
    batch_size: int
    accumulation: int = 1
    log_every: int = 10
    eval_every: int = 0
    eval_batches: int = 8
    save_every: int = 0
    sample_every: int = 0
    keep: int = 3
    seed: int = 0

    def __post_init__(self):
        positive = ("steps", "batch_size", "accumulation", "log_every", "eval_batches", "keep")
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), int(field.name in positive)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{field.name}={value!r} must be an integer of at least {least}")
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of accumulation="
                f"{self.accumulation}: every microbatch needs the same number of rows"
            )

    def to_json(self) -> str:
        """The config as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The config that `to_json` wrote."""
        return cls(**json.loads(text))


_INTERVALS = ("log_every", "eval_every", "eval_batches", "save_every", "sample_every", "keep")
MAY_CHANGE = (
    *(f"train.{name}" for name in ("steps", *_INTERVALS)),
    *("data.corpus", "data.prompt", "data.sample", "tokenizer.path"),
)
"""Keys of a run's config that may differ when it is resumed: no loss depends on them.

Text and tokenizer may have moved; "data.crc32" and "tokenizer.fingerprint" tell whether they changed.
"""


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts as ("optim.eta_max", value) pairs."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """What keeps a run of config `given` from going on with one of config `saved`.

    Args:
        saved: nested dicts of JSON values.
        given: likewise.

    Returns:
        "optim.eta_max was 0.01, is 0.001" for each leaf that differs, `MAY_CHANGE` left out.
    """
    old, new = dict(flatten(json.loads(json.dumps(saved)))), dict(flatten(given))
    new = json.loads(json.dumps(new))  # Tuples become lists on both sides.
    return [
        f"{key} was {old.get(key, 'absent')!r}, is {new.get(key, 'absent')!r}"
        for key in dict.fromkeys((*old, *new))
        if key not in MAY_CHANGE and old.get(key, ...) != new.get(key, ...)
    ]
