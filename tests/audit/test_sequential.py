"""Block against sequential scoring on toy decoders whose answer is known."""

import numpy as np
import pytest

from plga_jax.audit.sequential import block_against_sequential
from plga_jax.audit.toys import GlobalSum, RunningMean

V = 11
causal_decoder, global_decoder = RunningMean(vocab_size=V), GlobalSum(vocab_size=V)


def windows(seed=0, count=3, length=8):
    return np.random.default_rng(seed).integers(1, V, size=(count, length))


def log_softmax(x):
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


def test_prefix_consistent_decoder_scores_the_same_either_way():
    found = block_against_sequential(causal_decoder, windows(), batch=5)
    assert found.block.shape == (3, 7)
    # The same float64 sums, in another batch row: measured 0.
    np.testing.assert_allclose(found.block, found.sequential, rtol=1e-13)
    assert abs(found.gap) < 1e-14


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_every_entry_is_the_call_it_claims_to_be(batch):
    tokens = windows(1)
    found = block_against_sequential(global_decoder, tokens, batch=batch)
    whole = log_softmax(global_decoder(tokens[:, :-1]))
    for window in range(tokens.shape[0]):
        for t in range(tokens.shape[1] - 1):
            label = tokens[window, t + 1]
            prefix = log_softmax(global_decoder(tokens[window : window + 1, : t + 1]))
            assert found.sequential[window, t] == pytest.approx(-prefix[0, -1, label], rel=1e-12)
            assert found.block[window, t] == pytest.approx(-whole[window, t, label], rel=1e-12)
    assert found.largest_gap > 0.1
    assert found.gap == pytest.approx(found.block.mean() - found.sequential.mean(), rel=1e-12)
    # The last row of a window has no later token to profit from.
    np.testing.assert_array_equal(found.block[:, -1], found.sequential[:, -1])


def test_all_calls_have_one_shape_and_never_see_the_last_token():
    seen = []

    def spy(tokens):
        seen.append(tokens.copy())
        return causal_decoder(tokens)

    tokens = np.full((2, 6), 3)
    tokens[:, -1] = 9
    block_against_sequential(spy, tokens, batch=4)
    assert {call.shape for call in seen} == {(4, 5)}
    assert all(call.dtype == np.int32 and (call != 9).all() for call in seen)


def test_scores_are_float64_even_from_large_float32_logits():
    logits = np.array([1e4, 1e4 - 3.0, 0.0], dtype=np.float32)
    found = block_against_sequential(lambda x: np.broadcast_to(logits, (*x.shape, 3)), np.array([[1, 2, 1]]))
    # Token 1 is 3 below the best: nll = 3 + log1p(e^-3), exact to float64.
    assert found.block[0, 1] == pytest.approx(3 + np.log1p(np.exp(-3.0)), rel=1e-14)
    assert found.block.dtype == np.float64


@pytest.mark.parametrize(
    ("tokens", "kwargs", "message"),
    [
        (np.ones(5, int), {}, "at least 2 ids"),
        (np.ones((2, 1), int), {}, "at least 2 ids"),
        (np.array([[1, 0, 2]]), {}, "equal to pad_id=0"),
        (np.ones((1, 3), int), {"batch": 0}, "batch=0"),
    ],
)
def test_bad_input_is_refused(tokens, kwargs, message):
    with pytest.raises(ValueError, match=message):
        block_against_sequential(causal_decoder, tokens, **kwargs)
