"""How reading and answering grow with the length of the text: seconds, tokens per second, memory.

    python -m experiments.ris_scaling --out=runs/ris_scaling
    python -m experiments.ris_scaling --lengths=4096,8192 --geometries=dense,probe --decode=0

Each (geometry, length) runs in a process of its own, so that its peak memory is its own, on random tokens; beyond the
model's context the positions mean nothing to it, which time does not mind. Points are kept in points.jsonl and the same
command goes on after Ctrl-C. Writes report.md, with fitted exponents beside those of the pairs, and scaling.png.
"""

import pathlib

from absl import flags
from tqdm import tqdm

from experiments import ris_scaling_report as report
from experiments.benchmarks.ris_point import GEOMETRIES, measure_apart
from experiments.cli import run
from plga_jax.audit.report import write_text
from plga_jax.train.records import Records

_MODEL = flags.DEFINE_string("model", None, ".gguf file or Hugging Face folder; default: SmolLM2-135M-Instruct.")
_OUT = flags.DEFINE_string("out", "runs/ris_scaling", "Folder for everything that is written.")
_LENGTHS = flags.DEFINE_list("lengths", [str(2**n * 1024) for n in range(2, 8)], "Tokens read, whole chunks.")
_GEOMETRIES = flags.DEFINE_list("geometries", list(GEOMETRIES), "Of dense, probe, block_shared, window.")
_DENSE_MAX = flags.DEFINE_integer("dense_max", 16_384, "Longest text that dense attention reads.")
_CHUNK = flags.DEFINE_integer("chunk", 1024, "Tokens read at once.")
_DECODE = flags.DEFINE_integer("decode", 3, "Decodings, of which the median is told; 0: none.")
_KV_DTYPE = flags.DEFINE_string("kv_dtype", "bfloat16", "Of keys and values; dense attention takes float32.")


def main() -> int:
    """Measures what is missing."""
    if unknown := set(_GEOMETRIES.value) - set(GEOMETRIES):
        raise ValueError(f"--geometries names {sorted(unknown)}; choose of {', '.join(GEOMETRIES)}")
    out, lengths = pathlib.Path(_OUT.value), sorted(int(length) for length in _LENGTHS.value)
    wanted = [(kind, n) for n in lengths for kind in _GEOMETRIES.value if kind != "dense" or n <= _DENSE_MAX.value]
    records = Records(out / "points.jsonl")
    records.rewind(2**53)  # drops a line that a kill cut off
    points = list(records)
    done = {(point["kind"], point["length"]) for point in points}
    with tqdm(wanted, ncols=100) as bar:
        for kind, length in bar:
            if (kind, length) in done:
                continue
            bar.set_description(f"{kind} {length}")
            found = measure_apart(
                model=_MODEL.value,
                geometry=kind,
                length=length,
                chunk=_CHUNK.value,
                decode=_DECODE.value,
                kv_dtype="float32" if kind == "dense" else _KV_DTYPE.value,
            )
            records.append(found | {"kind": kind, "step": len(points)})
            points.append(found | {"kind": kind})
    text = report.markdown([point for point in points if (point["kind"], point["length"]) in set(wanted)])
    write_text(out / "report.md", text)
    report.figure(points).savefig(out / "scaling.png", dpi=120)
    print(text)
    return 0


if __name__ == "__main__":
    run(main)
