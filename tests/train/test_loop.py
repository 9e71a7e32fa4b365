"""The step and the loop: exact accumulation, logs, resuming, signals, divergence."""

import dataclasses
import functools
import os
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plga_jax.train import loop
from plga_jax.train.checkpoint import Checkpoints
from plga_jax.train.config import TrainConfig, differences
from plga_jax.train.journal import TrainingDiverged
from plga_jax.train.loop import Hooks, Steering, fit
from plga_jax.train.optim import OptimConfig, make_optimizer, schedule
from plga_jax.train.records import Records
from plga_jax.train.step import TrainState, make_eval_step, make_train_step
from tests.toy_model import Toy, ToyBatches, ToyConfig, toy_objective

OPTIM = OptimConfig(learning_rate=0.02, warmup_steps=3, total_steps=12, max_consecutive_skips=2)
TX = make_optimizer(OPTIM)
CLOCKS = ("first_step_s", "tokens_per_s")


def fresh_state(config=None, tx=TX):
    return TrainState.init(Toy(config or ToyConfig(), rngs=nnx.Rngs(0)), tx)


def train(workdir, *, steps=12, batches=None, hooks=None, run_config=None, tx=TX, **settings):
    settings = {"batch_size": 8, "log_every": 4, "save_every": 5, **settings}
    return fit(
        fresh_state(tx=tx),
        toy_objective,
        tx,
        batches or ToyBatches(),
        TrainConfig(steps=steps, **settings),
        hooks=hooks or Hooks.of(OPTIM),
        workdir=workdir,
        run_config=run_config or {"kind": "toy", "optim": {"learning_rate": 0.02}},
        progress=False,
    )


def lines(workdir):
    """The metrics that must not depend on the clock."""
    records = Records(workdir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in records]


