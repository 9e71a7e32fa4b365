"""The cumulative Gram: causal for every refresh interval, whichever way its tokens are read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.models.pldr_transforms import constant_operator_model, operators_of
from tests.models.conftest import extend, prefill, run

T = 19
CONFIG = PLDRConfig(
    vocab_size=23, num_layers=2, num_heads=2, head_width=4, residual_units=2, context=32,
    param_dtype="float64", compute_dtype="float64",
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(1, 23, size=(2, T)).astype(np.int32)
EVERY = [1, 3, 8, 100]

pytestmark = pytest.mark.usefixtures("x64")


def make(every, **fields):
    return PLDR(dataclasses.replace(CONFIG, gram_refresh=every, **fields), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("every", EVERY)
def test_a_block_gives_what_its_prefixes_give(every):
    model = make(every)
    block = np.asarray(run(model, jnp.asarray(TOKENS))[0])
    for end in range(1, T + 1):
        padded = np.where(np.arange(T) < end, TOKENS, 0)
        prefix = np.asarray(run(model, jnp.asarray(padded), last_only=True)[0])[:, 0]
        np.testing.assert_allclose(block[:, end - 1], prefix, atol=1e-9)


@pytest.mark.parametrize("every", EVERY)
def test_later_tokens_change_nothing_before_them(every):
    model, other = make(every), TOKENS.copy()
    other[:, 11:] = 1 + other[:, 11:] % 22
    before, after = (np.asarray(run(model, jnp.asarray(tokens))[0]) for tokens in (TOKENS, other))
    np.testing.assert_array_equal(before[:, :11], after[:, :11])
    assert np.abs(before[:, 11:] - after[:, 11:]).max() > 1e-3
    ordinary = make(None)
    before, after = (np.asarray(run(ordinary, jnp.asarray(tokens))[0]) for tokens in (TOKENS, other))
    assert np.abs(before[:, 1:11] - after[:, 1:11]).max() > 1e-6


@pytest.mark.parametrize("every", EVERY)
def test_no_gradient_comes_from_later_tokens(every):
    model = make(every)
    # Each token of the row is another id, so that a row of the embedding is a place in time.
    tokens = jnp.arange(1, 13)[None]
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def early(params):
        return nnx.merge(graphdef, params, rest)(tokens)[0][0, :5].sum()

    by_token = np.abs(np.asarray(jax.jit(jax.grad(early))(params)["embedding"][...])).max(axis=1)
    assert (by_token[1:6] > 0).all()
    np.testing.assert_array_equal(by_token[6:], 0)


@pytest.mark.parametrize("every", EVERY)
def test_one_layer_is_the_ordinary_model_on_the_prefix_of_each_refresh(every):
    """With one layer queries and keys do not depend on operators, so rows can be checked one by one."""
    model, ordinary = make(every, num_layers=1), make(None, num_layers=1)
    found = np.asarray(run(model, jnp.asarray(TOKENS[:1]))[0])[0]
    prefixes = [jnp.asarray(np.where(np.arange(T) <= t, TOKENS[:1], 0)) for t in range(T)]
    for t in range(T):
        G = run(ordinary, prefixes[every * (t // every)], collect=("G_LM",))[1].G_LM
        expected = run(ordinary, prefixes[t], operators=G, last_only=True)[0][0, 0]
        np.testing.assert_allclose(found[t], expected, atol=1e-10, err_msg=str(t))


def test_gradients_are_those_of_the_rows_one_by_one():
    model, ordinary = make(1, num_layers=1), make(None, num_layers=1)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(6, 23)))
    tokens = jnp.asarray(TOKENS[:1, :6])

    def whole(params, graphdef, rest):
        return (nnx.merge(graphdef, params, rest)(tokens)[0][0] * weights).sum()

    def one_by_one(params, graphdef, rest):
        model = nnx.merge(graphdef, params, rest)
        return sum((model(tokens[:, : t + 1], last_only=True)[0][0, 0] * weights[t]).sum() for t in range(6))

    grads = []
    for function, each in ((whole, model), (one_by_one, ordinary)):
        graphdef, params, rest = nnx.split(each, nnx.Param, ...)
        grads.append(jax.jit(jax.grad(lambda p, f=function, g=graphdef, r=rest: f(p, g, r)))(params))
    found, expected = (dict(nnx.to_flat_state(grad)) for grad in grads)
    assert found.keys() == expected.keys()
    for path, value in found.items():
        scale = np.abs(np.asarray(expected[path][...])).max()
        np.testing.assert_allclose(value[...], expected[path][...], atol=1e-10 * max(scale, 1.0), err_msg=str(path))


@pytest.mark.parametrize(("every", "kind"), [(1, "kv_g"), (3, "kv_g"), (3, "kv")])
def test_a_prefix_read_at_once_and_the_rest_in_pieces_is_the_block(every, kind):
    model = make(every)
    block = np.asarray(run(model, jnp.asarray(TOKENS))[0])
    for k in (1, 4, T - 1):
        logits, cache = prefill(model, jnp.asarray(TOKENS[:, :k]), model.init_cache(2, 32, kind=kind))
        found, at = [np.asarray(logits)], k
        for size in (1, 1, 4, 4, 4, 1, 4):
            piece = TOKENS[:, at : at + size]
            if not piece.size:
                break
            logits, cache = extend(model, jnp.asarray(piece), cache)
            found.append(np.asarray(logits))
            at += piece.shape[1]
        np.testing.assert_allclose(np.concatenate(found, axis=1), block[:, :at], atol=1e-9)


@pytest.mark.parametrize("every", [1, 3])
def test_padding_and_packing_change_nothing(every):
    model = make(every)
    alone = [np.asarray(run(model, jnp.asarray(row[None]))[0])[0] for row in (TOKENS[0, :7], TOKENS[1, :9])]
    padded = np.zeros((2, 14), np.int32)
    padded[0, 2:9], padded[1, 1:5], padded[1, 7:12] = TOKENS[0, :7], TOKENS[1, :4], TOKENS[1, 4:9]
    found = np.asarray(run(model, jnp.asarray(padded))[0])
    np.testing.assert_allclose(found[0, 2:9], alone[0], atol=1e-10)
    np.testing.assert_allclose(np.concatenate([found[1, 1:5], found[1, 7:12]]), alone[1], atol=1e-10)
    packed = np.concatenate([TOKENS[0, :7], TOKENS[1, :9], [0, 0]])[None]
    segments = np.array([[1] * 7 + [2] * 9 + [0, 0]])
    found = np.asarray(run(model, jnp.asarray(packed), segment_ids=jnp.asarray(segments), num_segments=3)[0])[0]
    np.testing.assert_allclose(found[:7], alone[0], atol=1e-10)
    np.testing.assert_allclose(found[7:16], alone[1], atol=1e-10)


def test_rows_of_a_batch_do_not_meet_and_vmap_agrees():
    model = make(3)
    block = run(model, jnp.asarray(TOKENS))[0]
    mapped = jax.jit(jax.vmap(lambda row: model(row[None])[0][0]))(jnp.asarray(TOKENS))
    np.testing.assert_allclose(block, mapped, atol=1e-10)


def test_operators_are_never_held_all_at_once():
    """1,024 operators of two heads of width 64 would be 33 MB, and the chain that makes them many times that."""
    length = 1024
    config = PLDRConfig(
        vocab_size=23, num_layers=1, num_heads=2, head_width=64, residual_units=1, context=length, gram_refresh=1
    )
    with jax.enable_x64(False):
        model = nnx.eval_shape(lambda: PLDR(config, rngs=nnx.Rngs(0)))
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        compiled = jax.jit(lambda model, tokens: model(tokens, last_only=True)[0]).lower(model, tokens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * 2 * 64 * 64 * 4


def test_what_means_nothing_is_refused():
    for every in (0, -3):
        with pytest.raises(ValueError, match=f"gram_refresh = {every} must be at least 1"):
            make(every)
    with pytest.raises(ValueError, match="constant operators are made from no Gram"):
        make(2, operator="constant")
    model = make(2)
    G = jnp.zeros((2, 2, 4, 4))
    with pytest.raises(ValueError, match="cannot be frozen"):
        model.prefill(jnp.asarray(TOKENS), model.init_cache(2, 32), operators=G)
    constant = constant_operator_model(model, operators_of(model, jnp.asarray(TOKENS[0])))
    assert constant.config.gram_refresh is None
