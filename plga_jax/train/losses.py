"""What a PLDR-LLM is trained on: masked cross entropy and the DAG loss of its operators."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array, align, statistics_dtype

OPERATORS = ("A_LM", "A_P", "G_LM")
"""The deductive outputs that may carry a DAG loss, in the order in which losses are added."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """Sums over tokens, so that adding the parts of a split batch gives the whole batch exactly.

    Attributes:
        total: [] sum of the weighted cross entropies, in nats.
        count: [] sum of the weights.
        correct: [] sum of the weights of the tokens whose largest logit is the target.
    """

    total: Array
    count: Array
    correct: Array

    def __add__(self, other: "TokenLoss") -> "TokenLoss":
        return jax.tree.map(jnp.add, self, other)

    @property
    def mean(self) -> Array:
        """[] cross entropy per counted token; 0 when no token counts."""
        return _ratio(self.total, self.count)

    @property
    def accuracy(self) -> Array:
        """[] share of the counted tokens that were predicted; 0 when no token counts."""
        return _ratio(self.correct, self.count)


def _ratio(total: Array, count: Array) -> Array:
    empty = count == 0
    return jnp.where(empty, 0, total / jnp.where(empty, 1, count))


def cross_entropy(logits: Array, targets: Array, *, pad_id: int = 0, weights: Array | None = None) -> TokenLoss:
    """Cross entropy of next tokens, with padding left out.

    Args:
        logits: [B, T, V], any floating dtype; summed in float32 or better.
        targets: [B, T] token ids. Where a target equals `pad_id` it has weight 0, whatever
            `weights` says.
        pad_id: the padding id; a negative id counts every target.
        weights: [B, T] further weights; None means 1. `segment_weights` makes those of packed rows.

    Returns:
        The sums as a `TokenLoss`. `.mean` is the published loss: the sum over the batch by the
        number of targets that are not padding.

    Raises:
        ValueError: when the shapes of logits, targets and weights do not go together.

    Source: block cross entropy and accuracy of the published PLDR-LLM programs.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets have shape {targets.shape}, logits {logits.shape}: targets must have the "
            "logits' shape without the vocabulary axis; shift them by one token before the call"
        )
    if weights is not None and weights.shape != targets.shape:
        raise ValueError(f"weights have shape {weights.shape}, targets {targets.shape}: give one weight per target")
    dtype = statistics_dtype(logits.dtype)
    counted = targets != pad_id
    weight = counted.astype(dtype) if weights is None else jnp.where(counted, weights.astype(dtype), 0)
    # A comparison instead of a gather: its gradient fuses with the softmax's, where a gather's is a scatter into zeros.
    vocabulary = align(jnp.arange(logits.shape[-1], dtype=targets.dtype), logits.ndim)
    picked = jnp.sum(jnp.where(vocabulary == targets[..., None], logits.astype(dtype), 0), axis=-1)
    # Padding may be any id; a target that counts and lies outside the vocabulary must not pass for a score of 0.
    missing = counted & ((targets < 0) | (targets >= logits.shape[-1]))
    picked = jnp.where(missing, jnp.nan, picked)
    loss = jax.nn.logsumexp(logits.astype(dtype), axis=-1) - picked
    hit = jnp.argmax(logits, axis=-1).astype(targets.dtype) == targets
    return TokenLoss(
        total=jnp.sum(weight * loss),
        count=jnp.sum(weight),
        correct=jnp.sum(jnp.where(hit, weight, 0)),
    )


def segment_weights(segment_ids: Array) -> Array:
    """Weights for packed rows: a document's last token does not predict the next one's first.

    Args:
        segment_ids: [B, S] of a batch whose inputs are `[:, :-1]` and targets `[:, 1:]`; 0 is
            padding.

    Returns:
        [B, S - 1] float32: 1 where input and target are of one document, else 0.
    """
    same = segment_ids[:, :-1] == segment_ids[:, 1:]
    return (same & (segment_ids[:, 1:] != 0)).astype(jnp.float32)


def log_trace_exp(N: Array) -> Array:
    """log tr exp(N) of nonnegative matrices, with a gradient, at any size of N.

    Args:
        N: [..., H, H], all entries >= 0; float32 or float64 (lower dtypes are raised to float32).

    Returns:
        [...], never below log H.

    Source: NOTEARS (arXiv:1803.01422); the scheme is `log_mean_trace_exp`'s.
    """
    return log_mean_trace_exp(N) + math.log(N.shape[-1])


