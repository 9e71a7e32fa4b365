"""One geometry at one length, in a process of its own so that its peak memory is its own.

    python -m experiments.benchmarks.ris_point --geometry=probe --length=8192

Reads random tokens through the `Reader` that sessions use, then decodes through it, and prints one line of JSON.
Compilation is told apart. `measure_apart` starts such a process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

from experiments.benchmarks import harness

GEOMETRIES = ("dense", "probe", "block_shared", "window")

NATIVE = 16_384
"""Up to twice this length probes stay as dense as at 8192; beyond, they thin out."""

_ROOM = 64
"""Tokens of the window beyond what is read; decoding must fit."""


def measure_apart(**options: object) -> dict:
    """Runs this program in a process of its own.

    Args:
        **options: its flags; None leaves one out.

    Returns:
        What it measured.

    Raises:
        ValueError: it failed; the last line it wrote is told.
    """
    command = [sys.executable, "-m", "experiments.benchmarks.ris_point"]
    command += [f"--{name}={value}" for name, value in options.items() if value is not None]
    return run_apart(command)


def run_apart(command: list[str]) -> dict:
    """The JSON that a command writes as its last line; see `measure_apart`."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ValueError(f"{' '.join(command[1:])} ended with {done.returncode}: {told}")
    return json.loads(done.stdout.splitlines()[-1])


def make_geometry(kind: str, length: int, recall: tuple[tuple[int, int], ...] = ()):
    """The geometry of a name for a window of some length."""
    from ris_jax.block_shared import BlockSharedGeometry
    from ris_jax.patterns import DenseGeometry
    from ris_jax.probe import ProbeGeometry

    if kind == "dense":
        return DenseGeometry(length=length)
    probe = ProbeGeometry(length=length, recall=recall).thinned(NATIVE)
    if kind == "probe":
        return probe
    # As many keys of each kind as the probe-selected one reads; a window alone is a list of no blocks.
    fields = {"local": probe.local, "anchors": probe.anchors, "block": probe.block, "tile": 64}
    budget = probe.blocks * probe.block if kind == "block_shared" else 0
    if kind == "window":
        fields["local"] += probe.blocks * probe.block
    return BlockSharedGeometry(length=length, budget=budget, **fields)


def measure(options: argparse.Namespace) -> dict:
    """Everything that is measured at one point."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    import numpy as np

    from plga_jax.interop.pretrained import load_any
    from plga_jax.ops.sampling import SamplingConfig
    from ris_jax.reader import Reader
    from ris_jax.recall import TEXT, recall_heads

    model, tokenizer = load_any(options.model, compute_dtype=options.dtype)
    begin = time.perf_counter()
    recall = recall_heads(model, tokenizer.encode(TEXT)) if options.geometry == "probe" else ()
    recall_seconds = time.perf_counter() - begin
    window = options.length + _ROOM
    if window > model.config.context:
        # Positions beyond what the model was trained for: for time and memory their values do not matter.
        model = model.with_config(dataclasses.replace(model.config, context=window))
    begin = time.perf_counter()
    geometry = make_geometry(options.geometry, window, recall)
    reader = Reader(model, geometry, capacity=window, chunk=options.chunk, kv_dtype=options.kv_dtype)
    build = time.perf_counter() - begin
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, options.length).astype(np.int32)

    empty = reader.mark()
    compilation = harness.first_call(lambda: reader.read(tokens[: options.chunk], progress=lambda _: None))
    reader.rewind(empty)
    ends = [time.perf_counter()]
    cpu = time.process_time()
    reader.read(tokens, progress=lambda _: ends.append(time.perf_counter()))
    cpu = time.process_time() - cpu
    chunks = np.diff(ends)
    full, share = reader.mark(), reader.real_share()
    found = {
        "geometry": geometry.to_config(),
        "real_share": geometry.share() if share is None else share,
        "recall_seconds": recall_seconds,
        "build_seconds": build,
        # The first chunk was read to compile, too: what it took beyond a second reading.
        "compile_seconds": max(compilation - chunks[0], 0.0),
        "prefill_seconds": float(chunks.sum()),
        "prefill_cpu_seconds": cpu,
        "chunk_seconds": chunks.round(4).tolist(),
        "prefill_rss_mb": harness.peak_rss_mb(),
    }
    if options.decode:
        logits, seen = jnp.zeros(model.config.vocab_size), np.zeros(model.config.vocab_size, bool)

        def draw(count: int) -> float:
            """Tokens per second, whole periods of ranking included."""
            drawn = reader.draw(
                logits,
                sampling=SamplingConfig(greedy=True),
                key=jax.random.key(0),
                seen=seen,
                max_new_tokens=count,
            )
            next(drawn)
            start = time.perf_counter()
            for _ in drawn:
                pass
            seconds = time.perf_counter() - start
            reader.rewind(full)
            return (count - 1) / seconds

        found["decode_compile_seconds"] = harness.first_call(lambda: draw(2))
        found["decode_tokens_per_s"] = statistics.median(draw(_ROOM // 2 + 1) for _ in range(options.decode))
    return found | {"peak_rss_mb": harness.peak_rss_mb()}


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help=".gguf file or Hugging Face folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--geometry", choices=GEOMETRIES, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens read, whole chunks")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", help="of matrix products")
    parser.add_argument("--kv_dtype", default="bfloat16", help="of keys and values")
    parser.add_argument("--decode", type=int, default=3, help="decodings, of which the median is told; 0: none")
    parser.add_argument("--threads", default="all")
    options = parser.parse_args()
    try:
        if options.length < 1 or options.length % options.chunk:
            raise ValueError(f"--length={options.length} must be whole chunks of {options.chunk} tokens.")
        threads = harness.use_threads(options.threads)  # before JAX is imported
        result = measure(options) | {"length": options.length, "threads": threads}
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
