"""What certificates of the G-cache are worth on a model: coverage, false alarms, wrong ones, and their cost.

    python -m experiments.certify --checkpoint=runs/tiny --out=runs/certify
    python -m experiments.certify --checkpoint=runs/tiny --prompts=40 --new_tokens=64 --mode=lipschitz

Greedy continuations of stretches of text are made by the cache, and every token of them gets a certificate, which is
then compared with recomputing everything. A certificate is *wrong* if the recomputed token is another one, and its
absence a *false alarm* if it is the same. Writes certify.json, certify.md and certify.png; prompts that are done are
kept, so the same command goes on after Ctrl-C.
"""

import pathlib

from absl import flags

from experiments import certify_report
from experiments.certify_run import Trial, run_trial
from experiments.cli import run
from experiments.loading import load
from plga_jax.audit.certificate import MODES
from plga_jax.train.data import load_corpus

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Run of train_pldr, Hugging Face folder, or .pth file.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "byte, or path of a SentencePiece model; default: as trained.")
_CORPUS = flags.DEFINE_string("corpus", None, "Text file or folder; default: speeches or Python's help.")
_PROMPTS = flags.DEFINE_integer("prompts", Trial.prompts, "Stretches of held-out text, spread over all of it.")
_LENGTH = flags.DEFINE_integer("prompt_tokens", Trial.prompt_tokens, "Tokens of each.")
_NEW = flags.DEFINE_integer("new_tokens", Trial.new_tokens, "Tokens added to each by the cache.")
_MODE = flags.DEFINE_enum("mode", Trial.mode, MODES, "How bounds are found; see plga_jax.audit.certificate.")
_OUT = flags.DEFINE_string("out", "runs/certify", "Folder for everything that is written.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")


def main() -> int:
    """Certifies, compares, reports; fails if a certificate is wrong."""
    trial = Trial(prompts=_PROMPTS.value, prompt_tokens=_LENGTH.value, new_tokens=_NEW.value, mode=_MODE.value)
    model, tokenizer = load(_CHECKPOINT.value, tokenizer=_TOKENIZER.value)
    out = pathlib.Path(_OUT.value)
    found = run_trial(trial, model, tokenizer, load_corpus(_CORPUS.value), out, progress=_PROGRESS.value)
    print(certify_report.write(out, trial, found, subject=_CHECKPOINT.value))
    return 1 if certify_report.summary(found)["wrong"] else 0


if __name__ == "__main__":
    run(main)
