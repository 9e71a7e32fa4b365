"""Routing to experts: choices, weights, capacity, losses, statistics and alarms."""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.ops.routing import (
    ExpertsConfig,
    load_balancing_loss,
    route,
    router_logits,
    router_loss,
    router_statistics,
    router_z_loss,
    tally,
    updated_bias,
)
from tests.ops.expert_cases import Case, oracle_routing, sigmoid

SIZES = {"num_experts": 4, "num_chosen": 2, "hidden_width": 3}
CONFIG = ExpertsConfig(**SIZES)

_route = jax.jit(route, static_argnums=1)


def _logits(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def _to(experts, num_experts=4, **options):
    """The routing of tokens [B, T, k] to given experts, highest first."""
    experts = np.asarray(experts)
    logits = np.zeros((*experts.shape[:2], num_experts))
    for rank in range(experts.shape[2]):
        np.put_along_axis(logits, experts[..., rank : rank + 1], float(experts.shape[2] - rank), axis=-1)
    config = ExpertsConfig(num_experts=num_experts, num_chosen=experts.shape[2], hidden_width=1, **options)
    return route(jnp.asarray(logits), config)


@pytest.mark.usefixtures("x64")
class TestChoicesAndWeights:
    @pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
    @pytest.mark.parametrize("renormalise", [True, False])
    @pytest.mark.parametrize("biased", [True, False])
    @pytest.mark.parametrize("factor", [None, 0.75])
    def test_are_the_definition(self, scores, renormalise, biased, factor):
        options = {"scores": scores, "renormalise": renormalise, "capacity_factor": factor, "scale": 1.5}
        case = Case(T=12, X=5, k=3, biased=biased, lengths=(12, 7, 1, 0), options=tuple(options.items()))
        _, logits, _, bias, valid = case.make()
        routing = _route(logits, case.config, bias=bias, valid=valid)
        kept, dropped = oracle_routing(logits, case.config, bias, valid)
        assert bool(dropped) == (factor is not None)
        for token in np.ndindex(4, 12):
            mask = np.asarray(routing.kept[token])
            choices = kept.get(token, [])
            assert np.asarray(routing.experts[token])[mask].tolist() == [expert for expert, _ in choices]
            np.testing.assert_allclose(routing.weights[token][mask], [weight for _, weight in choices], rtol=1e-13)
            assert np.all(np.asarray(routing.weights[token])[~mask] == 0)
        assert int(tally(routing).dropped) == len(dropped)

    def test_softmax_before_the_choice_and_renormalised_is_softmax_after_it(self):
        logits = _logits(2, 5, 4)
        routing = route(logits, CONFIG)
        after = jax.nn.softmax(jnp.take_along_axis(logits, routing.experts, axis=-1))
        np.testing.assert_allclose(routing.weights, after, rtol=1e-14)
        plain = route(logits, dataclasses.replace(CONFIG, renormalise=False))
        np.testing.assert_allclose(
            plain.weights, jnp.take_along_axis(jax.nn.softmax(logits), routing.experts, axis=-1), rtol=1e-14
        )
        assert np.all(plain.weights.sum(-1) < 1 - 1e-3)

    def test_highest_first_and_the_lower_index_among_equals(self):
        assert route(jnp.array([[[1.0, 3.0, 1.0, 1.0]]]), CONFIG).experts.tolist() == [[[1, 0]]]

    def test_sigmoids_that_underflow(self):
        """e^−1000 is 0: a quotient of the scores would be 0/0."""
        config = dataclasses.replace(CONFIG, scores="sigmoid")
        routing = route(jnp.array([[[-1000.0, -1001.0, -1500.0, -1500.0]]]), config)
        np.testing.assert_allclose(routing.weights[0, 0], [sigmoid(1.0), sigmoid(-1.0)], rtol=1e-13)
        np.testing.assert_allclose(routing.probabilities.sum(), 1, rtol=1e-13)

    def test_a_bias_moves_the_choice_but_no_weight(self):
        logits = jnp.array([[[2.0, 1.0, 0.0, -1.0]]])
        config = dataclasses.replace(CONFIG, renormalise=False)
        plain, moved = (route(logits, config, bias=bias) for bias in (None, jnp.array([0.0, -1.0, 0.0, 0.0])))
        assert (plain.experts[0, 0].tolist(), moved.experts[0, 0].tolist()) == ([0, 1], [0, 2])
        np.testing.assert_allclose(moved.weights[0, 0], jax.nn.softmax(logits[0, 0])[jnp.array([0, 2])], rtol=1e-14)
        gradient = jax.grad(lambda bias: route(logits, config, bias=bias).weights.sum())(jnp.zeros(4))
        assert np.all(gradient == 0)


class TestPrecision:
    def test_the_router_is_float32_for_bfloat16_tokens(self):
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.standard_normal((3, 400, 64)), jnp.bfloat16)
        kernel = jnp.asarray(rng.standard_normal((64, 4)), jnp.float32)
        logits = router_logits(x, kernel)
        assert logits.dtype == jnp.float32
        exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
        np.testing.assert_allclose(logits, exact, rtol=0, atol=2e-5)
        # In bfloat16 the logits would be off by a thousand times that, and some choices with them.
        coarse = jnp.matmul(x, kernel.astype(jnp.bfloat16))
        assert np.abs(np.asarray(coarse, np.float64) - exact).max() > 1e-2
        experts = [route(l.astype(jnp.float32), CONFIG).experts for l in (logits, coarse)]
        assert not np.array_equal(*experts)

    def test_everything_is_float32_or_better(self):
        routing = route(_logits(2, 5, 4).astype(jnp.bfloat16), CONFIG)
        counted = tally(routing)
        for array in (routing.logits, routing.weights, counted.probabilities, load_balancing_loss(counted)):
            assert array.dtype == jnp.float32


