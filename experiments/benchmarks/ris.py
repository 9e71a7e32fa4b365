"""How fast long documents are read and answered, beside dense attention and beside transformers, in one run.

    python -m experiments.benchmarks.ris --out=runs/benchmarks --torch_python=PYTHON

Every point is a process of its own, so that its peak memory is its own; all points run in turn, round after round, and
medians are told, so ratios hold on a busy machine too. Writes ris.json and ris.md after every round. --torch_python is
a Python that has torch and transformers; without it that comparison is left out.
"""

import contextlib
import pathlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from absl import flags
from tqdm import tqdm

from experiments.benchmarks import harness
from experiments.benchmarks.ris_point import measure_apart, run_apart
from experiments.cli import run
from plga_jax.audit.report import environment, markdown_table, write_json, write_text

_MODEL = flags.DEFINE_string("model", None, ".gguf file or Hugging Face folder; default: SmolLM2-135M-Instruct.")
_OUT = flags.DEFINE_string("out", "runs/benchmarks", "Folder for ris.json and ris.md.")
_TORCH_PYTHON = flags.DEFINE_string("torch_python", None, "Python with torch and transformers, to compare with.")
_THREADS = flags.DEFINE_string("threads", "all", "Cores to use: 'all' or a number.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each point is taken.", lower_bound=1)
_SHORT = flags.DEFINE_integer("short", 1024, "Tokens that an answer's speed is measured after, at the least.")
_MIDDLE = flags.DEFINE_integer("middle", 4096, "The same, to compare the longest with.")
_READ = flags.DEFINE_integer("read", 8192, "Tokens of a text that dense attention still affords.")
_LONG = flags.DEFINE_integer("long", 32_768, "Tokens of a text that it hardly affords; 0: none.")
_LONGEST = flags.DEFINE_integer("longest", 65_536, "Tokens of a text that it does not; 0: none.")
_CHUNK = flags.DEFINE_integer("chunk", 1024, "Tokens read at once.")
_DECODE = flags.DEFINE_integer("decode", 3, "Decodings of each point, of which the median is told.", lower_bound=1)
_DIVERGENCE = flags.DEFINE_bool("divergence", True, "Measure the KL of bfloat16 products to float32, on text.")

PEER = "transformers"


class Point(NamedTuple):
    """What is measured: how a text of some length is read."""

    geometry: str
    length: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.geometry} {self.length}" + ("" if self.dtype == "float32" else f" {self.dtype}")


class Ratio(NamedTuple):
    """Two numbers compared.

    Attributes:
        what: in words.
        value: of wall clock times, or of rates.
        cpu: the same of processor time, which other work on the machine disturbs least; None where it has no meaning.
        target: what is asked for.
        least: whether the target is the least that is asked for, or the most.
    """

    what: str
    value: float
    cpu: float | None
    target: float
    least: bool = True

    @property
    def met(self) -> bool:
        """Whether the target is reached, by wall clock."""
        return self.value >= self.target if self.least else self.value <= self.target


def points(*, short: int, middle: int, read: int, long: int, longest: int, peer: bool) -> list[Point]:
    """The points of a run, each once; lengths of 0 are left out."""
    found = [
        *(Point("dense", short), Point("dense", middle), Point("probe", middle)),
        *(Point("dense", read), Point("dense", read, "bfloat16"), Point("probe", read), Point("block_shared", read)),
        *(Point("dense", long), Point("probe", long), Point("block_shared", long), Point("probe", longest)),
        *(Point(PEER, length) for length in (short, middle, read) if peer),
    ]
    return list(dict.fromkeys(point for point in found if point.length))


