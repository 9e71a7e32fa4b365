"""A model with each layer's weights in arrays of their own is the same model; one with another config shares them."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.models.pldr import PLDR, PLDRConfig


@pytest.mark.parametrize("operator", ["learned", "constant"])
def test_unstacked_computes_the_same(operator, x64):
    config = PLDRConfig(
        vocab_size=37,
        num_layers=3,
        num_heads=2,
        head_width=4,
        residual_units=2,
        context=16,
        operator=operator,
        param_dtype="float64",
        compute_dtype="float64",
    )
    model = PLDR(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 11), 1, 37)

    @jax.jit
    def run(model):
        logits, out = model(tokens, collect=("G_LM", "E"))
        filled, cache = model.prefill(tokens[:, :8], model.init_cache(2, 16))
        extended, cache = model.extend(tokens[:, 8:], cache)
        return logits, out, filled, extended, cache

    unstacked = model.unstacked()
    assert unstacked.layers[1].ffn.down.kernel.shape == model.layers.ffn.down.kernel.shape[1:]
    assert unstacked.layers[1].ffn.gate_up.kernel.shape == (8, 2 * config.hidden_width)
    assert isinstance(model.layers, nnx.Module) and not isinstance(model.layers, nnx.List)
    # Loop and scan are fused differently: rounding of float64 only.
    chex.assert_trees_all_close(run(unstacked), run(model), rtol=1e-10, atol=1e-12)
    assert unstacked.num_parameters == model.num_parameters
    assert unstacked.unstacked() is unstacked


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_an_unstacked_decoder_computes_the_same(qkv_bias, x64):
    config = DecoderConfig(
        vocab_size=37,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_width=4,
        model_width=8,
        hidden_width=12,
        context=16,
        qkv_bias=qkv_bias,
        param_dtype="float64",
        compute_dtype="float64",
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 11), 1, 37)

    @jax.jit
    def run(model):
        filled, cache = model.prefill(tokens[:, :8], model.init_cache(2, 16))
        return filled, *model.extend(tokens[:, 8:], cache)

    unstacked = model.unstacked()
    assert unstacked.layers[1].attention.joined.kernel.shape == (8, (4 + 2 + 2) * 4)
    # Loop and scan are fused differently: rounding of float64 only.
    chex.assert_trees_all_close(run(unstacked), run(model), rtol=1e-10, atol=1e-12)
    assert unstacked.num_parameters == model.num_parameters


def test_unstacked_layers_are_not_sliced_from_a_stack():
    """The reason it exists: no copy of a layer's weights in the compiled decoding step."""
    model = PLDR(PLDRConfig.preset("tiny"), rngs=nnx.Rngs(0))
    D, F = model.config.model_width, model.config.hidden_width

    def compiled(model):
        cache = model.init_cache(1, 8)
        return jax.jit(lambda m, t, c: m.extend(t, c)).lower(model, jnp.ones((1, 1), jnp.int32), cache).compile()

    def weight_slices(model):
        lines = compiled(model).as_text().splitlines()
        return [line for line in lines if "dynamic-slice" in line and f"{F},{D}]" in line]

    assert weight_slices(model)
    assert not weight_slices(model.unstacked())


def test_another_config_reads_by_it_and_shares_the_weights():
    config = DecoderConfig(
        vocab_size=19, num_layers=2, num_heads=2, num_kv_heads=1, head_width=4, model_width=8, hidden_width=12,
        context=16,
    )  # fmt: skip
    model, tokens = Decoder(config, rngs=nnx.Rngs(0)), jnp.arange(6, dtype=jnp.int32)[None]
    turned = dataclasses.replace(config, rope=dataclasses.replace(config.rope, base=10.0), context=32)
    other = model.with_config(turned)
    assert (model.config, other.config) == (config, turned)
    for mine, shared in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True):
        assert mine.unsafe_buffer_pointer() == shared.unsafe_buffer_pointer()
    chex.assert_trees_all_equal(other(tokens)[0], Decoder(turned, rngs=nnx.Rngs(0))(tokens)[0])
    assert not jnp.array_equal(other(tokens)[0], model(tokens)[0])
