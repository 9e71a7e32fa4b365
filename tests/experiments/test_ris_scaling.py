"""Time and memory against length: the binary on a tiny model, and what its report makes of points."""

import json

import pytest

from experiments import ris_scaling_report as report
from ris_jax.density import causal_pairs
from tests.experiments.ris_model import start, write_model


def test_a_point_is_measured_once(tmp_path):
    write_model(tmp_path / "model")
    out = tmp_path / "out"
    flags = ["--lengths=128", "--geometries=probe", "--chunk=64", "--decode=1", f"--out={out}"]
    told = []
    for _ in range(2):
        process = start("ris_scaling", f"--model={tmp_path / 'model'}", *flags)
        text, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        told.append(text)
    assert told[0] == told[1] == (out / "report.md").read_text() + "\n"
    [point] = map(json.loads, (out / "points.jsonl").read_text().splitlines())
    assert point["kind"] == "probe" and point["length"] == 128 and len(point["chunk_seconds"]) == 2
    # Window and anchors of the default geometry cover a text this short.
    assert point["real_share"] == pytest.approx(1, abs=0.02)
    assert point["decode_tokens_per_s"] > 0 and point["peak_rss_mb"] > 50
    assert (out / "scaling.png").stat().st_size > 5000


def test_exponents_are_those_of_the_points():
    points = [
        {
            "kind": "probe",
            "length": n,
            "real_share": 3e4 / causal_pairs(n) * n / 1000,
            "build_seconds": 0.5,
            "recall_seconds": 0.25,
            "prefill_seconds": 1e-6 * n**1.2,
            "prefill_cpu_seconds": 1e-6 * n**1.5,
            "peak_rss_mb": 512.0,
        }
        for n in (1024, 4096, 16384)
    ]
    assert report.exponents(points) == pytest.approx((1.2, 1.5, 1.0, 0.0), abs=1e-6)
    text = report.markdown(points)
    assert "| probe    | 1024 … 16384 | 1.20         | 1.50        | 1.00       | 0.00     |" in text
    assert "0.8" in text and "0.50" in text


def test_unknown_geometries_are_refused(tmp_path):
    process = start("ris_scaling", "--geometries=dense,sparse", f"--out={tmp_path}")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and "['sparse']" in err and "block_shared" in err
