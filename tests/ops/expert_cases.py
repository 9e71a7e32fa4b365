"""What every way to compute a mixture of experts must do: named cases, a NumPy oracle, and one class of tests.

To hold a way to the contract, subclass and say how to call it:

    class TestSharded(ExpertsContract):
        apply = staticmethod(sharded)           # (x, routing, weights, config)

`supports` may decline a case (batches that do not divide over devices).
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.array_types import statistics_dtype
from plga_jax.ops.gated import GatedWeights
from plga_jax.ops.routing import ExpertsConfig, route


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and choices; `lengths` are the real tokens of each row, the rest of T is padding on the right."""

    B: int = 4
    T: int = 6
    D: int = 5
    F: int = 3
    X: int = 4
    k: int = 2
    lengths: tuple[int, ...] | None = None
    biases: bool = False
    biased: bool = False
    skew: float = 0.0
    options: tuple[tuple[str, object], ...] = ()

    @property
    def config(self):
        sizes = {"num_experts": self.X, "num_chosen": self.k, "hidden_width": self.F}
        return ExpertsConfig(**sizes, biased=self.biased, **dict(self.options))

    def make(self, dtype=jnp.float64, seed=0):
        """x, logits, weights, bias or None, valid or None."""
        rng = np.random.default_rng(seed)

        def draw(*shape):
            return jnp.asarray(rng.standard_normal(shape), dtype)

        x = draw(self.B, self.T, self.D)
        logits = draw(self.B, self.T, self.X).astype(statistics_dtype(dtype))
        logits = logits.at[..., 0].add(self.skew)
        into, out = (self.X, self.D, self.F), (self.X, self.F, self.D)
        ins, outs = [draw(self.X, n) if self.biases else None for n in (self.F, self.D)]
        up_bias = draw(self.X, self.F) if self.biases else None
        weights = GatedWeights(draw(*into), ins, draw(*into), up_bias, draw(*out), outs)
        bias = 0.3 * draw(self.X).astype(logits.dtype) if self.biased else None
        if self.lengths is None:
            return x, logits, weights, bias, None
        return x, logits, weights, bias, jnp.arange(self.T)[None] < jnp.asarray(self.lengths)[:, None]


CASES = {
    "two of four": Case(),
    "one of one": Case(X=1, k=1, T=1),
    "all of three, biases": Case(X=3, k=3, biases=True),
    "sigmoid": Case(k=1, biased=True, options=(("scores", "sigmoid"), ("renormalise", False), ("scale", 2.5))),
    "padding": Case(lengths=(6, 3, 1, 0)),
    "capacity and padding": Case(T=9, skew=2.0, lengths=(9, 6, 2, 0), options=(("capacity_factor", 1.25),)),
    "little capacity": Case(T=9, skew=2.0, options=(("capacity_factor", 0.1),)),
    "empty experts": Case(X=6, skew=50.0, k=1),
}


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def oracle_routing(logits, config, bias=None, valid=None):
    """Token by token in the order of the definition: {(b, t): [(expert, weight)]} of what is kept, and the rest."""
    logits = np.asarray(logits, np.float64)
    B, T, X = logits.shape
    valid = np.ones((B, T), bool) if valid is None else np.asarray(valid)
    bias = np.zeros(X) if bias is None else np.asarray(bias, np.float64)
    kept, dropped = {}, []
    for b in range(B):
        load, real = np.zeros(X, int), int(valid[b].sum())
        capacity = real
        if config.capacity_factor is not None:
            capacity = int(np.ceil(config.capacity_factor * config.num_chosen * real / X - 1e-9))
        for t in np.flatnonzero(valid[b]):
            z = logits[b, t]
            scores = sigmoid(z) if config.scores == "sigmoid" else np.exp(z) / np.exp(z).sum()
            chosen = np.argsort(-(scores + bias), kind="stable")[: config.num_chosen]
            weights = scores[chosen] / (scores[chosen].sum() if config.renormalise else 1)
            kept[b, t] = []
            for expert, weight in zip(chosen, weights):
                if load[expert] < capacity:
                    kept[b, t].append((expert, config.scale * weight))
                else:
                    dropped.append((b, t, expert))
                load[expert] += 1
    return kept, dropped


def oracle(x, logits, weights, config, bias=None, valid=None):
    """Only the chosen experts of each token, in float64."""
    x = np.asarray(x, np.float64)
    y = np.zeros_like(x)
    w = GatedWeights(*(None if a is None else np.asarray(a, np.float64) for a in weights))

    def plus(z, bias, expert):
        return z if bias is None else z + bias[expert]

    for (b, t), choices in oracle_routing(logits, config, bias, valid)[0].items():
        for e, weight in choices:
            gate = plus(x[b, t] @ w.gate_kernel[e], w.gate_bias, e)
            hidden = gate * sigmoid(gate) * plus(x[b, t] @ w.up_kernel[e], w.up_bias, e)
            y[b, t] += weight * plus(hidden @ w.down_kernel[e], w.down_bias, e)
    return y


