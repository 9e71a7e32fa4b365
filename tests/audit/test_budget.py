"""The perturbation budget: against the reference audit, its certified links against perturbations, its product."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.audit import budget
from plga_jax.models.pldr_transforms import constant_operator_model
from plga_jax.ops.attention import attention
from plga_jax.ops.power_law import fold_operator, hadamard_power, iswiglu, positive_tensor, superposition


@pytest.fixture
def found(x64, published, golden):
    return budget.perturbation_budget(published(), golden("forward_f64")["full.ids"][0, :-1])


# Float64 sums in another order, through the whole forward pass: measured 1e-14.
CLOSE = {"rtol": 1e-12, "atol": 0}


class TestReference:
    def test_every_factor(self, found, golden):
        audit = golden("audit_small_f64")
        # The least entry of A_LM near the floor, to a power of -1.3: measured 5e-12.
        np.testing.assert_allclose(found.operator_gain, audit["budget.C_G"], rtol=1e-10, atol=0)
        np.testing.assert_allclose(found.operator_gain_floor, audit["budget.C_G_floor"], **CLOSE)
        np.testing.assert_allclose(found.head_factor, audit["budget.headfac"], **CLOSE)
        names = ("out_norm", "attention_norm_gain", "ffn_gain", "ffn_norm_gain", "layer_gain", "attention_gain")
        chain = np.stack([getattr(found, name) for name in names], axis=-1)
        np.testing.assert_allclose(chain, audit["chain.WO_LLN1_Lffn_LLN2_Llayer_Lattn"], **CLOSE)

    def test_product_and_criterion(self, found, golden):
        audit = golden("audit_small_f64")
        np.testing.assert_allclose(found.end_to_end, audit["chain.end_to_end"], **CLOSE)
        np.testing.assert_allclose(found.radius, audit["chain.eps_spec"], **CLOSE)
        assert found.deviation == found.end_to_end * found.radius
        # 5.6e3 against a margin of 0.014: the chain decides nothing, as published.
        assert not found.decides()
        assert found.decides(2.0001 * found.deviation) and not found.decides(2 * found.deviation)

    def test_margin_is_the_last_rows(self, found, golden):
        second, best = np.sort(golden("forward_f64")["full.logits"][0, -1])[-2:]
        assert found.margin == pytest.approx(best - second, rel=1e-9)

    def test_float32_tensors_give_the_same_budget(self, found, published, golden):
        with jax.enable_x64(False):
            narrow = budget.perturbation_budget(published("float32"), golden("forward_f64")["full.ids"][0, :-1])
        # The least entry of A_LM near the floor, to a power of -1.3, is what float32 resolves least: measured 9e-3.
        # The margin is a difference of logits of order 1: measured 1.5e-3 of it. All others 2e-5.
        loose = {"operator_gain": 5e-2, "margin": 1e-2}
        for field in dataclasses.fields(found):
            value = np.asarray(getattr(narrow, field.name))
            assert value.dtype == np.float64
            tolerance = loose.get(field.name, 2e-4)
            np.testing.assert_allclose(value, getattr(found, field.name), rtol=tolerance, err_msg=field.name)


def test_product_by_hand(found):
    three = dataclasses.replace(
        found,
        head_factor=np.array([[1.0, 2, 1, 1], [3, 1, 1, 1], [1, 1, 1, 1]]),
        out_norm=np.array([2.0, 3, 5]),
        attention_norm_gain=np.array([1.0, 2, 1]),
        ffn_gain=np.array([1.0, 0, 3]),
        ffn_norm_gain=np.array([1.0, 1, 1]),
        attention_gain=np.array([0.0, 4, 1]),
        logits_norm=7.0,
    )
    np.testing.assert_array_equal(three.layer_gain, [2, 10, 8])
    injected = [2 * 2 * 2 * 10 * 8, 2 * 3 * 2 * 8, 2 * 5 * 4]
    assert three.end_to_end == 3 * sum(injected) * 7
    one = {name: getattr(three, name)[2:] for name in ("out_norm", "attention_norm_gain", "ffn_gain", "ffn_norm_gain")}
    last = dataclasses.replace(three, **one, attention_gain=three.attention_gain[2:], head_factor=three.head_factor[2:])
    assert last.end_to_end == 2 * 5 * 4 * 7


def stage(rng, heads=3, width=5):
    weights = dict(zip(("W", "b_W", "P", "a"), rng.normal(size=(4, heads, width, width))))
    return weights, rng.normal(size=(heads, width, width))


def operator_of(A, weights):
    A_P = hadamard_power(positive_tensor(A, weights["W"], weights["b_W"]), weights["P"])
    return superposition(A_P, weights["a"], jnp.zeros_like(A))


@pytest.mark.parametrize("seed", range(4))
def test_certified_operator_gain_holds_between_any_two_points_of_its_ball(x64, seed):
    rng = np.random.default_rng(seed)
    weights, A = stage(rng)
    weights = {name: jnp.asarray(x) for name, x in weights.items()}
    for radius in (1e-6, 0.3):
        gain = budget.certified_operator_gain(A, **weights, radius=radius)
        steps = rng.normal(size=(2, 200, 3, 5, 5))
        steps *= radius * rng.uniform(size=(2, 200, 3, 1, 1)) / np.linalg.norm(steps, axis=(-2, -1), keepdims=True)
        first, second = (jnp.asarray(A + step) for step in steps)
        moved = operator_of(first, weights) - operator_of(second, weights)
        ratio = np.linalg.norm(moved, axis=(-2, -1)) / np.linalg.norm(first - second, axis=(-2, -1))
        assert (ratio <= gain).all()
    # A larger ball is never better, and the floor never better than what was observed.
    A_LM = positive_tensor(jnp.asarray(A), weights["W"], weights["b_W"])
    observed, floor = (budget.operator_gain(A, A_LM, **weights, least=least) for least in (None, 1e-9))
    at_once = budget.certified_operator_gain(A, **weights, radius=0.0)
    assert (observed <= floor).all() and (floor <= at_once * (1 + 1e-12)).all() and (at_once <= gain).all()


def test_certified_gain_is_reached_in_a_case_without_slack(x64):
    """One entry: U is attained, and so is A_LM = z²σ(z) + ε; only the envelope of the slope is above the slope."""
    W, b_W, P, a = (np.full((1, 1, 1), x) for x in (2.0, 0.0, 3.0, 0.5))
    A = np.full((1, 1, 1), 3.0)
    gain = budget.certified_operator_gain(A, W=W, b_W=b_W, P=P, a=a, radius=0.0)
    weights = {name: jnp.asarray(x) for name, x in {"W": W, "P": P, "a": a, "b_W": b_W}.items()}
    slope = jax.grad(lambda x: operator_of(x, weights).sum())(jnp.asarray(A))[0, 0, 0]
    envelope = budget.iswiglu_slope(6.0) / jax.grad(iswiglu)(6.0)
    assert gain[0] == pytest.approx(float(slope * envelope), rel=1e-12)
    assert 1 < envelope < 2
    # A ball is as steep as its steepest point.
    ball = budget.certified_operator_gain(A, W=W, b_W=b_W, P=P, a=a, radius=0.5)
    edge = budget.certified_operator_gain(A + 0.5, W=W, b_W=b_W, P=P, a=a, radius=0.0)
    np.testing.assert_allclose(ball, edge, rtol=1e-14)


@pytest.mark.parametrize("seed", range(4))
def test_head_factor_holds_for_any_change_of_the_operator(x64, seed):
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(x) for x in rng.normal(size=(3, 1, 7, 2, 4)))
    G = jnp.asarray(rng.normal(size=(2, 4, 4)))
    factor = budget.head_factor(q, k, v)[0]
    before = attention(fold_operator(q, G), k, v)
    for size in (1e-3, 1.0, 30.0):
        change = size * rng.normal(size=(2, 4, 4))
        moved = attention(fold_operator(q, G + change), k, v) - before
        rows = np.linalg.norm(moved[0], axis=-1).max(axis=0)
        assert (rows <= factor * np.linalg.norm(change, 2, axis=(-2, -1))).all()


@pytest.mark.parametrize(("slope", "function"), [(budget.iswiglu_slope, iswiglu), (budget.silu_slope, jax.nn.silu)])
def test_slopes_are_above_the_function_within_reach(x64, slope, function):
    z = jnp.linspace(-40.0, 40.0, 4001)
    steepest = np.abs(jax.vmap(jax.grad(function))(z))
    assert (steepest <= slope(np.abs(z))).all()
    # And grow with the reach, so the end is the worst of an interval.
    assert (np.diff(slope(np.linspace(0, 40, 1000))) > 0).all()


def test_powers_beyond_float64_are_infinite_not_an_error():
    weights, A = stage(np.random.default_rng(0))
    gain = budget.certified_operator_gain(A, **(weights | {"P": weights["P"] - 40}), radius=0.0)
    assert np.isposinf(gain).all()


def test_bad_input_is_refused(x64, published):
    model = published()
    with pytest.raises(ValueError, match=r"shape \(1, 2\)"):
        budget.perturbation_budget(model, [[1, 2]])
    with pytest.raises(ValueError, match="shape \\(0,\\)"):
        budget.perturbation_budget(model, [])
    identity = jnp.broadcast_to(jnp.eye(16, dtype=jnp.float64), (2, 4, 16, 16))
    with pytest.raises(ValueError, match="constant operators"):
        budget.perturbation_budget(constant_operator_model(model, identity), [1, 2])
