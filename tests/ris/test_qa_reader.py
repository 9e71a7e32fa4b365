"""The reader of the benchmark against calls of the model without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from ris_jax import density
from ris_jax.block_shared import BlockSharedGeometry
from ris_jax.geometry import PublishedGeometry
from ris_jax.patterns import DenseGeometry
from ris_jax.probe import ProbeGeometry
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
    return CacheReader(model, DenseGeometry(length=model.config.context), **options)


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
    with pytest.raises(ValueError, match="141 tokens and 20 for a question exceed the model's context of 160"):
        mine.prefill(np.zeros(141, np.int32))


def test_real_density_is_counted(model):
    context = np.random.default_rng(0).integers(0, 50, 50).astype(np.int32)
    published = PublishedGeometry(length=160, local=7, anchors=4, seeds=2)
    structural = published.replace(mode="structural")
    fixed = {"local": 8, "anchors": 4}
    shared = BlockSharedGeometry(length=160, budget=8, block=4, tile=8, **fixed)
    alone = density.fixed_pairs(50, **fixed) / density.causal_pairs(50)
    for geometry, expected in (
        (DenseGeometry(length=160), 1.0),
        (published, density.real_share(published.chunks(10, 0, 50), 50)),
        (structural, density.real_share(structural.chunks(10, 0, 50), 50)),
        (ProbeGeometry(length=160, block=4, blocks=0, stride=8, **fixed), alone),
        (shared.replace(budget=0), alone),
    ):
        mine = CacheReader(model, geometry, chunk=16, reserve=100)
        # float32 counts of few pairs are exact, their quotient is not.
        assert mine.real_density(mine.prefill(context)) == pytest.approx(expected, rel=1e-6)
    for geometry in (shared, ProbeGeometry(length=160, block=4, blocks=2, stride=8, recall=((1, 0),), **fixed)):
        mine = CacheReader(model, geometry, chunk=16, reserve=100)
        assert alone < mine.real_density(mine.prefill(context)) < 1
