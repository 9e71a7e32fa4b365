"""Trains a PLDR-LLM, or goes on with the run in --workdir.

    python -m experiments.train_pldr --workdir=runs/tiny
    python -m experiments.train_pldr --config=small --corpus=books/ --workdir=runs/books \\
        --set learning_rate=3e-3 --set dag.A_LM=0.05 --steps=2000
    python -m experiments.train_pldr --config=110m --tokenizer=spm.model --mesh=data=2,fsdp=4 ...

Writes metrics.jsonl (a line per step), samples.jsonl and checkpoints/ into --workdir. Ctrl-C or
SIGTERM saves and stops; the same command goes on from there. With --emergence the symptoms of a
collapse are measured along the way, and emergence.md, .json and .png tell when each of them fell;
a monitor tells the phase, and --on_collapse what to do about a collapse.
"""

import dataclasses
import pathlib

from absl import flags

from experiments import emergence_report
from experiments.cli import run
from experiments.configs import pldr
from plga_jax.audit.emergence import Emergence, EmergenceConfig
from plga_jax.audit.monitor import ON_COLLAPSE, MonitorConfig, PhaseMonitor
from plga_jax.parallel.mesh import make_mesh, parse_mesh
from plga_jax.tokenizers import ByteTokenizer, SentencePieceTokenizer
from plga_jax.train.data import load_corpus
from plga_jax.train.pldr import train_pldr

_CONFIG = flags.DEFINE_string("config", "tiny", f"Run to start from: {', '.join(pldr.NAMES)}.")
_SET = flags.DEFINE_multi_string("set", [], "key=value to change in it, e.g. learning_rate=3e-3.")
_STEPS = flags.DEFINE_integer("steps", None, "Updates in all; short for --set train.steps=N.")
_CORPUS = flags.DEFINE_string(
    "corpus", None, "Text file, or folder of .txt and .md; default: speeches or Python's help."
)
_TOKENIZER = flags.DEFINE_string("tokenizer", "byte", "byte, or the path of a SentencePiece model.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/pldr", "Folder for everything that is written.")
_MESH = flags.DEFINE_string("mesh", None, "Devices, e.g. data=2,fsdp=4; default: one device.")
_FALLBACK = flags.DEFINE_bool("allow_fallback", False, "Pass over a damaged checkpoint.")
_EMERGENCE = flags.DEFINE_bool("emergence", False, "Measure the collapse along the way, on held-out text.")
_EVERY = flags.DEFINE_integer("emergence_every", EmergenceConfig.every, "Updates between two such probes.")
_ON_COLLAPSE = flags.DEFINE_enum(
    "on_collapse", "none", ON_COLLAPSE, "With --emergence: tell, end the run, cut the rate, or keep a checkpoint."
)
_BELOW = flags.DEFINE_float("collapsed_below", MonitorConfig.collapsed_below, 'm(A) of the phase "collapsed".')


def make_probe(config, corpus, tokenizer) -> Emergence:
    """The probe of the flags, on the text that training holds out."""
    _, held_out = corpus.split(config.data.validation)
    length = min(EmergenceConfig.length, config.data.context - 1)
    settings = EmergenceConfig(every=_EVERY.value, length=length, scored=min(EmergenceConfig.scored, length))
    return Emergence(settings, tokenizer.encode("\n".join(held_out.documents)), steps=config.train.steps)


def main() -> None:
    """Trains and reports."""
    path = _TOKENIZER.value
    tokenizer = ByteTokenizer() if path == "byte" else SentencePieceTokenizer(path)
    steps = [] if _STEPS.value is None else [f"train.steps={_STEPS.value}"]
    config = pldr.make_run(_CONFIG.value, [*_SET.value, *steps], vocab_size=tokenizer.vocab_size)
    corpus = load_corpus(_CORPUS.value)
    print(f"{pldr.describe(config)}; text: {corpus.name}", flush=True)
    probe, steering = None, {}
    if _EMERGENCE.value:
        probe = make_probe(config, corpus, tokenizer)
        monitor = MonitorConfig(
            collapsed_below=_BELOW.value, uncollapsed_above=5 * _BELOW.value, on_collapse=_ON_COLLAPSE.value
        )
        steering = {
            "callbacks": (probe,),
            "steer": PhaseMonitor(monitor),
            "adjustable_rate": monitor.on_collapse == "cut",
            "notes": {"emergence": dataclasses.asdict(probe.config), "monitor": dataclasses.asdict(monitor)},
        }
    elif _ON_COLLAPSE.value != "none":
        raise ValueError(f"--on_collapse={_ON_COLLAPSE.value} needs --emergence, which measures m(A)")
    result = train_pldr(
        config,
        corpus,
        tokenizer,
        workdir=_WORKDIR.value,
        mesh=None if _MESH.value is None else make_mesh(parse_mesh(_MESH.value)),
        **steering,
        allow_fallback=_FALLBACK.value,
    )
    if probe is not None:
        trained = result.seconds - probe.seconds - probe.first_seconds - (result.first_step_seconds or 0)
        print(emergence_report.write(pathlib.Path(_WORKDIR.value), probe, train_seconds=trained))
    names = ("loss", "accuracy", "val_loss", "val_accuracy", "total_skipped", "tokens_per_s")
    numbers = [f"{name} {result.metrics[name]:.6g}" for name in names if name in result.metrics]
    ended = f"stopped by {result.interrupted}" if result.interrupted else "done"
    print(f"{ended} after step {result.step} ({result.seconds:.0f} s): {', '.join(numbers)}")
    print(f"everything is in {_WORKDIR.value}")


if __name__ == "__main__":
    run(main)
