"""Reports: tables that parse, verdicts that follow, files that are whole and valid."""

import json

import numpy as np
import pytest

from plga_jax.audit import report


def test_table_has_one_aligned_cell_per_column():
    text = report.markdown_table(("name", "x"), [("a|b", 0.123456), ("long name", [1e-7, 2.0])])
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) == set("| -")
    assert r"a\|b" in lines[2] and "0.1235" in lines[2]
    assert "1e-07, 2" in lines[3]
    with pytest.raises(ValueError, match="2 cells"):
        report.markdown_table(("a", "b"), [("only one",)])


def test_verdict_follows_the_numbers():
    claim = {"statement": "s", "criterion": "x < 1", "measured": "x = 2"}
    text = report.claims_table([report.Claim(**claim, holds=False), report.Claim(**claim, holds=True)])
    assert text.count("**does not hold**") == 1
    assert text.count("**holds**") == 1


def test_json_takes_numpy_and_refuses_what_json_cannot_hold(tmp_path):
    path = tmp_path / "report.json"
    value = {"a": np.float32(0.5), "b": np.arange(3), "c": np.bool_(True), "η": "1e-2"}
    report.write_json(path, value)
    assert json.loads(path.read_text()) == {"a": 0.5, "b": [0, 1, 2], "c": True, "η": "1e-2"}
    with pytest.raises(ValueError):
        report.write_json(path, {"a": float("nan")})
    with pytest.raises(TypeError, match="no JSON form"):
        report.write_json(path, {"a": object()})
    # A refused value leaves the old file and nothing else.
    assert json.loads(path.read_text())["a"] == 0.5
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_environment_names_the_machine_and_the_versions():
    import jax

    found = report.environment()
    assert found["jax"] == jax.__version__
    assert found["cores"] >= 1
    json.dumps(found)
