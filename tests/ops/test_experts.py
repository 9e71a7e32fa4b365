"""Mixture of experts: the shared contract for all ways to compute it, and shared and fine-grained experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.ops.experts import apply_experts, shared_expert, split_experts
from plga_jax.ops.gated import GatedWeights, gated_linear
from plga_jax.ops.routing import IMPLEMENTATIONS, ExpertsConfig, route
from tests.ops.expert_cases import CASES, ExpertsContract, oracle


def _by(name):
    def apply(x, routing, weights, config):
        return apply_experts(x, routing, weights, dataclasses.replace(config, implementation=name))

    return staticmethod(apply)


class TestRagged(ExpertsContract):
    apply = _by("ragged")


class TestDense(ExpertsContract):
    apply = _by("dense")


class TestDispatch(ExpertsContract):
    apply = _by("dispatch")


class TestGather(ExpertsContract):
    apply = _by("gather")


class TestChoiceOfImplementation:
    @pytest.mark.parametrize(("tokens", "gathers"), [(2, True), (3, False)])
    def test_few_tokens_read_their_own_experts_only(self, tokens, gathers):
        """Two of four experts: two tokens have four choices."""
        x, logits, weights, _, _ = CASES["two of four"].make(jnp.float32)
        config = CASES["two of four"].config

        def run(x, logits, weights):
            return apply_experts(x, route(logits, config), weights, config)

        text = jax.jit(run).lower(x[:1, :tokens], logits[:1, :tokens], weights).as_text()
        gathered = f"tensor<{2 * tokens}x5x3xf32>"
        assert (gathered in text) == gathers

    def test_memory_of_the_dense_way_does_not_grow_with_the_experts(self):
        """One expert's activations at a time: forward and backward."""
        T, D, F = 256, 16, 64

        def temporary(X):
            config = ExpertsConfig(num_experts=X, num_chosen=1, hidden_width=F, implementation="dense")
            shapes = (1, T, D), (1, T, X), (X, D, F), (X, F, D)
            x, logits, into, out = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
            weights = GatedWeights(into, None, into, None, out, None)

            def total(x, logits, weights):
                return jnp.sum(apply_experts(x, route(logits, config), weights, config))

            program = jax.jit(jax.grad(total)).lower(x, logits, weights).compile()
            return program.memory_analysis().temp_size_in_bytes

        # The router's own arrays, some [T, X] and the loop's shares, do grow; activations would by T·F·4 per expert.
        assert temporary(32) - temporary(8) < 0.5 * 24 * T * F * 4


def test_shapes_that_do_not_fit():
    x, logits, weights, _, _ = CASES["two of four"].make(jnp.float32)
    config = CASES["two of four"].config
    routing = route(logits, config)
    with pytest.raises(ValueError, match=r"\(4, 5, 3\), expected \[5, 5, F\]"):
        apply_experts(x, routing, weights, dataclasses.replace(config, num_experts=5))
    with pytest.raises(ValueError, match=r"x is \(4, 5, 5\), but the routing is of \(4, 6\) tokens"):
        apply_experts(x[:, :5], routing, weights, config)
    with pytest.raises(ValueError, match=r"logits must be \[B, T, 3\]"):
        route(logits, dataclasses.replace(config, num_experts=3))


class TestSharedExpert:
    @staticmethod
    def _weights(width, seed=0):
        rng = np.random.default_rng(seed)
        into, out = (jnp.asarray(rng.standard_normal((2, *shape))) for shape in ((5, width), (width, 5)))
        return GatedWeights(into[0], None, into[1], None, out[0], None)

    def test_gate(self, x64):
        weights, rng = self._weights(3), np.random.default_rng(1)
        x, gate = jnp.asarray(rng.standard_normal((2, 4, 5))), jnp.asarray(rng.standard_normal((5, 1)))
        plain = gated_linear(x, weights)
        np.testing.assert_array_equal(shared_expert(x, weights), plain)
        want = np.asarray(plain) / (1 + np.exp(-np.asarray(x) @ np.asarray(gate)))
        np.testing.assert_allclose(shared_expert(x, weights, gate), want, rtol=1e-13)
        assert shared_expert(x.astype(jnp.bfloat16), weights, gate).dtype == jnp.bfloat16

    def test_several_are_one_of_their_width_together(self, x64):
        both = self._weights(6)
        first, second = (
            GatedWeights(both[0][:, cut], None, both[2][:, cut], None, both[4][cut], None)
            for cut in (slice(3), slice(3, None))
        )
        x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 4, 5)))
        want = shared_expert(x, first) + shared_expert(x, second)
        np.testing.assert_allclose(shared_expert(x, both), want, rtol=0, atol=1e-12)


class TestFineGrained:
    def test_pieces_add_up(self, x64):
        """Choosing all pieces of an expert, each with its weight, is choosing the expert."""
        case = dataclasses.replace(CASES["two of four"], biases=True, F=6, options=(("renormalise", False),))
        x, logits, weights, _, _ = case.make()
        config = case.config.fine_grained(3)
        assert (config.num_experts, config.num_chosen, config.hidden_width) == (12, 6, 2)
        # Thrice the logit in equal pieces: each piece has a third of the probability, hence the scale.
        config = dataclasses.replace(config, scale=3.0)
        got = apply_experts(x, route(jnp.repeat(logits, 3, axis=-1), config), split_experts(weights, 3), config)
        np.testing.assert_allclose(got, oracle(x, logits, weights, case.config), rtol=0, atol=1e-12)

    def test_parameters_and_compute_stay(self):
        config = ExpertsConfig(num_experts=8, num_chosen=2, hidden_width=12)
        fine = config.fine_grained(4)
        for count in ("num_experts", "num_chosen"):
            assert getattr(fine, count) * fine.hidden_width == getattr(config, count) * config.hidden_width

    @pytest.mark.parametrize("pieces", [0, 5])
    def test_pieces_that_do_not_divide(self, pieces):
        case = CASES["two of four"]
        with pytest.raises(ValueError, match=f"{pieces} pieces do not divide the experts' width of 3"):
            case.config.fine_grained(pieces)
        with pytest.raises(ValueError, match="do not divide"):
            split_experts(case.make(jnp.float32)[2], pieces)


def test_a_step_of_training_moves_the_router(x64):
    """The gradient reaches the router through the weights alone, and descends."""
    case = CASES["two of four"]
    x, _, weights, _, _ = case.make()
    kernel = jnp.asarray(np.random.default_rng(3).standard_normal((5, 4)))
    target = jnp.asarray(np.random.default_rng(4).standard_normal(x.shape))

    @functools.partial(jax.jit, static_argnums=1)
    def loss(kernel, name):
        config = dataclasses.replace(case.config, implementation=name)
        routing = route(jnp.einsum("BTD,DX->BTX", x, kernel), config)
        return jnp.mean(jnp.square(apply_experts(x, routing, weights, config) - target))

    gradients = [jax.grad(loss)(kernel, name) for name in IMPLEMENTATIONS]
    for gradient in gradients:
        np.testing.assert_allclose(gradient, gradients[0], rtol=0, atol=1e-12)
    assert loss(kernel - 1e-3 * gradients[0], "dense") < loss(kernel, "dense")