@pytest.fixture(autouse=True, scope="module")
def compile_once():
    """One compilation for the many runs of the same step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_train_step", functools.cache(make_train_step))
        patch.setattr(loop, "make_eval_step", functools.cache(make_eval_step))
        yield


class TestStep:
    def test_accumulation_is_the_big_batch(self, x64):
        """Rows have unequal numbers of targets, so a mean of means would miss by percents."""
        batch, accumulation = next(ToyBatches()), 4
        config = ToyConfig(dtype="float64")
        ends = []
        for microbatches in (1, accumulation):
            step = make_train_step(toy_objective, TX, accumulation=microbatches)
            state, first = step(fresh_state(config), batch)
            state, second = step(state, batch)
            ends.append((first, second, state.params, state.opt_state))
        chex.assert_trees_all_close(ends[1], ends[0], rtol=1e-12, atol=1e-12)
        before = fresh_state(config).params
        moved = optax.tree.norm(optax.tree.sub(ends[0][2], before))
        assert moved > 1e-2

    def test_loss_is_tokens_plus_penalty(self):
        batch = next(ToyBatches())
        state = fresh_state()
        objective = toy_objective(state.model, batch, None)
        _, metrics = make_train_step(toy_objective, TX)(state, batch)
        assert float(metrics["tokens"]) == np.sum(batch["tokens"][:, 1:] != 0)
        np.testing.assert_allclose(metrics["nll"], objective.tokens.mean, rtol=1e-6)
        expected = objective.tokens.total / objective.tokens.count + objective.penalty
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)

    def test_state_is_consumed_and_the_model_is_not(self):
        model = Toy(ToyConfig(), rngs=nnx.Rngs(0))
        state = TrainState.init(model, TX)
        after, _ = make_train_step(toy_objective, TX)(state, next(ToyBatches()))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))
        assert np.isfinite(model.embedding[...]).all()
        assert int(after.step) == 1
        chex.assert_trees_all_equal(after.rest, nnx.split(model, nnx.Param, ...)[2])

    def test_one_trace_for_many_steps(self):
        objective = chex.assert_max_traces(toy_objective, n=1)
        step, state, batches = make_train_step(objective, TX), fresh_state(), ToyBatches()
        for _ in range(3):
            state, _ = step(state, next(batches))

    def test_keys_differ_between_steps_and_microbatches(self):
        seen = []

        def objective(model, batch, key):
            jax.debug.callback(lambda data: seen.append(tuple(data.tolist())), jax.random.key_data(key))
            return toy_objective(model, batch, key)

        step, state = make_train_step(objective, TX, accumulation=2), fresh_state()
        for batch in (next(ToyBatches()), next(ToyBatches())):
            state, _ = step(state, batch)
        jax.effects_barrier()
        assert len(set(seen)) == 4

    def test_rows_that_do_not_divide(self):
        with pytest.raises(ValueError, match="8 rows cannot be cut into 3 microbatches"):
            make_train_step(toy_objective, TX, accumulation=3)(fresh_state(), next(ToyBatches()))
        with pytest.raises(ValueError, match="accumulation=0"):
            make_train_step(toy_objective, TX, accumulation=0)


class TestLogs:
    def test_every_step_has_its_line(self, tmp_path):
        result = train(
            tmp_path,
            eval_every=5,
            sample_every=6,
            hooks=Hooks.of(
                OPTIM,
                validation=lambda: (b for b, _ in zip(ToyBatches(rows=4), range(3))),
                sample=lambda state: [f"after {int(state.step)}"],
                callbacks=[lambda step, state: {"probe": step * 10.0} if step % 4 == 0 else None],
            ),
        )
        found = lines(tmp_path)
        assert [line["step"] for line in found] == list(range(13))
        assert [line["step"] for line in found if "val_loss" in line] == [0, 5, 10, 12]
        assert {line["step"]: line["probe"] for line in found if "probe" in line} == {
            0: 0.0,
            4: 40.0,
            8: 80.0,
            12: 120.0,
        }
        rates = [line["lr"] for line in found[1:]]
        np.testing.assert_allclose(rates, schedule(OPTIM)(np.arange(12)), rtol=1e-6)
        texts = list(Records(tmp_path / "samples.jsonl"))
        assert texts == [{"step": s, "text": f"after {s}"} for s in (6, 12)]
        assert result.metrics["loss"] == found[-1]["loss"] < found[1]["loss"]
        assert result.first_step_seconds > 0 and result.interrupted is None

    def test_validation_is_one_big_batch(self, tmp_path):
        batches = [b for b, _ in zip(ToyBatches(rows=3), range(4))]
        hooks = Hooks.of(OPTIM, validation=lambda: batches)
        result = train(tmp_path, steps=1, eval_every=1, hooks=hooks)
        whole = {"tokens": np.concatenate([b["tokens"] for b in batches])}
        expected = make_eval_step(toy_objective)(result.state, whole).tokens
        np.testing.assert_allclose(lines(tmp_path)[-1]["val_loss"], expected.mean, rtol=1e-6)
        np.testing.assert_allclose(lines(tmp_path)[-1]["val_accuracy"], expected.accuracy)

    def test_loss_that_is_not_finite_is_valid_json(self, tmp_path):
        train(tmp_path, steps=4, batches=ToyBatches(poisoned=(2, 4)))
        found = lines(tmp_path)
        assert [line["loss"] is None for line in found[1:]] == [False, True, False, True]
        assert "loss" not in train(tmp_path, steps=4).metrics

    def test_records_survive_a_torn_line(self, tmp_path):
        records = Records(tmp_path / "r.jsonl")
        for step in range(4):
            records.append({"step": step, "text": "ü\u2028\n"})
        with records.path.open("a") as file:
            file.write('{"step": 4, "te')
        assert [r["step"] for r in records] == [0, 1, 2, 3]
        records.rewind(2)
        records.append({"step": 3, "text": "again"})
        assert [r["step"] for r in records] == [0, 1, 2, 3]
        assert [r["text"] for r in records][-2:] == ["ü\u2028\n", "again"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nothing disturbs: its result and its lines."""
    workdir = tmp_path_factory.mktemp("straight")
    return train(workdir), lines(workdir)


