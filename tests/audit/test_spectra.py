"""Spectra and ranks against the reference audit, and at the corners where ratios are 0/0."""

import numpy as np
import pytest

from plga_jax.audit import spectra

# Same float64 LAPACK routines on the same inputs; measured differences are at most 6e-15.
CLOSE = {"rtol": 1e-12, "atol": 0}


@pytest.fixture(scope="module")
def stack(golden):
    """Loads a deductive tensor of the forward golden, [L, B, N, H, H]."""
    forward = golden("forward_f64")
    return lambda name: np.stack([forward[f"full.L{layer}.{name}"] for layer in range(2)])


@pytest.mark.parametrize("name", ["A", "A_LM"])
def test_spectrum_matches_reference(stack, golden, name):
    reference, tensor = golden("audit_small_f64"), stack(name)
    values = spectra.singular_values(tensor)
    np.testing.assert_allclose(values[..., 0], reference[f"{name}.s1"], **CLOSE)
    np.testing.assert_allclose(spectra.rank_one_ratio(tensor), reference[f"{name}.s2s1"], **CLOSE)
    np.testing.assert_array_equal(spectra.numerical_rank(tensor), reference[f"{name}.numrank"])


def test_sameness_and_entropy_match_reference(stack, golden):
    reference, a, a_lm = golden("audit_small_f64"), stack("A"), stack("A_LM")
    np.testing.assert_allclose(spectra.entropy_rank(a_lm, "nuclear"), reference["A_LM.entropy_rank_nuclear"], **CLOSE)
    np.testing.assert_allclose(spectra.cross_head_rms(a), reference["A.crosshead_rel"], **CLOSE)
    np.testing.assert_allclose(spectra.row_variance_ratio(a), reference["A.rowvar_ratio"], **CLOSE)


def test_perron_matches_reference(stack, golden):
    found = spectra.perron(stack("A_LM"))
    wanted = golden("audit_small_f64")["A_LM.perron_root_and_gap_ratio"]
    # Eigenvalues of a nonsymmetric matrix: measured 1e-15 for the root, 5e-15 for the ratio.
    np.testing.assert_allclose(np.stack(found, axis=-1), wanted, rtol=1e-11, atol=0)


def test_perron_root_of_a_constant_matrix_is_its_row_sum():
    found = spectra.perron(np.full((5, 5), 1e-9))
    assert found.root == pytest.approx(5e-9, rel=1e-12)
    assert found.gap_ratio == pytest.approx(0.0, abs=1e-12)


def test_identity_and_outer_product_are_the_two_ends():
    outer = np.outer(np.arange(1.0, 7), np.arange(2.0, 8))
    assert spectra.numerical_rank(outer) == 1
    assert spectra.rank_one_ratio(outer) < 1e-15
    for kind in ("nuclear", "energy"):
        assert spectra.entropy_rank(np.eye(6), kind) == pytest.approx(6, rel=1e-12)
        assert spectra.entropy_rank(outer, kind) == pytest.approx(1, abs=1e-12)


def test_entropy_rank_kinds_of_a_known_spectrum():
    matrix = np.diag([3.0, 1.0])
    entropy = lambda p: np.exp(-sum(x * np.log(x) for x in p))  # noqa: E731
    assert spectra.entropy_rank(matrix, "nuclear") == pytest.approx(entropy([0.75, 0.25]))
    assert spectra.entropy_rank(matrix, "energy") == pytest.approx(entropy([0.9, 0.1]))
    # σ² underflows here, the rank does not change.
    assert spectra.entropy_rank(1e-200 * matrix, "energy") == pytest.approx(entropy([0.9, 0.1]))


def test_zero_matrix_has_rank_zero_and_no_nan():
    zero = np.zeros((2, 3, 4, 4))
    assert (spectra.numerical_rank(zero) == 0).all()
    assert (spectra.rank_one_ratio(zero) == 0).all()
    assert (spectra.entropy_rank(zero) == 0).all()
    assert (spectra.row_variance_ratio(zero) == 0).all()
    assert (spectra.cross_head_rms(zero) == 0).all()


def test_cross_head_is_infinite_from_a_dead_head_zero():
    heads = np.stack([np.zeros((4, 4)), np.zeros((4, 4)), np.eye(4)])
    np.testing.assert_array_equal(spectra.cross_head_rms(heads), [0.0, np.inf])


def test_equal_rows_have_no_row_variance():
    rows = np.tile(np.arange(5.0), (5, 1))
    assert spectra.row_variance_ratio(rows) == 0
    assert spectra.row_variance_ratio(rows.T) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spectra.singular_values(np.zeros(3)), "at least 2 axes"),
        (lambda: spectra.singular_values(np.array([[np.nan, 1], [1, 1]])), "1 of 4 entries"),
        (lambda: spectra.rank_one_ratio(np.ones((3, 1))), "at least 2 rows"),
        (lambda: spectra.entropy_rank(np.eye(2), "shannon"), "'nuclear' or 'energy'"),
        (lambda: spectra.cross_head_rms(np.ones((1, 2, 2))), "axis of at least 2"),
        (lambda: spectra.perron(-np.ones((2, 2))), "positive entries"),
        (lambda: spectra.perron(np.ones((2, 3))), "square"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class TestSymmetry:
    def test_matches_reference_on_the_shipped_operators(self, golden):
        shipped = golden("audit/glm_110m_1")
        np.testing.assert_allclose(
            spectra.antisymmetric_share(shipped["G_LM"]), shipped["antisym_share"], rtol=1e-12, atol=0
        )
        np.testing.assert_array_equal(np.stack(spectra.signature(shipped["G_LM"]), -1), shipped["signature"])
        np.testing.assert_allclose(
            spectra.singular_values(shipped["G_LM"])[..., 0], shipped["singular_values"][..., 0], rtol=1e-6
        )

    def test_signature_survives_a_congruence_and_not_a_similarity(self):
        rng = np.random.default_rng(0)
        G, S = rng.normal(size=(2, 6, 6))
        found = spectra.signature(G)
        assert sum(found) == 6
        assert spectra.signature(S.T @ G @ S) == found
        others = [spectra.signature(np.linalg.inv(S) @ G @ S) for S in rng.normal(size=(20, 6, 6))]
        assert any(other != found for other in others)

    def test_by_hand(self):
        assert spectra.signature(np.diag([2.0, -1.0, 0.0])) == (1, 1, 1)
        turn = np.array([[0.0, -1.0], [1.0, 0.0]])
        assert spectra.antisymmetric_share(turn) == 1
        assert spectra.signature(turn) == (0, 0, 2)
        assert spectra.antisymmetric_share(1e-200 * (np.eye(2) + turn)) == pytest.approx(0.5)
        assert spectra.antisymmetric_share(np.zeros((2, 2))) == 0

    def test_needs_square_matrices(self):
        for function in (spectra.signature, spectra.antisymmetric_share):
            with pytest.raises(ValueError, match=r"square.*\(2, 3\)"):
                function(np.ones((2, 3)))
