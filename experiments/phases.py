"""One small PLDR-LLM trained twice from the same weights, on either side of the collapse, and measured alike."""

import dataclasses
import functools
import os
import pathlib

import jax
import numpy as np
from flax import nnx

from plga_jax.audit import spectra
from plga_jax.audit.collapse import Collapse, measure_collapse
from plga_jax.audit.sequential import BlockSequential, block_against_sequential
from plga_jax.audit.ways import Decode, decode_four_ways
from plga_jax.models.pldr import PLDR
from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.data import Corpus
from plga_jax.train.loop import FitResult, TrainState
from plga_jax.train.pldr import PLDRRun, train_pldr
from plga_jax.train.records import Records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that decides the numbers, beside the text.

    Attributes:
        run: sizes, recipe and data of both runs, which differ in the learning rate alone.
        eta_collapsed: η_max of the run meant to collapse.
        eta_uncollapsed: η_max of the run meant not to.
        probe_every: updates between two measurements of the order parameter.
        pairs: pairs of held-out windows in the probe.
        scored: held-out windows scored both in a block and one prefix at a time.
        prompts: held-out texts that are continued.
        prompt_length: their tokens.
        new_tokens: tokens added to each.
        repeats: passes over the prompts, of which the fastest gives the speed.
    """

    run: PLDRRun
    eta_collapsed: float = 2e-2
    eta_uncollapsed: float = 1e-3
    probe_every: int = 25
    pairs: int = 4
    scored: int = 4
    prompts: int = 4
    prompt_length: int = 64
    new_tokens: int = 64
    repeats: int = 3

    @property
    def length(self) -> int:
        """Tokens of a training window that are fed in."""
        return self.run.data.context - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probes:
    """Fixed stretches of held-out text, spread over all of it; int32.

    Attributes:
        inputs: [2P, T], of which rows 2i and 2i + 1 are a pair.
        scored: [windows, T + 1].
        prompts: [prompts, prompt length].
    """

    inputs: np.ndarray
    scored: np.ndarray
    prompts: np.ndarray

    @classmethod
    def cut(cls, study: Study, corpus: Corpus, tokenizer: ByteTokenizer) -> "Probes":
        """Cuts them.

        Args:
            study: gives numbers and lengths.
            corpus: whose held-out part is taken, as training holds it out.
            tokenizer: of both runs.

        Returns:
            The stretches.

        Raises:
            ValueError: if the held-out text is shorter than one of them.
        """
        _, held_out = corpus.split(study.run.data.validation)
        tokens = np.array(tokenizer.encode("\n".join(held_out.documents)), np.int32)

        def windows(count: int, length: int) -> np.ndarray:
            if len(tokens) < length:
                raise ValueError(f"{held_out.name} has {len(tokens)} tokens, {length} are needed: give more text")
            starts = np.linspace(0, len(tokens) - length, count).astype(int)
            return np.stack([tokens[start : start + length] for start in starts])

        return cls(
            inputs=windows(2 * study.pairs, study.length),
            scored=windows(study.scored, study.length + 1),
            prompts=windows(study.prompts, study.prompt_length),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One trained run and what was measured on it.

    Attributes:
        eta_max: its largest learning rate.
        model: after the last step.
        fit: how training ended.
        lines: its metrics, one dict per step.
        collapse: the probe after the last step.
        values: singular values of A and A_LM on the probe inputs, by name, [L, 2P, N, H].
        operators: G of the first probe input, [L, N, H, H].
        scores: block and sequential negative log-likelihoods.
        decodes: the four ways of decoding.
    """

    eta_max: float
    model: PLDR
    fit: FitResult
    lines: list[dict]
    collapse: Collapse
    values: dict[str, np.ndarray]
    operators: np.ndarray
    scores: BlockSequential
    decodes: dict[str, Decode]


class Interrupted(RuntimeError):
    """A signal ended the training; the same command goes on from the last checkpoint."""


def measure_start(study: Study, probes: Probes) -> tuple[Collapse, dict[str, np.ndarray]]:
    """The probe on the weights both runs start from, and the singular values of A and A_LM there."""
    model = PLDR(study.run.model, rngs=nnx.Rngs(study.run.train.seed))
    deduced = _deduce(model, probes.inputs)
    return measure_collapse(deduced.A, deduced.G_LM), _spectra(deduced)


def run_phase(
    study: Study,
    corpus: Corpus,
    tokenizer: ByteTokenizer,
    probes: Probes,
    eta_max: float,
    workdir: str | os.PathLike,
    *,
    progress: bool = True,
) -> Phase:
    """Trains one run, going on from its last checkpoint if it has one, and measures it.

    Args:
        study: sizes and lengths.
        corpus: the text.
        tokenizer: its tokenizer.
        probes: what to measure on.
        eta_max: the run's largest learning rate.
        workdir: for its checkpoints and metrics.
        progress: whether to show bars.

    Returns:
        The measured run.

    Raises:
        Interrupted: a signal came; everything is saved.
        ValueError: `workdir` holds a run of another configuration; training diverged; too little text.
    """
    run = dataclasses.replace(study.run, optim=dataclasses.replace(study.run.optim, learning_rate=eta_max))

    def probe(step: int, state: TrainState) -> dict[str, float] | None:
        if step % study.probe_every and step != run.train.steps:
            return None
        deduced = _deduce(state.model, probes.inputs)
        found = measure_collapse(deduced.A, deduced.G_LM).as_dict()
        return {f"{name}.{layer}": value for name, row in found.items() for layer, value in enumerate(row)}

    result = train_pldr(run, corpus, tokenizer, workdir=workdir, callbacks=(probe,), progress=progress)
    if result.interrupted:
        raise Interrupted(f"{result.interrupted} after step {result.step}: the same command goes on from there")
    model = result.state.model
    deduced = _deduce(model, probes.inputs)
    return Phase(
        eta_max=eta_max,
        model=model,
        fit=result,
        lines=list(Records(pathlib.Path(workdir) / "metrics.jsonl")),
        collapse=measure_collapse(deduced.A, deduced.G_LM),
        values=_spectra(deduced),
        operators=np.asarray(deduced.G_LM[:, 0]),
        scores=block_against_sequential(
            functools.partial(_logits, model),
            probes.scored,
            pad_id=run.model.pad_id,
            batch=run.train.batch_size,
            progress=progress,
        ),
        decodes=decode_four_ways(
            model, probes.prompts.tolist(), new_tokens=study.new_tokens, repeats=study.repeats, progress=progress
        ),
    )


def _spectra(deduced) -> dict[str, np.ndarray]:
    return {name: spectra.singular_values(getattr(deduced, name)) for name in ("A", "A_LM")}


@jax.jit
def _deduce(model: PLDR, tokens):
    return model(tokens, collect=("A", "A_LM", "G_LM"))[1]


@jax.jit
def _logits(model: PLDR, tokens):
    return model(tokens)[0]
