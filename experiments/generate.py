"""Continues text with a PLDR-LLM: a run of ours, a Hugging Face folder, or a native .pth file.

    python -m experiments.generate --checkpoint=runs/tiny --prompt="Fellow citizens,"
    echo "Once upon a time" | python -m experiments.generate --checkpoint=PLDR-LLM-v51-110M/ --tokenizer=spm.model \\
        --prompt=- --top_p=0.6 --max_new_tokens=200

The text of a single prompt appears as it is made; several prompts make one batch, printed when it is done.
"""

import sys
import time

from absl import flags

from experiments.cli import run
from experiments.loading import load
from plga_jax.audit.certified import decode_certified
from plga_jax.generate import CACHES, stream
from plga_jax.ops.sampling import TOP_P_RULES, SamplingConfig

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Run of train_pldr, Hugging Face folder, or .pth file.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "Text to continue; may be repeated; - reads standard input.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "byte, or path of a SentencePiece model; default: as trained.")
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "The most tokens to add.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Logits are divided by it.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Probability mass that remains, (0, 1].")
_RULE = flags.DEFINE_enum("top_p_rule", "standard", TOP_P_RULES, "native: as in the published programs.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "How many of the likeliest tokens remain; 0: all.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Drops tokens less likely than this times the likeliest.")
_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "Above 1: tokens seen before lose.")
_GREEDY = flags.DEFINE_bool("greedy", False, "Take the likeliest token each time.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")
_CACHE = flags.DEFINE_enum("cache", "kv_g", CACHES, "What is kept between tokens.")
_STOP = flags.DEFINE_list("stop", None, "Token ids that end a text; default: the end token; empty: none.")
_CERTIFY = flags.DEFINE_bool("certify", False, "Greedily, and each token certified or chosen by operators made anew.")
_OPERATORS = flags.DEFINE_string("operators", None, "An .npz of constant operators G to use instead of learned ones.")


def certified(model, tokenizer, prompts: list[list[int]], sampling: SamplingConfig, stop: list[int]) -> None:
    """Continues one prompt under certificates; see `audit.certified`."""
    if len(prompts) != 1 or (sampling != SamplingConfig() and not sampling.greedy):
        raise ValueError("--certify continues one --prompt greedily: leave out the sampling flags and further prompts")
    steps = decode_certified(model, prompts[0], max_new_tokens=_NEW.value, stop_ids=stop)
    decoder, tokens = tokenizer.stream(), []
    print("".join(map(decoder.push, prompts[0])), end="", flush=True)
    for token in steps:
        tokens.append(token)
        print(decoder.push(token.token), end="", flush=True)
    print(decoder.flush())
    sure = sum(token.certified for token in tokens)
    print(
        f"{len(tokens)} tokens: {sure} certified, {len(tokens) - sure} chosen by operators made anew there "
        "(certificates are linear ones: a checked remainder, no proof)",
        file=sys.stderr,
    )


def main() -> None:
    """Loads, continues, prints."""
    given = [sys.stdin.read().rstrip("\n") if text == "-" else text for text in _PROMPT.value]
    if not given or not all(given):
        raise ValueError("there is no text to continue: give a --prompt that is not empty")
    sampling = SamplingConfig(
        temperature=_TEMPERATURE.value,
        top_p=_TOP_P.value,
        top_p_rule=_RULE.value,
        top_k=_TOP_K.value,
        min_p=_MIN_P.value,
        repetition_penalty=_PENALTY.value,
        greedy=_GREEDY.value,
    )
    model, tokenizer = load(_CHECKPOINT.value, tokenizer=_TOKENIZER.value, operators=_OPERATORS.value)
    stop = [tokenizer.eos_id] if _STOP.value is None else [int(token) for token in _STOP.value]
    prompts = [tokenizer.encode(text) for text in given]
    if _CERTIFY.value:
        return certified(model, tokenizer, prompts, sampling, stop)
    choices = {"sampling": sampling, "seed": _SEED.value, "cache": _CACHE.value, "stop_ids": stop}
    steps = stream(model, prompts, max_new_tokens=_NEW.value, **choices)

    texts, decoders, times, count = [""] * len(given), [tokenizer.stream() for _ in given], [], 0

    def emit(row: int, text: str) -> None:
        texts[row] += text
        if len(given) == 1:
            print(text, end="", flush=True)

    for row, prompt in enumerate(prompts):
        # Read by the decoder too: it then knows whether the first new piece begins with a space.
        emit(row, "".join(map(decoders[row].push, prompt)))
    for step in steps:
        times.append(time.perf_counter())
        for row in (step.tokens >= 0).nonzero()[0]:
            emit(row, decoders[row].push(step.tokens[row]))
            count += 1
    for row, decoder in enumerate(decoders):
        emit(row, decoder.flush())
    print("" if len(given) == 1 else "\n\n".join(texts))
    rate = ""
    if len(times) > 2:  # The first two steps compile.
        rate = f", {count / len(times) * (len(times) - 2) / (times[-1] - times[1]):.1f} tokens/s"
    print(f"{count} tokens{rate}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
