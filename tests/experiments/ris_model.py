"""A Hugging Face folder with a tiny random model and a byte tokenizer, and processes that use it."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import tokenizers
from flax import nnx
from tokenizers import AddedToken, decoders, pre_tokenizers

from plga_jax.interop.hf import save_decoder
from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.ops.rope_scaling import RopeConfig

ROOT = pathlib.Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: pathlib.Path) -> None:
    """A Llama of two layers that answers in letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    config = DecoderConfig(
        vocab_size=258,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_width=8,
        model_width=16,
        hidden_width=16,
        context=2048,
        rope=RopeConfig(context=2048),
        eos_ids=(257,),
    )
    # Larger weights than a fresh model's, so that answers differ; and only printable letters are ever likely.
    model = jax.tree.map(lambda x: 8 * x, Decoder(config, rngs=nnx.Rngs(2)))
    printable = [letters.index(chr(code)) for code in range(97, 123)]
    table = model.embedding[...]
    model.embedding = nnx.Param(table.at[jax.numpy.asarray(printable)].multiply(3.0))
    save_decoder(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def start(program: str, *arguments: str) -> subprocess.Popen:
    """Starts a binary with pipes for everything."""
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.{program}", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
