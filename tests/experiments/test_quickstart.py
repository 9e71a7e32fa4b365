"""The quickstart from end to end with tiny sizes: every file, every number, and what is refused."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TINY = (
    "model.num_layers=1",
    "model.num_heads=2",
    "model.head_width=4",
    "model.residual_units=1",
    "model.blocks_per_unit=1",
    "data.context=17",
    "train.batch_size=4",
    "train.eval_every=2",
    "train.eval_batches=1",
)


def call(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "experiments.quickstart", "--noprogress", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of three steps on a made-up text."""
    folder = tmp_path_factory.mktemp("quickstart")
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"Sentence {i} of a small text, {i * i % 97} words long.\n" for i in range(400)))
    out = folder / "out"
    settings = [f"--set={setting}" for setting in TINY]
    done = call(f"--out={out}", f"--corpus={corpus}", "--steps=3", "--seed=5", *settings)
    assert done.returncode == 0, done.stderr
    return done, out


def numbers(value):
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def test_report_json_has_the_promised_schema(finished):
    _, out = finished
    record = json.loads((out / "report.json").read_text())
    for name in ("collapsed", "uncollapsed"):
        run = record[name]
        assert run["steps"] == 3
        for key in ("eta_max", "m_A", "m_G", "rank_one_ratio", "val_loss", "block_minus_sequential"):
            assert isinstance(run[key], float), key
        assert run["m_A"] == max(run["layers"]["m_A"]) and 0 < run["m_A"] < 2
        # Three steps leave a uniform guess over 262 ids nearly as it was.
        assert abs(run["val_loss"] - math.log(262)) < 2
    assert (record["collapsed"]["eta_max"], record["uncollapsed"]["eta_max"]) == (2e-2, 1e-3)
    for decode in (record["decode"], record["decode_uncollapsed"]):
        assert list(decode) == ["none", "kv", "kv_g", "constant_g"]
        for way in decode.values():
            assert way["tokens_per_s"] > 0 and 0 <= way["agree_with_none"] <= 1 and way["min_margin"] >= 0
        assert decode["none"]["agree_with_none"] == 1 and decode["none"]["max_logit_dev"] == 0
    assert record["seconds"] > 1
    assert all(math.isfinite(number) for number in numbers(record))


def test_claims_that_fail_say_so_everywhere(finished):
    """Three steps collapse nothing, and the report must not pretend."""
    done, out = finished
    claims = json.loads((out / "report.json").read_text())["claims"]
    first = next(claim for claim in claims if "collapses every layer" in claim["statement"])
    assert first["holds"] is False
    text = (out / "report.md").read_text()
    assert text.count("**does not hold**") == sum(not claim["holds"] for claim in claims)
    for claim in claims:
        assert claim["measured"].replace("|", "\\|") in text and claim["criterion"].replace("|", "\\|") in text
    assert text in done.stdout
    assert "seed 5" in text and "jax" in text


def test_metrics_and_figures(finished):
    _, out = finished
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for name in ("collapsed", "uncollapsed"):
        mine = [line for line in lines if line["run"] == name]
        assert [line["step"] for line in mine] == [0, 1, 2, 3]
        assert {"m_A.0", "m_G.0", "rank_one_ratio.0", "cross_head_rms.0"} <= set(mine[0]) & set(mine[-1])
        assert all("loss" in line for line in mine[1:])
    # The same weights, so the same probe before the first step.
    first, second = (next(line for line in lines if line["run"] == name) for name in ("collapsed", "uncollapsed"))
    assert first["m_A.0"] == second["m_A.0"]
    for figure in ("loss_and_order", "spectra", "operators_collapsed", "operators_uncollapsed"):
        assert (out / f"{figure}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--corpus=/no/such/text"], "/no/such/text"), (["--set=depth=3"], "depth")],
)
def test_bad_input_ends_in_one_line(tmp_path, arguments, message):
    done = call(f"--out={tmp_path / 'out'}", *arguments)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert message in line and "Traceback" not in line
    assert not (tmp_path / "out").exists()
