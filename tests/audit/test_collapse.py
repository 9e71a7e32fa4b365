"""The collapse probe on tensors whose state is known by construction."""

import numpy as np
import pytest

from plga_jax.audit import order
from plga_jax.audit.collapse import measure_collapse

L, PAIRS, N, H = 2, 3, 4, 6


def noise(seed=0):
    return np.random.default_rng(seed).normal(size=(L, 2 * PAIRS, N, H, H))


def test_a_fresh_model_is_far_from_collapse_in_every_sense():
    found = measure_collapse(noise(0), noise(1))
    for value in (found.m_A, found.m_G, found.rank_one_ratio, found.cross_head_rms):
        assert value.shape == (L,) and (value > 0.3).all()
    assert not found.collapsed.any()


def test_a_collapsed_layer_is_collapsed_in_every_sense_and_alone():
    A = noise(0)
    A[1] = np.arange(1.0, H + 1) + 1e-5 * A[1]
    G = noise(1)
    G[1] = G[1, :1]
    found = measure_collapse(A, G)
    assert found.collapsed.tolist() == [False, True]
    assert found.m_A[1] < 1e-5 and found.rank_one_ratio[1] < 1e-4 and found.cross_head_rms[1] < 1e-5
    assert found.m_G[1] == 0 and found.m_G[0] > 0.3


def test_m_is_the_median_over_pairs_of_neighbouring_rows():
    A = noise(3)
    A[:, 1] = 1.001 * A[:, 0]
    found = measure_collapse(A, noise(4))
    per_pair = [[order.relative_rms(A[layer, 2 * p], A[layer, 2 * p + 1]) for p in range(PAIRS)] for layer in range(L)]
    np.testing.assert_allclose(found.m_A, np.median(per_pair, axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.m_A_least, 0.001 / 1.0005, rtol=1e-9)
    np.testing.assert_allclose(found.m_A_most, np.max(per_pair, axis=1), rtol=1e-12)


def test_float32_tensors_are_measured_in_float64():
    A = np.ones((1, 2, 2, 3, 3), np.float32)
    A[:, 1] *= np.float32(1 + 2**-20)
    found = measure_collapse(A, A)
    assert found.m_A[0] == pytest.approx(2**-20 / (1 + 2**-21), rel=1e-12)
    assert found.as_dict()["m_A"] == found.m_A.tolist()


@pytest.mark.parametrize("shape", [(1, 3, 2, 2, 2), (1, 0, 2, 2, 2), (2, 2, 2, 2)])
def test_bad_input_is_refused(shape):
    with pytest.raises(ValueError, match="even number of inputs"):
        measure_collapse(np.ones(shape), np.ones(shape))
