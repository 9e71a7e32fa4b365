"""The prefill store: what goes in comes out bit for bit, and whatever is not what went in is a miss that says why."""

import dataclasses
import errno
import json
import os
import pathlib
import time

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from ris_jax import store as store_module
from ris_jax.store import Layers, Miss, PrefillKey, PrefillStore, weights_fingerprint

FIELDS = {"weights": "ab", "kv_dtype": "bfloat16", "geometry": {"kind": "dense", "length": 64}, "rope": [1.0, None]}


def make_key(**changes):
    return PrefillKey(tokens=np.arange(7, dtype=np.int32), fields=FIELDS | changes)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "k": rng.standard_normal((3, 1, 7, 2, 4)).astype(ml_dtypes.bfloat16),
        "v": rng.standard_normal((3, 1, 7, 2, 4)).astype(np.float32),
        "length": np.array([7], np.int32),
        "blocks": rng.integers(-128, 127, (5, 3)).astype(np.int8),
        "flag": np.array([True, False, True]),
        "none": np.zeros((0, 3), np.float32),
        "scalar": np.array(2.5),
    }


@pytest.fixture
def store(tmp_path):
    return PrefillStore(tmp_path / "made" / "when needed")


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def test_round_trip(store, arrays):
    key = make_key()
    entry = store.save(key, arrays)
    found = store.load(key)
    assert_same(found, arrays)
    assert all(not array.flags.writeable for array in found.values())
    assert entry.path == store.path(key) and entry.size == entry.path.stat().st_size
    assert entry.num_tokens == 7 and entry.fields["weights"] == "ab" and entry.problem is None


def test_any_program_can_read_the_file(store, arrays):
    store.save(make_key(), arrays)
    found = load_file(store.path(make_key()))
    assert found.pop("tokens").tolist() == list(range(7))
    assert_same(found, arrays)


def test_layers_are_fetched_one_by_one(store, arrays):
    asked = []

    def read(index):
        asked.append(index)
        return arrays["k"].transpose(0, 2, 1, 3, 4)[index].transpose(1, 0, 2, 3)  # Not contiguous.

    given = arrays | {"k": Layers(shape=arrays["k"].shape, dtype=arrays["k"].dtype, read=read)}
    store.save(make_key(), given)
    assert asked == [0, 1, 2]
    assert_same(store.load(make_key()), arrays)


@pytest.mark.parametrize(
    "changes",
    [{"weights": "ac"}, {"kv_dtype": "float32"}, {"geometry": {"kind": "dense", "length": 65}}, {"rope": [1.0, 0]}],
)
def test_every_field_is_part_of_the_key(store, arrays, changes):
    store.save(make_key(), arrays)
    assert store.load(make_key(**changes)).reason == "absent"


@pytest.mark.parametrize("tokens", [[0, 1, 2, 3, 4, 5], [0, 1, 2, 9, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 0]])
def test_every_token_is_part_of_the_key(store, arrays, tokens):
    store.save(make_key(), arrays)
    other = dataclasses.replace(make_key(), tokens=np.array(tokens, np.int32))
    assert store.load(other).reason == "absent"


def test_spelling_is_no_part_of_the_key():
    backwards = PrefillKey(tokens=np.arange(7, dtype=np.int64), fields=dict(reversed(FIELDS.items())))
    assert backwards.digest == make_key().digest
    assert json.loads(make_key().canonical)["version"] == store_module.VERSION


def test_every_flipped_byte_is_noticed(store, arrays):
    key, arrays = make_key(), {"k": arrays["k"][0, 0], "length": arrays["length"]}
    path = store.save(key, arrays).path
    whole = path.read_bytes()
    silent = []
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 0x10]) + whole[index + 1 :])
        found = store.load(key)
        if not isinstance(found, Miss):
            silent.append(index)
            assert_same(found, arrays)
    # Only the time of writing, which nothing depends on.
    saved = whole.index(b'"saved"')
    assert all(saved <= index < saved + 40 for index in silent)
    path.write_bytes(whole)
    assert_same(store.load(key), arrays)


def test_every_truncation_is_noticed(store, arrays):
    key, arrays = make_key(), {"k": arrays["k"][0, 0], "length": arrays["length"]}
    path = store.save(key, arrays).path
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert store.load(key).reason == "damaged"
    path.write_bytes(whole + b"\0")
    assert "were written" in store.load(key).detail


def test_foreign_files_are_refused(store, arrays):
    key, other = make_key(), make_key(weights="other")
    path = store.save(other, arrays).path
    path.rename(store.path(key))
    miss = store.load(key)
    assert (miss.reason, "another text" in miss.detail) == ("foreign", True)
    save_file({"k": arrays["v"]}, store.path(key))
    assert store.load(key).reason == "damaged"
    store.path(key).write_text("not safetensors at all, but long enough to be read")
    assert store.load(key).reason == "damaged"
    store.path(key).unlink()
    store.path(key).mkdir()
    assert store.load(key).reason == "damaged"


