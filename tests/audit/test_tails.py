"""Power-law fits on samples whose law is known."""

import numpy as np
import pytest

from plga_jax.audit.tails import fit_power_law


def draw(weights, count, seed=0):
    support = np.arange(1, len(weights) + 1)
    return np.random.default_rng(seed).choice(support, size=count, p=weights / weights.sum())


def test_exponent_is_recovered_within_its_interval():
    found = fit_power_law(draw(np.arange(1.0, 1001) ** -1.5, 20_000), 2, 500)
    assert found.low < 1.5 < found.high and found.high - found.low < 0.1
    assert found.holds and found.ks_distance < 0.02 and found.ratio_z > 10


def test_an_exponential_is_told_apart():
    found = fit_power_law(draw(np.exp(-np.arange(1.0, 201) / 10), 20_000), 1, 100)
    assert not found.holds and found.ratio_z < -10


def test_intervals_cover():
    """Of 40 samples about 38 intervals hold the true exponent; fewer than 33 has a chance of 1 in 1,000."""
    weights = np.arange(1.0, 201) ** -1.2
    found = [fit_power_law(draw(weights, 500, seed), 1, 200, draws=100, seed=seed) for seed in range(40)]
    assert sum(fit.low <= 1.2 <= fit.high for fit in found) >= 33


def test_is_repeatable_and_only_of_the_range():
    sizes = draw(np.arange(1.0, 1001) ** -1.5, 2_000)
    first = fit_power_law(sizes, 3, 50)
    assert first == fit_power_law(sizes[(sizes >= 3) & (sizes <= 50)], 3, 50)
    assert first.sizes == ((sizes >= 3) & (sizes <= 50)).sum()


@pytest.mark.parametrize(
    ("least", "most", "message"), [(0, 9, "0…9"), (3, 4, "three sizes"), (900, 999, "simulate more")]
)
def test_bad_ranges_are_refused(least, most, message):
    with pytest.raises(ValueError, match=message):
        fit_power_law(np.arange(1, 60), least, most)
