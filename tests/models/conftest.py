"""The small published model, in any dtype."""

import functools

import jax
import numpy as np
import pytest

from plga_jax.interop.pldr import config_from_tensors, model_from_tensors
from plga_jax.models.pldr import PLDR


@pytest.fixture
def published(golden):
    """Makes the model of `weights_small`, float64 unless told; fields of the config by keyword."""

    def make(dtype: str = "float64", weights: str = "weights_small", **fields):
        tensors = golden(weights)
        known = {"context": 64, "param_dtype": dtype, "compute_dtype": dtype} | fields
        return model_from_tensors(tensors, config_from_tensors(tensors, **known))

    return make


@pytest.fixture
def distance():
    """The largest absolute difference of two arrays."""
    return lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max())


@functools.partial(jax.jit, static_argnames=("collect", "num_segments", "last_only"))
def run(model, tokens, **kwargs):
    """A jitted call, since op-by-op dispatch is slower than compiling these models once."""
    return model(tokens, **kwargs)


prefill = jax.jit(PLDR.prefill, static_argnames="last_only")
extend = jax.jit(PLDR.extend)