def log_mean_trace_exp(N: Array) -> Array:
    """log(tr exp(N) / H) of nonnegative matrices, accurate relative to itself from 1e-18 to 1e18.

    Scaling and squaring, written for nonnegative N so that nothing ever cancels:

    * N is halved s times, s the least with ‖N‖₁ / 2^s <= 1, and Y = exp(N / 2^s) - 1 is summed as
      a Taylor series.
    * Then s squarings of σ·1 + Y, held apart: (σ·1 + Y)² = σ²·1 + (2σY + Y²). As long as nothing
      was rescaled the value is log1p(tr Y / H), which keeps a trace of 1e-18 that would drown in
      the ones.
    * Whenever the mean diagonal passes 2 it is divided out and its logarithm kept, so nothing
      overflows.

    Each matrix of a batch takes its own number of squarings, since needless ones would double its
    rounding error each time. The loop (`lax.while_loop`) runs to the largest of them: about 7 at
    initialisation, 16 on trained operators, where a bound for all float32 matrices would be 126.
    Reverse mode never sees the loop: the gradient, (exp N)ᵀ / tr exp N, is what it ends with.
    Forward mode and second derivatives are not defined. Entries of exp N that exceed its mean
    diagonal 1e18 times (float32) saturate there.

    Args:
        N: [..., H, H], all entries >= 0.

    Returns:
        [...], >= 0, in float32 or better. Input that is not finite gives a value that is not.
    """
    return _log_mean_trace_exp(N.astype(statistics_dtype(N.dtype)))


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _mean_diagonal(a: Array) -> Array:
    return jnp.trace(a, axis1=-2, axis2=-1) / a.shape[-1]


def _spread(x: Array) -> Array:
    """One scalar per matrix, against matrices."""
    return x[..., None, None]


@jax.custom_vjp
def _log_mean_trace_exp(N: Array) -> Array:
    return _scale_and_square(N)[0]


def _scale_and_square(N: Array) -> tuple[Array, Array]:
    """The value [...] and the gradient (exp N)ᵀ / tr exp N [..., H, H]."""
    width, dtype = N.shape[-1], N.dtype
    limits = jnp.finfo(dtype)
    ceiling = float(np.sqrt(float(limits.max) / width) / 2)  # below it 2σY + Y² stays finite

    norm = jnp.max(jnp.sum(N, axis=-2), axis=-1)
    exponent = jnp.frexp(jnp.where(jnp.isfinite(norm), norm, 0))[1]  # norm < 2**exponent
    # One over a greater power of two would be flushed to zero.
    squarings = jnp.clip(exponent, 0, limits.maxexp - 2)
    small = N * _spread(jnp.ldexp(jnp.ones((), dtype), -squarings))
    # The first term left out is 1/(degree + 1)!, under the rounding of 1.
    degree = 12 if limits.bits <= 32 else 19

    def series(i, y):
        return (small + _product(small, y)) / (degree - i).astype(dtype)

    Y = jax.lax.fori_loop(1, degree, series, small / degree)

    def square(state):
        step, log_scale, sigma, Y = state
        due = step < squarings
        squared = 2 * _spread(sigma) * Y + _product(Y, Y)
        mean = sigma * sigma + _mean_diagonal(squared)
        scale = jnp.where(mean > 2, mean, 1)
        squared = jnp.minimum(squared / _spread(scale), ceiling)
        return (
            step + 1,
            jnp.where(due, 2 * log_scale + jnp.log(scale), log_scale),
            jnp.where(due, sigma * sigma / scale, sigma),
            jnp.where(_spread(due), squared, Y),
        )

    steps = jnp.max(squarings, initial=0)
    start = (jnp.zeros_like(steps), jnp.zeros_like(norm), jnp.ones_like(norm), Y)
    _, log_scale, sigma, Y = jax.lax.while_loop(lambda state: state[0] < steps, square, start)

    trace = _mean_diagonal(Y)
    rescaled = log_scale > 0
    value = jnp.where(rescaled, log_scale + jnp.log(sigma + trace), jnp.log1p(trace))
    exponential = _spread(sigma) * align(jnp.eye(width, dtype=dtype), N.ndim) + Y
    gradient = jnp.swapaxes(exponential, -2, -1) / _spread((sigma + trace) * width)
    return value, gradient


