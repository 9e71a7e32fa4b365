"""Test-wide settings: strict promotion, eight simulated devices, float64 on request."""

import os
import pathlib
import signal
import sys

# Most of a test's time is XLA compiling a tiny model. Unoptimised machine code is made in half the time and computes
# the same program; XLA_FLAGS= (empty) in the environment runs the suite on optimised code instead. Before JAX is
# imported.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import chex
import jax
import numpy as np
import pytest
from absl import flags

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")

GOLDENS = pathlib.Path(__file__).parent / "goldens"


def pytest_configure(config):
    """Parses absl's flags once (to their defaults): grain reads one of them when it starts workers.

    A run started in the background of a shell ignores Ctrl-C, and so would every process it starts; tests send it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])


@pytest.fixture(autouse=True)
def fresh_trace_counter():
    """chex counts traces by a function's name; tests must not see each other's."""
    chex.clear_trace_counter()


_MAPPINGS = 20_000
"""Of 65,530 that Linux gives a process by default."""


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Forgets compiled programs when there are many: each holds memory mappings, and XLA crashes when they run out."""
    yield
    try:
        with open("/proc/self/maps", "rb") as maps:
            count = sum(1 for _ in maps)
    except OSError:
        return
    if count > _MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def x64():
    """Runs the test in float64; goldens and oracles are compared there."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def golden():
    """Loads one golden file of `tests/goldens` by name, as a dict of arrays."""
    cache = {}

    def load(name: str) -> dict[str, np.ndarray]:
        if name not in cache:
            with np.load(GOLDENS / f"{name}.npz") as file:
                cache[name] = {key: file[key] for key in file.files}
        return cache[name]

    return load
