"""A phase diagram: where in (η_max, T_w) small PLDR-LLMs collapse, over several seeds.

    python -m experiments.phase_diagram --out=runs/phases
    python -m experiments.phase_diagram --rates=3e-3,6e-3 --warmups=20,100 --seeds=0,1,2,3,4 --out=runs/finer

Seeds of a point train side by side, and one compiled program serves the whole grid. Finished points are kept: the same
command goes on after Ctrl-C, and with more rates or warm-ups adds points to the grid. Writes phase_diagram.md, .json
and .png, and everything about each run to points/: numbers as JSON, all instances as .npz.
"""

import pathlib
import sys
import time

from absl import flags

from experiments import phase_grid_report
from experiments.cli import run
from experiments.configs.pldr import make_run
from experiments.phase_grid import Criterion, Grid, run_grid
from experiments.phases import Interrupted, Study
from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.data import load_corpus

_OUT = flags.DEFINE_string("out", "runs/phases", "Folder for everything that is written.")
_CORPUS = flags.DEFINE_string("corpus", None, "Text file or folder; default: speeches or Python's help.")
_RATES = flags.DEFINE_list("rates", [f"{rate:g}" for rate in Grid.rates], "η_max of each column.")
_WARMUPS = flags.DEFINE_list("warmups", [str(warmup) for warmup in Grid.warmups], "T_w of each row, updates.")
_SEEDS = flags.DEFINE_list("seeds", [str(seed) for seed in Grid.seeds], "Of weights and of the order of data.")
_STEPS = flags.DEFINE_integer("steps", 300, "Updates of each run.")
_BELOW = flags.DEFINE_float("collapsed_below", Criterion.below, "m(A) below which a layer counts as collapsed.")
_SET = flags.DEFINE_multi_string("set", [], "key=value to change in every run, e.g. model.num_layers=3.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")


def main() -> int:
    """Trains, measures, reports."""
    tokenizer = ByteTokenizer()
    small = [f"train.steps={_STEPS.value}", "data.context=129", "train.sample_every=0"]
    grid = Grid(
        study=Study(run=make_run("tiny", [*small, *_SET.value], vocab_size=tokenizer.vocab_size)),
        rates=tuple(sorted(float(rate) for rate in _RATES.value)),
        warmups=tuple(sorted(int(warmup) for warmup in _WARMUPS.value)),
        seeds=tuple(int(seed) for seed in _SEEDS.value),
        criterion=Criterion(below=_BELOW.value),
    )
    corpus, out = load_corpus(_CORPUS.value), pathlib.Path(_OUT.value)
    print(
        f"text: {corpus.name}; {len(grid.points)} points × {len(grid.seeds)} seeds × {_STEPS.value} steps", flush=True
    )
    began, cpu = time.perf_counter(), time.process_time()
    try:
        points = run_grid(grid, corpus, tokenizer, out, progress=_PROGRESS.value)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 130
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    print(phase_grid_report.write(out, grid, points, seconds=seconds, cpu_seconds=cpu_seconds))
    return 0


if __name__ == "__main__":
    run(main)
