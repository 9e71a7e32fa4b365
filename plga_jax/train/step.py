"""One training step: the state it carries, the objective it lowers, exact gradient accumulation.

A loss function is `(model, batch, key) -> Objective`. An objective keeps sums and counts apart, so
that microbatches, devices and validation batches add up to what one big batch would have given.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from plga_jax.array_types import Array, PRNGKey
from plga_jax.parallel.sharding import ShardingRules, param_shardings
from plga_jax.train.losses import TokenLoss

Batch = Mapping[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What a loss function returns: loss = tokens.total / tokens.count + penalty.

    tokens: sums over the targets; the count depends on the batch only, never on the model.
    penalty: a mean over the rows of the batch (a regulariser), a scalar; None is no penalty.
    means: further scalars to log, each a mean over the rows of the batch.
    """

    tokens: TokenLoss
    penalty: Array | None = None
    means: dict[str, Array] = dataclasses.field(default_factory=dict)

    def loss(self, count: Array | None = None, share: float = 1.0) -> Array:
        """The scalar to differentiate.

        Args:
            count: divisor of the tokens' total; None takes their own count.
            share: weight of the penalty: one over the number of microbatches.

        Returns:
            A scalar; a batch without targets has token loss 0.
        """
        count = self.tokens.count if count is None else count
        loss = dataclasses.replace(self.tokens, count=count).mean
        return loss if self.penalty is None else loss + share * self.penalty.astype(loss.dtype)

    @classmethod
    def merge(cls, parts: "Objective") -> "Objective":
        """One objective from a stack of them (every leaf [M]): sums add up, means are averaged."""
        return cls(
            tokens=jax.tree.map(lambda x: jnp.sum(x, 0), parts.tokens),
            penalty=None if parts.penalty is None else jnp.mean(parts.penalty, 0),
            means={name: jnp.mean(x, 0) for name, x in parts.means.items()},
        )


LossFn = Callable[[Any, Batch, PRNGKey], Objective]
"""`(model, batch, key) -> Objective`; the key is the step's own, for dropout and the like."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything a step changes, plus the static structure of the model.

    graphdef: structure of the model, static.
    params: its `nnx.Param`s, the float32 (or wider) master weights.
    rest: its other variables, not trained.
    opt_state: of the optimizer.
    step: number of updates made, int32 scalar.
    key: typed key of the run; step k uses fold_in(key, k).
    """

    graphdef: Any = dataclasses.field(metadata={"static": True})
    params: Any
    rest: Any
    opt_state: Any
    step: Array
    key: PRNGKey

    @classmethod
    def init(
        cls,
        model: nnx.Module,
        tx: optax.GradientTransformation,
        *,
        seed: int = 0,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
    ) -> "TrainState":
        """The state before the first step.

        Args:
            model: its weights are copied, so that donating the state leaves the model usable.
            tx: the optimizer.
            seed: of the run's key.
            mesh: devices to place the state on; None leaves it on the default device.
            rules: how to split it; needed with a mesh.

        Returns:
            A state with step 0.
        """
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def make(params, rest):
            params, rest = jax.tree.map(jnp.copy, (params, rest))
            zero = jnp.zeros((), jnp.int32)
            key = jax.random.key(seed)
            opt_state = tx.init(params)
            return cls(graphdef=graphdef, params=params, rest=rest, opt_state=opt_state, step=zero, key=key)

        if mesh is None:
            return make(params, rest)
        shardings = param_shardings(jax.eval_shape(make, params, rest), mesh, rules)
        # Params first, so that the moments are born split and never whole on one device.
        placed = jax.device_put((params, rest), (shardings.params, shardings.rest))
        return jax.jit(make, out_shardings=shardings)(*placed)

    @property
    def model(self) -> nnx.Module:
        """The model with the current weights; valid until a step consumes (donates) this state."""
        return nnx.merge(self.graphdef, self.params, self.rest)


