"""A language model small enough to compile in a second, with everything the trainer relies on."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from plga_jax.train.losses import cross_entropy
from plga_jax.train.step import Objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig:
    vocab_size: int = 16
    width: int = 8
    hidden: int = 24
    num_layers: int = 2
    dtype: str = "float32"

    def to_json(self):
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text):
        return cls(**json.loads(text))


class Scale(nnx.Variable):
    """Not trained."""


class Toy(nnx.Module):
    """Predicts the next token from the present one; layers are stacked, weights carry letters."""

    def __init__(self, config: ToyConfig, *, rngs: nnx.Rngs):
        L, V, D, F = config.num_layers, config.vocab_size, config.width, config.hidden

        def param(shape, axes):
            value = jax.random.normal(rngs.params(), shape, config.dtype)
            return nnx.Param(value * jnp.asarray(shape[-2] ** -0.5, config.dtype), axes=axes)

        self.embedding = param((V, D), ("V", "D"))
        self.up = param((L, D, F), ("D", "F"))
        self.down = param((L, F, D), ("F", "D"))
        self.head = param((D, V), ("D", "V"))
        self.bias = nnx.Param(jnp.zeros((V,), config.dtype), axes=("V",))
        self.scale = Scale(jnp.ones((), config.dtype))

    def __call__(self, tokens):
        def layer(x, weights):
            up, down = weights
            return x + jnp.tanh(x @ up) @ down, None

        x = self.scale[...] * self.embedding[...][tokens]
        x, _ = jax.lax.scan(layer, x, (self.up[...], self.down[...]))
        return x @ self.head[...] + self.bias[...][None, None], x


def toy_objective(model, batch, key):
    """Cross entropy and a penalty that is a mean over rows; "poison" makes the loss not finite."""
    del key
    logits, x = model(batch["tokens"][:, :-1])
    tokens = cross_entropy(logits, batch["tokens"][:, 1:])
    if "poison" in batch:
        tokens = dataclasses.replace(tokens, total=tokens.total / jnp.min(batch["poison"]))
    size = jnp.mean(x * x)
    return Objective(tokens=tokens, penalty=0.1 * size, means={"size": size})


class ToyBatches:
    """An endless, resumable stream of batches; rows end in padding of random length."""

    def __init__(self, rows=8, length=7, poisoned=()):
        self.rows, self.length, self.poisoned, self.index = rows, length, poisoned, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.index += 1
        generator = np.random.default_rng(self.index)
        tokens = generator.integers(1, 16, (self.rows, self.length)).astype(np.int32)
        ends = generator.integers(2, self.length + 1, (self.rows, 1))
        batch = {"tokens": np.where(np.arange(self.length)[None] < ends, tokens, 0)}
        if self.poisoned:
            bad = self.index in self.poisoned
            batch["poison"] = np.full((self.rows,), 0.0 if bad else 1.0, np.float32)
        return batch

    def get_state(self):
        return {"index": self.index}

    def set_state(self, state):
        self.index = state["index"]
