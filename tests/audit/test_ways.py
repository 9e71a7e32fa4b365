"""The four ways of decoding on a model whose operators do not depend on the input, and on one whose do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.audit.ways import WAYS, decode_four_ways
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig

PROMPTS = np.random.default_rng(0).integers(1, 23, size=(3, 8)).tolist()
CONFIG = PLDRConfig(vocab_size=23, num_layers=2, num_heads=2, head_width=4, residual_units=2, context=32)


def collapsed(model):
    """The same model with metric learners that give one A for every input: the last norm has γ = 0 and a fixed β."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    flat = dict(nnx.to_flat_state(params))
    (scale,) = [path for path in flat if path[-1] == "norm_scale"]
    (bias,) = [path for path in flat if path[-1] == "norm_bias"]
    flat[scale] = flat[scale].replace(jnp.zeros_like(flat[scale][...]))
    shift = jax.random.normal(jax.random.key(1), flat[bias][...].shape)
    flat[bias] = flat[bias].replace(shift)
    return nnx.merge(graphdef, nnx.from_flat_state(list(flat.items())), rest)


def test_a_model_with_constant_operators_decodes_alike_in_every_way():
    found = decode_four_ways(collapsed(PLDR(CONFIG, rngs=nnx.Rngs(0))), PROMPTS, new_tokens=6)
    assert set(found) == set(WAYS)
    for way, decode in found.items():
        assert decode.tokens.shape == (3, 6)
        assert decode.free == 1.0 and decode.forced.token_agreement == 1.0, way
        # One float32 rounding of the same sums in another order: measured 6e-7 on logits of order 1.
        assert decode.forced.largest_deviation < 1e-5
        assert decode.tokens_per_s > 0


def test_a_fresh_model_deviates_once_its_operators_are_frozen():
    found = decode_four_ways(PLDR(CONFIG, rngs=nnx.Rngs(0)), PROMPTS, new_tokens=6, repeats=2)
    assert found["none"].forced.largest_deviation == 0 and found["none"].free == 1.0
    assert found["kv_g"].forced.largest_deviation > 1e-4
    # The first prompt's own operator serves it as its cache does, and serves no other prompt.
    kv_g, constant_g = found["kv_g"].tokens, found["constant_g"].tokens
    np.testing.assert_array_equal(constant_g[0], kv_g[0])
    assert (constant_g[1:] != kv_g[1:]).any(axis=1).all()
    np.testing.assert_array_equal(found["kv"].tokens, found["kv_g"].tokens)


def test_bad_prompts_are_refused():
    with pytest.raises(ValueError, match="one length"):
        decode_four_ways(None, [[1, 2], [1]], new_tokens=1)
    with pytest.raises(ValueError, match="one length"):
        decode_four_ways(None, [], new_tokens=1)
