"""A trained model and its tokenizer, from whatever a --checkpoint flag may name."""

import pathlib

from plga_jax.interop.pldr import load_hf, load_operators, load_pth
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_transforms import constant_operator_model
from plga_jax.tokenizers import ByteTokenizer, SentencePieceTokenizer, Tokenizer, tokenizer_from_config
from plga_jax.train.checkpoint import load_model


def load(
    checkpoint: str | None, *, tokenizer: str | None = None, operators: str | None = None
) -> tuple[PLDR, Tokenizer]:
    """Loads a model and the tokenizer it was trained with.

    Args:
        checkpoint: a run of ours, a Hugging Face folder of the PLDR-LLM family, or a native .pth file.
        tokenizer: "byte" or the path of a SentencePiece model. None takes the one a run of ours recorded, or the
            `tokenizer.model` of the folder.
        operators: an .npz of constant operators to put in place of the model's own; None keeps those.

    Returns:
        Both; their vocabularies are equally large.

    Raises:
        ValueError: nothing that can be loaded, or a tokenizer that is missing or not the model's.
        OSError: no such checkpoint.
    """
    if not checkpoint:
        raise ValueError("give --checkpoint: a run of train_pldr, a Hugging Face folder, or a .pth file")
    path, recorded = pathlib.Path(checkpoint), None
    if not path.exists():
        raise ValueError(f"checkpoint {path} does not exist; name a run of train_pldr, a folder or a .pth file")
    if path.is_file():
        model = load_pth(path)
    elif (path / "config.json").is_file():
        model = load_hf(path)
    else:
        model, config = load_model(path)
        recorded = config.get("tokenizer")
    beside = path / "tokenizer.model"
    if tokenizer is None and recorded is None and beside.is_file():
        tokenizer = str(beside)
    if tokenizer is None and recorded is None:
        raise ValueError(f"{path} does not tell its tokenizer: pass --tokenizer=byte or the path of a .model file")
    found = _tokenizer(tokenizer, recorded)
    if found.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {found.vocab_size} tokens, the model {model.config.vocab_size}: "
            "pass --tokenizer with the one it was trained with"
        )
    if operators is None:
        return model, found
    G = load_operators(operators)
    return model.with_operators(G) if model.config.operator == "constant" else constant_operator_model(model, G), found


def _tokenizer(named: str | None, recorded: dict | None) -> Tokenizer:
    if named is None:
        return tokenizer_from_config(recorded)
    found = ByteTokenizer() if named == "byte" else SentencePieceTokenizer(named)
    if recorded is not None and recorded.get("fingerprint", found.fingerprint) != found.fingerprint:
        raise ValueError(f"--tokenizer={named} is not the one of the checkpoint; its ids would mean other text")
    return found
