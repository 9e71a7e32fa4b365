"""How cyclic operators are, in the two forms that NOTEARS values are quoted in, and the floors of each.

    excess     h(M) = tr exp(M ⊙ M) − H         zero when no entries of M close a cycle; astronomically large otherwise
    log loss   log(tr exp(M ⊙ M) / H)           the same on a scale on which models can be trained, and compared

The diagonal is a cycle of one, so positive entries keep both from zero: each has its floor, and the two differ by
the factor H. Only A_LM has them by its architecture, since every entry is at least ε_A; A_P has none that is uniform
in P, and G may have any sign.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.ops.power_law import FLOOR
from plga_jax.train.losses import log_mean_trace_exp


def log_loss(M) -> np.ndarray:
    """*Measured*: log(tr exp(M ⊙ M) / H) of each operator, in float64; their mean is the training loss.

    Args:
        M: [..., H, H].

    Returns:
        [...] float64 ≥ 0, accurate relative to itself from 1e-18 on, where eigenvalues would leave rounding only.

    Raises:
        ValueError: if the matrices are not square or an entry is not finite.

    Source: NOTEARS (arXiv:1803.01422), normalised as in the DAG loss of the PLDR-LLM programs.
    """
    M = np.asarray(M, np.float64)
    if M.ndim < 2 or M.shape[-1] != M.shape[-2]:
        raise ValueError(f"operators must be [..., H, H], got shape {M.shape}")
    if not np.isfinite(M).all():
        bad = int(np.sum(~np.isfinite(M)))
        raise ValueError(f"{bad} of {M.size} entries are not finite; audit the last finite checkpoint")
    with jax.enable_x64(True):
        return np.asarray(_log_loss(jnp.asarray(M)))


@jax.jit
def _log_loss(M):
    return log_mean_trace_exp(M * M)


def excess(M) -> np.ndarray:
    """*Measured*: h(M) = tr exp(M ⊙ M) − H of each operator.

    Args:
        M: [..., H, H].

    Returns:
        [...] float64 ≥ 0; +inf where it exceeds 1.8e308, which is at a log loss of 705 for H = 64.

    Raises:
        ValueError: if the matrices are not square or an entry is not finite.
    """
    with np.errstate(over="ignore"):
        return np.shape(M)[-1] * np.expm1(log_loss(M))


def log_loss_floor(epsilon: float = FLOOR) -> float:
    """*Bound*: log(1 + ε²), below which no log loss of a matrix of entries ≥ ε can be.

    Args:
        epsilon: ε_A, the least entry of A_LM. Float32 holds 1e-9 as 9.9999997e-10: take the floor of the tensor's
            dtype when values come close.

    Returns:
        A positive number; 1e-18 for 1e-9.
    """
    return math.log1p(epsilon**2)


def excess_floor(width: int, epsilon: float = FLOOR) -> float:
    """*Bound*: H·ε², below which h of no matrix of entries ≥ ε can be.

    Args:
        width: H.
        epsilon: as in `log_loss_floor`.

    Returns:
        A positive number; 6.4e-17 for H = 64 and 1e-9.
    """
    return width * epsilon**2
