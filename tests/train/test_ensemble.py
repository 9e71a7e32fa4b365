"""Runs side by side are the runs one by one, and one program serves all rates."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.train.ensemble import Ensemble, make_ensemble_steps, member_batches
from plga_jax.train.objectives import next_token_objective
from plga_jax.train.optim import OptimConfig, make_optimizer
from plga_jax.train.step import TrainState, make_train_step

CONFIG = PLDRConfig(vocab_size=23, num_layers=1, num_heads=2, head_width=4, residual_units=1, context=16)
DOUBLE = dataclasses.replace(CONFIG, param_dtype="float64", compute_dtype="float64")
STEPS, RATE, WARMUP = 6, 3e-3, 2
LOSS = next_token_objective()


def make(seed, config=CONFIG):
    return PLDR(config, rngs=nnx.Rngs(seed))


def batches(seed):
    rng = np.random.default_rng(seed)
    while True:
        yield {"tokens": rng.integers(1, 23, size=(4, 9)).astype(np.int32)}


def optim(**changes):
    return OptimConfig(**{"learning_rate": 1.0, "warmup_steps": 0, "total_steps": STEPS} | changes)


@pytest.mark.usefixtures("x64")
def test_members_are_the_runs_one_by_one():
    # In float64: in float32 a different order of sums grows to 1e-4 of the loss in six updates of Adam.
    start = functools.partial(make, config=DOUBLE)
    members = Ensemble.init(start, optim(), (5, 7))
    steps = make_ensemble_steps(LOSS, optim())
    loaders = [batches(seed) for seed in (5, 7)]
    state, losses = members.state, []
    for _ in range(2):
        state, metrics = steps(state, member_batches(loaders, STEPS // 2), jnp.float64(RATE), jnp.float64(WARMUP))
        losses.append(metrics["nll"])
    losses = np.concatenate(losses)
    for index, seed in enumerate((5, 7)):
        config = optim(learning_rate=RATE, warmup_steps=WARMUP)
        tx = make_optimizer(config)
        alone, step, loader, expected = (
            TrainState.init(start(seed), tx, seed=seed),
            make_train_step(LOSS, tx),
            batches(seed),
            [],
        )
        for _ in range(STEPS):
            alone, metrics = step(alone, next(loader))
            expected.append(float(metrics["nll"]))
        np.testing.assert_allclose(losses[:, index], expected, rtol=1e-11)
        member = Ensemble(state=state, size=2).member(index)
        assert int(member.step) == STEPS
        for found, wanted in zip(jax.tree.leaves(member.params), jax.tree.leaves(alone.params), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-10)


def test_one_trace_serves_all_rates_and_a_rate_of_zero_changes_nothing():
    chex.clear_trace_counter()
    traced = make_ensemble_steps(chex.assert_max_traces(LOSS, n=1), optim(weight_decay=0.5))
    start = np.asarray(Ensemble.init(make, optim(), (0,)).state.params["head"]["kernel"][...])
    for rate, warmup in ((0.0, 1), (1e-3, 1), (1e-2, 3)):
        state = Ensemble.init(make, optim(), (0,)).state
        state, _ = traced(state, member_batches([batches(0)], 3), jnp.float32(rate), jnp.float32(warmup))
        moved = np.abs(np.asarray(state.params["head"]["kernel"][...]) - start).max()
        assert (moved == 0) == (rate == 0)


def test_needs_a_member():
    with pytest.raises(ValueError, match="at least one seed"):
        Ensemble.init(make, optim(), ())
