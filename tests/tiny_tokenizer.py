"""Byte-level BPE tokenizers small enough to write down, as files of either kind."""

import json
import pathlib

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

CONTROLS = ("<|end|>", "<|start|>", "<|stop|>")
MERGES = (("t", "h"), ("th", "e"), ("Ċ", "Ċ"), ("Ġ", "the"))
CHATML = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|stop|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> list[str]:
    """Control tokens, the 256 bytes, and what the merges make."""
    return [*CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]


def write(folder: pathlib.Path, *, bos: bool = False, template: str | None = CHATML, **config) -> pathlib.Path:
    """Writes `tokenizer.json` and `tokenizer_config.json`; with `bos`, texts begin with `<|start|>`."""
    model = models.BPE(vocab={token: index for index, token in enumerate(vocabulary())}, merges=list(MERGES))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROLS])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", 1)]
        )
    tokenizer.enable_padding(length=7)
    tokenizer.enable_truncation(3)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": "<|start|>", "eos_token": {"content": "<|stop|>"}, "chat_template": template} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder
