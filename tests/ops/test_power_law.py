"""The five operators: definitions, positivity, algebra, and what each may not depend on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from plga_jax.ops import power_law
from plga_jax.ops.gated import GatedWeights, gated_linear
from plga_jax.ops.norms import layer_norm

B, T, N, H, F, U, J = 2, 5, 3, 4, 6, 3, 2


def draw(seed, *shape, dtype=None):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def units(seed=0):
    shapes = [(U, J, H, F), (U, J, F), (U, J, H, F), (U, J, F), (U, J, F, H), (U, J, H)]
    blocks = GatedWeights(*(draw(seed + i, *shape) for i, shape in enumerate(shapes)))
    return power_law.RowMapUnits(blocks, 1 + draw(seed + 7, U, H), draw(seed + 8, U, H))


@pytest.mark.usefixtures("x64")
class TestDensityOperator:
    def test_is_the_sum_of_outer_products(self):
        q = draw(0, B, T, N, H)
        expected = sum(np.einsum("bnh,bnj->bnhj", q[:, t], q[:, t]) for t in range(T))
        np.testing.assert_allclose(power_law.density_operator(q), expected, rtol=1e-13, atol=1e-14)

    def test_is_positive_semidefinite_of_rank_at_most_T(self):
        values = np.linalg.eigvalsh(power_law.density_operator(draw(0, B, T, N, 8)))
        assert values.min() > -1e-13
        np.testing.assert_array_equal((values > 1e-10).sum(-1), T)

    def test_padding_does_not_count_even_when_it_is_nan(self):
        q, valid = draw(0, B, T, N, H), jnp.arange(T)[None] < jnp.array([[3], [5]])
        padded = jnp.where(valid[..., None, None], q, jnp.nan)
        gram = power_law.density_operator(padded, valid)
        np.testing.assert_allclose(gram[0], power_law.density_operator(q[:1, :3])[0], rtol=1e-13)
        np.testing.assert_allclose(gram[1], power_law.density_operator(q[1:])[0], rtol=1e-13)

    def test_sums_over_the_shards_of_a_sequence(self):
        q = draw(0, B, 6, N, H)
        shards = jnp.stack(jnp.split(q, 3, axis=1))
        summed = jax.vmap(lambda s: power_law.density_operator(s, axis_name="seq"), axis_name="seq")(shards)
        np.testing.assert_allclose(summed[1], power_law.density_operator(q), rtol=1e-12)

    def test_one_token_makes_a_rank_one_gram(self):
        values = np.linalg.svd(power_law.density_operator(draw(0, B, 1, N, H)), compute_uv=False)
        assert (values[..., 1] < 1e-14 * values[..., 0]).all()


@pytest.mark.usefixtures("x64")
class TestRowMap:
    def test_follows_the_definition(self):
        weights, rows = units(), draw(9, B, N, H, H)
        expected = rows
        for u in range(U):
            inner = expected
            for j in range(J):
                inner = gated_linear(inner, jax.tree.map(lambda x, at=(u, j): x[at], weights.blocks))
            expected = layer_norm(inner + expected, weights.norm_scale[u], weights.norm_bias[u])
        np.testing.assert_allclose(power_law.row_map(rows, weights), expected, rtol=1e-12)

    def test_acts_on_every_row_alike(self):
        rows = draw(9, 7, H)
        permuted = power_law.row_map(rows[::-1], units())[::-1]
        np.testing.assert_allclose(permuted, power_law.row_map(rows, units()), rtol=1e-13)

    def test_the_skip_goes_round_the_unit_not_the_block(self):
        weights = units()
        zero_last = weights._replace(
            blocks=weights.blocks._replace(
                down_kernel=weights.blocks.down_kernel.at[:, -1].set(0),
                down_bias=weights.blocks.down_bias.at[:, -1].set(0),
            )
        )
        rows = expected = draw(9, 7, H)
        for u in range(U):
            expected = layer_norm(expected, weights.norm_scale[u], weights.norm_bias[u])
        np.testing.assert_allclose(power_law.row_map(rows, zero_last), expected, rtol=1e-13)

    def test_the_program_does_not_grow_with_the_number_of_units(self):
        def size(count):
            weights = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), units())
            return len(jax.jit(power_law.row_map).lower(draw(9, 7, H), weights).as_text())

        assert size(8) < 1.05 * size(1)


@pytest.mark.usefixtures("x64")
class TestPowerLaw:
    def test_positive_tensor_multiplies_from_the_left(self):
        A, W, b = draw(0, B, N, H, H), draw(1, N, H, H), draw(2, N, H, H)
        z = np.stack([[W[n] @ A[i, n] + b[n] for n in range(N)] for i in range(B)])
        expected = z**2 / (1 + np.exp(-z)) + 1e-9
        np.testing.assert_allclose(power_law.positive_tensor(A, W, b), expected, rtol=1e-12)

    def test_iswiglu_is_zero_only_at_zero_and_never_negative(self):
        z = jnp.concatenate([-jnp.logspace(-6, 2, 200), jnp.logspace(-6, 2, 200)])
        assert (power_law.iswiglu(z) > 0).all() and power_law.iswiglu(jnp.zeros(())) == 0

    def test_perron_root_is_simple_with_positive_vector(self):
        A_LM = np.asarray(power_law.positive_tensor(draw(0, B, N, H, H), draw(1, N, H, H), draw(2, N, H, H)))
        assert A_LM.min() >= 1e-9
        for matrix in A_LM.reshape(-1, H, H):
            values, vectors = np.linalg.eig(matrix)
            order = np.argsort(-abs(values))
            root, vector = values[order[0]], vectors[:, order[0]]
            assert abs(root.imag) < 1e-12 and root.real > 0 and abs(values[order[1]]) < root.real
            assert (vector.real / vector.real[0] > 0).all()

    def test_powers_of_one_base_add_up(self):
        A_LM = jnp.abs(draw(0, B, N, H, H)) + 1e-9
        P, s, t = draw(1, N, H, H), 0.7, -1.9
        product = power_law.hadamard_power(A_LM, s * P) * power_law.hadamard_power(A_LM, t * P)
        np.testing.assert_allclose(product, power_law.hadamard_power(A_LM, (s + t) * P), rtol=1e-12)

    def test_power_is_positive_and_has_finite_gradients_at_the_floor(self):
        A_LM, P = jnp.full((B, N, H, H), power_law.FLOOR), draw(1, N, H, H)
        assert (power_law.hadamard_power(A_LM, P) > 0).all()
        gradients = jax.grad(lambda a, p: power_law.hadamard_power(a, p).sum(), argnums=(0, 1))(A_LM, P)
        chex.assert_tree_all_finite(gradients)
        P = np.asarray(P)
        expected = np.broadcast_to(P * np.float64(1e-9) ** (P - 1), A_LM.shape)
        np.testing.assert_allclose(gradients[0], expected, rtol=1e-9)

    def test_float32_power_at_the_floor(self):
        # exp(P log A) in float32: |P log A| ≤ 63 here, so the relative error is about 63·2^-24 = 4e-6.
        P = draw(1, N, H, H, dtype=jnp.float32)
        got = power_law.hadamard_power(jnp.full((B, N, H, H), power_law.FLOOR, jnp.float32), P)
        expected = np.float64(np.float32(1e-9)) ** np.asarray(P, np.float64)
        np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=1e-5)

    def test_superposition_multiplies_from_the_left(self):
        A_P, a, b = draw(0, B, N, H, H), draw(1, N, H, H), draw(2, N, H, H)
        expected = np.stack([[a[n] @ A_P[i, n] + b[n] for n in range(N)] for i in range(B)])
        np.testing.assert_allclose(power_law.superposition(A_P, a, b), expected, rtol=1e-12, atol=1e-13)

    def test_a_constant_row_map_makes_a_constant_operator(self):
        # (1.1) of the paper: if φ forgets its row, G forgets the input.
        weights = units()
        constant = weights._replace(norm_scale=weights.norm_scale.at[-1].set(0))
        tensors = [draw(i, N, H, H) for i in range(5)]

        def operator(q):
            A = power_law.row_map(power_law.density_operator(q), constant)
            A_LM = power_law.positive_tensor(A, tensors[0], tensors[1])
            return power_law.superposition(power_law.hadamard_power(A_LM, tensors[2]), tensors[3], tensors[4])

        np.testing.assert_array_equal(operator(draw(5, B, T, N, H)), operator(draw(6, B, T, N, H)))


class TestFoldOperator(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_the_identity_changes_no_bit(self):
        q = draw(0, B, T, N, H, dtype=jnp.float32)
        eye = jnp.broadcast_to(jnp.eye(H), (N, H, H))
        np.testing.assert_array_equal(self.variant(power_law.fold_operator)(q, eye), q)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters("shared", "batched", "packed")
    def test_scores_are_the_bilinear_form(self, kind):
        with jax.enable_x64(True):
            q, k = draw(0, B, T, N, H), draw(1, B, T, N, H)
            segments = jnp.array([[1, 1, 2, 2, 2], [2, 1, 1, 0, 0]])
            shape = {"shared": (), "batched": (B,), "packed": (B, 2)}[kind]
            G = draw(2, *shape, N, H, H)
            scores = jnp.einsum("BTNH,BSNH->BNTS", self.variant(power_law.fold_operator)(q, G, segments), k)
            for b, n, t in np.ndindex(B, N, T):
                if kind == "packed" and segments[b, t] == 0:
                    continue
                place = {"shared": (n,), "batched": (b, n), "packed": (b, int(segments[b, t]) - 1, n)}[kind]
                expected = k[b, :, n] @ (q[b, t, n] @ G[place])
                np.testing.assert_allclose(scores[b, n, t], expected, rtol=1e-10)

    def test_an_operator_that_was_never_made_is_loud(self):
        folded = power_law.fold_operator(jnp.ones((1, 3, N, H)), jnp.ones((1, 2, N, H, H)), jnp.array([[1, 2, 3]]))
        assert jnp.isfinite(folded[:, :2]).all() and jnp.isnan(folded[:, 2]).all()

    def test_operators_per_segment_need_segments(self):
        with pytest.raises(ValueError, match="pass segment_ids"):
            power_law.fold_operator(jnp.ones((1, 3, N, H)), jnp.ones((1, 2, N, H, H)))


@pytest.mark.usefixtures("x64")
def test_the_chain_reproduces_the_published_tensors(golden):
    """From one published tensor to the next, so that an error shows where it is made."""
    forward, weights = golden("forward_f64"), golden("weights_small")
    for layer in (0, 1):
        prefix = f"decoder.dec_layers.{layer}.mha1."
        W, b_W, P, a, b_a = (
            jnp.asarray(weights[f"{prefix}plgatt_layer.{name}"], jnp.float64)
            for name in ("Wlst", "blst", "pwlst", "alst", "balst")
        )
        norm = [jnp.asarray(weights[f"{prefix}layernorm1.{name}"], jnp.float64) for name in ("weight", "bias")]
        tensors = {name: forward[f"full.L{layer}.{name}"] for name in ("gram", "gram_ln", "A", "A_LM", "A_P", "G_LM")}
        np.testing.assert_allclose(layer_norm(jnp.asarray(tensors["gram"]), *norm), tensors["gram_ln"], atol=1e-12)
        A_LM = power_law.positive_tensor(jnp.asarray(tensors["A"]), W, b_W)
        np.testing.assert_allclose(A_LM, tensors["A_LM"], atol=1e-13)
        np.testing.assert_allclose(
            power_law.hadamard_power(jnp.asarray(tensors["A_LM"]), P), tensors["A_P"], rtol=1e-12
        )
        np.testing.assert_allclose(
            power_law.superposition(jnp.asarray(tensors["A_P"]), a, b_a), tensors["G_LM"], atol=1e-12
        )
