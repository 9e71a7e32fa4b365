"""Cross entropy against a float64 oracle and the reference; the DAG loss at every size."""

import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from plga_jax.train.losses import (
    OPERATORS,
    DagCoefficients,
    TokenLoss,
    cross_entropy,
    dag_loss,
    log_mean_trace_exp,
    log_trace_exp,
    pldr_loss,
    segment_weights,
)

_cross_entropy = jax.jit(cross_entropy, static_argnames="pad_id")
_dag = jax.jit(dag_loss)
_dag_and_gradient = jax.jit(jax.value_and_grad(dag_loss))
_log_mean = jax.jit(log_mean_trace_exp)
_log_mean_gradient = jax.jit(jax.grad(lambda N: jnp.sum(log_mean_trace_exp(N))))


def _block(seed=0, shape=(2, 5), vocabulary=11):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(*shape, vocabulary)) * 3
    targets = rng.integers(1, vocabulary, size=shape)
    targets[0, -2:] = 0
    return logits, targets


def _token_losses(logits, targets):
    """-log softmax, one token at a time, in float64."""
    out = np.zeros(targets.shape)
    for at in np.ndindex(targets.shape):
        row = logits[at] - logits[at].max()
        out[at] = np.log(np.exp(row).sum()) - row[targets[at]]
    return out


class TestCrossEntropy:
    def test_reference_golden(self, x64, golden):
        g = golden("forward_f64")
        parts = _cross_entropy(jnp.asarray(g["full.logits"]), jnp.asarray(g["full.ids"][:, 1:]))
        np.testing.assert_allclose(parts.mean, g["full.ce"], rtol=1e-12)
        np.testing.assert_allclose(parts.accuracy, g["full.acc"], atol=1e-7)

    def test_accuracy_golden(self, x64, golden):
        targets = jnp.asarray(golden("misc")["acc_demo.real"])
        parts = _cross_entropy(jnp.asarray(golden("forward_f64")["full.logits"]), targets)
        # The reference holds the figure in float32.
        np.testing.assert_allclose(parts.accuracy, golden("misc")["acc_demo.acc"], rtol=1e-6)

    @pytest.mark.parametrize("weighted", [False, True])
    def test_float64_oracle(self, x64, weighted):
        logits, targets = _block()
        given = np.random.default_rng(1).uniform(size=targets.shape) if weighted else None
        weight = (targets != 0) * (1.0 if given is None else given)
        losses = _token_losses(logits, targets)
        parts = _cross_entropy(
            jnp.asarray(logits),
            jnp.asarray(targets),
            weights=None if given is None else jnp.asarray(given),
        )
        np.testing.assert_allclose(parts.total, (weight * losses).sum(), rtol=1e-13)
        np.testing.assert_allclose(parts.count, weight.sum(), rtol=1e-15)
        hits = (logits.argmax(-1) == targets) * weight
        np.testing.assert_allclose(parts.correct, hits.sum(), rtol=1e-15)

    def test_padding_id_outside_the_vocabulary(self):
        logits, targets = _block()
        logits = jnp.asarray(logits, jnp.float32)
        want = _cross_entropy(logits, jnp.asarray(targets))
        got = _cross_entropy(logits, jnp.where(targets == 0, -100, targets), pad_id=-100)
        chex.assert_trees_all_equal(got, want)

    def test_gradient_is_softmax_minus_one_hot(self, x64):
        logits, targets = _block()
        got = jax.grad(lambda x: _cross_entropy(x, jnp.asarray(targets)).mean)(jnp.asarray(logits))
        soft = np.exp(logits - logits.max(-1, keepdims=True))
        want = soft / soft.sum(-1, keepdims=True) - np.eye(11)[targets]
        want *= (targets != 0)[..., None] / (targets != 0).sum()
        np.testing.assert_allclose(got, want, atol=1e-15)

    def test_nothing_to_score(self):
        value, gradient = jax.value_and_grad(lambda x: _cross_entropy(x, jnp.zeros((1, 3), jnp.int32)).mean)(
            jnp.ones((1, 3, 4))
        )
        assert value == 0
        np.testing.assert_array_equal(gradient, 0)

    def test_bf16_logits_lose_nothing_further(self):
        logits, targets = _block()
        low = jnp.asarray(logits, jnp.bfloat16)
        parts = _cross_entropy(low, jnp.asarray(targets))
        assert parts.total.dtype == jnp.float32
        chex.assert_trees_all_equal(parts, _cross_entropy(low.astype(jnp.float32), jnp.asarray(targets)))

    def test_parts_of_a_split_batch_add_up(self, x64):
        logits, targets = map(jnp.asarray, _block(shape=(4, 5)))
        whole = _cross_entropy(logits, targets)
        parts = [cross_entropy(logits[i : i + 2], targets[i : i + 2]) for i in (0, 2)]
        chex.assert_trees_all_close(parts[0] + parts[1], whole, rtol=1e-15, atol=0)
        # The halves hold unequal numbers of targets: their means do not average to the mean.
        assert abs((parts[0].mean + parts[1].mean) / 2 - whole.mean) > 1e-3

    def test_shapes_that_do_not_meet(self):
        with pytest.raises(ValueError, match="shift them by one"):
            cross_entropy(jnp.ones((1, 3, 4)), jnp.ones((1, 4), jnp.int32))
        with pytest.raises(ValueError, match="one weight per target"):
            cross_entropy(jnp.ones((1, 3, 4)), jnp.ones((1, 3), jnp.int32), weights=jnp.ones((1,)))

    def test_segment_weights(self):
        ids = jnp.array([[1, 1, 2, 2, 2, 0, 0]])
        np.testing.assert_array_equal(segment_weights(ids), [[1, 0, 1, 1, 0, 0]])


