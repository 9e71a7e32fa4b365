"""What the configs of all architectures share: a JSON round trip, and names for dtypes."""

import dataclasses
import json
from typing import Self

import jax.numpy as jnp

from plga_jax.array_types import DType


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and choices of a model: frozen, hashable, with a JSON round trip."""

    def to_json(self) -> str:
        """The config as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A config from the text of `to_json`.

        Args:
            text: JSON object.

        Returns:
            The config.

        Raises:
            ValueError: not a JSON object, unknown or missing fields.
        """
        fields = json.loads(text)
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or set(fields) - known:
            found = sorted(set(fields) - known) if isinstance(fields, dict) else type(fields).__name__
            raise ValueError(f"Not a {cls.__name__}: {found}; known fields are {', '.join(sorted(known))}.")
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(f"Not a {cls.__name__}: {error}.") from None


def float_name(field: str, dtype: DType) -> str:
    """The name of a dtype that models compute in.

    Args:
        field: what it is for, for the error.
        dtype: anything numpy takes for a dtype.

    Returns:
        "bfloat16", "float32" or "float64".

    Raises:
        ValueError: any other dtype.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f"{field} = {dtype!r} is not a dtype; try 'float32' or 'bfloat16'.") from None
    if found not in (jnp.dtype(n) for n in ("bfloat16", "float32", "float64")):
        # float16 cannot hold the floor 1e-9 of A_LM, nor the activations of many pretrained models.
        raise ValueError(f"{field} = {found.name} must be bfloat16, float32 or float64.")
    return found.name
