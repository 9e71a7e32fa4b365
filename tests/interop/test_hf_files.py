"""Hugging Face folders as files: what is read, what is refused, and what a failed write leaves behind."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from plga_jax.interop import hf_files

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float16)}


def test_round_trip_keeps_dtypes(tmp_path):
    tensors = TENSORS | {"c": np.asarray(jnp.arange(3, dtype=jnp.bfloat16)), "d": np.array([True, False])}
    hf_files.write_folder(tmp_path / "new", {"x": [1, None]}, tensors)
    assert hf_files.read_config(tmp_path / "new") == {"x": [1, None]}
    read = hf_files.read_tensors(tmp_path / "new")
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["config.json", "model.safetensors"]


def test_shards_are_joined(tmp_path):
    _shards(tmp_path)
    read = hf_files.read_tensors(tmp_path)
    assert set(read) == {"a", "b"}
    np.testing.assert_array_equal(read["a"], TENSORS["a"])


def test_single_file_wins_over_an_old_index(tmp_path):
    _shards(tmp_path)
    hf_files.write_folder(tmp_path, {}, {"a": np.zeros(1, np.float32)})
    assert set(hf_files.read_tensors(tmp_path)) == {"a"}


def test_failed_write_keeps_the_old_file(tmp_path):
    hf_files.write_folder(tmp_path, {"old": 1}, TENSORS)
    with pytest.raises(TypeError):
        hf_files.write_folder(tmp_path, {"new": object()}, {"a": np.zeros(1, np.float32)})
    assert hf_files.read_config(tmp_path) == {"old": 1}
    assert not list(tmp_path.glob("*.partial"))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        hf_files.read_config(tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        hf_files.read_tensors(tmp_path)
    _shards(tmp_path)
    (tmp_path / "part-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks part-2\.safetensors"):
        hf_files.read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[1]", "a JSON list"), ("\udcff", "not valid JSON")]
)
def test_damaged_config_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        hf_files.read_config(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {"a": 1}}, "no weight_map"),
        ({"weight_map": {"a": "../part-1.safetensors"}}, "not a file of this folder"),
        ({"weight_map": {"a": "part-1.safetensors", "z": "part-1.safetensors"}}, "lists 'z'"),
    ],
)
def test_bad_index_is_refused(tmp_path, index, message):
    _shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        hf_files.read_tensors(tmp_path)


@pytest.mark.parametrize("size", [0, 7, 40, -1])
def test_truncated_weights_are_refused(tmp_path, size):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="damaged"):
        hf_files.read_tensors(tmp_path)


def _shards(folder):
    save_file({"a": TENSORS["a"]}, folder / "part-1.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "part-2.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
