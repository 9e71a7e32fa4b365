"""Asks multiple-choice questions about documents, under every geometry of a grid and beside its floors.

    python -m experiments.ris_qa --questions=questions.json --context=articles/ --windows=8192 --seeds=1,10
    python -m experiments.ris_qa --questions=questions.json --context=articles/ --modes=probe,block_shared

Without documents and with dense attention is always run. Rows are added to results.csv in --out as they are known, so
that the same command goes on after Ctrl-C; summary.md and summary.json are written at the end. --questions is a JSON
list of objects with id, question, options, answer (a letter) and, better with it, evidence: words of the documents.

The real density of a row is counted: by the cache for probe and block_shared, in the masks that were drawn for the
published geometries.
"""

import dataclasses
import functools
import pathlib

from absl import flags

from experiments.cli import run
from plga_jax.audit.report import write_json, write_text
from plga_jax.interop.pretrained import load_any
from plga_jax.models.decoder import Decoder
from ris_jax import qa, qa_summary
from ris_jax.block_shared import BlockSharedGeometry
from ris_jax.documents import read_documents
from ris_jax.geometry import Geometry, PublishedGeometry
from ris_jax.patterns import DenseGeometry
from ris_jax.probe import ProbeGeometry
from ris_jax.qa_reader import CacheReader
from ris_jax.qa_records import ResultFile
from ris_jax.questions import read_questions
from ris_jax.recall import TEXT, recall_heads

_QUESTIONS = flags.DEFINE_string("questions", None, "JSON file of the questions.", required=True)
_CONTEXT = flags.DEFINE_list("context", None, "Text files, or folders of them.", required=True)
_MODEL = flags.DEFINE_string("model", None, "A .gguf file or Hugging Face folder; default: SmolLM2-135M-Instruct.")
_WINDOWS = flags.DEFINE_list("windows", ["8192"], "Tokens of the window, 1024 of them for the question.")
_DENSITIES = flags.DEFINE_list("densities", ["0.01", "0.05"], "stochastic, structural: nominal densities.")
_SEEDS = flags.DEFINE_list("seeds", ["1", "10", "40"], "stochastic, structural: redundant samplings.")
_SHARES = flags.DEFINE_list("shares", ["0.25"], "block_shared: real shares of the causal pairs.")
_BASE_SEEDS = flags.DEFINE_list("base_seeds", ["42"], "First seeds; each repeats whatever is sampled.")
_MODES = flags.DEFINE_list("modes", ["stochastic", "structural"], f"Geometries: {', '.join(qa.MODES)}.")
_ROPE = flags.DEFINE_list("rope", ["yarn"], "RoPE scalings for windows beyond the model's context.")
_SCORINGS = flags.DEFINE_list("scorings", list(qa.SCORINGS), "Ways of scoring.")
_SHUFFLES = flags.DEFINE_integer("shuffles", 1, "Orders of the options, 4 for every place once.")
_OUT = flags.DEFINE_string("out", "runs/ris_qa", "Folder for everything that is written.")


def make_geometry(setting: qa.Setting, recall: tuple[tuple[int, int], ...]) -> Geometry:
    """Which earlier tokens a token attends to under a setting; recall is for probes, of `recall_heads`."""
    # Without documents the window is 0: the instruction and one question.
    length = setting.window or 2 * qa.RESERVE
    if setting.mode in ("none", "dense"):
        return DenseGeometry(length=length)
    if setting.mode == "probe":
        return ProbeGeometry(length=length, recall=recall).thinned()
    if setting.mode == "block_shared":
        fields = {"local": 256, "anchors": 64, "seed": setting.base_seed}
        return BlockSharedGeometry.with_share(length, share=setting.density, **fields)
    mode, _, budget = setting.mode.partition("-")
    return PublishedGeometry(
        length=length,
        mode=mode,
        density=setting.density,
        seeds=setting.seeds,
        base_seed=setting.base_seed,
        budget=budget or "additive",
    )


def make_reader(model: Decoder, recall: tuple[tuple[int, int], ...], setting: qa.Setting) -> CacheReader:
    """The model under a setting."""
    if setting.window > model.config.context:
        rope = model.config.rope.stretched(setting.window, kind=setting.rope)
        model = model.with_config(dataclasses.replace(model.config, rope=rope, context=setting.window))
    return CacheReader(model, make_geometry(setting, recall))


def main() -> int:
    """Reads, asks, summarises."""
    settings = qa.settings(
        _MODEL.value or "smollm2-135m-instruct",
        windows=[int(window) for window in _WINDOWS.value],
        densities=[float(density) for density in _DENSITIES.value],
        seeds=[int(seeds) for seeds in _SEEDS.value],
        modes=_MODES.value,
        ropes=_ROPE.value,
        base_seeds=[int(seed) for seed in _BASE_SEEDS.value],
        shares=[float(share) for share in _SHARES.value],
    )
    questions = read_questions(_QUESTIONS.value)
    model, tokenizer = load_any(_MODEL.value)
    documents = read_documents(_CONTEXT.value, tokenizer)
    print(documents.report())
    benchmark = qa.Benchmark(
        questions=questions,
        documents=documents.ids,
        tokenizer=tokenizer,
        scorings=tuple(_SCORINGS.value),
        shuffles=_SHUFFLES.value,
    )
    recall = recall_heads(model, tokenizer.encode(TEXT)) if "probe" in _MODES.value else ()
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    results = ResultFile(out / "results.csv")
    qa.evaluate(benchmark, settings, functools.partial(make_reader, model, recall), results)
    summary = qa_summary.summarise(results)
    text = qa_summary.markdown(summary)
    write_json(out / "summary.json", summary)
    write_text(out / "summary.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    run(main)
