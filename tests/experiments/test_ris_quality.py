"""The quality binary on a tiny model: it measures, goes on where it stopped, and refuses to mix settings."""

import csv
import io
import json

import numpy as np
import pytest
from matplotlib.image import imread

from experiments import ris_quality_report as report
from plga_jax.train.records import Records
from tests.experiments.ris_model import start, write_model

SIZES = [
    *("--length=512", "--context=384", "--chunk=128", "--bins=64,128", "--positions=32", "--passages=2", "--keys=2"),
    *("--draws=1", "--families=dense,window,probe", "--shares=0.2"),
]


PLACES = (("model", "model"), ("corpus", "text.txt"), ("out", "out"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("quality")
    write_model(root / "model")
    config = json.loads((root / "model" / "config.json").read_text())
    # The text that finds the heads which recall is long in bytes.
    (root / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, 5))) for _ in range(600)]
    (root / "text.txt").write_text(" ".join(words))
    return root


def run(folder, *arguments):
    model, text, out = (f"--{name}={folder / place}" for name, place in PLACES)
    process = start("ris_quality", model, text, out, *SIZES, *arguments)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def first(folder):
    code, out, err = run(folder, "--seeds=0")
    assert code == 0, err
    return out


def test_everything_is_written(first, folder):
    with (folder / "out" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["family"] for row in rows] == ["dense", "window", "probe"]
    dense, window, probe = rows
    assert float(dense["kl"]) == 0 and float(dense["real_share"]) == 1 and dense["context"] == "384"
    assert 0.15 < float(window["real_share"]) <= 0.2 and float(window["kl"]) > 0
    assert 0 < float(probe["real_share"]) <= 0.2 < 0.2 + float(probe["ranking_share"])
    assert len(probe["copy_each"].split()) == 2 and json.loads(probe["geometry"])["kind"] == "probe"
    assert np.mean([float(x) for x in probe["copy_each"].split()]) == pytest.approx(float(probe["copy_nll"]), abs=1e-4)
    text = (folder / "out" / "report.md").read_text()
    assert text.strip() == first.strip() and "| window" in text and "distances 144 to 336" in text
    image = imread(folder / "out" / "quality.png")
    assert image.shape[1] > image.shape[0] > 300 and image.std() > 0.05


def test_it_goes_on_where_it_stopped(first, folder):
    path = folder / "out" / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # As a kill leaves it: the last line cut off.
    path.write_text("".join(lines[:2]) + lines[2][:40])
    code, _, err = run(folder, "--seeds=0")
    assert code == 0, err
    again = path.read_text().splitlines(keepends=True)
    assert again[:2] == lines[:2] and len(again) == 3
    repeated, before = json.loads(again[2]), json.loads(lines[2])
    timed = {"seconds", "cpu_seconds", "compile_seconds"}
    assert {k: v for k, v in repeated.items() if k not in timed} == {k: v for k, v in before.items() if k not in timed}


def test_settings_are_not_mixed(first, folder):
    code, out, err = run(folder, "--seeds=0", "--passages=3")
    assert code == 2 and out == "" and "Traceback" not in err
    assert "holds results of another setting (passages 2): name another folder" in err.splitlines()[-1]


def test_tables_pair_passages_and_keep_the_last_of_equal_rows(first, folder, tmp_path):
    rows = list(Records(folder / "out" / "rows.jsonl"))
    changed = rows[2] | {"copy_each": [x + 0.25 for x in rows[0]["copy_each"]]}
    text = report.write(tmp_path, [*rows, changed])
    (line,) = (line for line in text.splitlines() if line.startswith("| probe"))
    assert "+0.25 (+0.25 … +0.25)" in line
    report.write_csv(tmp_path, [*rows, changed])
    assert len(list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))) == 3


@pytest.mark.slow
def test_ablations_have_answers_without_pfus(folder):
    out = folder / "ablated"
    sizes = ("--families=", "--ablations", "--ablation_shares=0.3", f"--out={out}")
    code, text, err = run(folder, "--seeds=0", *sizes)
    assert code == 0, err
    with (out / "results.csv").open(newline="") as file:
        rows = {row["family"]: row for row in csv.DictReader(file)}
    union, half = rows["stochastic, one softmax"], rows["stochastic, half and half"]
    assert union["geometry"] == half["geometry"] and union["kl"] == half["kl"] and union["nll"] == half["nll"]
    assert union["copy_each"] != half["copy_each"] and union["passkey_nll"] != half["passkey_nll"]
    assert "| stochastic, half and half" in text
