"""The generate binary as a user runs it: real processes, started together because each imports JAX."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plga_jax.generate import generate
from plga_jax.interop.pldr import save_hf
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.models.pldr_transforms import constant_operator_model
from plga_jax.ops.sampling import SamplingConfig
from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.checkpoint import Checkpoints
from plga_jax.train.step import TrainState

ROOT = pathlib.Path(__file__).parents[2]
PROMPT = "Señor"
IDENTITY = np.broadcast_to(np.eye(4, dtype=np.float32), (1, 2, 4, 4))
NATIVE = ["--top_p=0.9", "--top_p_rule=native"]
FOLDER = ["--checkpoint={folder}", "--tokenizer=byte"]
GOOD = {
    "one": ["--checkpoint={run}", f"--prompt={PROMPT}", "--max_new_tokens=12", "--seed=3", "--stop=", *NATIVE],
    "batch": [
        *FOLDER,
        "--prompt=-",
        "--prompt=Ab",
        "--max_new_tokens=4",
        "--greedy",
        "--cache=none",
        "--operators={G}",
    ],
    "certified": ["--checkpoint={run}", f"--prompt={PROMPT}", "--max_new_tokens=6", "--certify", "--stop="],
}
BAD = {
    "empty prompt": (["--prompt="], "give a --prompt that is not empty"),
    "long prompt": ([f"--prompt={'x' * 65}"], "exceed the context of 64; shorten the prompt"),
    "unknown checkpoint": (["--prompt=a", "--checkpoint=absent"], "absent does not exist"),
    "corrupt checkpoint": (["--prompt=a", "--checkpoint={corrupt}"], "damaged or not a safetensors file"),
    "top_p": (["--prompt=a", "--top_p=1.5"], "top_p is 1.5; it must be within (0, 1]"),
    "certified sampling": (["--prompt=a", "--certify", "--top_p=0.9"], "--certify continues one --prompt greedily"),
    "certified constant": (["--prompt=a", "--certify", "--operators={G}"], "nothing to certify"),
}


@pytest.fixture(scope="module")
def model():
    config = PLDRConfig(vocab_size=262, num_layers=1, num_heads=2, head_width=4, residual_units=1, context=64)
    return PLDR(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def ran(model, tmp_path_factory):
    """Name of a case -> exit code, stdout, stderr."""
    root = tmp_path_factory.mktemp("checkpoints")
    places = {name: str(root / name) for name in ("run", "folder", "corrupt", "G.npz")}
    places["G"] = places.pop("G.npz")
    save_hf(model, places["folder"])
    save_hf(model, places["corrupt"])
    weights = pathlib.Path(places["corrupt"]) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    np.savez(places["G"], G_LM=IDENTITY)
    saved = {"kind": "pldr", "model": dataclasses.asdict(model.config), "tokenizer": ByteTokenizer().to_config()}
    with Checkpoints(root / "run" / "checkpoints") as checkpoints:
        checkpoints.save(TrainState.init(model, optax.sgd(0.0)), config=saved)
    cases = GOOD | {name: FOLDER + flags for name, (flags, _) in BAD.items()}
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", "experiments.generate", *(flag.format(**places) for flag in flags)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for name, flags in cases.items()
    }
    outputs = {name: process.communicate("Xy\n", timeout=300) for name, process in processes.items()}
    return {name: (processes[name].returncode, *output) for name, output in outputs.items()}


def _expected(model, prompts, **options):
    tokenizer = ByteTokenizer()
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    # The binary runs at the default matmul precision, which on a CPU is the highest.
    rows = generate(model, ids, **options).tokens
    return [tokenizer.decode(prompt + row) for prompt, row in zip(ids, rows)]


def test_one_prompt_is_continued(ran, model):
    code, out, err = ran["one"]
    sampling = SamplingConfig(top_p=0.9, top_p_rule="native")
    assert code == 0
    assert out == _expected(model, [PROMPT], max_new_tokens=12, sampling=sampling, seed=3)[0] + "\n"
    assert err.startswith("12 tokens, ") and err.endswith(" tokens/s\n")


def test_batch_from_standard_input_with_operators(ran, model):
    code, out, err = ran["batch"]
    options = {"max_new_tokens": 4, "cache": "none", "stop_ids": [ByteTokenizer.eos_id]}
    assert code == 0
    assert (
        out
        == "\n\n".join(_expected(constant_operator_model(model, jnp.asarray(IDENTITY)), ["Xy", "Ab"], **options)) + "\n"
    )
    assert " tokens" in err


def test_certified_tokens_are_those_of_no_cache(ran, model):
    code, out, err = ran["certified"]
    assert code == 0
    assert out == _expected(model, [PROMPT], max_new_tokens=6, cache="none")[0] + "\n"
    assert err.startswith("6 tokens: ") and "chosen by operators made anew" in err


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(ran, name):
    code, out, err = ran[name]
    assert code == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert BAD[name][1] in err
