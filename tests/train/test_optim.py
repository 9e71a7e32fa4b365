"""The optimizer against an independent float64 AdamW, the schedule against the reference."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plga_jax.train.optim import (
    OptimConfig,
    SkipNonfiniteState,
    make_optimizer,
    schedule,
    skip_nonfinite,
    skipped,
)

CONFIG = OptimConfig(learning_rate=0.05, warmup_steps=2, total_steps=6)


class AdamW:
    """AdamW in torch's order of operations, clip by value before it, non-finite steps passed over."""

    def __init__(self, params, config):
        self.config = config
        self.params = {k: np.array(v, np.float64) for k, v in params.items()}
        self.m = {k: np.zeros_like(v) for k, v in self.params.items()}
        self.v = {k: np.zeros_like(v) for k, v in self.params.items()}
        self.updates, self.steps = 0, 0

    def rate(self):
        c, s = self.config, min(self.steps, self.config.total_steps)
        if s <= c.warmup_steps:
            return c.learning_rate * s / c.warmup_steps
        share = (s - c.warmup_steps) / (c.total_steps - c.warmup_steps)
        cosine = 0.5 * (1 + np.cos(np.pi * share))
        return c.learning_rate * ((1 - c.final_ratio) * cosine + c.final_ratio)

    def step(self, gradients):
        c, rate = self.config, self.rate()
        self.steps += 1
        if not all(np.isfinite(g).all() for g in gradients.values()):
            return
        self.updates += 1
        for k, gradient in gradients.items():
            g = np.clip(gradient, -c.clip_value, c.clip_value)
            self.params[k] *= 1 - rate * c.weight_decay
            self.m[k] = c.b1 * self.m[k] + (1 - c.b1) * g
            self.v[k] = c.b2 * self.v[k] + (1 - c.b2) * g * g
            m = self.m[k] / (1 - c.b1**self.updates)
            v = self.v[k] / (1 - c.b2**self.updates)
            self.params[k] -= rate * m / (np.sqrt(v) + c.epsilon)


def _params(dtype):
    rng = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(rng.normal(size=(3, 2)), dtype),
        "bias": jnp.asarray(rng.normal(size=2), dtype),
    }


def _gradients(steps, dtype, bad=()):
    rng = np.random.default_rng(1)
    out = []
    for step in range(steps):
        # A spread over four decades, entries beyond the clip among them.
        size = 10.0 ** rng.uniform(-3, 1, size=(3, 2))
        gradient = {
            "kernel": (rng.normal(size=(3, 2)) * size).astype(dtype),
            "bias": rng.normal(size=2).astype(dtype),
        }
        if step in bad:
            gradient["bias"][1] = bad[step]
        out.append(gradient)
    return out


def _run(config, params, gradients, jit=True):
    optimizer = make_optimizer(config)

    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    state, history = optimizer.init(params), []
    for gradient in gradients:
        params, state = step(params, state, jax.tree.map(jnp.asarray, gradient))
        history.append((params, state))
    return history


class TestSchedule:
    def test_golden(self, x64, golden):
        want = golden("misc")["lr_factor_total250_warm20_alpha0p1"]
        rate = schedule(OptimConfig(learning_rate=1.0, warmup_steps=20, total_steps=250))
        np.testing.assert_allclose(rate(np.arange(len(want))), want, rtol=1e-14, atol=1e-16)

    def test_golden_of_a_training_run(self, x64, golden):
        g = golden("train_gentle_f64")
        eta, _, _, _, _, warmup, total, alpha, _ = g["hp"]
        config = OptimConfig(
            learning_rate=float(eta),
            warmup_steps=int(warmup),
            total_steps=int(total),
            final_ratio=float(alpha),
        )
        np.testing.assert_allclose(schedule(config)(np.arange(len(g["lr"]))), g["lr"], rtol=1e-14, atol=1e-20)

    def test_landmarks(self):
        rate = schedule(OptimConfig(learning_rate=2.0, warmup_steps=4, total_steps=10))
        assert rate(0) == 0
        np.testing.assert_allclose(rate(4), 2.0)
        np.testing.assert_allclose(rate(10), 0.2, rtol=1e-6)
        assert rate(1000) == rate(10)

    def test_no_warmup(self):
        rate = schedule(OptimConfig(learning_rate=2.0, warmup_steps=0, total_steps=10))
        np.testing.assert_allclose(rate(0), 2.0)