def _microbatches(batch: Batch, accumulation: int) -> Batch:
    """[B, ...] -> [accumulation, B // accumulation, ...], rows dealt out like cards.

    Dealing keeps every microbatch spread over all devices when B is split over them.
    """

    def deal(x):
        if x.shape[0] % accumulation:
            raise ValueError(
                f"a batch of {x.shape[0]} rows cannot be cut into {accumulation} microbatches: "
                "choose a batch size that is a multiple of the accumulation"
            )
        return jnp.swapaxes(x.reshape(-1, accumulation, *x.shape[1:]), 0, 1)

    return jax.tree.map(deal, batch)


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    accumulation: int = 1,
    monitor: Callable[[Any], Mapping[str, Array]] | None = None,
    shardings: TrainState | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """`make_step`, jitted; the state given to it is consumed.

    Args:
        loss_fn: see `make_step`, likewise below.
        tx: the optimizer.
        accumulation: number of microbatches.
        monitor: further scalars.
        shardings: of the state that comes out, from `param_shardings`; None lets JAX choose.

    Returns:
        The step.

    Raises:
        ValueError: as `make_step`.
    """
    step = make_step(loss_fn, tx, accumulation=accumulation, monitor=monitor)
    outputs = {} if shardings is None else {"out_shardings": (shardings, None)}
    return jax.jit(step, donate_argnums=0, **outputs)


def make_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    accumulation: int = 1,
    monitor: Callable[[Any], Mapping[str, Array]] | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """Builds `(state, batch) -> (state, metrics)`.

    Args:
        loss_fn: the objective of a model on a batch.
        tx: the optimizer.
        accumulation: number of microbatches a batch is cut into; the update is that of the whole
            batch: totals and counts are summed and divided once.
        monitor: further scalars read from the new optimizer state.

    Returns:
        The step, not jitted. Metrics are scalars on the device: loss, nll (the loss without penalty), accuracy,
        tokens, grad_norm, the objective's `means`, and what `monitor` adds.

    Raises:
        ValueError: accumulation below 1; on tracing, rows that do not divide into microbatches.
    """
    if accumulation < 1:
        raise ValueError(f"accumulation={accumulation}: at least one microbatch is needed")

    def step(state: TrainState, batch: Batch):
        key = jax.random.fold_in(state.key, state.step)

        def objective(params, rows, key):
            return loss_fn(nnx.merge(state.graphdef, params, state.rest), rows, key)

        def loss(params, rows, key, count=None):
            part = objective(params, rows, key)
            return part.loss(count, 1.0 / accumulation), part

        if accumulation == 1:
            grads, whole = jax.grad(loss, has_aux=True)(state.params, batch, key)
        else:
            slices = (_microbatches(batch, accumulation), jax.random.split(key, accumulation))
            # The divisor of every microbatch is the count of the whole batch. It needs no model,
            # so the compiler drops everything else from this first pass.
            counts = jax.lax.map(lambda rows: objective(state.params, *rows).tokens.count, slices)
            count = jnp.sum(counts)

            def add(grads, rows):
                new, part = jax.grad(loss, has_aux=True)(state.params, *rows, count)
                return jax.tree.map(jnp.add, grads, new), part

            zeros = jax.tree.map(jnp.zeros_like, state.params)
            grads, parts = jax.lax.scan(add, zeros, slices)
            whole = Objective.merge(parts)

        with jax.named_scope("update"):
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": whole.loss(),
            "nll": whole.tokens.mean,
            "accuracy": whole.tokens.accuracy,
            "tokens": whole.tokens.count,
            "grad_norm": optax.tree.norm(grads),
            **whole.means,
        }
        metrics |= monitor(opt_state) if monitor else {}
        new = dataclasses.replace(state, params=params, opt_state=opt_state, step=state.step + 1)
        return new, metrics

    return step


def make_eval_step(loss_fn: LossFn) -> Callable[[TrainState, Batch], Objective]:
    """Builds the jitted `(state, batch) -> Objective`; the state is kept, the key is the run's."""

    @jax.jit
    def step(state: TrainState, batch: Batch) -> Objective:
        return loss_fn(state.model, batch, state.key)

    return step


def evaluate(
    eval_step: Callable[[TrainState, Batch], Objective], state: TrainState, batches: Iterable[Batch]
) -> dict[str, float]:
    """Mean loss per token over batches, as one big batch would give it.

    Args:
        eval_step: from `make_eval_step`.
        state: whose model.
        batches: at least one.

    Returns:
        val_loss (penalties left out) and val_accuracy.

    Raises:
        ValueError: no batch.
    """
    whole = None
    for batch in batches:
        tokens = eval_step(state, batch).tokens
        whole = tokens if whole is None else whole + tokens
    if whole is None:
        raise ValueError("validation has no batch: give it more text or a smaller batch size")
    return {"val_loss": float(whole.mean), "val_accuracy": float(whole.accuracy)}
