"""The phase diagram on a tiny grid: labels, intervals, what is kept on disk, and what is refused."""

import contextlib
import dataclasses
import json
import math
import shutil

import numpy as np
import pytest

from experiments import phase_grid, phase_grid_report
from experiments.configs.pldr import make_run
from experiments.phase_grid import Criterion, Grid, run_grid
from experiments.phases import Interrupted, Study
from plga_jax.audit.quantities import load
from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.data import Corpus

TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. "
CORPUS = Corpus(name="two cities", documents=[TEXT * 12, TEXT[::-1] * 12, TEXT.upper() * 12])
RUN = make_run(
    "tiny",
    ["train.steps=4", "train.batch_size=2", "data.context=17", "data.validation=0.34", "train.sample_every=0",
     "model.num_heads=2", "model.head_width=4", "model.metric_width=8", "model.residual_units=2"],
    vocab_size=262,
)  # fmt: skip
GRID = Grid(
    study=Study(run=RUN, pairs=1, scored=1, prompts=1, prompt_length=4),
    rates=(1e-3, 1e-2),
    warmups=(1,),
    seeds=(0, 1),
    prefix_pairs=2,
    steps_per_call=2,
)


@pytest.fixture(autouse=True, scope="module")
def compile_once():
    """One compilation for all grids here: they differ in rates, warm-ups and folders alone."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_ensemble_steps", "make_eval_step"):
            make = getattr(phase_grid, name)
            patch.setattr(phase_grid, name, lambda *args, name=name, make=make: made.setdefault(name, make(*args)))
        yield


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    out = tmp_path_factory.mktemp("grid")
    points = run_grid(GRID, CORPUS, ByteTokenizer(), out, progress=False)
    return points, out


def test_every_run_is_measured(ran):
    points, _ = ran
    assert [(p["learning_rate"], p["warmup"]) for p in points] == GRID.points
    for point in points:
        assert np.shape(point["train_loss"]) == (2, 4)
        assert len(point["members"]) == 2
        for run in point["members"]:
            assert run["label"] == "uncollapsed"
            # Row 0 of the four shared rows has one key to attend to and never moves.
            assert 0.5 < run["historical_fraction"] <= 0.75
            assert len(run["m_A"]) == 2 and 0 < run["val_loss"] < 7
    first, second = (np.array(point["train_loss"]) for point in points)
    # The first update has rate 0, so rates show from the third loss on; seeds from the first.
    np.testing.assert_array_equal(first[:, :2], second[:, :2])
    assert (first[:, 3] != second[:, 3]).all()
    assert first[0, 0] != first[1, 0]


def test_instances_are_kept_beside_the_numbers(ran):
    points, out = ran
    path = out / "points" / "eta_0.01_warmup_1.npz"
    kept = {found.name: found for found in load(path, phase_grid.digest(points[1]["setting"]))}
    assert load(path, "another setting") is None
    members = points[1]["members"]
    np.testing.assert_array_equal(kept["train_loss"].values, points[1]["train_loss"])
    np.testing.assert_array_equal(kept["runs"].values, [0, 1])
    np.testing.assert_array_equal(np.median(kept["m_A"].values, -1), [run["m_A"] for run in members])
    np.testing.assert_array_equal(
        np.median(kept["rank_one_ratio"].values, (-2, -1)), [run["rank_one_ratio"] for run in members]
    )
    changed = kept["historical_changed"].values
    assert changed.shape == (2, 2, 4) and (changed[..., 0] == 0).all()
    np.testing.assert_allclose(changed.mean((1, 2)) / 262, [run["historical_fraction"] for run in members])


def test_a_point_without_its_instances_is_run_again(ran, monkeypatch, tmp_path):
    points, out = ran
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    (tmp_path / "points" / "eta_0.01_warmup_1.npz").write_bytes(b"half a file")
    asked = []
    init = phase_grid.Ensemble.init
    monkeypatch.setattr(phase_grid.Ensemble, "init", lambda *args: asked.append(args) or init(*args))
    assert run_grid(GRID, CORPUS, ByteTokenizer(), tmp_path, progress=False) == points
    assert len(asked) == 1


def test_diverged_runs_are_recorded(tmp_path):
    far = dataclasses.replace(GRID, rates=(1e30,))
    (point,) = run_grid(far, CORPUS, ByteTokenizer(), tmp_path, progress=False)
    assert point["members"] == [{"val_loss": None, "label": "diverged"}] * 2
    # The first update has rate 0: two losses are sound.
    assert all(loss[0] is not None and loss[-1] is None for loss in point["train_loss"])
    assert run_grid(far, CORPUS, ByteTokenizer(), tmp_path, progress=False) == [point]
    text = phase_grid_report.write(tmp_path, far, [point], seconds=1, cpu_seconds=2)
    assert "2 diverged | – " in text and "**Only one phase occurs.** 2 diverged." in text


def test_points_are_read_back_and_runs_repeat_bit_for_bit(ran, tmp_path, monkeypatch):
    points, out = ran
    one = dataclasses.replace(GRID, rates=(1e-2,))
    again = run_grid(one, CORPUS, ByteTokenizer(), tmp_path, progress=False)
    assert json.dumps(again[0]) == json.dumps(points[1])
    monkeypatch.setattr(phase_grid.Ensemble, "init", lambda *_: pytest.fail("trained again"))
    assert json.dumps(run_grid(GRID, CORPUS, ByteTokenizer(), out, progress=False)) == json.dumps(points)


def test_a_stop_keeps_what_is_finished(tmp_path, monkeypatch):
    class Stop:
        by, calls = "SIGINT", 0

        @property
        def requested(self):
            self.calls += 1
            return self.calls > 3  # after the first call of the second point

    monkeypatch.setattr(phase_grid, "stop_on_signal", lambda: contextlib.nullcontext(Stop()))
    with pytest.raises(Interrupted, match=r"SIGINT at η 0.01, T_w 1"):
        run_grid(GRID, CORPUS, ByteTokenizer(), tmp_path, progress=False)
    assert [path.name for path in (tmp_path / "points").glob("*.json")] == ["eta_0.001_warmup_1.json"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"criterion": Criterion(below=0.5)}, "criterion"), ({"seeds": (3, 4)}, "seeds")],
)
def test_another_setting_does_not_mix(ran, changes, named):
    _, out = ran
    with pytest.raises(ValueError, match=f"another {named}: choose another --out"):
        run_grid(dataclasses.replace(GRID, **changes), CORPUS, ByteTokenizer(), out, progress=False)


def test_labels():
    label = Criterion(below=0.1).label
    assert label([0.01, 0.09], 1.0) == "collapsed"
    assert label([0.01, 0.1], 1.0) == "mixed"
    assert label([0.2, 0.1], 1.0) == "uncollapsed"
    assert label([0.01, 0.01], math.inf) == label([math.nan, 0.01], 1.0) == "diverged"


def test_report_counts_and_draws(ran, tmp_path):
    points, _ = ran
    fallen = json.loads(json.dumps(points))
    for run in fallen[1]["members"]:
        run |= {"label": "collapsed", "m_A": [1e-4, 3e-4]}
    fallen[1]["members"].append({"val_loss": math.nan, "label": "diverged"})
    rows = phase_grid_report.summary(fallen)
    assert rows[1]["labels"] == {"collapsed": 2, "diverged": 1}
    assert rows[1]["m_A"]["mean"] == 3e-4 and rows[1]["m_A"]["runs"] == 2
    assert rows[0]["val_loss"]["least"] <= rows[0]["val_loss"]["low"] <= rows[0]["val_loss"]["high"]
    text = phase_grid_report.write(tmp_path, GRID, fallen, seconds=1, cpu_seconds=2)
    assert "Both phases occur. 2 collapsed, 2 uncollapsed, 1 diverged." in text
    assert "0.0003 [0.0003, 0.0003] " in text
    assert phase_grid_report.summary([{**fallen[0], "members": fallen[0]["members"] * 3}])[0]["m_A"]["runs"] == 6
    cell = {"mean": 2.0, "low": 1.5, "high": 2.5, "least": 1.0, "largest": 3.0}
    assert phase_grid_report._interval(cell) == "2 [1.5, 2.5] (1 … 3)"
    assert (tmp_path / "phase_diagram.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "phase_diagram.json").read_text())["points"][1]["labels"]["collapsed"] == 2


@pytest.mark.parametrize(
    "changes", [{"rates": ()}, {"rates": (0.0,)}, {"warmups": (4,)}, {"seeds": (1, 1)}, {"steps_per_call": 3}]
)
def test_bad_grids_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes)).replace("steps_per_call", "whole calls of 3")):
        dataclasses.replace(GRID, **changes)
