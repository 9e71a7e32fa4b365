"""Trains a PLDR-LLM on a corpus: the model, the recipe, the data and the loop put together."""

import dataclasses
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from plga_jax.generate import generate
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.parallel.sharding import DATA_PARALLEL, FSDP, batch_ways
from plga_jax.tokenizers import Tokenizer
from plga_jax.train.config import TrainConfig
from plga_jax.train.data import Corpus, TokenDataset, make_loader
from plga_jax.train.loop import Callback, FitResult, Hooks, Steering, fit
from plga_jax.train.losses import DagCoefficients
from plga_jax.train.objectives import next_token_objective
from plga_jax.train.optim import OptimConfig, make_optimizer
from plga_jax.train.step import Batch, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How text becomes batches.

    Attributes:
        context: S, tokens of a row; S − 1 of them are scored.
        mode: how documents fill rows, see `TokenDataset`.
        validation: share of the documents held out.
        prompt: tokens of held-out text that a sample continues.
        sample: tokens that it adds.
    """

    context: int
    mode: str = "pack"
    validation: float = 0.05
    prompt: int = 32
    sample: int = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PLDRRun:
    """Everything that decides the losses of a run, beside the text."""

    model: PLDRConfig
    optim: OptimConfig
    train: TrainConfig
    data: DataConfig
    dag: DagCoefficients = DagCoefficients()  # noqa: RUF009 (frozen)

    def __post_init__(self):
        if self.data.context - 1 > self.model.context:
            raise ValueError(
                f"rows of {self.data.context} tokens do not fit a model with a context of "
                f"{self.model.context}: shorten data.context or raise model.context"
            )


def train_pldr(
    run: PLDRRun,
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    workdir: str | os.PathLike | None,
    mesh: Mesh | None = None,
    callbacks: Sequence[Callback] = (),
    steer: Callable[[int, Mapping[str, Any]], Steering | None] | None = None,
    adjustable_rate: bool = False,
    notes: Mapping[str, Any] | None = None,
    allow_fallback: bool = False,
    progress: bool = True,
) -> FitResult:
    """Trains, or goes on with the run in `workdir`.

    Args:
        run: the configuration.
        corpus: the text; a share of it is held out.
        tokenizer: of as many tokens as the model has.
        workdir: see `fit`.
        mesh: devices; weights are split over "fsdp" where that is more than 1. None is one device.
        callbacks: probes, see `Hooks`.
        steer: what follows from them, see `Hooks`.
        adjustable_rate: whether `steer` may change the learning rate.
        notes: further JSON for the run's config, such as that of the probes; a resumed run must have the same.
        allow_fallback: see `fit`.
        progress: show progress bars.

    Returns:
        How it ended.

    Raises:
        ValueError: a vocabulary that is not the tokenizer's, too little text, and as `fit`.
    """
    if tokenizer.vocab_size != run.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {run.model.vocab_size}: "
            "set model.vocab_size to the tokenizer's"
        )
    rules = FSDP if mesh is not None and mesh.shape["fsdp"] > 1 else DATA_PARALLEL
    settings = {"context": run.data.context, "mode": run.data.mode, "progress": progress}
    train, held_out = (
        TokenDataset.from_documents(part.documents, tokenizer, **settings) for part in corpus.split(run.data.validation)
    )
    num_segments = None
    if run.data.mode == "segments":
        num_segments = max(train.num_segments, held_out.num_segments)
    ways = 1 if mesh is None else batch_ways(mesh, rules)
    rows = min(run.train.batch_size, len(held_out) // ways * ways)
    if not rows:
        raise ValueError(
            f"the held-out text makes {len(held_out)} row(s) of {run.data.context} tokens, {ways} "
            "are needed: give more text, raise data.validation or shorten data.context"
        )
    prompt = held_out.tokens[: run.data.prompt].tolist()

    def validation() -> Iterable[Batch]:
        batches = make_loader(held_out, rows, shuffle=False, repeat=False)
        return (batch for batch, _ in zip(batches, range(run.train.eval_batches)))

    def sample(state: TrainState) -> list[str]:
        added = min(run.data.sample, run.model.context - len(prompt))
        tokens = generate(state.model, [prompt], max_new_tokens=added).tokens[0]
        return [f"{tokenizer.decode(prompt)} → {tokenizer.decode(tokens)}"]

    tx = make_optimizer(run.optim, adjustable=adjustable_rate)
    model = PLDR(run.model, rngs=nnx.Rngs(run.train.seed))
    return fit(
        TrainState.init(model, tx, seed=run.train.seed, mesh=mesh, rules=rules),
        next_token_objective(run.dag, pad_id=run.model.pad_id, num_segments=num_segments),
        tx,
        make_loader(train, run.train.batch_size, seed=run.train.seed),
        run.train,
        hooks=Hooks.of(run.optim, validation=validation, sample=sample, callbacks=callbacks, steer=steer),
        workdir=workdir,
        run_config=_run_config(run, corpus, train, tokenizer) | dict(notes or {}),
        mesh=mesh,
        rules=rules,
        allow_fallback=allow_fallback,
        progress=progress,
    )


def _run_config(run: PLDRRun, corpus: Corpus, train: TokenDataset, tokenizer: Tokenizer) -> dict[str, Any]:
    config = {"kind": "pldr"} | dataclasses.asdict(run)
    config["data"] |= {
        "corpus": corpus.name,
        "tokens": len(train.tokens),
        "crc32": zlib.crc32(train.tokens.tobytes()),
    }
    return config | {"tokenizer": tokenizer.to_config()}
