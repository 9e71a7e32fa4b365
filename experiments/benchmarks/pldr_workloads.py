"""What the PLDR benchmark times: steps of decoding, prefilling and training, as functions without arguments."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.benchmarks import harness
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.models.pldr_transforms import constant_operator_model
from plga_jax.train.objectives import next_token_objective
from plga_jax.train.optim import OptimConfig, make_optimizer
from plga_jax.train.step import TrainState, make_train_step


def decoders(config: PLDRConfig, length: int, rounds: int):
    """The ways to decode one token after `length - 1`, and to get there.

    Args:
        config: of the model.
        length: tokens of context.
        rounds: how many tokens the caches must have room for.

    Returns:
        By name: one step, one prefill, first-call seconds of the prefills, and bytes of weights that a step reads.
    """
    model = jax.jit(lambda: PLDR(config, rngs=nnx.Rngs(0)))()
    identity = jnp.broadcast_to(
        jnp.eye(config.head_width), (config.num_layers, config.num_heads, config.head_width, config.head_width)
    )
    prompt = jax.random.randint(jax.random.key(1), (1, length), 1, config.vocab_size)

    @functools.partial(jax.jit, donate_argnames="cache")
    def prefill(model, tokens, cache):
        return model.prefill(tokens, cache, last_only=True)

    @functools.partial(jax.jit, donate_argnames="cache")
    def extend(model, token, cache):
        logits, cache = model.extend(token, cache)
        return jnp.argmax(logits[:, -1], axis=-1, keepdims=True).astype(jnp.int32), cache

    @jax.jit
    def whole(model, tokens):
        return jnp.argmax(model(tokens, last_only=True)[0], axis=-1)

    tasks = {"none": lambda: jax.block_until_ready(whole(model, prompt))}
    models = {"kv": model, "kv_g": model, "constant_g": constant_operator_model(model, identity)}
    prefills, first, read = {}, {}, {}
    for name, one in models.items():
        kind = "kv" if name == "kv" else "kv_g"
        capacity = min(length + rounds + 4, config.context)
        unstacked = one.unstacked()
        # Flattened once: walking the modules takes Python longer than a small model takes to decode.
        leaves, structure = jax.tree.flatten(unstacked)

        @functools.partial(jax.jit, donate_argnums=2)
        def step(leaves, token, cache, structure=structure):
            return extend(jax.tree.unflatten(structure, leaves), token, cache)

        def fill(one=one, kind=kind, capacity=capacity):
            return jax.block_until_ready(prefill(one, prompt[:, :-1], one.init_cache(1, capacity, kind=kind)))

        prefills[f"prefill_{name}"] = fill
        first[f"prefill_{name}"] = harness.first_call(fill)
        state = [jnp.ones((1, 1), jnp.int32), fill()[1]]

        def decode(step=step, leaves=leaves, state=state):
            state[:] = jax.block_until_ready(step(leaves, *state))

        tasks[name] = decode
        # Every weight once, but one row of the embedding; a metric learner only by "kv", and then only its last stage.
        metric = sum(
            x.nbytes for path, x in jax.tree.leaves_with_path(nnx.state(one, nnx.Param)) if "metric" in str(path)
        )
        read[name] = sum(x.nbytes for x in leaves) - unstacked.embedding[...].nbytes - metric
        read[name] += 0 if name == "constant_g" else state[1].operators.nbytes
    return tasks, prefills, first, read


def train_steps(config: PLDRConfig, batch: int, length: int):
    """One training step (published recipe) in float32 and in bfloat16: {name: step}."""
    tokens = jax.random.randint(jax.random.key(2), (batch, length + 1), 1, config.vocab_size)
    tasks = {}
    for dtype in ("float32", "bfloat16"):
        optimizer = make_optimizer(OptimConfig(learning_rate=1e-3, warmup_steps=10, total_steps=1000))
        model = jax.jit(lambda c: PLDR(c, rngs=nnx.Rngs(0)), static_argnums=0)(
            dataclasses.replace(config, compute_dtype=dtype)
        )
        state = [TrainState.init(model, optimizer)]
        del model
        step = make_train_step(next_token_objective(), optimizer)

        def train(step=step, state=state):
            state[0], metrics = step(state[0], {"tokens": tokens})
            jax.block_until_ready(metrics)

        tasks[f"train_{dtype}"] = train
    return tasks


def train_flops(config: PLDRConfig, rows: int, length: int) -> float:
    """Floating-point operations of the matrix products of one step, forward and backward (three times forward)."""
    D, H, N, L = config.model_width, config.head_width, config.num_heads, config.num_layers
    layer = 4 * D * D + 3 * D * config.hidden_width
    attention = 2 * length * D + 2 * H * D  # scores and values over the whole table, fold and Gram
    chain = 3 * H * config.metric_width * config.residual_units * config.blocks_per_unit + 2 * H * H
    per_token = L * (layer + attention) + D * config.vocab_size
    return 6.0 * (rows * length * per_token + rows * N * H * L * chain)