class TestCapacity:
    @pytest.mark.parametrize(
        ("factor", "tokens", "places"),
        [(1.0, 8, 4), (1.25, 8, 5), (1.1, 20, 11), (1.0, 9, 5), (0.5, 1, 1), (2.0, 8, 8), (100.0, 8, 8), (1.25, 0, 0)],
    )
    def test_places(self, factor, tokens, places):
        config = dataclasses.replace(CONFIG, capacity_factor=factor)
        assert config.capacity(tokens) == places
        assert jax.jit(config.capacity)(jnp.int32(tokens)) == places

    def test_long_rows_do_not_overflow(self):
        config = ExpertsConfig(num_experts=512, num_chosen=8, hidden_width=1, capacity_factor=1.05)
        tokens = 1_000_000_000
        assert config.capacity(jnp.int32(tokens)) == math.ceil(tokens * 21 * 8 / (20 * 512))

    def test_earlier_tokens_stay(self):
        routing = _to([[[0], [0], [1], [0], [0]]], capacity_factor=1.6)  # two places
        assert routing.kept[0, :, 0].tolist() == [True, True, True, False, False]
        assert routing.slots[0, :, 0].tolist() == [0, 1, 0, 2, 3]
        assert routing.weights[0, :, 0].tolist() == [1, 1, 1, 0, 0]

    def test_all_choices_of_a_token_come_before_the_next_token(self):
        """So that no token can lose its place to a later one, whatever that one's first choice is."""
        routing = _to([[[1, 0], [0, 2], [0, 3]]], capacity_factor=0.7)  # ⌈0.7·2·3/4⌉ = 2 places
        assert routing.kept[0].tolist() == [[True, True], [True, True], [False, True]]

    def test_padding_takes_no_place(self):
        config = dataclasses.replace(CONFIG, num_chosen=1, capacity_factor=2.0)
        logits = jnp.zeros((1, 6, 4)).at[..., 0].set(5.0)
        valid = jnp.array([[False, True, False, True, True, False]])
        routing = route(logits, config, valid=valid)
        assert config.capacity(3) == 2
        assert routing.kept[0, :, 0].tolist() == [False, True, False, True, False, False]


