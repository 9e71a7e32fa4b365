"""GGUF files as files: metadata as Python values, and tensors as they are stored."""

import os
import pathlib
import struct
from typing import Any

from gguf import GGUFReader


def open_gguf(path: str | os.PathLike[str]) -> GGUFReader:
    """Opens a file; its tensors are mapped, not read.

    Args:
        path: of the file.

    Returns:
        The reader of the `gguf` library.

    Raises:
        ValueError: the file is missing, damaged or not a GGUF.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; name a .gguf file.")
    try:
        return GGUFReader(path)
    # What a cut or foreign file runs into depends on where it ends.
    except (ValueError, IndexError, KeyError, TypeError, OSError, OverflowError, struct.error) as error:
        raise ValueError(f"{path} is damaged or not a GGUF file ({error}); download it again.") from None


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """The fields of a file.

    Args:
        reader: of `open_gguf`.

    Returns:
        Names -> numbers, text, or lists of them.
    """
    return {name: field.contents() for name, field in reader.fields.items()}
