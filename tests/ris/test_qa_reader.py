"""The reader of the benchmark against calls of the model without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from ris_jax.qa_reader import CacheReader


@pytest.fixture(scope="module")
def model():
    config = DecoderConfig(
        vocab_size=50,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_width=8,
        model_width=16,
        hidden_width=24,
        context=160,
    )
    return Decoder(config, rngs=nnx.Rngs(0))


@jax.jit
def without_cache(model, tokens):
    return model(tokens)[0][0]


def reader(model, **changes):
    options = {"chunk": 16, "reserve": 100} | changes
    return CacheReader(model, functools.partial(model.init_cache, 1), lambda length: 1.0, **options)


@pytest.mark.parametrize("length", [1, 37])
def test_reads_as_the_model_does_without_a_cache(model, length):
    rng = np.random.default_rng(length)
    context = rng.integers(0, 50, length).astype(np.int32)
    questions = [rng.integers(0, 50, size).astype(np.int32) for size in (1, 7, 70)]
    mine = reader(model)
    state = mine.prefill(context)
    # The first one twice, since a question must leave nothing behind.
    for question in [*questions, questions[0]]:
        wanted = np.asarray(without_cache(model, jnp.asarray(np.concatenate([context, question]))[None]))
        for rows in {1, min(3, len(question)), len(question)}:
            found = mine.logits(state, question, rows)
            assert found.shape == (rows, 50)
            # Float32 sums over keys in another order; logits are of order 0.1.
            np.testing.assert_allclose(found, wanted[-rows:], atol=2e-6)


def test_what_does_not_fit_is_refused(model):
    mine = reader(model, reserve=20)
    state = mine.prefill(np.zeros(5, np.int32))
    with pytest.raises(ValueError, match="21 tokens, 20 are kept"):
        mine.logits(state, np.zeros(21, np.int32))
    with pytest.raises(ValueError, match="exceeds the model's context"):
        mine.prefill(np.zeros(141, np.int32))