def measure(point: Point, model: str | None, folder: str | None, python: str | None) -> dict:
    """Takes one point in a process of its own.

    Args:
        point: which.
        model: as --model.
        folder: the same model as a Hugging Face folder, for the peer.
        python: that runs the peer.

    Returns:
        What `ris_point` or `ris_peer` printed.
    """
    common = {"length": point.length, "decode": _DECODE.value, "threads": _THREADS.value}
    if point.geometry == PEER:
        options = common | {"model": folder}
        flags_ = [f"--{name}={value}" for name, value in options.items()]
        return run_apart([str(python), "-m", "experiments.benchmarks.ris_peer", *flags_])
    # Dense attention reads its cache with every product: narrow keys would be widened each time.
    kv_dtype = "float32" if point.geometry == "dense" else "bfloat16"
    return measure_apart(
        model=model, geometry=point.geometry, dtype=point.dtype, kv_dtype=kv_dtype, chunk=_CHUNK.value, **common
    )


def medians(laps: Sequence[dict]) -> dict:
    """One point's rounds as one: medians of what varies, the most memory of any."""
    numbers = {name for lap in laps for name, value in lap.items() if isinstance(value, float)}
    found = {name: statistics.median(lap[name] for lap in laps) for name in numbers}
    return laps[0] | found | {name: max(lap[name] for lap in laps) for name in numbers if name.endswith("rss_mb")}


def ratios(found: dict[Point, dict], *, middle: int, read: int, long: int, longest: int, short: int) -> list[Ratio]:
    """What is asked of speed and memory, as far as the points tell."""
    result: list[Ratio] = []

    def faster(what: str, ours: Point, theirs: Point, target: float) -> None:
        if ours in found and theirs in found:
            value, cpu = (
                found[theirs][clock] / found[ours][clock] for clock in ("prefill_seconds", "prefill_cpu_seconds")
            )
            result.append(Ratio(f"{what}, {ours.length} tokens read", value, cpu, target))

    def number(what: str, value: float, target: float, least: bool = True) -> None:
        result.append(Ratio(what, value, None, target, least))

    dense = Point("dense", read)
    faster("dense float32 over transformers", dense, Point(PEER, read), 0.9)
    faster("dense bfloat16 over transformers", Point("dense", read, "bfloat16"), Point(PEER, read), 1.5)
    for kind in ("probe", "block_shared"):
        faster(f"{kind} over dense", Point(kind, read), dense, 1.0)
        faster(f"{kind} over dense", Point(kind, long), Point("dense", long), 3.0)
    rate = "decode_tokens_per_s"
    number(f"dense float32 tokens/s after {short}", found[Point("dense", short)][rate], 20)
    number(f"probe float32 tokens/s after {middle}", found[Point("probe", middle)][rate], 20)
    for length in dict.fromkeys((short, middle)):
        if Point(PEER, length) in found:
            mine, theirs = found[Point("dense", length)][rate], found[Point(PEER, length)][rate]
            number(f"dense tokens/s over transformers after {length}", mine / theirs, 1.0)
    if far := found.get(Point("probe", longest)):
        kept = far[rate] / found[Point("probe", middle)][rate]
        number(f"probe tokens/s after {longest} over after {middle}", kept, 0.9)
        number(f"probe peak RSS of reading {longest}, GB", far["prefill_rss_mb"] / 1e3, 3.0, least=False)
    return result


def report(result: dict) -> str:
    """The result as Markdown."""
    rows = [
        (
            *(name, f"{row['real_share']:.1%}" if "real_share" in row else "", row["prefill_seconds"]),
            *(row["prefill_cpu_seconds"], row.get("compile_seconds", ""), row["decode_tokens_per_s"]),
            *(round(row["prefill_rss_mb"]), round(row["peak_rss_mb"])),
        )
        for name, row in result["points"].items()
    ]
    head = ("what", "pairs", "read, s", "CPU s", "compile, s", "decode, tokens/s", "RSS of reading, MB", "peak RSS, MB")
    asked = [
        (
            *(row["what"], row["value"], "" if row["cpu"] is None else row["cpu"]),
            *(f"{'≥' if row['least'] else '≤'} {row['target']:g}", "yes" if row["met"] else "no"),
        )
        for row in result["ratios"]
    ]
    lines = [
        f"# Reading and answering, {result['model']}, {result['threads']} core(s), median of {result['rounds']}",
        f"{result['machine']}; {result['environment']}",
        markdown_table(head, rows),
        markdown_table(("asked", "value", "by CPU time", "target", "reached"), asked),
    ]
    if "bfloat16" in result:
        told = result["bfloat16"]
        lines.append(
            f"bfloat16 products to float32 on {told['tokens']} tokens of text: KL {told['kl']:.2e} nats, "
            f"{told['top1']:.1%} of {told['positions']} likeliest tokens the same."
        )
    return "\n\n".join(line.rstrip() for line in lines) + "\n"


