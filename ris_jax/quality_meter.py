"""A model and a geometry put through the protocol of `quality`."""

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array, DType
from plga_jax.models.decoder import Decoder
from ris_jax.anchor import respond
from ris_jax.attend import open_cache
from ris_jax.block_shared import BlockSharedGeometry
from ris_jax.geometry import Geometry
from ris_jax.patterns import DenseGeometry
from ris_jax.probe import ProbeGeometry
from ris_jax.qa_reader import CacheReader, State, read_share, row_pairs
from ris_jax.quality import Episode, Protocol
from ris_jax.tasks import Probe, log_probs

_PARTS = 16
"""Stretches of the text that divergences are averaged over: neighbouring positions are alike, stretches are not."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What reading one text gives.

    Attributes:
        nll: float32 [C - 1], loss of each query's next token, in nats.
        logits: float32 [P, V], at the compared positions.
        share: pairs read over the causal ones.
    """

    nll: np.ndarray
    logits: np.ndarray
    share: float


class Meter:
    """A model that reads texts under one geometry; its programs are compiled beforehand, apart from what is timed."""

    def __init__(
        self,
        model: Decoder,
        geometry: Geometry,
        protocol: Protocol,
        kv_dtype: DType | None = None,
        mix: str | None = None,
    ):
        """Compiles.

        Args:
            model: the model; its context holds the geometry's window.
            geometry: which earlier tokens a token attends to.
            protocol: sizes.
            kv_dtype: of keys and values; None takes the compute dtype.
            mix: reads answers token by token through `anchor.respond`, far keys chosen once, as published, and put
                together with the window so; None reads them as text.

        Raises:
            ValueError: a mix for a geometry whose answers are not read by window and far keys.
        """
        if mix is not None and isinstance(geometry, DenseGeometry | ProbeGeometry | BlockSharedGeometry):
            raise ValueError(
                f"mix = {mix!r} says nothing to a {geometry.kind} geometry, which always has one softmax: leave it "
                "out, or take a published geometry."
            )
        self.geometry, self.protocol, self.model = geometry, protocol, model
        self._kv_dtype, self._mix = kv_dtype, mix
        self._reader = CacheReader(model, geometry, kv_dtype=kv_dtype, reserve=protocol.length - protocol.context)
        self._seconds: list[tuple[float, float]] = []  # wall clock and processor time of each chunk that is timed
        begin = time.perf_counter()
        tokens = jnp.zeros((1, protocol.chunk), jnp.int32)
        cache = self._open(protocol.length).ready(0, protocol.chunk)
        self._advance = _advance.lower(model, tokens, cache).compile()
        self.compile_seconds = time.perf_counter() - begin

    def score(self, context: np.ndarray) -> tuple[Scores, State]:
        """Reads a text and notes its predictions; never more than a chunk of them is held.

        Args:
            context: int32 [C].

        Returns:
            The scores, and the state for `ask`.
        """
        protocol, cache = self.protocol, self._open(self.protocol.length)
        compared, targets = protocol.compared(), np.append(context[1:], 0)
        starts = range(0, len(context), protocol.chunk)
        most = max(np.count_nonzero((compared >= i) & (compared < i + protocol.chunk)) for i in starts)
        nll, logits, pairs = [], [], 0
        for start in starts:
            stop = start + protocol.chunk
            here = compared[(compared >= start) & (compared < stop)] - start
            at = np.zeros(most, np.int32)
            at[: len(here)] = here
            cache = cache.ready(start, stop)
            pairs += row_pairs(cache)
            losses, rows, cache = _score(
                self.model, *(jnp.asarray(x[None, start:stop]) for x in (context, targets)), jnp.asarray(at), cache
            )
            nll.append(np.asarray(losses))
            logits.append(np.asarray(rows)[: len(here)])
        share = read_share(cache, len(context), pairs)
        scores = Scores(nll=np.concatenate(nll)[:-1], logits=np.concatenate(logits), share=share)
        return scores, State(cache, len(context), share)

    def read(self, context: np.ndarray) -> State:
        """Reads a text, timed.

        Args:
            context: int32 [C].

        Returns:
            The state for `ask`.
        """
        cache = jax.block_until_ready(self._open(self.protocol.length))
        for start in range(0, len(context), self.protocol.chunk):
            stop = start + self.protocol.chunk
            tokens = jnp.asarray(context[None, start:stop])
            wall, cpu = time.perf_counter(), time.process_time()
            # What a geometry does on the host to be read by is part of its price.
            cache = jax.block_until_ready(self._advance(self.model, tokens, cache.ready(start, stop)))
            self._seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
        return State(cache, len(context))

    def ask(self, state: State, probe: Probe, continuation: np.ndarray | None = None) -> np.ndarray:
        """Predictions of a continuation's tokens after a text and a prompt; the state stays as it is.

        Args:
            state: of `score` or `read`.
            probe: the question.
            continuation: int32 [A]; None is the answer.

        Returns:
            float32 [A, V].
        """
        if self._mix is None:
            rows = len(probe.answer if continuation is None else continuation)
            return self._reader.logits(state, probe.inputs(continuation), rows).reshape(rows, -1)
        answer = probe.inputs(continuation)[len(probe.prompt) :]
        logits, cache = self._reader.follow(state, probe.prompt)
        rows = [logits]
        if len(answer):
            cache = respond(cache, room=len(answer), mix=self._mix)
        for token in answer:
            logits, cache = _step(self.model, jnp.asarray(token[None, None]), cache)
            rows.append(np.asarray(logits))
        return np.stack(rows)

    def seconds(self) -> tuple[float, float]:
        """Wall clock and processor time of reading one text: the sum over its chunks of each one's median.

        Raises:
            ValueError: nothing was read.
        """
        chunks = self.protocol.context // self.protocol.chunk
        if not self._seconds:
            raise ValueError("No text was read yet, so there is no time to tell.")
        wall, cpu = zip(
            *([statistics.median(each) for each in zip(*self._seconds[i::chunks])] for i in range(chunks)), strict=True
        )
        return sum(wall), sum(cpu)

    def _open(self, capacity: int) -> Any:
        return open_cache(self.geometry, self.model.config, capacity=capacity, dtype=self._kv_dtype)


