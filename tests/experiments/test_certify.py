"""The trial of certificates on a small model: counts against their definitions, and what is kept on disk."""

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx

from experiments import certify_report, certify_run
from experiments.certify_run import Trial, run_trial
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.data import Corpus
from tests.audit.test_ways import collapsed

TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. "
CORPUS = Corpus(name="two cities", documents=[TEXT * 2, TEXT.upper() * 2])
TRIAL = Trial(prompts=3, prompt_tokens=10, new_tokens=8, validation=0.5, repeats=1)


@pytest.fixture(scope="module")
def model():
    config = PLDRConfig(vocab_size=262, num_layers=2, num_heads=2, head_width=4, residual_units=1, context=32)
    return PLDR(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def ran(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("trial")
    return run_trial(TRIAL, model, ByteTokenizer(), CORPUS, out, progress=False), out


def test_no_certificate_is_wrong(ran):
    found, _ = ran
    counts = certify_report.summary(found)
    assert counts["tokens"] == 24 and counts["wrong"] == 0
    assert counts["certified"] + counts["alarms"] == 24
    # A fresh model's operators move: not all is certified, and not everything would stay.
    assert 0 < counts["certified"] < 24 and counts["largest_deviation"] > 1e-3
    for row in found:
        np.testing.assert_array_equal(row["certified"], 2 * np.array(row["bound"]) < np.array(row["margin"]))


def test_a_collapsed_model_is_certified_throughout(model, tmp_path):
    found = run_trial(TRIAL, collapsed(model), ByteTokenizer(), CORPUS, tmp_path, progress=False)
    counts = certify_report.summary(found)
    assert counts["certified"] == counts["same"] == 24
    assert counts["exceeded"] == 0


def test_counts_by_hand():
    row = {
        "certified": [True, True, False, False],
        "same": [True, False, True, False],
        "deviation": [0.0, 2.0, 0.5, 0.1],
        "bound": [1.0, 1.0, 1.0, 1.0],
    }
    counts = certify_report.summary([row])
    assert (counts["wrong"], counts["alarms"], counts["false_alarms"], counts["exceeded"]) == (1, 2, 1, 1)


def test_prompts_are_kept_and_another_trial_does_not_mix(ran, model, monkeypatch):
    found, out = ran
    lines = (out / "prompts.jsonl").read_text().splitlines(keepends=True)
    (out / "prompts.jsonl").write_text("".join(lines[:2]) + lines[2][:50])
    again = run_trial(TRIAL, model, ByteTokenizer(), CORPUS, out, progress=False)
    assert [row["bound"] for row in again] == [row["bound"] for row in found]
    monkeypatch.setattr(certify_run, "certify", lambda *_, **__: pytest.fail("certified again"))
    run_trial(TRIAL, model, ByteTokenizer(), CORPUS, out, progress=False)
    with pytest.raises(ValueError, match="another model or trial"):
        run_trial(dataclasses.replace(TRIAL, new_tokens=7), model, ByteTokenizer(), CORPUS, out, progress=False)


def test_report_says_what_is_proved(ran, tmp_path):
    found, _ = ran
    text = certify_report.write(tmp_path, TRIAL, found, subject="a small model")
    assert "checked at both ends" in text and "does not make it cheaper" in text
    assert json.loads((tmp_path / "certify.json").read_text())["wrong"] == 0
    assert (tmp_path / "certify.png").stat().st_size > 10_000


def test_bad_trials_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match="prompts=0"):
        Trial(prompts=0)
    with pytest.raises(ValueError, match="'hope'"):
        Trial(mode="hope")
    with pytest.raises(ValueError, match="give more text"):
        run_trial(dataclasses.replace(TRIAL, prompts=99), model, ByteTokenizer(), CORPUS, tmp_path)
