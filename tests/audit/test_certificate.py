"""Certificates: bounds against the deviation itself, and greedy decoding that must say what recomputing says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.audit.certificate import MODES, ROUNDINGS, certify, model_gains
from plga_jax.audit.certified import decode_certified
from plga_jax.audit.decoding import forced_logits
from plga_jax.generate import generate
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from tests.audit.test_ways import collapsed

CONFIG = PLDRConfig(vocab_size=23, num_layers=2, num_heads=2, head_width=4, residual_units=2, context=64)
RNG = np.random.default_rng(0)
PROMPT, CONTINUATION = RNG.integers(1, 23, 12), RNG.integers(1, 23, 16)


@pytest.fixture(scope="module")
def fresh():
    return PLDR(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def nearly(fresh):
    """A model whose operators depend on the input a little: the row map's last norm is turned down a thousandfold."""
    graphdef, params, rest = nnx.split(fresh, nnx.Param, ...)
    flat = dict(nnx.to_flat_state(params))
    (scale,) = [path for path in flat if path[-1] == "norm_scale"]
    (bias,) = [path for path in flat if path[-1] == "norm_bias"]
    flat[scale] = flat[scale].replace(flat[scale][...].at[:, -1].multiply(1e-3))
    flat[bias] = flat[bias].replace(jax.random.normal(jax.random.key(1), flat[bias][...].shape))
    return nnx.merge(graphdef, nnx.from_flat_state(list(flat.items())), rest)


def deviation(model):
    pair = [forced_logits(model, PROMPT, CONTINUATION, cache=cache) for cache in ("none", "kv_g")]
    return np.abs(pair[0].astype(np.float64) - pair[1]).max(axis=-1), pair[1]


@pytest.mark.parametrize("mode", MODES)
def test_bounds_hold_where_operators_hardly_move(nearly, mode):
    found = certify(nearly, PROMPT, CONTINUATION, mode=mode)
    moved, cached = deviation(nearly)
    assert (moved <= found.bound).all()
    assert moved.max() > 1e-4  # there is something to bound
    np.testing.assert_array_equal(found.tokens, cached.argmax(-1))
    best = np.sort(cached.astype(np.float64))
    np.testing.assert_allclose(found.margin, best[:, -1] - best[:, -2], atol=1e-5)
    if mode == "linear":
        # Not only true but of the right size: within a factor of 3 of what happens.
        assert (found.bound - found.bound[0] < 3 * moved.max()).all()
        assert found.certified.mean() > 0


def test_the_proved_mode_holds_on_any_model_and_says_nothing(fresh):
    found = certify(fresh, PROMPT, CONTINUATION, mode="lipschitz")
    assert (deviation(fresh)[0] <= found.bound).all()
    assert not found.certified[1:].any()


@pytest.mark.parametrize("mode", MODES)
def test_equal_operators_are_certified_by_their_margin_alone(fresh, mode):
    found = certify(collapsed(fresh), PROMPT, CONTINUATION, mode=mode)
    logits = forced_logits(collapsed(fresh), PROMPT, CONTINUATION, cache="kv_g")
    rounding = ROUNDINGS * 2.0**-23 * np.abs(logits).max(-1)
    np.testing.assert_allclose(found.bound, rounding, rtol=1e-5)
    assert found.remainder.max() == 0
    assert found.certified.all()


def test_padding_and_batches_change_nothing(nearly):
    plain = certify(nearly, PROMPT, CONTINUATION)
    other = certify(nearly, PROMPT, CONTINUATION, batch=5, width=40)
    np.testing.assert_array_equal(other.tokens, plain.tokens)
    np.testing.assert_allclose(other.bound, plain.bound, rtol=1e-3)


def test_gains_are_above_the_slope_at_random_operators(fresh):
    """Central differences along random directions never pass the proved gain, layer by layer."""
    gains, tokens = model_gains(fresh), jnp.asarray(PROMPT[None])
    G = np.random.default_rng(1).normal(size=(2, 2, 4, 4)).astype(np.float32)
    follow = jax.jit(lambda G: fresh(tokens, operators=G)[0][0])
    for seed in range(4):
        step = np.random.default_rng(seed).normal(size=G.shape).astype(np.float32)
        step *= 1e-2 * (np.arange(2) == seed % 2)[:, None, None, None]
        moved = np.abs(np.asarray(follow(G + step)) - np.asarray(follow(G - step))).max()
        size = np.maximum(np.linalg.norm(G + step, axis=(-2, -1)), np.linalg.norm(G - step, axis=(-2, -1)))
        assert 0 < moved <= gains.bound(np.linalg.norm(2 * step, axis=(-2, -1)), size)
    assert gains.bound(np.zeros((2, 2)), np.ones((2, 2))) == 0


@pytest.mark.parametrize("kind", ["fresh", "nearly", "collapsed"])
def test_certified_decoding_says_what_recomputing_says(fresh, nearly, kind):
    model = {"fresh": fresh, "nearly": nearly, "collapsed": collapsed(fresh)}[kind]
    found = list(decode_certified(model, PROMPT.tolist(), max_new_tokens=24, every=5))
    (expected,) = generate(model, [PROMPT.tolist()], max_new_tokens=24, cache="none").tokens
    assert [token.token for token in found] == expected
    sure = [token.certified for token in found]
    assert all(2 * token.bound < token.margin for token in found if token.certified)
    # A first token is the prompt's own; on a fresh model some are refreshed, on a collapsed one none is.
    assert sure[0] and (all(sure) if kind == "collapsed" else True)
    assert kind != "fresh" or not all(sure)


def test_decoding_ends_at_a_stop_id(fresh):
    tokens = [token.token for token in decode_certified(fresh, PROMPT.tolist(), max_new_tokens=24)]
    stopped = [t.token for t in decode_certified(fresh, PROMPT.tolist(), max_new_tokens=24, stop_ids=[tokens[3]])]
    assert stopped == tokens[: tokens.index(tokens[3]) + 1]


def test_bad_input_is_refused(fresh):
    constant = PLDR(
        PLDRConfig(vocab_size=23, num_layers=1, num_heads=1, head_width=4, operator="constant"), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="constant operators"):
        certify(constant, PROMPT, CONTINUATION)
    with pytest.raises(ValueError, match="constant operators"):
        decode_certified(constant, [1], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"\(0,\)"):
        certify(fresh, [], CONTINUATION)
    with pytest.raises(ValueError, match="'hope'"):
        certify(fresh, PROMPT, CONTINUATION, mode="hope")
    with pytest.raises(ValueError, match="exceed the context of 64"):
        decode_certified(fresh, PROMPT.tolist(), max_new_tokens=60)
