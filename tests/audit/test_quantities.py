"""Quantities: labels from docstrings, summaries by hand, files that are only read back whole and for the same key."""

import math

import numpy as np
import pytest

from plga_jax.audit import spectra
from plga_jax.audit.quantities import Quantity, label_of, load, store

VALUES = np.array([[1.0, 2.0, 3.0], [4.0, np.inf, np.nan]])


def quantity(**changes) -> Quantity:
    fields = {"name": "A.s", "label": "measured", "values": VALUES, "axes": ("layer", "head")}
    return Quantity(**fields | changes)


def test_label_is_the_first_word_of_the_docstring():
    assert label_of(spectra.rank_one_ratio) == "measured"

    def limit():
        """*Bound*: never above 1."""

    def mute():
        """Some number."""

    assert label_of(limit) == "bound"
    with pytest.raises(ValueError, match="mute does not say"):
        label_of(mute)


def test_summary_counts_what_is_undefined_and_keeps_infinities():
    assert quantity().summary == {"instances": 6, "min": 1.0, "median": 3.0, "max": math.inf, "undefined": 1}
    assert quantity(values=VALUES[:1]).summary == {"instances": 3, "min": 1.0, "median": 2.0, "max": 3.0}
    assert quantity(values=[[math.nan]]).summary == {"instances": 1, "undefined": 1}


def test_medians_by_layer_stand_in_the_order_of_layers():
    assert quantity().per_layer == [2.0, math.inf]
    assert quantity(values=VALUES.T, axes=("head", "layer")).per_layer == [2.0, math.inf]
    assert quantity(values=[1.0, 2.0], axes=("layer",)).per_layer is None


def test_json_has_no_numbers_that_json_has_not():
    found = quantity().as_dict()
    assert found["summary"]["max"] == "inf"
    assert found["median_by_layer"] == [2.0, "inf"]
    assert quantity(values=None, note="one head").as_dict()["note"] == "one head"


def test_what_was_not_taken_must_say_why():
    with pytest.raises(ValueError, match="must say why"):
        quantity(values=None)
    with pytest.raises(ValueError, match="do not have the axes"):
        quantity(axes=("layer",))
    with pytest.raises(ValueError, match="guessed"):
        quantity(label="guessed")


class TestFile:
    FOUND = (
        Quantity(name="A.s", label="measured", values=VALUES, axes=("layer", "head"), note="of A"),
        Quantity(name="A.rank", label="proxy", values=np.array([1, 2]), axes=("layer",)),
        Quantity(name="B.s", label="bound", values=None, note="one head"),
    )

    def test_round_trip_is_exact(self, tmp_path):
        store(tmp_path / "a.npz", "key", self.FOUND)
        found = load(tmp_path / "a.npz", "key")
        for expected, one in zip(self.FOUND, found, strict=True):
            assert (one.name, one.label, one.axes, one.note) == (
                expected.name,
                expected.label,
                expected.axes,
                expected.note,
            )
            np.testing.assert_array_equal(one.values, expected.values)
        assert found[1].values.dtype == np.int64
        assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]

    def test_two_writes_are_the_same_bytes(self, tmp_path):
        for name in ("a.npz", "b.npz"):
            store(tmp_path / name, "key", self.FOUND)
        assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()

    @pytest.mark.parametrize("damage", ["missing", "other key", "truncated", "foreign"])
    def test_anything_else_is_taken_again(self, tmp_path, damage):
        path = tmp_path / "a.npz"
        if damage != "missing":
            store(path, "key", self.FOUND)
        if damage == "truncated":
            path.write_bytes(path.read_bytes()[:-40])
        if damage == "foreign":
            np.savez(path, x=np.ones(2))
        assert load(path, "another" if damage == "other key" else "key") is None

    def test_names_must_differ(self, tmp_path):
        with pytest.raises(ValueError, match="names must differ"):
            store(tmp_path / "a.npz", "key", self.FOUND[:1] * 2)
