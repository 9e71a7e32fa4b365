"""Agreement of two decodes: by hand on logits small enough to read, and on a small model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.audit.decoding import agreement, forced_logits, operator_drift
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.models.pldr_transforms import constant_operator_model, operators_of

REFERENCE = np.array([[3.0, 1.0, 0.0], [0.0, 2.0, 1.5]])


def test_equal_decodes():
    found = agreement(REFERENCE, REFERENCE)
    assert found.token_agreement == 1
    assert found.largest_deviation == 0
    assert found.smallest_margin == 0.5
    assert found.certified


def test_margin_is_of_the_decode_under_test_and_deviation_over_all_ids():
    logits = REFERENCE + np.array([[0.0, 0.0, -0.7], [0.0, 0.0, 0.6]])
    found = agreement(logits, REFERENCE)
    assert found.token_agreement == 0.5
    assert found.largest_deviation == pytest.approx(0.7)
    assert found.smallest_margin == pytest.approx(0.1)
    assert not found.certified


def test_a_certified_pair_has_equal_argmax():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, 20))
    margin = agreement(logits, logits).smallest_margin
    noise = rng.uniform(-1, 1, size=logits.shape) * 0.49 * margin
    found = agreement(logits, logits + noise)
    assert found.certified
    assert found.token_agreement == 1


def test_tokens_may_come_from_free_runs():
    found = agreement(REFERENCE, REFERENCE, tokens=[0, 1, 2, 2], reference_tokens=[0, 1, 2, 1])
    assert found.token_agreement == 0.75


def test_ties_have_margin_zero_and_are_never_certified():
    found = agreement(np.array([[1.0, 1.0]]), np.array([[1.0, 1.0]]))
    assert found.smallest_margin == 0
    assert not found.certified


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((REFERENCE, REFERENCE[:1]), "differ in shape"),
        ((REFERENCE[:, :1], REFERENCE[:, :1]), "two ids"),
        ((np.zeros((0, 3)), np.zeros((0, 3))), "at least one step"),
        ((REFERENCE, REFERENCE, [0, 1], [0]), "one shape"),
    ],
)
def test_bad_input_is_refused(args, message):
    with pytest.raises(ValueError, match=message):
        agreement(*args)


@pytest.fixture
def model(x64):
    """A small float64 model: in float32 the power stage turns a rounding into 1e-4 of G."""
    sizes = {"vocab_size": 23, "num_layers": 2, "num_heads": 2, "head_width": 4, "residual_units": 1}
    config = PLDRConfig(**sizes, context=16, param_dtype="float64", compute_dtype="float64")
    return PLDR(config, rngs=nnx.Rngs(0))


PROMPT, CONTINUATION = np.array([3, 7, 11, 2]), np.array([5, 1, 20, 9, 13])
# Float64 sums in another order, amplified by the power stage: measured 2e-13 on logits of order 1.
CLOSE = {"rtol": 0, "atol": 1e-10}


def test_forced_logits_without_cache_are_those_of_each_prefix(model):
    found = forced_logits(model, PROMPT, CONTINUATION, cache="none")
    for i in (0, 3):
        prefix = np.concatenate([PROMPT, CONTINUATION[:i]])
        logits, _ = model(jnp.asarray(prefix[None], jnp.int32))
        np.testing.assert_allclose(found[i], logits[0, -1], **CLOSE)


def test_a_generated_pad_id_is_a_real_token(model):
    """Without padding told apart from tokens, row 2 would be row 1 again."""
    forced = np.array([5, 0, 20])
    none, kv_g = (forced_logits(model, PROMPT, forced, cache=c) for c in ("none", "kv_g"))
    whole = jnp.asarray(np.concatenate([PROMPT, forced[:-1]])[None], jnp.int32)
    wanted, _ = model(whole, segment_ids=jnp.ones_like(whole), num_segments=1)
    np.testing.assert_allclose(none[2], wanted[0, -1], **CLOSE)
    assert np.abs(kv_g[2] - kv_g[1]).max() > 1e-2


def test_forced_logits_with_frozen_operators(model):
    none, kv, kv_g = (forced_logits(model, PROMPT, CONTINUATION, cache=c) for c in ("none", "kv", "kv_g"))
    frozen = operators_of(model, jnp.asarray(PROMPT, jnp.int32))
    whole = jnp.asarray(np.concatenate([PROMPT, CONTINUATION[:-1]])[None], jnp.int32)
    wanted, _ = model(whole, operators=frozen)
    np.testing.assert_allclose(kv_g, wanted[0, len(PROMPT) - 1 :], **CLOSE)
    np.testing.assert_allclose(kv, kv_g, **CLOSE)
    # An untrained model's operators depend on the tokens after the prompt, so only row 0 agrees.
    np.testing.assert_allclose(none[0], kv_g[0], **CLOSE)
    assert (np.abs(none[1:] - kv_g[1:]).max(axis=1) > 1e-5).all()
    constant = constant_operator_model(model, frozen)
    np.testing.assert_allclose(forced_logits(constant, PROMPT, CONTINUATION, cache="none"), kv_g, **CLOSE)


@pytest.mark.parametrize(
    ("prompt", "continuation", "cache", "message"),
    [
        ([], [1], "kv", "at least one token"),
        ([1], [], "kv", "at least one token"),
        ([1], [1], "g", "'none', 'kv' or 'kv_g'"),
    ],
)
def test_bad_forcing_is_refused(prompt, continuation, cache, message):
    with pytest.raises(ValueError, match=message):
        forced_logits(None, np.array(prompt), np.array(continuation), cache=cache)


class TestDrift:
    PROMPT, CONTINUATION = [3, 1, 4, 1, 5], [9, 2, 6]

    @pytest.fixture
    def model(self):
        config = PLDRConfig(vocab_size=23, num_layers=2, num_heads=2, head_width=4, residual_units=2, context=32)
        return PLDR(config, rngs=nnx.Rngs(0))

    def test_is_the_distance_of_the_operators_of_each_prefix(self, model):
        found = operator_drift(model, self.PROMPT, self.CONTINUATION)
        frozen = np.asarray(operators_of(model, jnp.asarray(self.PROMPT)), np.float64)
        for i in range(3):
            prefix = jnp.asarray(self.PROMPT + self.CONTINUATION[: i + 1])
            G = np.asarray(operators_of(model, prefix), np.float64)
            size = np.sqrt(np.mean(G**2, axis=(1, 2, 3)))
            distance = np.sqrt(np.mean((G - frozen) ** 2, axis=(1, 2, 3)))
            # float32 operators of order 1 whose sums run in another order; the distances are of order 0.1.
            np.testing.assert_allclose(found.relative_rms[:, i], distance / size, rtol=1e-4)
            np.testing.assert_allclose(found.largest[:, i], np.abs(G - frozen).max(axis=(1, 2, 3)), rtol=1e-4)
        assert found.relative_rms.min() > 1e-3

    def test_needs_tokens_and_finite_operators(self, model):
        with pytest.raises(ValueError, match="at least one token"):
            operator_drift(model, self.PROMPT, [])
        broken = jax.tree.map(lambda x: x * jnp.nan, model)
        with pytest.raises(ValueError, match="not finite"):
            operator_drift(broken, self.PROMPT, self.CONTINUATION)
