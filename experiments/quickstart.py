"""Trains a small PLDR-LLM twice, watches its operator collapse once, and generates with the G-cache.

    python -m experiments.quickstart

Two runs from the same weights, one at a learning rate that collapses the operators and one at a
twentieth of it, are trained on the State of the Union addresses (or any --corpus), measured and
compared. Writes report.md, report.json, metrics.jsonl and figures into --out, and the checkpoints
of both runs below it. Ctrl-C or SIGTERM saves and stops; the same command goes on from there. Once
a report is written, the next start with the same --out begins anew.
"""

import pathlib
import shutil
import sys
import time

from absl import flags

from experiments.cli import run
from experiments.configs.pldr import make_run
from experiments.phases import Interrupted, Probes, Study, measure_start, run_phase
from experiments.phases_report import write_report
from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.data import load_corpus

_OUT = flags.DEFINE_string("out", "runs/quickstart", "Folder for everything that is written.")
_CORPUS = flags.DEFINE_string(
    "corpus", None, "Text file, or folder of .txt and .md; default: speeches or Python's help."
)
_STEPS = flags.DEFINE_integer("steps", 300, "Updates of each run.")
_ETA_COLLAPSED = flags.DEFINE_float("eta_collapsed", 2e-2, "η_max of the run meant to collapse; 1e-2 is at the border.")
_ETA_UNCOLLAPSED = flags.DEFINE_float("eta_uncollapsed", 1e-3, "η_max of the run meant not to.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the weights and of the order of the data.")
_SET = flags.DEFINE_multi_string("set", [], "key=value to change in both runs, e.g. model.num_layers=3.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show progress bars.")


def main() -> int:
    """Trains, measures, reports."""
    began = time.perf_counter()
    tokenizer = ByteTokenizer()
    small = [f"train.steps={_STEPS.value}", f"train.seed={_SEED.value}", "train.sample_every=0", "data.context=129"]
    study = Study(
        run=make_run("tiny", [*small, *_SET.value], vocab_size=tokenizer.vocab_size),
        eta_collapsed=_ETA_COLLAPSED.value,
        eta_uncollapsed=_ETA_UNCOLLAPSED.value,
    )
    corpus = load_corpus(_CORPUS.value)
    probes = Probes.cut(study, corpus, tokenizer)
    out = pathlib.Path(_OUT.value)
    rates = {"collapsed": study.eta_collapsed, "uncollapsed": study.eta_uncollapsed}
    if (out / "report.json").exists():
        (out / "report.json").unlink()
        for name in rates:
            shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)

    print(f"text: {corpus.name}; two runs of {study.run.train.steps} steps", flush=True)
    start, phases = measure_start(study, probes), {}
    for name, eta_max in rates.items():
        print(f"η_max = {eta_max:g}, expected to be {name}", flush=True)
        try:
            phases[name] = run_phase(study, corpus, tokenizer, probes, eta_max, out / name, progress=_PROGRESS.value)
        except Interrupted as stop:
            print(stop, file=sys.stderr)
            return 130
    print(write_report(out, study, corpus, tokenizer, probes, phases, start, began))
    print(f"everything is in {out}")
    return 0


if __name__ == "__main__":
    run(main)
