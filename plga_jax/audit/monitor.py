"""Which phase a training is in while it runs, and what to do when it collapses."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from plga_jax.audit.collapse import COLLAPSED_BELOW
from plga_jax.train.loop import Steering

OnCollapse = Literal["none", "abort", "cut", "save"]
ON_COLLAPSE: tuple[OnCollapse, ...] = ("none", "abort", "cut", "save")

_LEAST = 1e-30
"""For the logarithm of an m that is exactly 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """How phases are told apart, fixed before the run.

    Attributes:
        memory: weight of the past in the moving average of log m, m the largest m(A) of the layers; 0 forgets it.
        collapsed_below: the average from which on the phase is "collapsed".
        uncollapsed_above: the average above which it is "uncollapsed"; between the two it is "transition".
        on_collapse: "none" only tells; "abort" saves and ends the run; "cut" multiplies the learning rate by
            `cut_factor` from then on; "save" keeps a checkpoint of the step that no later one displaces. Once each time
            that the phase is "collapsed" after it was "uncollapsed".
        cut_factor: see above, within (0, 1).
    """

    memory: float = 0.5
    collapsed_below: float = COLLAPSED_BELOW
    uncollapsed_above: float = 5 * COLLAPSED_BELOW
    on_collapse: OnCollapse = "none"
    cut_factor: float = 0.3

    def __post_init__(self):
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory={self.memory} must be within [0, 1); 0 takes each probe as it is")
        if not 0 < self.collapsed_below < self.uncollapsed_above:
            raise ValueError(
                f"thresholds must be 0 < collapsed_below={self.collapsed_below} < "
                f"uncollapsed_above={self.uncollapsed_above}: the gap keeps the phase from flickering"
            )
        if self.on_collapse not in ON_COLLAPSE:
            raise ValueError(f"on_collapse={self.on_collapse!r} is unknown; choose one of {', '.join(ON_COLLAPSE)}")
        if not 0 < self.cut_factor < 1:
            raise ValueError(f"cut_factor={self.cut_factor} must be within (0, 1), for example 0.3")


class PhaseMonitor:
    """For `train.loop.Hooks.steer`: reads the probes of `audit.emergence` or `audit.collapse` ("m_A.0", …).

    All it knows follows from the lines it has seen, so a resumed run replays them and goes on as if it had not stopped.
    """

    def __init__(self, config: MonitorConfig):
        """Nothing seen yet."""
        self.config = config
        self.average: float | None = None  # of log m
        self.armed = False

    def __call__(self, step: int, values: Mapping[str, float]) -> Steering | None:
        """The phase after a step, and what to do.

        Args:
            step: updates made.
            values: of the step's line.

        Returns:
            None at steps without a probe.
        """
        found = [value for name, value in values.items() if name.startswith("m_A.") and name[4:].isdigit()]
        if not found or not all(value is not None and math.isfinite(value) for value in found):
            return None
        newest, memory = math.log(max(max(found), _LEAST)), self.config.memory
        self.average = newest if self.average is None else memory * self.average + (1 - memory) * newest
        m = math.exp(self.average)
        phase = self.label(m)
        seen = {"m_average": m, "phase": phase}
        if phase == "uncollapsed":
            self.armed = True
        if phase != "collapsed" or not self.armed:
            return Steering(values=seen)
        self.armed = False
        return self._act(step, m, seen)

    def label(self, m: float) -> str:
        """The phase at an average.

        Args:
            m: the moving average.

        Returns:
            "collapsed", "transition" or "uncollapsed".
        """
        if m < self.config.collapsed_below:
            return "collapsed"
        return "uncollapsed" if m > self.config.uncollapsed_above else "transition"

    def _act(self, step: int, m: float, seen: dict) -> Steering:
        note = f"collapsed at step {step}: moving average of m(A) {m:.3g} < {self.config.collapsed_below:g}"
        if self.config.on_collapse == "abort":
            return Steering(values=seen, note=f"{note}; stopped, as asked", stop=True)
        if self.config.on_collapse == "cut":
            factor = self.config.cut_factor
            return Steering(values=seen, note=f"{note}; learning rate × {factor:g}", rate_factor=factor)
        if self.config.on_collapse == "save":
            return Steering(values=seen, note=f"{note}; kept a checkpoint", mark=True)
        return Steering(values=seen, note=note)
