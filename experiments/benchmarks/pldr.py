"""How fast a PLDR-LLM decodes and trains on this machine, and how far that is from what the machine can do.

    python -m experiments.benchmarks.pldr --preset=110m --out runs/benchmarks [--threads=1] [--torch_python=PYTHON]

Everything is measured in one run and in turn, so ratios hold on a busy machine too; absolute numbers need an idle one.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import sys

from absl import app, flags
from tqdm import tqdm

from experiments.benchmarks import harness
from plga_jax.audit.report import markdown_table, write_json, write_text

FLAGS = flags.FLAGS
flags.DEFINE_string("preset", "110m", "Preset of PLDRConfig.")
flags.DEFINE_string("out", "runs/benchmarks", "Directory for pldr.json and pldr.md.")
flags.DEFINE_string("threads", "all", "Cores to use: 'all' or a number.")
flags.DEFINE_integer("length", 256, "Tokens of context when decoding, and of each training row.", lower_bound=2)
flags.DEFINE_integer("batch", 2, "Rows of a training step.", lower_bound=1)
flags.DEFINE_integer("decode_rounds", 30, "Tokens decoded in each way.", lower_bound=2)
flags.DEFINE_integer("train_rounds", 5, "Training steps in each dtype.", lower_bound=2)
flags.DEFINE_string("torch_python", None, "Python with torch: also times an eager PyTorch twin, alternating with ours.")


def torch_twin(python: str) -> dict:
    """One short run of the PyTorch twin in its own process, on the same cores."""
    names = ("preset", "threads", "length", "batch")
    command = [python, "-m", "experiments.benchmarks.pldr_torch", *(f"--{n}={getattr(FLAGS, n)}" for n in names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"The PyTorch twin did not run: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(ours: dict, theirs: list[dict]) -> dict[str, list[float]]:
    """Their time over ours, by wall clock and by processor time: above 1 we are faster.

    Trust processor time on one core of a busy machine; on several, torch's waiting threads spin and count.
    """
    pairs = {"none": "none", "kv": "kv", "kv_g": "kv_g", "train_float32": "train_float32"}
    pairs |= {"train_bfloat16": "train_float32"}

    def ratio(name, twin, clock):
        return statistics.median(run[twin][clock] for run in theirs) / ours[name][clock]

    return {name: [ratio(name, twin, clock) for clock in ("wall", "cpu")] for name, twin in pairs.items()}


def report(result: dict) -> str:
    """The result as Markdown."""
    cell = lambda name, row: [  # noqa: E731
        name,
        *(1e3 * row[k] for k in ("wall", "best", "cpu")),
        result["first_call_s"][name],
        row.get("share", ""),
    ]
    head = ("what", "median ms", "best ms", "CPU ms", "first call s", "share of machine")
    text = markdown_table(head, [cell(name, row) for name, row in result["timings"].items()])
    rates = result["rates"]
    lines = [
        f"# PLDR-LLM {result['preset']}, {result['length']} tokens, {result['threads']} core(s)",
        f"{result['machine']}",
        f"matmul {rates['matmul']} GFLOP/s, reading weights {rates['read']:.1f} GB/s, copy {rates['copy']:.1f} GB/s, "
        f"peak RSS {result['peak_rss_mb']:.0f} MB",
        text,
        markdown_table(("ratio", "value", "target"), [[name, *row] for name, row in result["ratios"].items()]),
    ]
    if "torch" in result:
        rows = [[name, *row] for name, row in result["torch"]["times_faster"].items()]
        lines.append(markdown_table(("against eager PyTorch", "times faster", "by CPU time"), rows))
    return "\n\n".join(line.rstrip() for line in lines) + "\n"


def main(_):
    try:
        threads = harness.use_threads(FLAGS.threads)
        # Only now: JAX sizes its thread pool by the cores it finds.
        from experiments.benchmarks import pldr_workloads as workloads
        from plga_jax.models.pldr_config import PLDRConfig

        config = PLDRConfig.preset(FLAGS.preset)
        if FLAGS.length + FLAGS.decode_rounds + 4 > config.context:
            raise ValueError(f"--length={FLAGS.length} and --decode_rounds exceed the context of {config.context}.")
    except ValueError as error:
        sys.exit(str(error))
    bar = functools.partial(tqdm, ncols=80, leave=False)
    D, F, V = config.model_width, config.hidden_width, config.vocab_size
    rates = harness.measure_rates([(512, D, F), (512, D, V), (1024, 1024, 1024)])
    decode, prefill, first, read = workloads.decoders(config, FLAGS.length, FLAGS.decode_rounds)
    first |= {name: harness.first_call(task) for name, task in bar(decode.items(), desc="compile")}
    peers = [torch_twin(FLAGS.torch_python)] if FLAGS.torch_python else []
    timings = harness.interleave(decode, rounds=FLAGS.decode_rounds, progress=functools.partial(bar, desc="decode"))
    timings |= harness.interleave(prefill, rounds=3, progress=functools.partial(bar, desc="prefill"))
    del decode, prefill
    train = workloads.train_steps(config, FLAGS.batch, FLAGS.length)
    first |= {name: harness.first_call(task) for name, task in bar(train.items(), desc="compile")}
    timings |= harness.interleave(train, rounds=FLAGS.train_rounds, progress=functools.partial(bar, desc="train"))
    if FLAGS.torch_python:
        peers.append(torch_twin(FLAGS.torch_python))
    rows = {name: dataclasses.asdict(timing) for name, timing in timings.items()}
    for name, row in rows.items():
        if name in read:
            row |= {"tokens_per_s": 1 / row["wall"], "read_gb_per_s": read[name] / row["wall"] / 1e9}
            row["share"] = row["read_gb_per_s"] / rates.read
        elif name.startswith("train"):
            row["gflop_per_s"] = workloads.train_flops(config, FLAGS.batch, FLAGS.length) / row["wall"] / 1e9
            row["share"] = row["gflop_per_s"] / rates.matmul[name.removeprefix("train_")]
    wall = lambda name: rows[name]["wall"]  # noqa: E731
    result = {
        "preset": FLAGS.preset,
        "length": FLAGS.length,
        "batch": FLAGS.batch,
        "threads": threads,
        "machine": harness.machine(),
        "rates": dataclasses.asdict(rates),
        "timings": rows,
        "first_call_s": first,
        "ratios": {
            "none / kv_g": [wall("none") / wall("kv_g"), ">= 12 (110m)"],
            "kv_g / constant_g": [wall("kv_g") / wall("constant_g"), "<= 1.10"],
            "float32 / bfloat16 step": [wall("train_float32") / wall("train_bfloat16"), ""],
        },
        "peak_rss_mb": harness.peak_rss_mb(),
    }
    if peers:
        result["torch"] = {"runs": peers, "times_faster": compare(rows, peers)}
    text = report(result)
    out = pathlib.Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "pldr.json", result)
    write_text(out / "pldr.md", text)
    print(text)


if __name__ == "__main__":
    app.run(main)
