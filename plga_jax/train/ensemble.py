"""Several runs of one model in one program: other seeds, other rates, the same compiled step.

Runs are members of a batch axis. Learning rate and warm-up are arguments of the program, so that a whole grid of them
is traced and compiled once.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from plga_jax.array_types import Array
from plga_jax.train.optim import OptimConfig, learning_rate, make_optimizer
from plga_jax.train.step import LossFn, TrainState, make_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Runs side by side.

    Attributes:
        state: every array with the members as its first axis, [R, ...].
        size: R.
    """

    state: TrainState
    size: int

    @classmethod
    def init(cls, make_model: Callable[[int], nnx.Module], optim: OptimConfig, seeds: Sequence[int]) -> "Ensemble":
        """The runs before their first step.

        Args:
            make_model: from a seed to the model that a run of it starts from; all of one structure.
            optim: settings; rates come with each step.
            seeds: one per member.

        Returns:
            The ensemble.

        Raises:
            ValueError: no seed.
        """
        if not seeds:
            raise ValueError("an ensemble needs at least one seed")
        states = [TrainState.init(make_model(seed), make_optimizer(optim), seed=seed) for seed in seeds]
        return cls(state=jax.tree.map(lambda *each: jnp.stack(each), *states), size=len(seeds))

    def member(self, index: int) -> TrainState:
        """The state of one run.

        Args:
            index: 0 … R − 1.

        Returns:
            A state as `fit` has it.
        """
        return jax.tree.map(lambda x: x[index], self.state)


def make_ensemble_steps(loss_fn: LossFn, optim: OptimConfig) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Builds the jitted `(state, batches, largest, warmup) -> (state, metrics)`; the state given to it is consumed.

    Args:
        loss_fn: the objective of a model on a batch.
        optim: settings but for η_max and T_w.

    Returns:
        Several steps in one call. `state` is an ensemble's; `batches` hold [steps, R, B, S]; `largest` (η_max) and
        `warmup` (T_w) are numbers, the same for all members. Metrics are [steps, R].
    """

    def steps(state: TrainState, batches, largest: Array, warmup: Array):
        tx = make_optimizer(optim, functools.partial(learning_rate, config=optim, largest=largest, warmup=warmup))
        step = make_step(loss_fn, tx)
        return jax.lax.scan(lambda state, batch: jax.vmap(step)(state, batch), state, batches)

    return jax.jit(steps, donate_argnums=0)


def member_batches(loaders: Sequence[Iterator[dict[str, np.ndarray]]], steps: int) -> dict[str, np.ndarray]:
    """The next batches of every member.

    Args:
        loaders: one per member.
        steps: how many of each.

    Returns:
        From a name to [steps, R, B, S].
    """
    drawn = [[next(loader) for loader in loaders] for _ in range(steps)]
    return jax.tree.map(lambda *each: np.stack(each), *(jax.tree.map(lambda *m: np.stack(m), *row) for row in drawn))