def bfloat16_divergence(name: str | None, length: int, chunk: int) -> dict:
    """How far bfloat16 products move predictions on text.

    Args:
        name: of the model, as for `load_any`.
        length: tokens of text, whole chunks.
        chunk: tokens read at once.

    Returns:
        The mean "kl" to float32 in nats and the share "top1" of equal likeliest tokens at "positions" queries.
    """
    from plga_jax.interop.pretrained import load_any
    from ris_jax.documents import long_text
    from ris_jax.patterns import DenseGeometry
    from ris_jax.quality import Protocol
    from ris_jax.quality_meter import Meter, divergence

    sizes = Protocol(
        length=length + Protocol.passage,
        context=length,
        chunk=chunk,
        bins=(length // 4,),
        positions=min(Protocol.positions, length // 2),
    )
    logits = []
    for dtype in ("float32", "bfloat16"):
        model, tokenizer = load_any(name, compute_dtype=dtype, context=sizes.length)
        meter = Meter(model, DenseGeometry(length=sizes.length), sizes)
        logits.append(meter.score(long_text(tokenizer, length, seed=0))[0].logits)
    kl, same = divergence(*logits)
    return {"kl": float(kl.mean()), "top1": float(same.mean()), "positions": sizes.positions, "tokens": length}


@contextlib.contextmanager
def hf_folder(name: str | None) -> Iterator[str]:
    """The model as a folder that transformers reads, written when it is none."""
    if name is not None and pathlib.Path(name).is_dir():
        yield name
        return
    from plga_jax.interop.hf import save_decoder
    from plga_jax.interop.pretrained import load_any

    with tempfile.TemporaryDirectory() as folder:
        save_decoder(load_any(name)[0], folder)
        yield folder


def main() -> int:
    """Takes all points, round after round."""
    threads = harness.use_threads(_THREADS.value)
    lengths = {flag.name: flag.value for flag in (_SHORT, _MIDDLE, _READ, _LONG, _LONGEST)}
    if odd := {name: n for name, n in lengths.items() if n % _CHUNK.value or (n < 1 and not name.startswith("long"))}:
        raise ValueError(f"lengths {odd} must be whole chunks of {_CHUNK.value} tokens")
    wanted = points(**lengths, peer=bool(_TORCH_PYTHON.value))
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    laps: dict[Point, list[dict]] = {point: [] for point in wanted}
    result = {
        "model": _MODEL.value or "smollm2-135m-instruct",
        "threads": threads,
        "machine": harness.machine(),
        "environment": environment(),
        **lengths,
    }
    if _DIVERGENCE.value:
        result["bfloat16"] = bfloat16_divergence(_MODEL.value, _MIDDLE.value, _CHUNK.value)
    folder = hf_folder(_MODEL.value) if _TORCH_PYTHON.value else contextlib.nullcontext()
    with folder as place, tqdm(total=_ROUNDS.value * len(wanted), ncols=100) as bar:
        for taken in range(1, _ROUNDS.value + 1):
            for point in wanted:
                bar.set_description(f"round {taken}, {point}")
                laps[point].append(measure(point, _MODEL.value, place, _TORCH_PYTHON.value))
                bar.update()
            found = {point: medians(each) for point, each in laps.items()}
            compared = [ratio._asdict() | {"met": ratio.met} for ratio in ratios(found, **lengths)]
            result |= {"rounds": taken, "points": {str(p): row for p, row in found.items()}, "ratios": compared}
            write_json(out / "ris.json", result)
            write_text(out / "ris.md", report(result))
    print(report(result))
    return 0


if __name__ == "__main__":
    run(main)