def gradients(x, logits, weights, config, bias, valid, cotangent):
    """Of Σ y·cotangent, with the oracle's routing as a constant mask on all experts: a sum with fixed places."""
    mask, chosen = np.zeros(logits.shape), np.zeros(logits.shape)
    for places, capacity in ((mask, config.capacity_factor), (chosen, None)):
        kept, _ = oracle_routing(logits, dataclasses.replace(config, capacity_factor=capacity), bias, valid)
        for token, choices in kept.items():
            for expert, _ in choices:
                places[(*token, expert)] = 1

    def total(x, logits, w):
        scores = jax.nn.sigmoid(logits) if config.scores == "sigmoid" else jax.nn.softmax(logits)
        if config.renormalise:
            sums = jnp.sum(scores * chosen, -1, keepdims=True)
            scores = scores / jnp.where(sums > 0, sums, 1)
        shares = config.scale * scores * mask

        def plus(z, bias):
            return z if bias is None else z + bias[None, None]

        gate = plus(jnp.einsum("BTD,XDF->BTXF", x, w.gate_kernel), w.gate_bias)
        up = plus(jnp.einsum("BTD,XDF->BTXF", x, w.up_kernel), w.up_bias)
        y = plus(jnp.einsum("BTXF,XFD->BTXD", jax.nn.silu(gate) * up, w.down_kernel), w.down_bias)
        return jnp.sum(jnp.einsum("BTXD,BTX->BTD", y, shares) * cotangent)

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(x, logits, weights)


@functools.cache
def wanted(case: Case):
    """Arrays, cotangent, value and gradients of a case in float64; the same for all implementations."""
    x, logits, weights, bias, valid = case.make()
    cotangent = jnp.asarray(np.random.default_rng(9).standard_normal(x.shape))
    value = oracle(x, logits, weights, case.config, bias, valid)
    grads = gradients(x, logits, weights, case.config, bias, valid, cotangent)
    return (x, logits, weights, bias, valid), cotangent, value, grads


@functools.cache
def compiled(apply):
    """Compiles once per implementation and shape: most of a test's time is that."""

    def run(x, logits, weights, bias, valid, config):
        return apply(x, route(logits, config, bias=bias, valid=valid), weights, config)

    def total(x, logits, weights, bias, valid, config, cotangent):
        y = run(x, logits, weights, bias, valid, config)
        return jnp.sum(y * cotangent), y

    return jax.jit(run, static_argnums=5), jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True), static_argnums=5)


class ExpertsContract:
    """Subclass it with `apply`: `(x, routing, weights, config) -> y`."""

    apply = None

    def supports(self, case: Case) -> bool:
        return True

    def value(self, x, logits, weights, bias, valid, config):
        return compiled(self.apply)[0](x, logits, weights, bias, valid, config)

    def evaluate(self, x, logits, weights, bias, valid, config, cotangent):
        """Value, and gradients of x, logits and weights."""
        grads, value = compiled(self.apply)[1](x, logits, weights, bias, valid, config, cotangent)
        return value, grads

    @pytest.mark.parametrize("name", CASES)
    def test_values_and_gradients(self, name, x64):
        case = CASES[name]
        if not self.supports(case):
            pytest.skip("does not divide over the devices")
        arrays, cotangent, value, grads = wanted(case)
        got = self.evaluate(*arrays, case.config, cotangent)
        chex.assert_trees_all_close(got, (value, grads), rtol=0, atol=1e-12 * max(1, np.abs(value).max()))

    def test_float32_and_bfloat16(self, x64):
        case = CASES["capacity and padding"]
        for dtype, tolerance in ((jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)):
            x, logits, weights, bias, valid = case.make(dtype)
            got = self.value(x, logits, weights, bias, valid, case.config)
            assert got.dtype == dtype
            want = oracle(x, logits, weights, case.config, bias, valid)
            # Eight bits of mantissa at four roundings: 7e-3 of the largest at most, measured; float32 4e-7.
            np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance * np.abs(want).max())

    def test_experts_without_tokens(self, x64):
        case = CASES["empty experts"]
        arrays, cotangent, _, _ = wanted(case)
        for array in jax.tree.leaves(self.evaluate(*arrays, case.config, cotangent)[1][2]):
            assert jnp.all(jnp.isfinite(array))
            assert jnp.all(array[1:] == 0) and jnp.any(array[0] != 0)

    @pytest.mark.parametrize("name", ["padding", "capacity and padding"])
    def test_padding_may_hold_anything(self, name, x64):
        case = CASES[name]
        (x, logits, *others, valid), cotangent, want, _ = wanted(case)
        x, logits = (jnp.where(valid[..., None], a, jnp.nan) for a in (x, logits))
        value, grads = self.evaluate(x, logits, *others, valid, case.config, cotangent)
        np.testing.assert_allclose(value, want, rtol=0, atol=1e-12 * np.abs(want).max())
        assert np.all(np.asarray(value)[~np.asarray(valid)] == 0)
        assert all(jnp.all(jnp.isfinite(array)) for array in jax.tree.leaves(grads))

    def test_padding_and_other_rows_change_no_token(self, x64):
        case = CASES["capacity and padding"]
        (x, logits, weights, bias, _), _, together, _ = wanted(case)
        row, length = 1, case.lengths[1]
        own = (jnp.tile(a[row : row + 1, :length], (case.B, 1, 1)) for a in (x, logits))
        alone = self.value(*own, weights, bias, None, case.config)
        np.testing.assert_allclose(alone[0], together[row, :length], rtol=0, atol=1e-12)

    def test_later_tokens_change_nothing_with_enough_places(self, x64):
        case = CASES["two of four"]
        (x, logits, *others), _, whole, _ = wanted(case)
        start = self.value(x[:, :3], logits[:, :3], *others, case.config)
        np.testing.assert_allclose(start, whole[:, :3], rtol=0, atol=1e-12)
