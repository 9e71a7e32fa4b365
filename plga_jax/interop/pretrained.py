"""A pretrained decoder and its tokenizer, by whatever name."""

import os

from plga_jax.array_types import DType
from plga_jax.interop.fetch import resolve
from plga_jax.interop.gguf import load_gguf
from plga_jax.interop.hf import load_decoder
from plga_jax.models.decoder import Decoder
from plga_jax.tokenizers_hf import HFTokenizer


def load_any(
    name: str | os.PathLike | None = None,
    *,
    compute_dtype: DType | None = None,
    param_dtype: DType | None = None,
    **overrides,
) -> tuple[Decoder, HFTokenizer]:
    """Reads a model and its tokenizer.

    Args:
        name: a `.gguf` file, a Hugging Face folder, "owner/name" on the hub, or None for the default model; see
            `fetch.resolve`.
        compute_dtype: of matrix products; None is float32.
        param_dtype: of the weights in memory; None chooses as `load_decoder` and `load_gguf` do.
        **overrides: fields of `DecoderConfig` that weights do not decide.

    Returns:
        Model and tokenizer.

    Raises:
        ValueError: nothing is there, or it is not a model of this family.
    """
    path = resolve(name)
    options = {"compute_dtype": compute_dtype, "param_dtype": param_dtype, **overrides}
    if path.is_file():
        return load_gguf(path, **options)
    model = load_decoder(path, **options)
    return model, HFTokenizer.from_path(path, eos_id=next(iter(model.config.eos_ids), None))


def load_tokenizer(name: str | os.PathLike | None = None) -> HFTokenizer:
    """Reads a tokenizer alone: documents can be measured before their model is loaded.

    Args:
        name: as for `load_any`.

    Returns:
        The tokenizer.

    Raises:
        ValueError: nothing is there, or it does not name the id that ends a text.
    """
    path = resolve(name)
    return HFTokenizer.from_gguf(path) if path.is_file() else HFTokenizer.from_path(path)
