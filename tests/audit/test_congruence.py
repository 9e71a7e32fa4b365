"""The congruence law: recovered exactly where it holds, with its invariants, and not by the wrong law."""

import numpy as np
import pytest

from plga_jax.audit import spectra
from plga_jax.audit.congruence import compare_laws, congruent, fit_basis, similar

RNG = np.random.default_rng(0)
S, G = RNG.normal(size=(2, 6, 6))
Q, K = RNG.normal(size=(2, 40, 6))


def test_basis_and_scores_are_recovered():
    rows = np.concatenate([Q, K])
    basis = fit_basis(rows, rows @ S.T)
    np.testing.assert_allclose(basis.S, S, rtol=1e-10)
    assert basis.residual < 1e-14
    assert basis.condition == pytest.approx(np.linalg.cond(S))
    found = compare_laws(G, basis, Q @ S.T, K @ S.T, Q @ G @ K.T)
    assert found.congruence < 1e-11
    assert found.similarity > 0.5 and found.untouched > 0.5
    assert found.same_rank and found.same_signature


def test_an_orthogonal_basis_makes_both_laws_one():
    turn = np.linalg.qr(S)[0]
    np.testing.assert_allclose(congruent(G, turn), similar(G, turn), atol=1e-12)


def test_invariants_of_the_laws():
    low = G.copy()
    low[:, 3:] = 0
    carried = congruent(low, S)
    assert spectra.numerical_rank(carried) == spectra.numerical_rank(low) == 3
    assert spectra.signature(congruent(G, S)) == spectra.signature(G)
    eigenvalues = lambda M: np.sort_complex(np.linalg.eigvals(M))  # noqa: E731
    np.testing.assert_allclose(eigenvalues(similar(G, S)), eigenvalues(G), rtol=1e-8)
    assert np.abs(eigenvalues(congruent(G, S)) - eigenvalues(G)).max() > 0.1


def test_unrelated_rows_have_a_large_residual():
    other = np.random.default_rng(5).normal(size=(80, 6))
    assert fit_basis(np.concatenate([Q, K]), other).residual > 0.8


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Q[:3], Q[:3], "R ≥ H"),
        (Q, K[:5], "must both be"),
        (np.full((8, 2), np.nan), np.ones((8, 2)), "not finite"),
        (np.outer(np.arange(8.0), [1, 2]), np.ones((8, 2)), "span 1 of 2"),
        (Q, np.outer(Q[:, 0], np.ones(6)), "singular"),
    ],
)
def test_bad_rows_are_refused(first, second, message):
    with pytest.raises(ValueError, match=message):
        fit_basis(first, second)


def test_scores_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 2\) must be of 40"):
        compare_laws(G, fit_basis(Q, Q @ S.T), Q, K, np.ones((2, 2)))
