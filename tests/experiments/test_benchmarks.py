"""The benchmark runs and writes what it measured; no assertion is about speed."""

import json
import math
import subprocess
import sys

import pytest

from experiments.benchmarks import harness
from plga_jax.audit.report import markdown_table


@pytest.mark.slow
def test_tiny_run_writes_json_and_markdown(tmp_path):
    command = [sys.executable, "-m", "experiments.benchmarks.pldr", "--preset=tiny", "--length=8", "--batch=1"]
    command += ["--decode_rounds=2", "--train_rounds=2", "--threads=1", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "pldr.json").read_text())
    ways = {"none", "kv", "kv_g", "constant_g"}
    assert set(result["timings"]) >= ways | {"prefill_kv_g", "train_float32", "train_bfloat16"}
    numbers = [row[key] for row in result["timings"].values() for key in ("wall", "best", "cpu")]
    assert all(math.isfinite(n) and n > 0 for n in numbers)
    assert set(result["first_call_s"]) == set(result["timings"])
    assert result["threads"] == 1
    # Every kernel of the layers and the head is read, once: 2 layers of width 64, head of 262 tokens.
    weights = 4 * (2 * (4 * 64 * 64 + 3 * 64 * 170) + 64 * 262)
    row = result["timings"]["constant_g"]
    assert row["read_gb_per_s"] * row["wall"] * 1e9 == pytest.approx(weights, rel=0.2)
    assert row["read_gb_per_s"] * row["wall"] * 1e9 > weights
    assert "| kv_g" in (tmp_path / "pldr.md").read_text()


@pytest.mark.parametrize("flag", ["--preset=huge", "--threads=none", "--length=100000"])
def test_bad_flags_end_with_one_line(flag):
    command = [sys.executable, "-m", "experiments.benchmarks.pldr", "--preset=tiny", flag]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert flag.partition("=")[2].strip() in done.stderr


def test_interleave_takes_turns_and_stops_in_time():
    order = []
    tasks = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = harness.interleave(tasks, rounds=3)
    assert order == list("ababab")
    assert all(0 <= t.best <= t.wall for t in timings.values())
    order.clear()
    harness.interleave(tasks, rounds=9, seconds=0.0)
    assert order == list("abab")


def test_table_is_markdown():
    assert markdown_table(("a", "b"), [("x", 1.23456), ("yy", 2)]).splitlines() == [
        "| a  | b     |",
        "| -- | ----- |",
        "| x  | 1.235 |",
        "| yy | 2     |",
    ]
