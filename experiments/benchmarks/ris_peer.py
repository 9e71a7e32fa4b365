"""The peer: transformers reading and answering with the same weights. Needs torch and transformers, nothing of ours.

    python -m experiments.benchmarks.ris_peer --model=FOLDER --length=8192

Float32, its sdpa attention, the whole text in one call as its users do, the logits of the last token only. It prints
one line of JSON like that of `ris_point`. `ris.py --torch_python` runs it between its own points.
"""

import argparse
import json
import statistics
import sys
import time

from experiments.benchmarks import harness

try:
    import torch
    import transformers
except ImportError:
    sys.exit("This comparison needs PyTorch and transformers: run it with a Python that has both, or leave it out.")


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict:
    """Seconds of reading random tokens, then tokens per second of an answer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, options.length), generator=generator)

    def read(ids, held=None):
        return model(ids, past_key_values=held, use_cache=True, logits_to_keep=1)

    # Thread pools and allocators start with the first calls; a short one is enough.
    read(tokens[:, :64])
    wall, cpu = time.perf_counter(), time.process_time()
    out = read(tokens)
    found = {"prefill_seconds": time.perf_counter() - wall, "prefill_cpu_seconds": time.process_time() - cpu}
    found["prefill_rss_mb"] = harness.peak_rss_mb()
    if options.decode:
        rates = []
        for _ in range(options.decode):
            begin = time.perf_counter()
            for _ in range(options.tokens):
                out = read(out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values)
            rates.append(options.tokens / (time.perf_counter() - begin))
        found["decode_tokens_per_s"] = statistics.median(rates)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return found | {"peak_rss_mb": harness.peak_rss_mb(), "versions": versions}


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--length", type=int, required=True, help="tokens read")
    parser.add_argument("--decode", type=int, default=3, help="decodings, of which the median is told; 0: none")
    parser.add_argument("--tokens", type=int, default=32, help="of each decoding")
    parser.add_argument("--threads", default="all")
    options = parser.parse_args()
    try:
        threads = harness.use_threads(options.threads)
        # torch was imported before, and has counted all cores.
        torch.set_num_threads(threads)
        result = measure(options) | {"length": options.length, "threads": threads}
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
