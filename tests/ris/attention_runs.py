"""Attention runs of the published program, an oracle for any mask, and caches filled with given keys."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.caches import KVCache
from plga_jax.ops.attention import attention
from ris_jax.geometry import PublishedGeometry

NAMES = ("dec_sto", "dec_str", "dec_str_pad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One golden run.

    Attributes:
        name: of it.
        geometry: its geometry.
        q, k, v: [1, T + 6, N or K, H] float32.
        scale: of the scores.
        schedules: name -> lengths after each decoding step.
        chunk: rows [a, b) that were also run as a chunk of their own.
        step: every so many rows of the prefill results are kept.
        data: arrays of the run by name.
    """

    name: str
    geometry: PublishedGeometry
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    schedules: dict
    chunk: tuple
    step: int
    data: dict

    @property
    def whole(self) -> tuple:
        """q, k, v of the window."""
        return tuple(x[:, : self.geometry.length] for x in (self.q, self.k, self.v))

    def short(self, name: str, dtype: str) -> np.ndarray:
        """A result in float16 or bfloat16, as float32; bfloat16 is kept as its bits."""
        result = self.data[f"{name}_{dtype}"]
        if dtype == "bfloat16":
            return (result.astype(np.uint32) << 16).view(np.float32)
        return result.astype(np.float32)


def load(golden, name: str) -> Run:
    """A run of `golden("ris/attention")`."""
    file = golden("ris/attention")
    case = json.loads(str(file["cases"]))[name]
    data = {key.removeprefix(f"{name}/"): value for key, value in file.items() if key.startswith(f"{name}/")}
    return Run(
        name=name,
        geometry=PublishedGeometry(
            mode=case["mode"],
            length=case["T"],
            seeds=case["n_seeds"],
            density=case["density"],
            local=case["w_local"],
            anchors=case["w_global"],
            base_seed=case["base_seed"],
            block_max=case["b_max"],
        ),
        **{x: data[x].swapaxes(1, 2) for x in "qkv"},
        scale=case["scale"],
        schedules=case["schedules"],
        chunk=tuple(case["chunk"]),
        step=case["step"],
        data=data,
    )


def random_inputs(seed: int, batch: int, length: int, heads: int = 4, kv_heads: int = 2, width: int = 8) -> tuple:
    """Random q, k, v, float32 [B, T, N or K, H]."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads)]
    # NumPy: a slice of a JAX array at every step would be a program at every step.
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def oracle(q, k, v, meet: np.ndarray, scale: float) -> np.ndarray:
    """Softmax attention in float64: q [B, T, N, H], k and v [B, S, K, H], meet bool [T, S] -> [B, T, N, H]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.where(meet, scale * np.einsum("btnh,bsnh->bnts", q, k), -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", p / p.sum(axis=-1, keepdims=True), v)


def store(k, capacity: int, dtype=jnp.float32) -> KVCache:
    """An empty store of one layer for keys like k."""
    return KVCache.init(1, k.shape[0], capacity, *k.shape[2:], dtype)


def step(cache, q, k, v, valid=None, *, scale: float, window=None):
    """Appends keys and attends with queries, as a model's layer does: the output, and the cache."""
    valid = jnp.ones(q.shape[:2], bool) if valid is None else valid
    slots = cache.slots(valid)
    cache = cache.append(0, k, v, slots, valid)
    out, cache = cache.attend(0, q, slots, valid, attention, scale=scale, window=window)
    return out, cache.advance(valid)


@jax.jit
def fill(cache, k, v, length):
    """Appends the first `length` keys and values without attending."""
    valid = jnp.broadcast_to(jnp.arange(k.shape[1])[None] < length, k.shape[:2])
    return cache.append(0, k, v, cache.slots(valid), valid).advance(valid)
