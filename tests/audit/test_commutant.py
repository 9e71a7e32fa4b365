"""Commutant residuals against the reference audit, the shipped operators and the algebra."""

import numpy as np
import pytest

from plga_jax.audit import commutant


def rotation(positions, width, layout):
    """R(n) as a matrix, one per position: [T, H, H]."""
    theta = 10_000.0 ** (-np.arange(0, width, 2) / width)
    out = np.zeros((len(positions), width, width))
    for a, angle in enumerate(theta):
        i, j = (2 * a, 2 * a + 1) if layout == "interleaved" else (a, a + width // 2)
        cos, sin = np.cos(positions * angle), np.sin(positions * angle)
        out[:, i, i] = out[:, j, j] = cos
        out[:, i, j], out[:, j, i] = -sin, sin
    return out


def test_matches_reference(golden):
    forward = golden("forward_f64")
    G = np.stack([forward[f"full.L{layer}.G_LM"] for layer in range(2)])
    # The same sums in another order: measured 3e-16.
    np.testing.assert_allclose(
        commutant.residual(G), golden("audit_small_f64")["G_LM.commutant_residual"], rtol=1e-13, atol=0
    )


def test_shipped_operators_commute_more_from_layer_to_layer_and_only_in_interleaved_planes(golden):
    shipped = golden("audit/glm_110m_1")
    found = commutant.residual(shipped["G_LM"])
    np.testing.assert_allclose(found, shipped["commutant_residual"], rtol=1e-12, atol=0)
    # Three published digits; the fourth median is 0.83949, which was rounded twice there.
    published = {"rtol": 0, "atol": 6e-4}
    np.testing.assert_allclose(np.median(found, axis=1), [0.991, 0.991, 0.940, 0.840, 0.733], **published)
    control = np.median(commutant.residual(shipped["G_LM"], layout="half"), axis=1)
    np.testing.assert_allclose(control, [0.992, 0.992, 0.976, 0.949, 0.942], **published)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_projection_is_the_orthogonal_one_onto_what_commutes(layout):
    rng = np.random.default_rng(0)
    G, other = rng.normal(size=(2, 3, 6, 6))
    inside = commutant.projection(G, layout=layout)
    for R in rotation(np.array([1.0, 7.0, 100.0]), 6, layout):
        np.testing.assert_allclose(R @ inside, inside @ R, atol=1e-14)
        # What already commutes is left alone, whatever it is multiplied by.
        np.testing.assert_allclose(commutant.residual(R @ inside, layout=layout), 0, atol=1e-15)
    np.testing.assert_array_equal(commutant.projection(inside, layout=layout), inside)
    # Orthogonal: the remainder meets nothing of the commutant.
    assert np.sum((G - inside) * commutant.projection(other, layout=layout)) == pytest.approx(0, abs=1e-13)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_commutant_of_width_d_has_d_dimensions(layout):
    units = np.eye(64).reshape(64, 8, 8)
    images = commutant.projection(units, layout=layout).reshape(64, 64)
    assert np.linalg.matrix_rank(images) == 8


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_scores_of_a_commuting_operator_depend_on_the_distance_only(layout):
    rng = np.random.default_rng(1)
    G = commutant.projection(rng.normal(size=(6, 6)), layout=layout)
    q, k = rng.normal(size=(2, 6))
    R = rotation(np.array([0.0, 3.0, 50.0, 53.0]), 6, layout)
    scores = [(R[m] @ q) @ G @ (R[n] @ k) for m, n in ((1, 0), (3, 2))]
    assert scores[0] == pytest.approx(scores[1], rel=1e-12)


def test_ends_of_the_scale():
    assert commutant.residual(np.eye(8)) == 0
    assert commutant.residual(np.zeros((8, 8))) == 0
    assert commutant.residual(np.diag([1.0, -1.0] * 4)) == 1
    # Scale free, also where squares underflow.
    G = np.random.default_rng(2).normal(size=(64, 64))
    assert commutant.residual(1e-200 * G) == pytest.approx(commutant.residual(G), rel=1e-12)


def test_random_operators_are_at_the_isotropic_value():
    G = np.random.default_rng(3).normal(size=(200, 64, 64))
    assert commutant.isotropic_residual(64) == pytest.approx(0.99216, abs=5e-6)
    # The mean of 200 squares whose spread is sqrt(2/64)/64: a standard error of 2e-4.
    assert np.mean(commutant.residual(G) ** 2) == pytest.approx(1 - 1 / 64, abs=1e-3)


@pytest.mark.parametrize(
    ("G", "layout", "message"),
    [
        (np.ones((3, 3)), "interleaved", r"H even.*\(3, 3\)"),
        (np.ones((4, 2)), "half", r"\(4, 2\)"),
        (np.full((2, 2), np.nan), "half", "4 of 4 entries"),
        (np.ones((2, 2)), "split", "'split'"),
    ],
)
def test_bad_input_is_refused(G, layout, message):
    for function in (commutant.residual, commutant.projection):
        with pytest.raises(ValueError, match=message):
            function(G, layout=layout)
    with pytest.raises(ValueError, match="width 7"):
        commutant.isotropic_residual(7)
