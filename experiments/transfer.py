"""Do operators carry over between two self-organised critical domains, and by which law?

    python -m experiments.transfer --out=runs/transfer

First the power law of both sandpiles is checked, and that of a dissipative control refused. Then one small model is
trained on each domain and rate; at the larger rate it should collapse. S is fitted per head on queries and keys of the
same text, and the second model is scored on its own domain with its own operators, with those of the first carried over
by the congruence, by the similarity, untouched, and with the identity. Writes transfer.json, transfer.md and
transfer.png; models that are trained are kept.
"""

import pathlib
import sys

from absl import flags

from experiments import transfer_report
from experiments.cli import run
from experiments.phases import Interrupted
from experiments.transfer_run import Study, run_transfer

_OUT = flags.DEFINE_string("out", "runs/transfer", "Folder for everything that is written.")
_STEPS = flags.DEFINE_integer("steps", Study.steps, "Updates of each training.")
_RATES = flags.DEFINE_list("rates", [f"{rate:g}" for rate in Study.rates], "η_max of the trainings of each domain.")
_SEED = flags.DEFINE_integer("seed", Study.seed, "Of piles, weights and data; the second domain takes the next one.")
_SAME = flags.DEFINE_bool("same_start", False, "Start both models from the same weights, in one basis.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show progress bars.")


def main() -> int:
    """Simulates, trains, carries over, reports."""
    study = Study(
        steps=_STEPS.value,
        rates=tuple(float(rate) for rate in _RATES.value),
        seed=_SEED.value,
        same_start=_SAME.value,
    )
    out = pathlib.Path(_OUT.value)
    try:
        found = run_transfer(study, out, progress=_PROGRESS.value)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 130
    print(transfer_report.write(out, study, found))
    return 0


if __name__ == "__main__":
    run(main)
