"""What a run tells: one line of metrics per step, fetched from the device in bunches."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from plga_jax.array_types import Array
from plga_jax.train.records import Records


class TrainingDiverged(ValueError, FloatingPointError):
    """Too many steps in a row whose loss or gradient was not finite."""


class Journal:
    """Keeps the metrics of recent steps on the device until they are flushed to a file.

    Attributes:
        last: the newest value of everything that was flushed.
    """

    def __init__(
        self,
        records: Records | None,
        *,
        schedule: Callable[[Any], Any] | None = None,
        max_consecutive_skips: int | None = None,
        last_saved: Callable[[], int | None] = lambda: None,
    ):
        """Starts the clock.

        Args:
            records: where the lines go; None keeps only `last`.
            schedule: learning rate of the update that follows a number of updates; None logs none.
            max_consecutive_skips: bound on the metric "consecutive_skipped"; None: the optimizer
                does not skip, and no step may have a loss or gradient that is not finite.
            last_saved: newest checkpoint, for the message when training diverges.
        """
        self.last: dict[str, float] = {}
        self._records = records
        self._schedule = schedule
        self._limit = max_consecutive_skips
        self._last_saved = last_saved
        self._pending: list[tuple[int, Mapping[str, Array], Mapping[str, Any]]] = []
        self._untimed, self._busy = 0, 0.0
        self._clock: float | None = time.perf_counter()

    def add(self, step: int, metrics: Mapping[str, Array], extra: Mapping[str, Any]) -> None:
        """Notes a step.

        Args:
            step: number of updates made.
            metrics: scalars on the device, not waited for.
            extra: values on the host for the same line; may be filled in until the flush.
        """
        self._pending.append((step, metrics, extra))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock of the throughput for work that is not training; pauses may nest."""
        if self._clock is None:
            yield
            return
        if self._pending:
            jax.block_until_ready(self._pending[-1][1])
        self._busy += time.perf_counter() - self._clock
        self._clock = None
        try:
            yield
        finally:
            self._clock = time.perf_counter()

    def restart(self) -> None:
        """Leaves the steps noted so far out of the throughput: the first one, which compiles."""
        self._untimed = len(self._pending)
        self._busy, self._clock = 0.0, time.perf_counter()

    def flush(self) -> None:
        """Waits for the noted steps and writes their lines.

        Raises:
            TrainingDiverged: after the line of the first step that passes the limit.
        """
        if not self._pending:
            return
        with self.paused():
            values = jax.device_get([metrics for _, metrics, _ in self._pending])
            steps = np.array([step for step, *_ in self._pending], np.int32)
            rates = None if self._schedule is None else np.asarray(self._schedule(steps - 1))
            timed = values[self._untimed :]
            tokens = sum(float(row.get("tokens", 0)) for row in timed)
            speed = {"tokens_per_s": round(tokens / self._busy, 1)} if tokens else {}
            entries, self._pending = self._pending, []
            self._untimed, self._busy = 0, 0.0
            for i, ((step, _, extra), row) in enumerate(zip(entries, values, strict=True)):
                line = {name: _number(value) for name, value in row.items()}
                if rates is not None and row:
                    line["lr"] = float(rates[i])
                line |= speed if i == len(entries) - 1 else {}
                line |= {name: _number(value) for name, value in extra.items()}
                self.last |= line
                if self._records is not None:
                    self._records.append({"step": step, **line})
                self._check(step, line)

    def _check(self, step: int, line: Mapping[str, float]) -> None:
        if self._limit is None:
            skipped, limit = int(not _finite(line)), 0
        else:
            skipped, limit = line.get("consecutive_skipped", 0), self._limit
        if skipped <= limit:
            return
        saved = self._last_saved()
        resume = "start anew" if saved is None else f"resume from step {saved}, the last one saved"
        raise TrainingDiverged(
            f"step {step}: loss {line.get('loss')}, gradient norm {line.get('grad_norm')}: "
            f"{skipped} step(s) in a row without a finite update, {limit} are allowed. Nothing was "
            f"saved since. Lower the learning rate or lengthen the warmup, then {resume}"
        )


def _finite(line: Mapping[str, float]) -> bool:
    return all(math.isfinite(line[name]) for name in ("loss", "grad_norm") if name in line)


def _number(value: Any) -> Any:
    """A JSON number of a scalar; float32 widens exactly, so equal text means equal bits."""
    if not hasattr(value, "dtype"):
        return value
    if np.issubdtype(value.dtype, np.integer) or value.dtype == bool:
        return int(value)
    return float(value)