class TestOptimizer:
    @pytest.mark.parametrize("jit", [False, True])
    def test_oracle(self, x64, jit):
        params, gradients = _params(np.float64), _gradients(8, np.float64)
        oracle = AdamW(params, CONFIG)
        for gradient, (got, _) in zip(gradients, _run(CONFIG, params, gradients, jit)):
            oracle.step(gradient)
            chex.assert_trees_all_close(got, oracle.params, rtol=1e-13, atol=1e-15)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_oracle_over_bad_steps(self, x64, value):
        params = _params(np.float64)
        gradients = _gradients(8, np.float64, bad={2: value, 3: value, 5: value})
        oracle = AdamW(params, CONFIG)
        counts = []
        for gradient, (got, state) in zip(gradients, _run(CONFIG, params, gradients)):
            oracle.step(gradient)
            chex.assert_trees_all_close(got, oracle.params, rtol=1e-13, atol=1e-15)
            counts.append(tuple(int(n) for n in skipped(state)))
        assert counts == [(0, 0), (0, 0), (1, 1), (2, 2), (2, 0), (3, 1), (3, 0), (3, 0)]

    def test_a_bad_step_changes_nothing_but_the_counts(self):
        params = _params(np.float32)
        gradients = _gradients(3, np.float32, bad={2: np.nan})
        (_, _), (before, state), (after, later) = _run(CONFIG, params, gradients)
        chex.assert_trees_all_equal(before, after)
        guard, guarded = state[0], later[0]
        chex.assert_trees_all_equal(guard.inner, guarded.inner)
        assert int(state[1].count) == 2 and int(later[1].count) == 3

    def test_first_update_moves_moments_only(self):
        params = _params(np.float32)
        ((after, state),) = _run(CONFIG, params, _gradients(1, np.float32))
        chex.assert_trees_all_equal(after, params)
        moments = optax.tree.get(state, "mu")
        assert all((m != 0).all() for m in jax.tree.leaves(moments))

    def test_clips_by_value_not_by_norm(self):
        params = _params(np.float32)
        gradient = {"kernel": np.full((3, 2), 0.9, np.float32), "bias": np.float32([50, -50])}
        ((_, state),) = _run(CONFIG, params, [gradient])
        moments = optax.tree.get(state, "mu")
        np.testing.assert_allclose(moments["kernel"], 0.09, rtol=1e-6)
        np.testing.assert_allclose(moments["bias"], [0.1, -0.1], rtol=1e-6)

    def test_float32_params_stay_float32_in_an_x64_run(self, x64):
        params = _params(np.float32)
        for got, state in _run(CONFIG, params, _gradients(3, np.float32)):
            chex.assert_trees_all_equal_dtypes(got, params)
            chex.assert_trees_all_equal_dtypes(optax.tree.get(state, "nu"), params)

    def test_one_trace(self):
        optimizer = make_optimizer(CONFIG)
        params = _params(np.float32)
        update = jax.jit(chex.assert_max_traces(optimizer.update, n=1))
        state = optimizer.init(params)
        for gradient in _gradients(3, np.float32, bad={1: np.nan}):
            _, state = update(jax.tree.map(jnp.asarray, gradient), state, params)
        assert jax.tree.map(int, skipped(state)) == (1, 0)


class TestSkipped:
    def test_found_within_another_chain(self):
        optimizer = optax.chain(optax.identity(), skip_nonfinite(optax.identity()))
        state = optimizer.init({"w": jnp.zeros(2)})
        _, state = optimizer.update({"w": jnp.array([0.0, jnp.nan])}, state)
        assert jax.tree.map(int, skipped(state)) == (1, 1)
        assert isinstance(state[1], SkipNonfiniteState)

    def test_absent(self):
        with pytest.raises(ValueError, match="make_optimizer"):
            skipped(optax.adam(1e-3).init({"w": jnp.zeros(2)}))


class TestConfig:
    @pytest.mark.parametrize(
        "setting, value, remedy",
        [
            ("learning_rate", -1e-3, ">= 0"),
            ("learning_rate", float("nan"), "finite"),
            ("warmup_steps", -1, "whole number"),
            ("warmup_steps", 6, "shorten the warm-up"),
            ("total_steps", 2.5, "whole number"),
            ("final_ratio", 1.5, "within"),
            ("b1", 1.0, "within"),
            ("b2", -0.1, "within"),
            ("epsilon", 0.0, "above 0"),
            ("weight_decay", -0.1, "switches decay off"),
            ("clip_value", 0.0, "None"),
            ("max_consecutive_skips", -1, "whole number"),
        ],
    )
    def test_bad_values(self, setting, value, remedy):
        settings = dict(learning_rate=0.05, warmup_steps=2, total_steps=6) | {setting: value}
        with pytest.raises(ValueError, match=rf"{setting} is .*{remedy}"):
            OptimConfig(**settings)

    def test_json_round_trip(self):
        config = OptimConfig(learning_rate=1e-3, warmup_steps=5, total_steps=50, clip_value=None, b2=0.99)
        assert OptimConfig.from_json(config.to_json()) == config

    def test_json_with_foreign_settings(self):
        with pytest.raises(ValueError, match=r"unknown \['lr'\], missing \['learning_rate'\]"):
            OptimConfig.from_json('{"lr": 1, "warmup_steps": 1, "total_steps": 2}')