class TestLosses:
    def test_uniform_routing_gives_alpha(self, x64):
        """f_x = P_x = 1/X."""
        for k, X in ((1, 4), (2, 4), (3, 5)):
            experts = (np.arange(X)[:, None] + np.arange(k)) % X
            counted = tally(_to(np.tile(experts[None], (2, 1, 1)), X))
            counted = dataclasses.replace(counted, probabilities=jnp.full(X, int(counted.tokens) / X, jnp.float64))
            np.testing.assert_allclose(load_balancing_loss(counted, 0.01), 0.01, rtol=1e-14)
            np.testing.assert_allclose(load_balancing_loss(counted, 0.01, per="token"), 0.01 * k, rtol=1e-14)

    def test_one_expert_for_all_gives_the_number_of_experts(self):
        logits = jnp.zeros((1, 7, 4)).at[..., 2].set(80.0)
        counted = tally(route(logits, dataclasses.replace(CONFIG, num_chosen=1)))
        np.testing.assert_allclose(load_balancing_loss(counted, 0.01), 0.04, rtol=1e-6)

    def test_definitions(self, x64):
        logits, valid = _logits(3, 5, 4), np.arange(5)[None] < np.array([[5], [2], [0]])
        counted = tally(route(logits, CONFIG, valid=jnp.asarray(valid)))
        z = np.asarray(logits)[valid]
        p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
        counts = np.bincount(np.argsort(-z, axis=-1)[:, :2].reshape(-1), minlength=4)
        assert counted.counts.tolist() == counts.tolist() and int(counted.tokens) == 7
        np.testing.assert_allclose(load_balancing_loss(counted), 4 * np.sum(counts / 14 * p.mean(0)), rtol=1e-13)
        np.testing.assert_allclose(
            load_balancing_loss(counted, per="token"), 4 * np.sum(counts / 7 * p.mean(0)), rtol=1e-13
        )
        z_loss = np.mean(np.log(np.exp(z).sum(-1)) ** 2)
        np.testing.assert_allclose(router_z_loss(counted), z_loss, rtol=1e-13)
        config = dataclasses.replace(CONFIG, balance_weight=0.5, z_weight=0.25)
        want = 0.5 * load_balancing_loss(counted) + 0.25 * z_loss
        np.testing.assert_allclose(router_loss(counted, config), want, rtol=1e-13)
        with pytest.raises(ValueError, match="per = 'layer' is unknown"):
            load_balancing_loss(counted, per="layer")

    def test_tallies_add_up_but_losses_do_not(self, x64):
        stacked = jax.vmap(lambda l: route(l, CONFIG))(_logits(3, 2, 5, 4) + 2 * _logits(3, 1, 1, 4, seed=1))
        layers = [tally(jax.tree.map(lambda a, l=layer: a[l], stacked)) for layer in range(3)]
        pooled = tally(stacked)
        for ours, theirs in zip(jax.tree.leaves(functools.reduce(operator.add, layers)), jax.tree.leaves(pooled)):
            np.testing.assert_allclose(ours, theirs, rtol=1e-13)
        mean = np.mean([load_balancing_loss(layer) for layer in layers])
        assert abs(load_balancing_loss(pooled) - mean) > 1e-3

    def test_gradients_lead_to_balance(self, x64):
        """Descent on the loss alone evens out the counts of a skewed router."""
        rng = np.random.default_rng(2)
        x = jnp.asarray(rng.standard_normal((4, 32, 8)))
        kernel = jnp.asarray(rng.standard_normal((8, 4)))
        start = jnp.array([2.0, 0.0, 0.0, -2.0])

        def counted(parameters):
            kernel, offset = parameters
            return tally(route(router_logits(x, kernel) + offset[None, None], CONFIG))

        gradient = jax.jit(jax.grad(lambda parameters: load_balancing_loss(counted(parameters))))
        parameters = kernel, start
        before = router_statistics(counted(parameters)).share
        for _ in range(60):
            parameters = jax.tree.map(lambda p, g: p - 1.0 * g, parameters, gradient(parameters))
        after = router_statistics(counted(parameters)).share
        assert before.max() - before.min() > 0.25 and after.max() - after.min() < 0.1

    def test_without_tokens_everything_is_zero_and_finite(self):
        def loss(logits):
            return router_loss(tally(route(logits, config, valid=jnp.zeros((2, 3), bool))), config)

        config = dataclasses.replace(CONFIG, z_weight=1.0)
        value, gradient = jax.value_and_grad(loss)(jnp.full((2, 3, 4), jnp.nan))
        assert value == 0 and jnp.all(gradient == 0)
        statistics = router_statistics(tally(route(jnp.zeros((2, 3, 4)), CONFIG, valid=jnp.zeros((2, 3), bool))))
        assert statistics.alarms() == []
        assert all(jnp.all(jnp.isfinite(array)) for array in jax.tree.leaves(statistics))


class TestBalanceWithoutALoss:
    def test_one_step(self):
        bias = jnp.array([0.0, 0.5, -0.5, 0.25])
        got = updated_bias(bias, jnp.array([10, 2, 6, 6], jnp.int32), rate=0.1)
        np.testing.assert_allclose(got, [-0.1, 0.6, -0.5, 0.25], rtol=1e-6)
        stacked = updated_bias(jnp.zeros((2, 2)), jnp.array([[3, 1], [0, 4]]), rate=1.0)
        np.testing.assert_array_equal(stacked, [[-1, 1], [1, -1]])

    def test_steps_even_out_a_skewed_router(self):
        config = dataclasses.replace(CONFIG, scores="sigmoid", biased=True)
        logits = (_logits(4, 64, 4) + jnp.array([3.0, 1.0, 0.0, -3.0])[None, None]).astype(jnp.float32)

        @jax.jit
        def step(bias):
            counted = tally(route(logits, config, bias=bias))
            return updated_bias(bias, counted.counts, rate=0.02), router_statistics(counted).share

        bias, first = step(jnp.zeros(4))
        for _ in range(80):
            bias, share = step(bias)
        assert first.max() > 0.45 and first.min() < 0.05
        assert share.max() - share.min() < 0.05