def _forward(N: Array) -> tuple[Array, Array]:
    return _scale_and_square(N)


def _backward(gradient: Array, cotangent: Array) -> tuple[Array]:
    return (cotangent[..., None, None] * gradient,)


_log_mean_trace_exp.defvjp(_forward, _backward)


def dag_loss(M: Array) -> Array:
    """How far operators are from directed acyclic graphs: the mean of log(tr exp(M ⊙ M) / H).

    Zero exactly when no entries of M close a cycle (the diagonal is a cycle of one); an identity
    gives 1. Entries of at least ε give at least log(1 + ε²).

    Args:
        M: [..., H, H] operators: A_LM, A_P or G_LM, layers and all.

    Returns:
        [] mean over all leading axes, in float32 or better; the gradient is 2 M ⊙ (exp(M ⊙ M)ᵀ / tr
        exp(M ⊙ M)).

    Source: NOTEARS (arXiv:1803.01422) and the published PLDR-LLM programs. These exponentiate directly and overflow
        float32 once the Perron root of M ⊙ M passes 88.7, which trained operators do by hundreds of times.
    """
    M = M.astype(statistics_dtype(M.dtype))
    return jnp.mean(log_mean_trace_exp(M * M))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DagCoefficients:
    """Weights of the DAG losses of the three operators; 0 leaves one out of the program."""

    A_LM: float = 0.0
    A_P: float = 0.0
    G_LM: float = 0.0

    def __post_init__(self):
        for name in OPERATORS:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"the DAG coefficient of {name} is {value!r}; it must be a finite number >= 0 "
                    "(0 switches that loss off)"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The operators with a coefficient above 0: what the model must be asked to `collect`."""
        return tuple(name for name in OPERATORS if getattr(self, name) > 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PLDRLoss:
    """The parts of the training loss: token sums and the DAG losses, not yet weighted."""

    tokens: TokenLoss
    dag: dict[str, Array]


def pldr_loss(
    logits: Array,
    targets: Array,
    out=None,
    coefficients: DagCoefficients | None = None,
    *,
    pad_id: int = 0,
    weights: Array | None = None,
    report: tuple[str, ...] = (),
) -> tuple[Array, PLDRLoss]:
    """Mean cross entropy plus the weighted DAG losses of the deductive outputs.

    Args:
        logits: [B, T, V].
        targets: [B, T].
        out: the model's deductive outputs, with fields A_LM, A_P, G_LM of shape [L, B, N, H, H] or
            None. Not read when no coefficient is above 0 and nothing is to be reported.
        coefficients: None means all 0.
        pad_id: as in `cross_entropy`.
        weights: as in `cross_entropy`.
        report: operators whose DAG loss is wanted in the parts even with coefficient 0 (no gradient
            then).

    Returns:
        The scalar to differentiate, and its parts: use with `jax.value_and_grad(...,
        has_aux=True)`.

    Raises:
        ValueError: when an operator that is needed was not collected, or `report` names another
            thing.

    Source: the objective of the published PLDR-LLM programs.
    """
    coefficients = DagCoefficients() if coefficients is None else coefficients
    unknown = [name for name in report if name not in OPERATORS]
    if unknown:
        raise ValueError(f"no DAG loss is defined for {unknown}; report any of {OPERATORS}")
    tokens = cross_entropy(logits, targets, pad_id=pad_id, weights=weights)
    loss, dag = tokens.mean, {}
    for name in OPERATORS:
        coefficient = getattr(coefficients, name)
        if not coefficient and name not in report:
            continue
        operator = getattr(out, name, None)
        if operator is None:
            raise ValueError(
                f"the DAG loss of {name} was asked for, but the model did not return {name}; "
                f"call the model with collect=({name!r}, ...), or set the coefficient to 0"
            )
        if coefficient:
            dag[name] = dag_loss(operator)
            loss = loss + coefficient * dag[name].astype(loss.dtype)
        else:
            dag[name] = dag_loss(jax.lax.stop_gradient(operator))
    return loss, PLDRLoss(tokens=tokens, dag=dag)
