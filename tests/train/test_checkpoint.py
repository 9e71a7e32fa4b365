"""Checkpoints: bit-exact, on any mesh, and honest about damage."""

import json
import logging
import pathlib
import shutil

import chex
import jax
import numpy as np
import pytest
from absl import logging as absl_logging
from flax import nnx

from plga_jax.parallel.mesh import make_mesh
from plga_jax.parallel.sharding import FSDP
from plga_jax.train.checkpoint import Checkpoints, load_model
from plga_jax.train.checkpoint_files import BrokenCheckpoint, saved_steps
from plga_jax.train.optim import OptimConfig, make_optimizer
from plga_jax.train.step import TrainState, make_train_step
from tests.toy_model import Toy, ToyBatches, ToyConfig, toy_objective

TX = make_optimizer(OptimConfig(learning_rate=0.02, warmup_steps=1, total_steps=9))
TOYS = {"toy": (ToyConfig, Toy)}


def fresh_state(seed=1, **sizes):
    mesh = sizes.pop("mesh", None)
    model = Toy(ToyConfig(**sizes), rngs=nnx.Rngs(seed))
    return TrainState.init(model, TX, seed=seed, mesh=mesh, rules=FSDP)


@pytest.fixture(scope="module")
def states():
    """The states after 1, 2, … updates, each a copy of its own."""
    step, state, batches, kept = make_train_step(toy_objective, TX), fresh_state(), ToyBatches(), []
    for _ in range(4):
        state, _ = step(state, next(batches))
        kept.append(jax.tree.map(lambda x: x.copy(), state))
    return kept


def save(directory, states, **settings):
    config = {"kind": "toy", "model": json.loads(ToyConfig().to_json())}
    metrics = {"loss": 1.0} | ({"val_loss": settings.pop("val_loss")} if "val_loss" in settings else {})
    with Checkpoints(directory, **settings) as checkpoints:
        for state in states:
            checkpoints.save(state, config=config, data={"index": int(state.step)}, metrics=metrics)