def _by_eigenvalues(N):
    """log(tr exp N / d) in float64, from the eigenvalues."""
    values = np.linalg.eigvals(np.asarray(N, np.float64))
    top = values.real.max(-1, keepdims=True)
    return top[..., 0] + np.log(np.exp(values - top).sum(-1).real / N.shape[-1])


class TestDag:
    def test_golden_value_and_gradient(self, x64, golden):
        g = golden("misc")
        value, gradient = jax.vmap(_dag_and_gradient)(jnp.asarray(g["dag_case.M"]))
        np.testing.assert_allclose(value, g["dag_case.value"], rtol=1e-13, atol=0)
        np.testing.assert_allclose(gradient, g["dag_case.grad"], rtol=1e-12, atol=1e-15)

    def test_golden_in_float32(self, golden):
        g = golden("misc")
        M = jnp.asarray(g["dag_case.M"], jnp.float32)
        assert not jnp.isfinite(jnp.exp(g["dag_case.value"].astype(np.float32))).all()
        value, gradient = jax.vmap(_dag_and_gradient)(M)
        # Entries rounded to float32 and squared: 1e-7 relative; the same on the gradient's scale of
        # 1.7.
        np.testing.assert_allclose(value, g["dag_case.value"], rtol=5e-7)
        np.testing.assert_allclose(gradient, g["dag_case.grad"], atol=1e-6)

    @pytest.mark.parametrize("column, name", list(enumerate(OPERATORS)))
    def test_reference_model(self, x64, golden, column, name):
        g = golden("forward_f64")
        M = jnp.stack([jnp.asarray(g[f"full.L{layer}.{name}"]) for layer in (0, 1)])
        np.testing.assert_allclose(_dag(M), g["full.dag"][column], rtol=1e-13)

    @pytest.mark.parametrize("size", [1e-3, 1.0, 5.0, 25.0, 300.0])
    def test_float32_at_every_size(self, size):
        M = (np.random.default_rng(2).uniform(size=(3, 64, 64)) * size).astype(np.float32)
        N = jnp.asarray(M) ** 2  # Perron roots from 2e-5 past 40,000 to 2e6
        value = _log_mean(N)
        # Near 0 the oracle itself loses digits to 1 + h: there the series to second order is exact.
        exact = np.asarray(N, np.float64)
        trace = np.trace(exact + exact @ exact / 2, axis1=1, axis2=2) / 64
        want = np.log1p(trace) if size < 0.01 else _by_eigenvalues(exact)
        np.testing.assert_allclose(value, want, rtol=1e-6)
        gradient = _log_mean_gradient(N)
        with jax.enable_x64(True):
            reference = _log_mean_gradient(jnp.asarray(exact))
        # Measured 9e-7 at the largest size.
        np.testing.assert_allclose(gradient, reference, rtol=1e-5)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_at_the_floor_of_the_positive_tensor(self, x64, dtype):
        M = jnp.full((2, 16, 16), 1e-9, dtype)
        # tr(M ⊙ M) / d = ε²; the second order, d ε⁴ / 2, is far below.
        rounding = 4 * np.finfo(dtype).eps
        np.testing.assert_allclose(_dag(M), 1e-18, rtol=rounding)
        np.testing.assert_allclose(
            _dag_and_gradient(M)[1],
            np.broadcast_to(np.eye(16) * 1e-9 / 16, (2, 16, 16)),
            atol=1e-25,
        )

    def test_each_matrix_of_a_batch_as_if_alone(self, x64):
        rng = np.random.default_rng(3)
        N = rng.uniform(size=(5, 8, 8)) * np.array([1e-9, 0.1, 1, 50, 1e4])[:, None, None]
        together = _log_mean(jnp.asarray(N))
        alone = [_log_mean(jnp.asarray(n)) for n in N]
        np.testing.assert_allclose(together, alone, rtol=1e-15)

    def test_gradient_by_differences(self, x64):
        rng = np.random.default_rng(4)
        for size in (0.1, 1.0, 3.0):
            M = jnp.asarray(rng.normal(size=(2, 5, 5)) * size)
            check_grads(_dag, (M,), order=1, modes=["rev"], rtol=1e-6)

    def test_no_cycle_no_loss(self):
        M = jnp.asarray(np.triu(np.random.default_rng(5).uniform(size=(64, 64)), 1), jnp.float32)
        for size in (1.0, 30.0, 1e3):  # exp of the largest has entries beyond float32
            value, gradient = _dag_and_gradient(M * size)
            assert value == 0
            np.testing.assert_array_equal(gradient, 0)

    def test_identity_is_one(self):
        np.testing.assert_allclose(_dag(jnp.eye(16)), 1, rtol=1e-6)
        np.testing.assert_allclose(log_trace_exp(jnp.eye(16)), 1 + np.log(16), rtol=1e-6)

    def test_never_below_its_floor(self, x64):
        rng = np.random.default_rng(6)
        for epsilon in (1e-9, 1e-3, 0.5):
            M = jnp.asarray(epsilon + rng.exponential(size=(20, 8, 8)) * epsilon)
            floor = np.log1p(epsilon**2)
            assert (jax.vmap(_dag)(M) >= floor).all()

    def test_a_lone_cycle(self, x64):
        """One cycle of two entries among large acyclic ones: small, and right to all digits."""
        M = np.triu(np.full((8, 8), 3.0), 1)
        M[7, 0] = 1e-6
        value, gradient = _dag_and_gradient(jnp.asarray(M))
        N = M * M
        series, power = 0.0, np.eye(8)
        for k in range(1, 60):
            power = power @ N / k
            series += np.trace(power)
        np.testing.assert_allclose(value, np.log1p(series / 8), rtol=1e-12)
        assert gradient[7, 0] > 0

    def test_a_diverged_operator_is_reported(self):
        assert jnp.isnan(_dag(jnp.full((2, 2), jnp.nan)))
        assert not jnp.isfinite(_dag(jnp.full((2, 2), jnp.inf)))


