"""Statements about power-law graph attention that are proved in a proof assistant, on the ops that must satisfy them.

One test per statement, over random instances in float64. Proofs are about real numbers: where floating point adds a
rounding, the tolerance is a few units in the last place of the largest number involved.
"""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.audit import spectra
from plga_jax.audit.prefix import historical_rows, suffix_pairs
from plga_jax.audit.row_map import contraction, metric_learner
from plga_jax.audit.sequential import block_against_sequential
from plga_jax.audit.toys import GlobalSum, RunningMean
from plga_jax.ops.attention import attention
from plga_jax.ops.gated import GatedWeights, linear
from plga_jax.ops.masks import Mask
from plga_jax.ops.norms import layer_norm
from plga_jax.ops.power_law import (
    RowMapUnits,
    density_operator,
    fold_operator,
    hadamard_power,
    iswiglu,
    positive_tensor,
    row_map,
)
from plga_jax.ops.rope import LAYOUTS, commutant_projection, rope
from plga_jax.train.losses import log_mean_trace_exp

pytestmark = pytest.mark.usefixtures("x64")

SEEDS = pytest.mark.parametrize("seed", range(4))
FEW_ROUNDINGS = {"rtol": 1e-13, "atol": 1e-13}


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


@SEEDS
def test_iswiglu_is_nonnegative_and_zero_only_at_zero(seed):
    z = 30 * draw(seed, 1000)
    values = iswiglu(z)
    assert (values[z != 0] > 0).all()
    assert iswiglu(jnp.zeros(())) == 0
    # So A_LM is never below its floor, whatever the sign of what it is made from.
    A_LM = positive_tensor(draw(seed, 2, 5, 5), 3 * draw(seed + 1, 2, 5, 5), draw(seed + 2, 2, 5, 5))
    assert A_LM.min() >= 1e-9


def weights_of(scores, mask):
    """Attention weights [T, S] for scores [T, S]: keys and values are unit vectors."""
    unit = jnp.eye(scores.shape[1])[None, :, None]
    return attention(scores[None, :, None], unit, unit, mask, scale=1.0)[0, :, 0]


@SEEDS
def test_masked_softmaxes_are_equal_iff_visible_scores_differ_by_a_constant(seed):
    scores, mask = draw(seed, 6, 6), Mask()
    visible = np.tril(np.ones((6, 6), bool))
    base = weights_of(scores, mask)
    # By any constant per row where it is visible, and by anything at all where it is not.
    shifted = scores + 5 * draw(seed + 1, 6, 1)
    chex.assert_trees_all_close(weights_of(shifted, mask), base, **FEW_ROUNDINGS)
    chex.assert_trees_all_equal(weights_of(jnp.where(visible, scores, 1e6), mask), base)
    # By two constants in one row: that row changes and no other.
    for row in range(1, 6):
        changed = np.abs(weights_of(scores.at[row, 0].add(0.1), mask) - base).max(axis=1)
        assert changed[row] > 1e-4 and (np.delete(changed, row) == 0).all()


@SEEDS
@pytest.mark.parametrize("tokens", [1, 3, 8, 20])
def test_density_operator_is_positive_semidefinite_of_rank_at_most_tokens_or_width(seed, tokens):
    gram = density_operator(draw(seed, 2, tokens, 3, 8))
    chex.assert_trees_all_equal(gram, jnp.swapaxes(gram, -2, -1))
    values = np.linalg.eigvalsh(gram)
    rounding = 1e-14 * values.max(axis=-1)
    assert (values.min(axis=-1) >= -rounding).all()
    # Of independent rows the rank is the bound itself.
    assert (np.sum(values > rounding[..., None], axis=-1) == min(tokens, 8)).all()


@SEEDS
def test_hadamard_powers_of_one_exponent_multiply(seed):
    A, P = jnp.exp(3 * draw(seed, 2, 3, 5, 5)), draw(seed + 1, 3, 5, 5)
    s, t = np.random.default_rng(seed).normal(size=2)
    product = hadamard_power(A, s * P) * hadamard_power(A, t * P)
    # exp turns a rounding of an exponent of up to 30 into 30 roundings.
    chex.assert_trees_all_close(product, hadamard_power(A, (s + t) * P), rtol=1e-13, atol=0)


@SEEDS
def test_equal_rows_make_a_matrix_of_rank_one_whose_square_is_a_multiple(seed):
    """A collapsed metric tensor is 1αᵀ: rank 1 iff α ≠ 0, A² = (Σα)A, nilpotent when Σα = 0."""
    H = 6
    alpha = jnp.asarray(np.random.default_rng(seed).integers(-9, 10, size=H), jnp.float64).at[0].set(1)

    def collapsed(beta):
        """What φ makes of any rows when its last norm has γ = 0."""
        kernels = [draw(seed, 1, 1, *shape) for shape in ((H, 4), (4,), (H, 4), (4,), (4, H), (H,))]
        units = RowMapUnits(GatedWeights(*kernels), norm_scale=jnp.zeros((1, H)), norm_bias=beta[None])
        return row_map(draw(seed + 1, H, H), units)

    A = collapsed(alpha)
    chex.assert_trees_all_equal(A, jnp.outer(jnp.ones(H), alpha))
    assert spectra.numerical_rank(A) == 1 and spectra.numerical_rank(collapsed(0 * alpha)) == 0
    chex.assert_trees_all_equal(A @ A, alpha.sum() * A)
    balanced = collapsed(alpha - alpha.sum() * jnp.eye(H)[1])
    assert spectra.numerical_rank(balanced) == 1
    chex.assert_trees_all_equal(balanced @ balanced, jnp.zeros((H, H)))


