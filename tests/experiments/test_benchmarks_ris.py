"""The benchmark of reading long texts: a whole run on a tiny model, and what its ratios say."""

import json

import pytest

from experiments.benchmarks import ris
from experiments.benchmarks.ris import PEER, Point
from tests.experiments.ris_model import start, write_model

LENGTHS = {"short": 64, "middle": 128, "read": 256, "long": 0, "longest": 0}


@pytest.mark.slow
def test_tiny_run_writes_json_and_markdown(tmp_path):
    write_model(tmp_path / "model")
    out = tmp_path / "out"
    sizes = [f"--{name}={length}" for name, length in LENGTHS.items()]
    flags = ["--rounds=1", "--chunk=64", "--decode=1", "--nodivergence", f"--out={out}", *sizes]
    process = start("benchmarks.ris", f"--model={tmp_path / 'model'}", *flags)
    text, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    result = json.loads((out / "ris.json").read_text())
    assert list(result["points"]) == [str(p) for p in ris.points(**LENGTHS, peer=False)]
    assert all(point["peak_rss_mb"] >= point["prefill_rss_mb"] > 50 for point in result["points"].values())
    assert text.strip() == (out / "ris.md").read_text().strip()
    assert "probe over dense, 256 tokens read" in text


def point(prefill: float, rate: float, rss: float = 500.0) -> dict:
    return {
        "prefill_seconds": prefill,
        "prefill_cpu_seconds": 2 * prefill,
        "decode_tokens_per_s": rate,
        "prefill_rss_mb": rss,
    }


def test_ratios_compare_like_with_like():
    lengths = {"short": 1, "middle": 2, "read": 4, "long": 8, "longest": 16}
    found = {p: point(10.0, 30.0) for p in ris.points(**lengths, peer=True)}
    found[Point("dense", 8)] = point(60.0, 30.0)
    found[Point("probe", 8)] = point(15.0, 30.0)
    found[Point("probe", 16)] = point(30.0, 15.0, rss=3500.0)
    found[Point(PEER, 4)] = point(8.0, 10.0)
    told = {ratio.what: ratio for ratio in ris.ratios(found, **lengths)}
    assert told["probe over dense, 8 tokens read"].value == 4 and told["probe over dense, 8 tokens read"].met
    assert told["dense float32 over transformers, 4 tokens read"].value == 0.8
    assert not told["dense float32 over transformers, 4 tokens read"].met
    assert told["probe tokens/s after 16 over after 2"].value == 0.5
    rss = told["probe peak RSS of reading 16, GB"]
    assert rss.value == pytest.approx(3.5) and not rss.met
    assert all(ratio.cpu in (None, ratio.value) for ratio in told.values())


def test_medians_keep_the_most_memory():
    laps = [point(1.0, 30.0, rss=400.0), point(9.0, 10.0, rss=900.0), point(2.0, 20.0, rss=500.0)]
    assert ris.medians(laps) == point(2.0, 20.0, rss=900.0)


@pytest.mark.parametrize("flag", ["--middle=100", "--short=0"])
def test_lengths_must_be_whole_chunks(flag, tmp_path):
    process = start("benchmarks.ris", flag, f"--out={tmp_path}")
    _, err = process.communicate(timeout=120)
    assert process.returncode and "must be whole chunks of 1024" in err and "Traceback" not in err
