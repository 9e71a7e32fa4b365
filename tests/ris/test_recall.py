"""Recall heads are found by what they attend to."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from ris_jax.recall import recall_heads, recall_scores

CONFIG = DecoderConfig(
    vocab_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_width=32, model_width=32, hidden_width=8,
    context=512, rope={"base": 1e60},
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    """A model whose query head 2 of layer 1 looks for the token it stands on; other heads look at nothing."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda x: 0 * x if x.ndim == 3 else x, state)
    model = nnx.merge(graph, state)
    model.embedding[...] = jax.random.normal(jax.random.key(0), (64, 32))
    # The slowest planes do not turn within the text: a match counts at any distance.
    look = jnp.diag(jnp.where(jnp.arange(32) % 16 > 0, 3.0, 0.0))
    query, key = model.layers.attention.query.kernel, model.layers.attention.key.kernel
    query[...] = query[...].at[1, :, 2 * 32 : 3 * 32].set(look)
    key[...] = key[...].at[1, :, 32:].set(look)
    return model


def test_the_head_that_looks_back_is_found(model):
    text = np.random.default_rng(1).permutation(64)[:40]
    scores = recall_scores(model, text)
    assert scores.shape == (3, 4)
    assert scores.argmax() == 1 * 4 + 2
    # Six occurrences of each token share its attention; the others have 3 of 240 keys by chance.
    assert 0.1 < scores.max() < 0.35
    assert np.delete(scores.ravel(), 6).max() < 0.03
    assert recall_heads(model, text, share=1 / 6) == ((1, 1),)


def test_the_scores_are_attention_weights(model):
    """The layer's weights, formed whole from its own queries and keys, give the same number."""
    text = np.random.default_rng(1).permutation(64)[:40].tolist()
    shuffle = np.random.default_rng(0).permutation
    ids = np.concatenate([text, *(shuffle(text) for _ in range(4)), text])
    x = model.embedding[...][ids]
    x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    look = jnp.where(jnp.arange(32) % 16 > 0, 3.0, 0.0)[None]
    scores = (x * look) @ (x * look).T * 32**-0.5
    weights = jax.nn.softmax(jnp.where(np.tril(np.ones((240, 240), bool)), scores, -jnp.inf), -1)
    rows = np.arange(40)
    expected = sum(weights[200 + rows, rows + offset] for offset in range(3)).mean()
    # Planes at base 1e60 still turn by 0.04 radians within the text.
    chex.assert_trees_all_close(recall_scores(model, text).max(), np.asarray(expected), rtol=0.05)


def test_shares(model):
    text = list(range(40))
    assert recall_heads(model, text, share=0) == ()
    assert len(recall_heads(model, text, share=1)) == 6
    with pytest.raises(ValueError, match="share = 2"):
        recall_heads(model, text, share=2)


def test_long_texts_are_cut_and_short_ones_refused(model):
    text = np.random.default_rng(1).integers(0, 64, 100)
    chex.assert_trees_all_equal(recall_scores(model, text), recall_scores(model, text[: 512 // 6]))
    with pytest.raises(ValueError, match="2 tokens"):
        recall_scores(model, text[:2])