@SEEDS
@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.3])
def test_layer_norm_forgets_shifts_always_and_scales_only_without_epsilon(seed, epsilon):
    d = 12
    x, one, zero = draw(seed, 5, d), jnp.ones(d), jnp.zeros(d)

    def normed(x):
        return layer_norm(x, one, zero, epsilon=epsilon)

    u = normed(x)
    chex.assert_trees_all_close(normed(x + 10 * draw(seed + 1, 5, 1)), u, rtol=1e-12, atol=1e-13)
    scale_matters = np.abs(normed(3 * x) - u).max()
    assert (scale_matters < 1e-14) if epsilon == 0 else (scale_matters > epsilon / 10)
    variance = jnp.var(x, axis=-1)
    chex.assert_trees_all_close(jnp.sum(u * u, axis=-1), d * variance / (variance + epsilon), **FEW_ROUNDINGS)


@SEEDS
def test_what_commutes_with_a_rotation_of_the_plane_is_a_scaled_rotation(seed):
    """The 2×2 commutant is c·1 + s·J, and nothing else commutes."""
    angle = np.random.default_rng(seed).uniform(0.1, 3.0)
    R = jnp.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    M = draw(seed, 2, 2)
    inside = commutant_projection(M)
    c, s = inside[0, 0], inside[1, 0]
    chex.assert_trees_all_equal(inside, c * jnp.eye(2) + s * jnp.array([[0.0, -1.0], [1.0, 0.0]]))
    chex.assert_trees_all_close(R @ inside, inside @ R, **FEW_ROUNDINGS)
    off = M - inside
    assert np.abs(R @ off - off @ R).max() > 0.1 * np.sin(angle) * np.abs(off).max()


@SEEDS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_of_a_commuting_operator_depend_on_the_distance_only(seed, layout):
    q, k = draw(seed, 1, 1, 2, 8), draw(seed + 1, 1, 1, 2, 8)
    G = draw(seed + 2, 2, 8, 8)

    def score(G, m, n):
        turned_q, turned_k = (rope(x, jnp.array([[p]]), layout=layout) for x, p in ((q, m), (k, n)))
        return jnp.sum(fold_operator(turned_q, G) * turned_k, axis=-1)

    commuting = commutant_projection(G, layout=layout)
    shift = np.random.default_rng(seed).integers(1, 900)
    # Angles of up to 900 radians are rounded to 1e-13.
    chex.assert_trees_all_close(score(commuting, 7, 3), score(commuting, 7 + shift, 3 + shift), rtol=0, atol=1e-11)
    assert np.abs(score(G, 7, 3) - score(G, 7 + shift, 3 + shift)).max() > 1e-3


@SEEDS
def test_trace_of_the_exponential_is_at_least_width_and_trace(seed):
    """tr exp(N) ≥ H + tr N for N ≥ 0; both are H when no entries close a cycle."""
    rng = np.random.default_rng(seed)
    N = jnp.asarray(rng.exponential(size=(50, 6, 6)) * 10.0 ** rng.uniform(-9, 1, size=(50, 1, 1)))
    value = log_mean_trace_exp(N)
    floor = np.log1p(np.trace(N, axis1=-2, axis2=-1) / 6)
    assert (value >= floor * (1 - 1e-15)).all()
    assert (log_mean_trace_exp(jnp.triu(N, 1)) == 0).all()


@SEEDS
def test_lipschitz_constants_of_a_composition_multiply(seed, published):
    """The Jacobian of a row map is at most the product of those of its units, each taken where the row arrives."""
    learner = metric_learner(published("float32"), seed % 2)
    found = contraction(learner, draw(seed, 10, 16))
    assert (found.largest <= found.units.prod(axis=1) * (1 + 1e-12)).all()


@SEEDS
def test_an_affine_map_and_an_operator_fold_into_one_affine_map(seed):
    """(X·W + 1bᵀ)·G = X·(W·G) + 1(bᵀ·G), for each head."""
    X, W, b, G = (draw(seed + i, *shape) for i, shape in enumerate([(7, 10), (10, 6), (6,), (3, 6, 6)]))
    mapped = jnp.broadcast_to(linear(X, W, b)[None, :, None], (1, 7, 3, 6))
    folded = jnp.stack([linear(X, W @ g, b @ g) for g in G], axis=1)[None]
    chex.assert_trees_all_close(fold_operator(mapped, G), folded, rtol=1e-12, atol=1e-12)


@SEEDS
def test_a_row_local_decoder_scores_a_block_as_it_scores_online(seed):
    tokens = np.random.default_rng(seed).integers(1, 17, size=(3, 9))
    found = block_against_sequential(RunningMean(vocab_size=17, seed=seed), tokens)
    np.testing.assert_array_equal(found.block, found.sequential)


@SEEDS
def test_a_global_sum_preserves_length_and_is_not_prefix_consistent(seed):
    decoder = GlobalSum(vocab_size=17, seed=seed)
    first, second = suffix_pairs(17, length=9, shared=4, seed=seed)
    for length in range(1, 10):
        chex.assert_shape(decoder(first[:, :length]), (16, length, 17))
    assert historical_rows(decoder, first, second, shared=4).fraction == 1