@pytest.mark.parametrize(
    "header",
    [
        {"k": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}},
        {"k": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"k": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}},
        {"k": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"k": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"k": {"dtype": "O8", "shape": [1], "data_offsets": [0, 8]}},
        {"k": {"dtype": "F32", "shape": 1, "data_offsets": [0]}},
        {"k": {"dtype": "F32", "shape": ["1"], "data_offsets": ["0", "4"]}},
        {"k": None},
        {"__metadata__": 3},
        [],
    ],
)
def test_forged_headers_are_damage(store, header):
    key = make_key()
    text = json.dumps(header).encode()
    store.folder.mkdir(parents=True)
    store.path(key).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert store.load(key).reason == "damaged"
    (entry,) = store.entries()
    assert entry.problem is not None and entry.num_tokens is None


def test_a_full_disk_leaves_nothing_behind_and_the_old_entry_whole(store, arrays, monkeypatch):
    key = make_key()
    store.save(key, arrays)

    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read(index):
        if index == 1:
            full(None, None)
        return arrays["k"][index]

    with pytest.raises(OSError, match="No space left"):
        store.save(key, arrays | {"k": Layers(shape=arrays["k"].shape, dtype=arrays["k"].dtype, read=read)})
    assert [path.name for path in store.folder.iterdir()] == [store.path(key).name]
    assert_same(store.load(key), arrays)


def test_an_interrupted_save_leaves_nothing_behind(store, arrays):
    def read(index):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(make_key(), {"k": Layers(shape=(2, 3), dtype=np.dtype("f4"), read=read)})
    assert list(store.folder.iterdir()) == [] and store.load(make_key()).reason == "absent"


def test_what_cannot_be_stored(store):
    with pytest.raises(ValueError, match="'tokens' names the token ids"):
        store.save(make_key(), {"tokens": np.zeros(2, np.int32)})
    with pytest.raises(ValueError, match="dtype complex64"):
        store.save(make_key(), {"k": np.zeros(2, np.complex64)})
    with pytest.raises(ValueError, match="Out of range"):
        store.path(make_key(rope=float("nan")))


@pytest.fixture
def aged(store, arrays):
    """Three entries used 30, 20 and 10 hours ago, each of about a third of the bytes."""
    now = time.time()
    for hours, name in ((30, "old"), (20, "middle"), (10, "young")):
        entry = store.save(make_key(weights=name), arrays)
        os.utime(entry.path, (now - 3600 * hours,) * 2)
    return store


def names(entries):
    return [entry.fields["weights"] for entry in entries]


def test_listing(aged):
    (aged.folder / "notes.txt").write_text("mine")
    assert names(aged.entries()) == ["young", "middle", "old"]
    assert sum(entry.size for entry in aged.entries()) == sum(p.stat().st_size for p in aged.folder.glob("*.safe*"))
    assert PrefillStore(aged.folder / "absent").entries() == []
    aged.load(make_key(weights="old"))
    assert names(aged.entries()) == ["old", "young", "middle"]


def test_pruning(aged):
    size = aged.entries()[0].size
    (aged.folder / "notes.txt").write_text("mine")
    assert aged.prune() == []
    assert names(aged.prune(older_than=25 * 3600)) == ["old"]
    assert names(aged.prune(max_bytes=size)) == ["middle"]
    assert names(aged.entries()) == ["young"]
    assert names(aged.prune(max_bytes=0)) == ["young"]
    assert [path.name for path in aged.folder.iterdir()] == ["notes.txt"]
    for limits in ({"max_bytes": -1}, {"older_than": -0.5}):
        with pytest.raises(ValueError, match="must be at least 0"):
            aged.prune(**limits)


def test_leftovers_of_killed_processes_are_pruned(store, arrays):
    path = store.save(make_key(), arrays).path
    running, killed = (path.with_name(f"{path.name}.{pid}.partial") for pid in (11, 12))
    for partial in (running, killed):
        partial.write_bytes(b"half")
    os.utime(killed, (time.time() - 7200,) * 2)
    store.prune()
    assert sorted(store.folder.iterdir()) == sorted([path, running])
    assert len(store.entries()) == 1


def test_entries_of_damaged_files_can_be_listed_and_pruned(store, arrays):
    path = store.save(make_key(), arrays).path
    path.write_bytes(path.read_bytes()[:20])
    (entry,) = store.entries()
    assert "header" in entry.problem
    assert store.prune(max_bytes=0) == [entry]


def test_the_fingerprint_knows_every_parameter():
    config = DecoderConfig(
        vocab_size=11,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_width=4,
        model_width=8,
        hidden_width=8,
        context=16,
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    first = weights_fingerprint(model)
    assert first == weights_fingerprint(Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    leaves = nnx.to_flat_state(state)
    seen = {first}
    for path, variable in leaves:
        array = np.array(variable[...])
        array.reshape(-1)[-1] += 1
        changed = nnx.from_flat_state([(p, v.replace(array) if p == path else v) for p, v in leaves])
        seen.add(weights_fingerprint(nnx.merge(graphdef, changed)))
    assert len(seen) == len(leaves) + 1


def test_the_path_may_begin_with_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PrefillStore("~/cache").folder == pathlib.Path(tmp_path / "cache")