class TestResume:
    def test_sigterm_saves_and_the_rest_is_the_same_bit_for_bit(self, tmp_path, straight):
        whole, expected = straight

        def stop(step, state):
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)

        first = train(tmp_path, hooks=Hooks.of(OPTIM, callbacks=[stop]))
        assert (first.interrupted, first.step) == ("SIGTERM", 8)  # The step under way is finished.
        assert Checkpoints(tmp_path / "checkpoints").latest_step == 8
        second = train(tmp_path)
        assert second.resumed_from == 8 and second.step == 12
        assert lines(tmp_path) == expected
        chex.assert_trees_all_equal(second.state.params, whole.state.params)
        chex.assert_trees_all_equal(second.state.opt_state, whole.state.opt_state)

    def test_a_crash_goes_back_to_the_last_checkpoint(self, tmp_path, straight):
        def crash(step, state):
            if step == 9:
                raise RuntimeError("power cut")

        with pytest.raises(RuntimeError, match="power cut"):
            train(tmp_path, hooks=Hooks.of(OPTIM, callbacks=[crash]), log_every=1)
        assert lines(tmp_path)[-1]["step"] == 8
        assert train(tmp_path).resumed_from == 5
        assert lines(tmp_path) == straight[1]

    def test_a_finished_run_is_left_as_it_is(self, tmp_path):
        train(tmp_path, steps=5)
        before = lines(tmp_path)
        again = train(tmp_path, steps=5)
        assert again.resumed_from == again.step == 5 and again.first_step_seconds is None
        assert again.metrics["loss"] == before[-1]["loss"]
        assert lines(tmp_path) == before

    def test_another_configuration_is_refused(self, tmp_path):
        train(tmp_path, steps=2)
        changed = {"kind": "toy", "optim": {"learning_rate": 0.5}}
        with pytest.raises(ValueError, match=r"optim.learning_rate was 0.02, is 0.5.*another work"):
            train(tmp_path, run_config=changed)
        with pytest.raises(ValueError, match=r"train.seed was 0, is 1"):
            train(tmp_path, seed=1)
        assert train(tmp_path, steps=3, log_every=1).step == 3

    def test_second_signal_ends_at_once(self, tmp_path):
        def twice(step, state):
            if step == 3:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, hooks=Hooks.of(OPTIM, callbacks=[twice]))
        assert signal.getsignal(signal.SIGINT) is before
        assert Checkpoints(tmp_path / "checkpoints").latest_step is None

    def test_data_that_end_are_said_so(self, tmp_path):
        few = (batch for batch, _ in zip(ToyBatches(), range(3)))
        with pytest.raises(ValueError, match=r"ended after 3 of 12 steps \(saved\)"):
            train(tmp_path, batches=few)
        assert Checkpoints(tmp_path / "checkpoints").latest_step == 3


class TestDivergence:
    def test_few_bad_steps_are_skipped(self, tmp_path):
        result = train(tmp_path, batches=ToyBatches(poisoned=(4, 5, 9)))
        assert result.metrics["total_skipped"] == 3
        assert [line.get("consecutive_skipped", 0) for line in lines(tmp_path)][4:7] == [1, 2, 0]
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.params))

    def test_too_many_end_the_run_and_save_nothing(self, tmp_path):
        with pytest.raises(TrainingDiverged) as raised:
            train(tmp_path, batches=ToyBatches(poisoned=range(7, 13)))
        message = str(raised.value)
        assert "step 9" in message and "3 step(s) in a row" in message
        assert "learning rate" in message and "resume from step 5" in message
        assert isinstance(raised.value, ValueError) and isinstance(raised.value, FloatingPointError)
        assert Checkpoints(tmp_path / "checkpoints").steps == (5,)
        assert lines(tmp_path)[-1]["step"] == 9

    def test_an_optimizer_that_does_not_skip_ends_at_the_first(self, tmp_path):
        with pytest.raises(TrainingDiverged, match=r"step 4.*start anew"):
            train(tmp_path, batches=ToyBatches(poisoned=(4,)), tx=optax.sgd(0.1), hooks=Hooks())
        assert Checkpoints(tmp_path / "checkpoints").latest_step is None