def measure(meter: Meter, episode: Episode, reference: np.ndarray) -> dict[str, Any]:
    """Puts a geometry through one episode.

    Args:
        meter: the model under the geometry.
        episode: texts and questions.
        reference: float32 [P, V], dense attention's `Scores.logits` on the same text.

    Returns:
        Plain numbers and lists of them, losses in nats per token: `real_share` and `ranking_share` over dense
        attention's products, `nll` and `nll_<position>`, `kl`, `kl_parts` (by stretches of the text), `top1`,
        `copy_nll`, `copy_each` and `copy_distance` by passage, `key_nll`, `key_each`, and by draw `passkey_rank`
        (1 is best), `passkey_exact` and `passkey_nll`; `seconds` and `cpu_seconds` of reading a text and
        `compile_seconds`, which they do not include.
    """
    protocol = meter.protocol
    scores, state = meter.score(episode.copy.context)
    kl, same = divergence(reference, scores.logits)
    found: dict[str, Any] = {
        "real_share": scores.share,
        "ranking_share": ranking_share(meter),
        "nll": float(scores.nll.mean()),
        **{f"nll_{first}": float(scores.nll[first:].mean()) for first in protocol.bins},
        "kl": float(kl.mean()),
        "kl_parts": [float(part.mean()) for part in np.array_split(kl, min(_PARTS, len(kl)))],
        "top1": float(same.mean()),
        "copy_each": [_nll(meter, state, probe) for probe in episode.copy.probes],
        "copy_distance": [probe.distance for probe in episode.copy.probes],
    }
    del state
    state = meter.read(episode.table.context)
    found["key_each"] = [_nll(meter, state, probe) for probe in episode.table.probes]
    del state
    ranks, exact, nll = [], [], []
    for task in episode.passkeys:
        state, (probe,) = meter.read(task.context), task.probes
        predictions = [meter.ask(state, probe, candidate) for candidate in probe.candidates]
        likelihoods = [log_probs(rows, ids).sum() for rows, ids in zip(predictions, probe.candidates)]
        ranks.append(1 + int(np.sum(np.array(likelihoods) > likelihoods[probe.correct])))
        # Greedy decoding gives the answer just when each of its tokens is the likeliest after those before it.
        exact.append(bool((predictions[probe.correct].argmax(-1) == probe.answer).all()))
        nll.append(float(-likelihoods[probe.correct] / len(probe.answer)))
        del state
    wall, cpu = meter.seconds()
    return found | {
        "copy_nll": float(np.mean(found["copy_each"])),
        "key_nll": float(np.mean(found["key_each"])),
        "passkey_rank": ranks,
        "passkey_exact": exact,
        "passkey_nll": nll,
        "seconds": wall,
        "cpu_seconds": cpu,
        "compile_seconds": meter.compile_seconds,
    }


def ranking_share(meter: Meter) -> float:
    """What ranking costs over what dense attention does: one product a pair, where dense attention makes two."""
    if not isinstance(meter.geometry, ProbeGeometry):
        return 0.0
    config = meter.model.config
    return meter.geometry.ranking_share(config.num_layers, config.num_kv_heads) / 2


def divergence(reference: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far predictions are from others.

    Args:
        reference: float32 [P, V], logits.
        logits: float32 [P, V].

    Returns:
        KL(reference ‖ other) in nats, float64 [P], and whether both find the same token likeliest, bool [P].
    """
    kl = []
    for first, second in zip(reference, logits, strict=True):
        first, second = (row - row.max() for row in (np.asarray(x, np.float64) for x in (first, second)))
        first, second = (row - np.log(np.exp(row).sum()) for row in (first, second))
        kl.append(float(np.exp(first) @ (first - second)))
    return np.array(kl), reference.argmax(-1) == logits.argmax(-1)


def _nll(meter: Meter, state, probe: Probe) -> float:
    return float(-log_probs(meter.ask(state, probe), probe.answer).mean())


@functools.partial(jax.jit, donate_argnames="cache")
def _advance(model: Decoder, tokens: Array, cache):
    return model.extend(tokens, cache, need_logits=False)[1]


@functools.partial(jax.jit, donate_argnames="cache")
def _step(model: Decoder, token: Array, cache):
    """Logits [V] after a token of an answer."""
    logits, cache = model.extend(token, cache)
    return logits[0, -1], cache


@functools.partial(jax.jit, donate_argnames="cache")
def _score(model: Decoder, tokens: Array, targets: Array, at: Array, cache):
    """Losses [T] of a chunk and its logits [A, V] at some of its queries."""
    logits, cache = model.extend(tokens, cache)
    logits = logits[0]
    right = jnp.take_along_axis(logits, targets[0, :, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - right, logits[at], cache
