"""Interventions on a small model: what must not change, what must, and what is written."""

import json

import numpy as np
import pytest
from flax import nnx

from experiments import interventions_report as report
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.data import Corpus
from tests.audit.test_ways import collapsed

TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. "
CORPUS = Corpus(name="two cities", documents=[TEXT * 2, TEXT.upper() * 2])
CONFIG = PLDRConfig(vocab_size=262, num_layers=2, num_heads=2, head_width=4, residual_units=1, context=32)


@pytest.fixture(scope="module")
def windows():
    return report.cut_windows(CORPUS, ByteTokenizer(), count=3, length=12, validation=0.5)


@pytest.fixture(scope="module")
def model():
    return PLDR(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def found(model, windows):
    return report.measure(model, windows, strengths=[0.0, 1.0], seeds=[0, 1], progress=False)


def test_nothing_changes_at_strength_zero_and_something_does_at_one(found):
    assert len(found["moves"]) == 2 + 2 * 2 * 2
    for move in found["moves"]:
        change = np.abs(np.array(move["loss"]) - found["own"]).max()
        assert (change < 1e-6) == (move["strength"] == 0)
    (projected,) = [m for m in found["moves"] if m["direction"] == "commutant" and m["strength"] == 1]
    assert projected["residual"] < 1e-12
    assert all(m["residual"] > 0.1 for m in found["moves"] if m["direction"] != "commutant")


def test_the_own_loss_is_that_of_the_model(model, windows, found):
    whole = report._logits_under(model, windows[:, :-1], report.deduce(model, windows[:, :-1], ("G_LM",)).G_LM)
    own = model(windows[:, :-1])[0]
    # Float32 sums in another order; 1.2e-5 at most on the machines it was measured on.
    np.testing.assert_allclose(whole, own, atol=5e-5)
    np.testing.assert_allclose(
        found["own"], report.negative_log_likelihood(np.asarray(own), windows[:, 1:]).mean(1), rtol=1e-5
    )


def test_keeping_all_rows_or_having_equal_ones_changes_nothing(model, windows, found):
    by_kept = {row["keep"]: np.array(row["loss"]) for row in found["centroid"]}
    np.testing.assert_allclose(by_kept[4], found["own"], atol=1e-5)
    assert np.abs(by_kept[0] - found["own"]).max() > 1e-4
    equal = report.measure(collapsed(model), windows, strengths=[0.0], seeds=[0], progress=False)
    np.testing.assert_allclose(equal["centroid"][0]["loss"], equal["own"], atol=1e-5)


def test_report(found, tmp_path):
    text = report.write(tmp_path, found, subject="a small model")
    assert "| commutant " in text and "+0.0000 [+0.0000, +0.0000]" in text.replace("-0.0000", "+0.0000")
    assert json.loads((tmp_path / "interventions.json").read_text())["own"] == found["own"]
    assert (tmp_path / "interventions.png").stat().st_size > 10_000


def test_bad_input_is_refused(windows):
    constant = PLDR(
        PLDRConfig(vocab_size=262, num_layers=1, num_heads=1, head_width=4, operator="constant"), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="constant operators"):
        report.measure(constant, windows, strengths=[1.0], seeds=[0])
    with pytest.raises(ValueError, match="give more text"):
        report.cut_windows(CORPUS, ByteTokenizer(), count=1, length=10_000, validation=0.5)
