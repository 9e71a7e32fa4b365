"""What a model loses when its operators are changed: commutant projection with controls, and rows of A made equal.

    python -m experiments.interventions --checkpoint=runs/tiny --out=runs/interventions

Operators are made for each window as the model makes them, changed in all layers at once, and given back; the loss is
that of the block. "commutant" moves them towards the part that commutes with the rotary embedding, "complement" and
"random" as far in random directions, over several seeds; "centroid" replaces the rows of A by their mean. Writes
interventions.json, interventions.md and interventions.png.
"""

import pathlib

from absl import flags

from experiments import interventions_report
from experiments.cli import run
from experiments.loading import load
from plga_jax.train.data import load_corpus

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Run of train_pldr, Hugging Face folder, or .pth file.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "byte, or path of a SentencePiece model; default: as trained.")
_CORPUS = flags.DEFINE_string("corpus", None, "Text file or folder; default: speeches or Python's help.")
_STRENGTHS = flags.DEFINE_list("strengths", ["0", "0.25", "0.5", "0.75", "1"], "λ: 0 changes nothing, 1 projects.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Of the random directions.")
_WINDOWS = flags.DEFINE_integer("windows", 16, "Stretches of held-out text, spread over all of it.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 128, "Tokens of each that are read.", lower_bound=2)
_OUT = flags.DEFINE_string("out", "runs/interventions", "Folder for everything that is written.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")


def main() -> int:
    """Changes, scores, reports."""
    model, tokenizer = load(_CHECKPOINT.value, tokenizer=_TOKENIZER.value)
    windows = interventions_report.cut_windows(
        load_corpus(_CORPUS.value), tokenizer, count=_WINDOWS.value, length=_LENGTH.value
    )
    found = interventions_report.measure(
        model,
        windows,
        strengths=[float(strength) for strength in _STRENGTHS.value],
        seeds=[int(seed) for seed in _SEEDS.value],
        progress=_PROGRESS.value,
    )
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    print(interventions_report.write(out, found, subject=_CHECKPOINT.value))
    return 0


if __name__ == "__main__":
    run(main)
