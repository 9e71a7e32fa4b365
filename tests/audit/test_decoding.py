"""Agreement of two decodes on logits small enough to read."""

import numpy as np
import pytest

from plga_jax.audit.decoding import agreement

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
