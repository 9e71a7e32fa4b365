"""The toy decoders are what they are said to be."""

import numpy as np
import pytest

from plga_jax.audit.toys import GlobalSum, RunningMean

TOKENS = np.random.default_rng(1).integers(1, 13, size=(3, 7))


@pytest.mark.parametrize("toy", [RunningMean, GlobalSum])
def test_maps_tokens_to_logits_deterministically(toy):
    logits = toy(vocab_size=13)(TOKENS)
    assert logits.shape == (3, 7, 13) and logits.dtype == np.float64
    np.testing.assert_array_equal(logits, toy(vocab_size=13)(TOKENS))
    assert (logits != toy(vocab_size=13, seed=1)(TOKENS)).all()


def test_a_running_mean_is_prefix_consistent_bit_for_bit():
    toy = RunningMean(vocab_size=13)
    whole = toy(TOKENS)
    for length in range(1, 8):
        np.testing.assert_array_equal(toy(TOKENS[:, :length]), whole[:, :length])


def test_a_global_sum_is_as_long_as_its_input_but_every_row_sees_the_last_token():
    toy = GlobalSum(vocab_size=13)
    whole = toy(TOKENS)
    for length in range(1, 7):
        prefix = toy(TOKENS[:, :length])
        assert prefix.shape == (3, length, 13)
        assert (prefix != whole[:, :length]).all()


@pytest.mark.parametrize("toy", [RunningMean, GlobalSum])
def test_padding_on_the_right_changes_no_real_row(toy):
    toy = toy(vocab_size=13)
    padded = np.pad(TOKENS, [(0, 0), (0, 3)])
    np.testing.assert_array_equal(toy(padded)[:, :7], toy(TOKENS))
    marked = np.where(padded == 0, 5, padded)
    np.testing.assert_array_equal(toy(marked, padded != 0)[:, :7], toy(TOKENS))


def test_padding_enters_the_sum_when_asked_to():
    toy = GlobalSum(vocab_size=13, gram_rows="all")
    np.testing.assert_array_equal(toy(TOKENS), GlobalSum(vocab_size=13)(TOKENS))
    padded = np.pad(TOKENS, [(0, 0), (0, 3)])
    assert (toy(padded)[:, :7] != toy(TOKENS)).all()


def test_sums_by_hand():
    toy = GlobalSum(vocab_size=3)
    np.testing.assert_allclose(toy([[1, 2, 0]])[0, 0], 2 * toy.table[1] + toy.table[2], rtol=1e-15)
    np.testing.assert_allclose(RunningMean(vocab_size=3)([[1, 2]])[0, 1], toy.table[1:].mean(0), rtol=1e-14)


@pytest.mark.parametrize(
    ("fields", "message"), [({"vocab_size": 1}, "vocab_size=1"), ({"vocab_size": 3, "gram_rows": "some"}, "'some'")]
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GlobalSum(**fields)
