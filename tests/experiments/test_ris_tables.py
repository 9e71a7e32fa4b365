"""The binary that recomputes the published RIS numbers, on made-up results of the released layout."""

import csv
import datetime
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from ris_jax.published_results import COLUMNS

ROOT = pathlib.Path(__file__).parents[2]
RELEASED = ROOT.parent / "shared" / "data" / "ris_results"
SEEDS = (1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)


def call(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "experiments.ris_tables", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def runs(clock, mode, rope, window, densities, seeds, questions, model="qwen2"):
    """Rows of a grid; question q of a run with S seeds is answered right if (q + S) mod 3 is not 0."""
    for density, count in itertools.product(densities, seeds):
        next(clock)
        for question in range(1, questions + 1):
            given = "B" if (question + count) % 3 else "C"
            moment = datetime.datetime(2026, 5, 1) + datetime.timedelta(seconds=next(clock))
            answer = ("B", given, int(given == "B"), 0.5, bool(window))
            yield dict(zip(COLUMNS, (moment, model, rope, mode, window, density, count, question, *answer)))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    clock = itertools.count()
    main = [*runs(clock, "stochastic", "yarn", 0, [0.01], [2], 7)]
    for window in (4096, 8192, 16384, 32768, 65536):
        main += runs(clock, "stochastic", "linear", window, [0.01, 0.05], [1, 10, 50], 7)
    main += runs(clock, "stochastic", "yarn", 65536, [0.01, 0.05], SEEDS, 7)
    main += runs(clock, "stochastic", "yarn", 4096, [0.01], [1, 10], 7, model="tinyllama")
    control = [*runs(clock, "stochastic", "linear", 0, [0.05], [2], 32)]
    control += runs(clock, "stochastic", "yarn", 32768, [0.01], SEEDS, 32)
    control += runs(clock, "structural", "yarn", 32768, [0.0], SEEDS, 32)
    files = {
        "results_64.csv": main,
        "results_baseline_32k.csv": control,
        "results_structural_64.csv": runs(clock, "structural", "yarn", 65536, [0.0, 0.04], SEEDS, 7),
        "results_structural_sweet_spot_64.csv": runs(
            clock, "structural", "yarn", 65536, [0.001, 0.005], [50, 100, 150, 200], 7
        ),
    }
    for name, rows in files.items():
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return folder


def test_writes_tables_and_figures(results, tmp_path):
    out = tmp_path / "out"
    done = call(f"--results={results}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == [
        "grid_32k.png",
        "grid_64k.png",
        "share_of_pairs.png",
        "tables.json",
        "tables.md",
    ]
    assert all((out / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in ("grid_32k", "grid_64k"))
    text = (out / "tables.md").read_text()
    assert text in done.stdout
    found = json.loads((out / "tables.json").read_text())
    # Of questions 1 to 7, three are answered wrong with 2, 20, 50 … seeds, two otherwise.
    assert found["grid_64k"]["structural yarn"]["0.05"] == {str(seeds): 4 if seeds % 3 == 2 else 5 for seeds in SEEDS}
    assert found["headline"]["64k without documents"]["right"] == 4
    assert found["answer_key"]["64k"] == {"A": 0, "B": 7, "C": 0, "D": 0, "E": 0}
    # 1 and 10 seeds leave the same questions wrong.
    assert found["tinyllama"]["identical_in_every_configuration"] == 7
    assert found["setup"]["median_s"]["65536"] == 2
    for title in ("## Exact McNemar tests", "## Right answers against computed pairs", "| structural yarn 5 %"):
        assert title in text


def test_a_folder_without_results_is_one_line(tmp_path):
    done = call(f"--results={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot read") and done.stderr.count("\n") == 1


def test_released_results_are_read(tmp_path):
    if not RELEASED.is_dir():
        pytest.skip("the released results are not here")
    done = call(f"--results={RELEASED}", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    for line in ("| 64k structural, best        | 42/64 | 65.62 | 53.4–76.1     |", "16 beat always B", "84.5 %"):
        assert line in done.stdout
