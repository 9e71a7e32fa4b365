"""NOTEARS values against the reference audit, against eigenvalues, and at their floors."""

import numpy as np
import pytest

from plga_jax.audit import notears
from plga_jax.ops.power_law import FLOOR


@pytest.mark.parametrize("name", ["A_LM", "A_P", "G_LM"])
def test_matches_reference(golden, name):
    forward = golden("forward_f64")
    M = np.stack([forward[f"full.L{layer}.{name}"] for layer in range(2)])
    found = notears.log_loss(M)
    # The reference's eigenvalues: measured 2e-14 for A_LM, whose losses are small, 4e-15 for the others.
    np.testing.assert_allclose(found, golden("audit_small_f64")[f"{name}.dag_per_instance"], rtol=1e-13, atol=0)
    np.testing.assert_allclose(found.mean(), forward["full.dag"][("A_LM", "A_P", "G_LM").index(name)], rtol=1e-13)


def test_known_cases(golden):
    cases = golden("misc")
    M = cases["dag_case.M"]
    found = notears.log_loss(M)
    np.testing.assert_allclose(found, cases["dag_case.value"], rtol=1e-13, atol=0)
    # Strictly upper triangular: no cycle, exactly.
    assert found[2] == 0 and notears.excess(M)[2] == 0
    assert notears.excess(M)[3] == pytest.approx(16 * (np.e - 1), rel=1e-14)


def eigenvalue_log_loss(M):
    """The published way: log-sum-exp of the eigenvalues of M ⊙ M."""
    values = np.linalg.eigvals(M * M)
    largest = values.real.max()
    return largest + np.log(np.exp(values - largest).sum().real / len(M))


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_agrees_with_eigenvalues_also_where_exponentials_overflow(scale):
    M = scale * np.random.default_rng(0).normal(size=(64, 64))
    # The eigenvalues' rounding, relative to the largest: measured 2e-15 to 1e-14.
    assert notears.log_loss(M) == pytest.approx(eigenvalue_log_loss(M), rel=1e-12)
    assert np.isinf(notears.excess(30 * M)) == (scale > 0.1)


def test_excess_is_the_trace_less_the_width():
    M = np.random.default_rng(1).normal(size=(3, 5, 5))
    term, series = np.broadcast_to(np.eye(5, dtype=np.longdouble), M.shape), 0
    for k in range(1, 120):
        term = term @ (M * M).astype(np.longdouble) / k
        series = series + np.trace(term, axis1=-2, axis2=-1)
    # The Taylor series in extended precision: measured 2e-16.
    np.testing.assert_allclose(notears.excess(M), series.astype(np.float64), rtol=1e-14)


@pytest.mark.parametrize("width", [16, 64])
def test_a_dead_head_is_at_both_floors(width):
    dead = np.full((width, width), FLOOR)
    # tr exp(ε² 11ᵀ) − H = exp(Hε²) − 1: the floors to first order, where eigenvalues give zero or less.
    assert notears.excess(dead) == pytest.approx(notears.excess_floor(width), rel=1e-13)
    assert notears.log_loss(dead) == pytest.approx(notears.log_loss_floor(), rel=1e-13)
    assert notears.excess_floor(width) == pytest.approx(width * notears.log_loss_floor(), rel=1e-15)


def test_floors_are_two_numbers():
    assert notears.excess_floor(64) == pytest.approx(6.4e-17, rel=1e-15)
    assert notears.log_loss_floor() == pytest.approx(1e-18, rel=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_positive_entries_are_never_below_the_floors(seed):
    rng = np.random.default_rng(seed)
    epsilon = 10.0 ** rng.uniform(-9, 0)
    M = epsilon * (1 + rng.exponential(size=(8, 12, 12)) * rng.integers(0, 2, size=(8, 1, 1)))
    # At ε itself the values are the floors up to rounding.
    assert (notears.log_loss(M) >= notears.log_loss_floor(epsilon) * (1 - 1e-14)).all()
    assert (notears.excess(M) >= notears.excess_floor(12, epsilon) * (1 - 1e-14)).all()


def test_operators_of_any_sign_have_no_floor():
    G = np.triu(np.random.default_rng(2).normal(size=(9, 9)), 1)
    assert notears.log_loss(G) == 0 < notears.log_loss_floor()


@pytest.mark.parametrize(
    ("M", "message"),
    [(np.ones(3), r"\[..., H, H\]"), (np.ones((2, 3)), r"\(2, 3\)"), (np.full((2, 2), np.inf), "4 of 4 entries")],
)
def test_bad_input_is_refused(M, message):
    for function in (notears.log_loss, notears.excess):
        with pytest.raises(ValueError, match=message):
            function(M)
