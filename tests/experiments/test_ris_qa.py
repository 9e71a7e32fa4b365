"""The question binary on a tiny model: every geometry really reads, and tells what it read."""

import csv
import json

import pytest

from ris_jax import density
from ris_jax.geometry import PublishedGeometry
from tests.experiments.ris_model import start, write_model

WINDOW, RESERVE = 1536, 1024
MODES = ("none", "dense", "stochastic", "structural", "probe", "block_shared")
QUESTIONS = [
    {"id": 1, "question": "What is red?", "options": ["the roof", "the door", "not told"], "answer": "A"},
    {"id": 2, "question": "What is old?", "options": ["the cat", "the wall", "not told"], "answer": "B"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("qa")
    write_model(root / "model")
    (root / "questions.json").write_text(json.dumps(QUESTIONS))
    (root / "text.txt").write_text(" ".join(f"Line {i} tells of the roof and the wall." for i in range(40)))
    return root


def run(folder, *arguments):
    places = (("model", "model"), ("questions", "questions.json"), ("context", "text.txt"), ("out", "out"))
    files = [f"--{name}={folder / place}" for name, place in places]
    process = start("ris_qa", *files, f"--windows={WINDOW}", "--scorings=letter", *arguments)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.mark.slow
def test_every_mode_reads_and_is_counted(folder):
    grid = (f"--modes={','.join(MODES[2:])}", "--densities=0.01", "--seeds=2", "--shares=0.5")
    code, out, err = run(folder, *grid)
    assert code == 0, err
    with (folder / "out" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["RIS_Mode"], row["Question_ID"]) for row in rows] == [(mode, q) for mode in MODES for q in "12"]
    shares = {row["RIS_Mode"]: float(row["Real_Density"]) for row in rows}
    length = WINDOW - RESERVE
    for mode in ("stochastic", "structural"):
        geometry = PublishedGeometry(length=WINDOW, mode=mode, density=0.01, seeds=2)
        counted = density.real_share(geometry.chunks(256, 0, length), length)
        assert shares[mode] == pytest.approx(counted, abs=1e-6)
    pairs = density.causal_pairs(length)
    # Window and anchors of each are read for sure; of the rest not all.
    for mode, fixed in (("probe", {"local": 128, "anchors": 32}), ("block_shared", {"local": 256, "anchors": 64})):
        assert density.fixed_pairs(length, **fixed) / pairs < shares[mode] < 1, mode
    assert shares["none"] == 0 and shares["dense"] == 1
    # What is left out changes the predictions; window and anchors of the published geometries hold all of this text.
    logits = {mode: [row["Option_Logits"] for row in rows if row["RIS_Mode"] == mode] for mode in MODES}
    assert len({tuple(logits[mode]) for mode in ("none", "dense", "probe", "block_shared")}) == 4
    assert "| probe" in out and (folder / "out" / "summary.md").read_text().strip() == out[out.index("## ") :].strip()


def test_unknown_modes_are_refused_before_anything_is_read(folder):
    code, _, err = run(folder, "--modes=probes", f"--out={folder / 'other'}", "--model=nowhere")
    assert code == 2 and "Traceback" not in err and not (folder / "other").exists()
    assert "modes ['probes'] are unknown; choose from stochastic" in err.splitlines()[-1]
