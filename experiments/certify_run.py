"""Certificates of many tokens, beside what they promise: each prompt is kept on disk as soon as it is done."""

import dataclasses
import json
import pathlib
import time

import numpy as np
from tqdm import tqdm

from experiments.audit_run import weights_digest
from plga_jax.audit.certificate import MODES, certify, mode_constants
from plga_jax.audit.decoding import forced_logits
from plga_jax.generate import generate
from plga_jax.models.pldr import PLDR
from plga_jax.tokenizers import Tokenizer
from plga_jax.train.data import Corpus
from plga_jax.train.records import Records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What is certified.

    Attributes:
        prompts: stretches of held-out text.
        prompt_tokens: tokens of each.
        new_tokens: tokens added to each.
        mode: of the certificates.
        validation: share of the text that was held out in training.
        repeats: decodes of the first prompt that are timed, without and with certificates.
    """

    prompts: int = 20
    prompt_tokens: int = 40
    new_tokens: int = 100
    mode: str = "linear"
    validation: float = 0.05
    repeats: int = 3

    def __post_init__(self):
        for name in ("prompts", "prompt_tokens", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is unknown; choose one of {', '.join(MODES)}")


def run_trial(
    trial: Trial, model: PLDR, tokenizer: Tokenizer, corpus: Corpus, out: pathlib.Path, *, progress: bool = True
) -> list[dict]:
    """Certifies greedy continuations and compares each token with recomputing.

    Args:
        trial: what is certified.
        model: of learned operators.
        tokenizer: its tokenizer.
        corpus: the text.
        out: folder; `prompts.jsonl` in it keeps the prompts that are done.
        progress: whether to show a bar.

    Returns:
        Per prompt: lists over tokens of "margin", "bound", "remainder", "deviation" (what recomputing moved), and the
        flags "certified" and "same"; of the first prompt also seconds.

    Raises:
        ValueError: too little text, or a folder of another trial.
    """
    _, held_out = corpus.split(trial.validation)
    tokens = np.array(tokenizer.encode("\n".join(held_out.documents)), np.int32)
    if len(tokens) < trial.prompts * trial.prompt_tokens:
        raise ValueError(
            f"{held_out.name} has {len(tokens)} tokens, {trial.prompts} prompts of {trial.prompt_tokens} are asked "
            "for: give more text or ask for fewer"
        )
    starts = np.linspace(0, len(tokens) - trial.prompt_tokens, trial.prompts).astype(int)
    setting = dataclasses.asdict(trial) | {"weights_sha256": weights_digest(model), "corpus": corpus.name}
    out.mkdir(parents=True, exist_ok=True)
    records = Records(out / "prompts.jsonl")
    records.rewind(2**53)  # drops a line that a kill cut off
    found = list(records)
    if found and found[0]["setting"] != json.loads(json.dumps(setting)):
        raise ValueError(f"{records.path} is of another model or trial: choose another --out, or remove it")
    constants = mode_constants(model, trial.mode)
    for index in tqdm(range(len(found), trial.prompts), desc="prompts", disable=not progress, ncols=100):
        prompt = tokens[starts[index] : starts[index] + trial.prompt_tokens]
        decode = {"max_new_tokens": trial.new_tokens, "cache": "kv_g"}
        (cached,) = generate(model, [prompt.tolist()], **decode).tokens
        certificates = certify(model, prompt, cached, mode=trial.mode, constants=constants)
        kept, reference = (
            forced_logits(model, prompt, cached, cache=cache).astype(np.float64) for cache in ("kv_g", "none")
        )
        record = {
            "step": index,
            "setting": setting,
            "margin": certificates.margin.tolist(),
            "bound": certificates.bound.tolist(),
            "remainder": certificates.remainder.tolist(),
            "deviation": np.abs(kept - reference).max(axis=-1).tolist(),
            "certified": certificates.certified.tolist(),
            "same": (np.asarray(cached) == reference.argmax(axis=-1)).tolist(),
        }
        if index == 0:
            record["seconds"] = _seconds(trial, model, prompt, cached, constants)
        records.append(record)
        found.append(json.loads(json.dumps(record)))
    return found


def _seconds(trial: Trial, model: PLDR, prompt: np.ndarray, cached: list[int], constants) -> dict[str, float]:
    """Fastest of a few: decoding with the cache, recomputing every token, and certifying what the cache chose."""
    work = {
        "cache": lambda: generate(model, [prompt.tolist()], max_new_tokens=trial.new_tokens, cache="kv_g"),
        "recompute": lambda: generate(model, [prompt.tolist()], max_new_tokens=trial.new_tokens, cache="none"),
        "certify": lambda: certify(model, prompt, cached, mode=trial.mode, constants=constants),
    }
    found = {}
    for name, function in work.items():
        function()  # compiles
        times = []
        for _ in range(trial.repeats):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        found[name] = min(times)
    return found