class TestPLDRLoss:
    def _outputs(self, dtype=np.float32):
        rng = np.random.default_rng(7)
        operators = rng.uniform(size=(3, 2, 2, 3, 4, 4)).astype(dtype)
        return types.SimpleNamespace(**dict(zip(OPERATORS, map(jnp.asarray, operators))))

    def test_is_the_weighted_sum(self, x64):
        logits, targets = map(jnp.asarray, _block())
        out = self._outputs(np.float64)
        coefficients = DagCoefficients(A_LM=0.05, A_P=0.02, G_LM=0.03)
        run = jax.jit(
            lambda *operators: pldr_loss(
                logits,
                targets,
                types.SimpleNamespace(**dict(zip(OPERATORS, operators))),
                coefficients,
            )
        )
        loss, parts = run(out.A_LM, out.A_P, out.G_LM)
        want = cross_entropy(logits, targets).mean + (
            0.05 * _dag(out.A_LM) + 0.02 * _dag(out.A_P) + 0.03 * _dag(out.G_LM)
        )
        np.testing.assert_allclose(loss, want, rtol=1e-14)
        assert set(parts.dag) == set(OPERATORS)
        assert isinstance(parts.tokens, TokenLoss)

    def test_zero_leaves_the_loss_out_of_the_program(self):
        logits, targets = map(jnp.asarray, _block())
        logits = logits.astype(jnp.float32)
        program = str(jax.make_jaxpr(lambda x: pldr_loss(x, targets, None))(logits))
        assert "while" not in program
        out = self._outputs()
        program = str(jax.make_jaxpr(lambda x: pldr_loss(x, targets, out, report=("A_P",)))(logits))
        assert "while" in program

    def test_a_reported_loss_has_no_gradient(self):
        logits, targets = map(jnp.asarray, _block())
        logits = logits.astype(jnp.float32)
        out = self._outputs()

        def gradient_and_parts(coefficients, report):
            def loss(operator):
                given = types.SimpleNamespace(A_LM=None, A_P=operator, G_LM=None)
                return pldr_loss(logits, targets, given, coefficients, report=report)

            return jax.jit(jax.grad(loss, has_aux=True))(out.A_P)

        gradient, parts = gradient_and_parts(DagCoefficients(), ("A_P",))
        np.testing.assert_array_equal(gradient, 0)
        np.testing.assert_allclose(parts.dag["A_P"], _dag(out.A_P), rtol=1e-6)
        gradient, _ = gradient_and_parts(DagCoefficients(A_P=1.0), ())
        assert (gradient > 0).any()

    def test_what_was_not_collected(self):
        logits, targets = map(jnp.asarray, _block())
        with pytest.raises(ValueError, match="collect="):
            pldr_loss(logits, targets, None, DagCoefficients(G_LM=0.1))
        with pytest.raises(ValueError, match="no DAG loss is defined"):
            pldr_loss(logits, targets, None, report=("E",))

    @pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.1"])
    def test_bad_coefficients(self, value):
        with pytest.raises(ValueError, match="A_P"):
            DagCoefficients(A_P=value)

    def test_names_are_what_to_collect(self):
        assert DagCoefficients(A_LM=0.1, G_LM=0.1).names == ("A_LM", "G_LM")