def assert_same(state, other):
    """To the last bit, random keys included."""
    words = [
        jax.tree.map(lambda x: jax.random.key_data(x) if x.dtype == other.key.dtype else np.asarray(x), tree)
        for tree in (state, other)
    ]
    chex.assert_trees_all_equal(*words)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, states):
    """A directory with steps 1, 2 and 3; tests that damage it copy it."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    save(directory, states[:3])
    return directory


@pytest.fixture
def copied(tmp_path, saved):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "checkpoints"))


class TestRoundTrip:
    def test_everything_comes_back_bit_for_bit(self, saved, states):
        with Checkpoints(saved) as checkpoints:
            assert checkpoints.latest_step == 3
            restored = checkpoints.restore(fresh_state(seed=5))
            older = checkpoints.restore(fresh_state(seed=5), 2)
        assert_same(restored.state, states[2])
        assert_same(older.state, states[1])
        assert (restored.step, restored.data, restored.refused) == (3, {"index": 3}, ())
        assert restored.config["model"]["width"] == 8
        assert not np.array_equal(older.state.params["head"][...], restored.state.params["head"][...])

    @pytest.mark.parametrize("shape", [{"fsdp": 8}, {"data": 2, "fsdp": 4}])
    def test_onto_another_mesh(self, saved, states, shape):
        like = fresh_state(mesh=make_mesh(shape))
        restored = Checkpoints(saved).restore(like).state
        assert_same(restored, states[2])
        for got, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
            assert got.sharding.is_equivalent_to(wanted.sharding, got.ndim)
        assert not restored.params["up"][...].is_fully_replicated

    def test_from_a_mesh_onto_one_device(self, tmp_path, states):
        like = fresh_state(mesh=make_mesh({"fsdp": 8}))
        spread = jax.device_put(states[0], jax.tree.map(lambda x: x.sharding, like))
        save(tmp_path, [spread])
        assert_same(Checkpoints(tmp_path).restore(fresh_state()).state, states[0])

    def test_model_alone(self, saved, states):
        model, config = load_model(saved.parent, registry=TOYS)
        tokens = next(ToyBatches())["tokens"]
        np.testing.assert_array_equal(model(tokens)[0], states[2].model(tokens)[0])
        assert config["kind"] == "toy"
        older, _ = load_model(saved, 1, registry=TOYS)
        np.testing.assert_array_equal(older.head[...], states[0].params["head"][...])


class TestKeeping:
    def test_latest_best_and_permanent(self, tmp_path, states):
        losses = {1: 2.0, 2: 0.5, 3: 1.0, 4: 1.5}
        with Checkpoints(tmp_path, keep=1, best=1, permanent_every=3) as checkpoints:
            for state in states:
                loss = losses[int(state.step)]
                checkpoints.save(state, config={}, metrics={"val_loss": loss})
        assert saved_steps(tmp_path) == (2, 3, 4)

    def test_without_metrics_only_the_latest_stay(self, tmp_path, states):
        save(tmp_path, states, keep=2)
        assert saved_steps(tmp_path) == (3, 4)

    def test_a_saved_step_is_never_overwritten(self, copied, states):
        with pytest.raises(FileExistsError):
            save(copied, [states[2]])

    def test_a_save_that_was_cut_off_is_no_checkpoint(self, copied, states):
        """Orbax writes under such a name and renames it when all is there."""
        shutil.copytree(copied / "3", copied / "9.orbax-checkpoint-tmp-17")
        with Checkpoints(copied) as checkpoints:
            assert checkpoints.restore(fresh_state()).step == 3

    def test_bad_settings(self, tmp_path):
        with pytest.raises(ValueError, match="keep=0"):
            Checkpoints(tmp_path, keep=0)


def _truncate(file):
    file.write_bytes(file.read_bytes()[:-7])


def _flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


class TestDamage:
    @pytest.mark.parametrize("damage", [_truncate, _flip, pathlib.Path.unlink])
    @pytest.mark.parametrize("part", ["model", "train", "metadata"])
    def test_the_error_names_step_and_remedy(self, copied, damage, part):
        files = [f for f in (copied / "3" / part).rglob("*") if f.is_file()] if part != "metadata" else []
        damage(max(files, key=lambda f: f.stat().st_size) if files else copied / "3/_CHECKPOINT_METADATA")
        with pytest.raises(BrokenCheckpoint, match=r"step 3 .*damaged.*restore step 2 instead.*Nothing was del"):
            Checkpoints(copied).restore(fresh_state())
        assert saved_steps(copied) == (1, 2, 3)

    def test_fallback_is_loud_and_loses_nothing(self, copied, states, caplog):
        for step in (2, 3):
            _flip(max((copied / str(step) / "model").rglob("d/*"), key=lambda f: f.stat().st_size))
        absl_logging.get_absl_logger().propagate = True
        with Checkpoints(copied, keep=2) as checkpoints, caplog.at_level(logging.WARNING):
            restored = checkpoints.restore(fresh_state(), allow_fallback=True)
            assert (restored.step, restored.refused) == (1, (3, 2))
            assert_same(restored.state, states[0])
            assert [r.levelname for r in caplog.records] == ["ERROR", "ERROR"]
            assert saved_steps(copied) == (1, 2, 3)
            # Going on: the broken steps neither stand in the way nor push out the sound one.
            checkpoints.save(states[1], config={})
        assert saved_steps(copied) == (1, 2)
        assert {path.name for path in copied.glob("broken*")} == {"broken_2", "broken_3"}
        assert_same(Checkpoints(copied).restore(fresh_state()).state, states[1])

    def test_nothing_sound_left(self, copied):
        for step in (1, 2, 3):
            (copied / str(step) / "model" / "_METADATA").unlink()
        with pytest.raises(BrokenCheckpoint, match=r"step 1 .*no earlier step"):
            Checkpoints(copied).restore(fresh_state(), allow_fallback=True)

    @pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
    def test_damage_without_checksums(self, copied):
        """The run died between the save and its checksums: Orbax's own errors are translated."""
        (copied / "3/checksums.json").unlink()
        assert Checkpoints(copied).restore(fresh_state()).step == 3
        (copied / "3/model/_METADATA").unlink()
        with pytest.raises(BrokenCheckpoint, match=r"step 3 .*restore step 2"):
            Checkpoints(copied).restore(fresh_state())

    def test_a_damaged_metrics_file_does_not_end_the_run(self, tmp_path, states):
        save(tmp_path, states[:2], val_loss=1.0)
        (file,) = [f for f in (tmp_path / "1/metrics").rglob("*") if f.read_bytes().startswith(b"{")][:1]
        _truncate(file)
        save(tmp_path, [states[2]], val_loss=0.5)
        assert saved_steps(tmp_path) == (2, 3) and (tmp_path / "broken_1").is_dir()

    def test_damaged_model_for_inference(self, copied):
        _flip(max((copied / "3/model").rglob("d/*"), key=lambda f: f.stat().st_size))
        with pytest.raises(BrokenCheckpoint, match="step 3"):
            load_model(copied, registry=TOYS)


class TestMismatch:
    def test_shapes_are_named(self, saved):
        with pytest.raises(ValueError) as raised:
            Checkpoints(saved).restore(fresh_state(hidden=32))
        message = str(raised.value)
        assert "params/up (expected (2, 8, 32), found (2, 8, 24))" in message
        assert "configuration it was trained with" in message
        assert not isinstance(raised.value, BrokenCheckpoint)

    def test_fallback_does_not_hide_it(self, saved):
        with pytest.raises(ValueError, match=r"params/bias \(expected \(20,\), found \(16,\)\)"):
            Checkpoints(saved).restore(fresh_state(vocab_size=20), allow_fallback=True)

    def test_missing_steps(self, tmp_path, saved):
        with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*it holds none"):
            Checkpoints(tmp_path / "nowhere").restore(fresh_state())
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7 .*1, 2, 3"):
            Checkpoints(saved).restore(fresh_state(), 7)
        with pytest.raises(FileNotFoundError, match="step 7"):
            load_model(saved, 7, registry=TOYS)
        with pytest.raises(FileNotFoundError, match="holds none"):
            load_model(tmp_path, registry=TOYS)

    def test_unknown_kind(self, saved):
        with pytest.raises(ValueError, match=r"kind 'toy', not of \['pldr'\]"):
            load_model(saved)