class TestConfig:
    def test_json_round_trip(self):
        config = TrainConfig(steps=3, batch_size=4, accumulation=2, save_every=1)
        assert TrainConfig.from_json(config.to_json()) == config

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"steps": 0}, "steps=0 must be an integer of at least 1"),
            ({"batch_size": 6, "accumulation": 4}, "batch_size=6 is not a multiple of accumulation=4"),
            ({"eval_every": -1}, "eval_every=-1 must be an integer of at least 0"),
            ({"keep": 1.5}, "keep=1.5 must be an integer"),
        ],
    )
    def test_bad_values(self, settings, message):
        with pytest.raises(ValueError, match=message):
            TrainConfig(**{"steps": 1, "batch_size": 4, **settings})

    def test_differences(self):
        saved = {"a": {"x": 1, "t": [1, 2]}, "train": {"steps": 5, "seed": 0}}
        same = {"a": {"x": 1, "t": (1, 2)}, "train": {"steps": 9, "seed": 0}}
        assert differences(saved, same) == []
        other = {"a": {"x": 2}, "train": {"steps": 5, "seed": 0}, "new": None}
        assert differences(saved, other) == [
            "a.x was 1, is 2",
            "a.t was [1, 2], is 'absent'",
            "new was 'absent', is None",
        ]


def test_master_weights_stay_float32_when_the_model_computes_in_bfloat16():
    """The loop casts nothing: a model that computes in bfloat16 still gets float32 updates."""

    def objective(model, batch, key):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, rest))
        return toy_objective(nnx.merge(graphdef, *low), batch, key)

    state, step = fresh_state(), make_train_step(objective, TX)
    for batch, _ in zip(ToyBatches(), range(3)):
        state, metrics = step(state, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert {metrics[name].dtype for name in ("loss", "grad_norm")} == {jnp.dtype("float32")}
    assert dataclasses.asdict(OPTIM) and np.isfinite(metrics["loss"])


class TestSteering:
    """What a monitor asks for is done, kept by checkpoints, and remembered when a run goes on."""

    @staticmethod
    def hooks(steer, **others):
        probe = lambda step, state: {"probe": float(step)}  # noqa: E731
        return Hooks.of(OPTIM, callbacks=[probe], steer=steer, **others)

    def test_values_reach_the_lines_and_a_stop_saves(self, tmp_path):
        def steer(step, values):
            return Steering(
                values={"phase": f"p{values['probe']:.0f}"}, note="enough" if step == 6 else None, stop=step == 6
            )

        result = train(tmp_path, hooks=self.hooks(steer))
        assert (result.interrupted, result.step) == ("enough", 6)
        assert [line["phase"] for line in lines(tmp_path)] == [f"p{step}" for step in range(7)]
        assert Checkpoints(tmp_path / "checkpoints").latest_step == 6

    def test_marked_steps_outlive_later_checkpoints(self, tmp_path):
        result = train(tmp_path, hooks=self.hooks(lambda step, _: Steering(mark=step in (2, 3))), keep=1, save_every=1)
        assert result.step == 12
        assert Checkpoints(tmp_path / "checkpoints").steps == (12,)
        marked = Checkpoints(tmp_path / "marked")
        assert marked.steps == (2, 3)
        assert int(marked.restore(fresh_state()).state.step) == 3

    def test_a_cut_rate_outlives_a_stop_and_is_made_once(self, tmp_path):
        tx = make_optimizer(OPTIM, adjustable=True)

        def run(workdir, stop_at=None):
            seen = []

            def steer(step, values):
                seen.append(step)
                return Steering(
                    rate_factor=0.25 if step == 4 else 1.0, stop=step == stop_at, note="cut" if step == 4 else None
                )

            return train(workdir, tx=tx, hooks=self.hooks(steer)), seen

        whole, _ = run(tmp_path / "whole")
        first, _ = run(tmp_path / "halves", stop_at=6)
        assert first.step == 6
        second, seen = run(tmp_path / "halves")
        assert second.resumed_from == 6 and seen == list(range(13))
        found = lines(tmp_path / "halves")
        assert found == lines(tmp_path / "whole")
        assert [line["rate_factor"] for line in found[1:]] == [1.0] * 4 + [0.25] * 8
        chex.assert_trees_all_equal(second.state.params, whole.state.params)
        untouched = train(tmp_path / "untouched", tx=tx)
        chex.assert_trees_all_equal(untouched.state.params, train(tmp_path / "plain").state.params)
        moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), untouched.state.params, whole.state.params)
        assert max(jax.tree.leaves(moved)) > 0

    def test_a_fixed_rate_cannot_be_cut(self, tmp_path):
        with pytest.raises(ValueError, match="adjustable=True"):
            train(tmp_path, hooks=self.hooks(lambda step, _: Steering(rate_factor=0.5)))