class TestStatistics:
    def test_numbers(self):
        routing = _to([[[0], [0], [1], [0], [3], [0]]], capacity_factor=1.5)  # ⌈1.5·6/4⌉ = 3 places
        statistics = router_statistics(tally(routing))
        assert statistics.counts.tolist() == [4, 1, 0, 1]
        np.testing.assert_allclose(statistics.share, np.array([4, 1, 0, 1]) / 6, rtol=1e-6)
        np.testing.assert_allclose(statistics.token_share, statistics.share, rtol=1e-6)
        np.testing.assert_allclose(statistics.dropped_share, 1 / 6, rtol=1e-6)
        np.testing.assert_allclose(statistics.unserved_share, 1 / 6, rtol=1e-6)
        entropy = -(4 / 6 * math.log(4 / 6) + 2 / 6 * math.log(1 / 6))
        np.testing.assert_allclose(statistics.entropy, entropy, rtol=1e-6)

    def test_entropy_of_equal_shares(self):
        statistics = router_statistics(tally(_to([[[0], [1], [2], [3]]])))
        np.testing.assert_allclose(statistics.entropy, math.log(4), rtol=1e-6)
        assert statistics.alarms() == []

    def test_a_token_is_served_while_one_choice_is_kept(self):
        routing = _to([[[0, 1], [0, 2], [0, 1], [0, 1]]], capacity_factor=0.75)  # ⌈0.75·2·4/4⌉ = 2 places
        counted = tally(routing)
        assert int(counted.dropped) == 3 and int(counted.unserved) == 1

    @pytest.mark.parametrize(("to_first", "alarm"), [(10, False), (11, True)])
    def test_one_expert_with_more_than_half(self, to_first, alarm):
        experts = [0] * to_first + [1 + i % 3 for i in range(20 - to_first)]
        statistics = router_statistics(tally(_to(np.array(experts)[None, :, None])))
        assert statistics.overloaded.tolist() == [alarm, False, False, False]
        assert any("expert 0 gets 55% of the tokens" in text for text in statistics.alarms()) == alarm

    def test_half_is_no_alarm_where_balance_is_half(self):
        """Three of five are 60 % for each when balanced; the limit is half way from there to all."""
        balanced = (np.arange(5)[:, None] + np.arange(3)) % 5
        assert router_statistics(tally(_to(balanced[None], 5))).alarms() == []
        always_first = np.stack([np.zeros(5, int), 1 + np.arange(5) % 4, 1 + (np.arange(5) + 1) % 4], axis=-1)
        statistics = router_statistics(tally(_to(always_first[None], 5)))
        assert statistics.overloaded.tolist() == [True, False, False, False, False]

    @pytest.mark.parametrize(("dropped", "alarm"), [(2, False), (3, True)])
    def test_more_than_five_percent_dropped(self, dropped, alarm):
        """Ten places for 40 tokens: 2 of 40 are 5 %."""
        experts = np.repeat(np.arange(4), [10 + dropped, 10, 10, 10 - dropped])
        statistics = router_statistics(tally(_to(experts[None, :, None], capacity_factor=1.0)))
        np.testing.assert_allclose(statistics.dropped_share, dropped / 40, rtol=1e-6)
        assert bool(statistics.dropping) == alarm
        assert any("of the choices are dropped" in text for text in statistics.alarms()) == alarm

    @pytest.mark.parametrize(("logit", "alarm"), [(0.5, False), (5.0, True)])
    def test_loss_far_above_alpha(self, logit, alarm):
        logits = jnp.zeros((1, 9, 4)).at[..., 2].set(logit)
        statistics = router_statistics(tally(route(logits, dataclasses.replace(CONFIG, num_chosen=1))))
        assert bool(statistics.unbalanced) == alarm
        assert any("times that of a uniform router" in text for text in statistics.alarms()) == alarm


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_chosen": 5}, r"num_chosen = 5 exceeds num_experts = 4: a token can go to 1…4"),
            ({"num_chosen": 0}, "num_chosen = 0 must be a whole number of at least 1"),
            ({"hidden_width": 2.5}, "hidden_width = 2.5"),
            ({"shared_width": 0}, "shared_width = 0"),
            ({"scores": "softplus"}, "scores = 'softplus' is unknown"),
            ({"implementation": "fast"}, "implementation = 'fast' is unknown"),
            ({"capacity_factor": 0.0}, r"capacity_factor = 0.0 must be within \[0.05, 100\]"),
            ({"scale": 0.0}, "scale = 0.0"),
            ({"z_weight": -1.0}, "z_weight = -1.0 must be at least 0"),
            ({"shared_gate": True}, "set shared_width"),
        ],
    )
    def test_refusals(self, options, message):
        with pytest.raises(ValueError, match=message):
            ExpertsConfig(**SIZES | options)
