"""Is a sample of sizes power-law distributed over a range, and with which exponent?

Everything is conditional on a range [least, most] that is given beforehand: a finite system cuts a power law off, and a
fit that reaches into the cut-off measures the system's size. The alternative is an exponential over the same range.

Source: Clauset, Shalizi and Newman 2009, for maximum likelihood, KS distance and the likelihood ratio; bounded above.
"""

import dataclasses

import numpy as np

from plga_jax.audit.order import quotient

_EXPONENTS = (-1.0, 6.0)
_GOLDEN = (np.sqrt(5) - 1) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """A fit of P(s) ∝ s^−τ on least ≤ s ≤ most, with what speaks against it."""

    exponent: float
    """τ."""
    low: float
    """Lower end of its bootstrap 95 % interval."""
    high: float
    """Upper end."""
    ks_distance: float
    """Largest difference of the two distribution functions."""
    ratio: float
    """Log-likelihood of the power law less that of the best exponential, per size: above 0 it is the likelier law."""
    ratio_z: float
    """The same in its standard errors: beyond ±2 it means something."""
    sizes: int
    """In the range."""

    @property
    def holds(self) -> bool:
        """*Measured*: whether the power law beats the exponential clearly and its distance is below a tenth."""
        return self.ratio_z > 2 and self.ks_distance < 0.1


def fit_power_law(sizes, least: int, most: int, *, draws: int = 200, seed: int = 0) -> PowerLaw:
    """*Measured*: exponent, interval, distance and likelihood ratio of a power law over a range.

    Args:
        sizes: integers; those outside the range are left out.
        least: smallest of the range, at least 1.
        most: largest.
        draws: bootstrap resamples.
        seed: of the resamples.

    Returns:
        A `PowerLaw`.

    Raises:
        ValueError: a range of fewer than three sizes, or fewer than 50 samples in it.
    """
    if least < 1 or most < least + 2:
        raise ValueError(f"the range {least}…{most} must hold at least three sizes from 1 on")
    sizes = np.asarray(sizes)
    inside = sizes[(sizes >= least) & (sizes <= most)]
    if inside.size < 50:
        raise ValueError(f"{inside.size} sizes are within {least}…{most}: simulate more, or choose another range")
    support = np.arange(least, most + 1)
    counts = np.bincount(inside - least, minlength=support.size)
    logs = np.log(support)
    exponent = _best(counts, logs, *_EXPONENTS)
    # Rates from so slow that it is flat over the range to so fast that the first size has nearly all.
    rate = _best(counts, (support - least).astype(float), -1 / support.size, 5.0)
    power, other = _log_probabilities(logs, exponent), _log_probabilities(support - least, rate)
    difference = power - other
    mean = float(counts @ difference / inside.size)
    spread = float(np.sqrt(counts @ (difference - mean) ** 2 / inside.size))
    rng, shares = np.random.default_rng(seed), counts / inside.size
    resampled = [_best(rng.multinomial(inside.size, shares), logs, *_EXPONENTS) for _ in range(draws)]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return PowerLaw(
        exponent=exponent,
        low=float(low),
        high=float(high),
        ks_distance=float(np.abs(np.cumsum(shares) - np.cumsum(np.exp(power))).max()),
        ratio=mean,
        ratio_z=float(np.sign(mean) * quotient(abs(mean) * np.sqrt(inside.size), spread)),
        sizes=int(inside.size),
    )


def _log_probabilities(statistic: np.ndarray, parameter: float) -> np.ndarray:
    """log of exp(−parameter · statistic), normalised."""
    logits = -parameter * statistic
    top = logits.max()
    return logits - top - np.log(np.exp(logits - top).sum())


def _best(counts: np.ndarray, statistic: np.ndarray, low: float, high: float) -> float:
    """The parameter of largest likelihood, by golden section: the log-likelihood of this family is concave."""

    def likelihood(parameter: float) -> float:
        return float(counts @ _log_probabilities(statistic, parameter))

    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = likelihood(left), likelihood(right)
    for _ in range(60):
        if at_left < at_right:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = likelihood(right)
        else:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = likelihood(left)
    return float((low + high) / 2)
