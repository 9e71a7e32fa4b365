"""Multiple choice over long documents: the published protocol, with floors, controls and measured evidence.

A `Reader` prefills the documents once; every question is read from that state, which is a snapshot, so that questions
cannot see each other.
"""

import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tqdm

from plga_jax.tokenizers import Tokenizer
from ris_jax.documents import Passages
from ris_jax.qa_records import Key, ResultFile
from ris_jax.questions import CUE, LETTERS, Question
from ris_jax.tasks import continuation, log_probs

RESERVE = 1024
"""Tokens of a window that the published program keeps for the question."""
LIMIT = 0.85
"""A question counts in the published protocol if its position is below this share of the documents read."""
SCORINGS = ("letter", "spaced", "option")
SAMPLED = ("stochastic", "structural", "structural-total")
"""Modes of the published geometry; "total" counts the cliques into the nominal density."""
MODES = (*SAMPLED, "probe", "block_shared")
WITH_DOCUMENTS = "Read these documents. Questions about what they say will follow.\n\n"
WITHOUT_DOCUMENTS = "Questions will follow. Answer each from what you know.\n\n"


class Reader(Protocol):
    """A model under one geometry."""

    def prefill(self, ids: np.ndarray) -> Any:
        """Reads ids, int32 [C], and returns a state that is never changed."""
        ...

    def logits(self, state: Any, ids: np.ndarray, rows: int = 1) -> np.ndarray:
        """Float [rows, V]: the predictions after the last `rows` of the ids, int32 [T], read after a state."""
        ...

    def real_density(self, state: Any) -> float:
        """Share of the causal pairs that were computed to get to a state."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One configuration of the benchmark.

    Attributes:
        model: a name for the model.
        rope: RoPE scaling, as given to the reader.
        mode: one of `MODES`; or "dense", which computes every pair, or "none", which reads no documents.
        window: tokens; 0 without documents.
        density: nominal; of "block_shared" the share of the causal pairs that is asked for; 1 where there is neither.
        seeds: redundant samplings; 0 where nothing is sampled.
        base_seed: of the first sampling.
    """

    model: str
    rope: str
    mode: str
    window: int
    density: float = 1.0
    seeds: int = 0
    base_seed: int = 0

    def __post_init__(self):
        if (self.mode == "none") != (self.window == 0):
            raise ValueError(f"mode {self.mode!r} with window {self.window}: window 0 and mode 'none' go together")
        if self.window and self.window <= RESERVE:
            raise ValueError(f"the window is {self.window}; {RESERVE} tokens are kept for the question: take more")
        if not 0 <= self.density <= 1 or self.seeds < 0:
            raise ValueError(f"density {self.density} and seeds {self.seeds}: need a density in [0, 1] and seeds ≥ 0")


def settings(
    model: str,
    *,
    windows: Sequence[int],
    densities: Sequence[float],
    seeds: Sequence[int],
    modes: Sequence[str],
    ropes: Sequence[str],
    base_seeds: Sequence[int] = (42,),
    shares: Sequence[float] = (0.25,),
) -> list[Setting]:
    """All combinations, after the floors, which are always run: no documents, and dense attention at every window.

    Args:
        model: a name for the model.
        windows: tokens.
        densities: nominal, of the modes that are `SAMPLED`.
        seeds: redundant samplings, likewise.
        modes: out of `MODES`; "probe" is one setting for each window and scaling.
        ropes: RoPE scalings.
        base_seeds: repetitions with other samples, by the seed of the first sampling.
        shares: of the causal pairs, for "block_shared".

    Returns:
        The settings, each once.

    Raises:
        ValueError: an unknown mode.
    """
    if unknown := sorted({*modes} - {*MODES}):
        raise ValueError(f"modes {unknown} are unknown; choose from {', '.join(MODES)}")
    found = [Setting(model=model, rope="none", mode="none", window=0)]
    for window, rope in itertools.product(windows, ropes):
        make = functools.partial(Setting, model=model, rope=rope, window=window)
        found.append(make(mode="dense"))
        for mode in modes:
            if mode == "probe":
                found.append(make(mode=mode))
                continue
            grid = itertools.product(densities, seeds) if mode in SAMPLED else ((share, 1) for share in shares)
            found += [
                make(mode=mode, density=density, seeds=count, base_seed=base)
                for density, count in grid
                for base in base_seeds
            ]
    return list(dict.fromkeys(found))


class Scores(NamedTuple):
    """Scores of the options under one way of scoring."""

    values: np.ndarray
    """float64 [options]: logits where one token decides, else mean log-probabilities per token."""
    chosen: int
    """The highest; of equals the first."""
    probability: float
    """Its share in a softmax over the options."""


def score(reader: Reader, state: Any, prompt: np.ndarray, continuations: Sequence[np.ndarray]) -> Scores:
    """Scores continuations of a prompt against each other.

    What they have in common at the beginning is read as part of the prompt. If one token each is left, all are scored
    by its logits, in one call; else each by its mean log-probability per token, so that long ones are not penalised.

    Args:
        reader: the model.
        state: of the documents; it is not changed.
        prompt: int32 [P].
        continuations: int32 [A] each.

    Returns:
        The scores.

    Raises:
        ValueError: if two continuations are equal, or one begins with the whole of another.
    """
    columns = zip(*(ids.tolist() for ids in continuations))
    shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    prompt = np.concatenate([prompt, continuations[0][:shared]])
    rest = [ids[shared:] for ids in continuations]
    if not all(map(len, rest)) or len({tuple(ids.tolist()) for ids in rest}) != len(rest):
        raise ValueError("two options are equal for this tokenizer, or one begins with the other: reword them")
    if all(len(ids) == 1 for ids in rest):
        values = np.asarray(reader.logits(state, prompt)[-1], np.float64)[np.concatenate(rest)]
    else:
        values = np.array(
            [log_probs(reader.logits(state, np.concatenate([prompt, ids[:-1]]), len(ids)), ids).mean() for ids in rest]
        )
    weights = np.exp(values - values.max())
    chosen = int(values.argmax())
    return Scores(values, chosen, float(weights[chosen] / weights.sum()))


def orders(options: int, count: int, seed: int, number: int) -> list[tuple[int, ...]]:
    """Orders in which to show the options.

    The last one stays where it is, since the prompt gives its letter a meaning; the others are rotated, so that over
    `options` - 1 orders each stands at each letter once.

    Args:
        options: of the question.
        count: orders, 1 to `options` - 1; the first is as written.
        seed: decides which rotations, if not all.
        number: of the question; so does this.

    Returns:
        For each order the option at each letter.

    Raises:
        ValueError: if there are not that many.
    """
    if not 1 <= count <= options - 1:
        raise ValueError(f"{count} orders of {options} options, the last one fixed: ask for 1 to {options - 1}")
    free = options - 1
    steps = 1 + np.random.default_rng([seed, number]).permutation(free - 1)[: count - 1]
    return [(*((i + step) % free for i in range(free)), free) for step in (0, *steps.tolist())]


def candidates(tokenizer: Tokenizer, prompt: str, options: Sequence[str], scoring: str) -> tuple[np.ndarray, list]:
    """The ids to read and those to choose among.

    Args:
        tokenizer: makes them.
        prompt: of `Question.prompt`.
        options: in the order shown.
        scoring: "letter" is the published way: the prompt ends in a space, and the bare letter follows, which is not
            how a text would be encoded. "spaced" has the letter follow as in a text. "option" scores the whole text
            of each option.

    Returns:
        int32 [P] and one int32 [A] for each option.

    Raises:
        ValueError: on an unknown scoring, or if the tokenizer joins prompt and answer.
    """
    letters = LETTERS[: len(options)]
    if scoring == "letter":
        ids = tokenizer.encode(prompt + " ")
        follow = [np.array(tokenizer.encode(letter), np.int32) for letter in letters]
    elif scoring == "spaced":
        ids = tokenizer.encode(prompt)
        follow = [continuation(tokenizer.encode, prompt, f" {letter}") for letter in letters]
    elif scoring == "option":
        prompt = prompt.removesuffix(CUE) + "The right answer:"
        ids = tokenizer.encode(prompt)
        follow = [continuation(tokenizer.encode, prompt, f" {option}\n") for option in options]
    else:
        raise ValueError(f"scoring is {scoring!r}; it must be one of {SCORINGS}")
    return np.array(ids, np.int32), follow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What is asked, of which documents, and how it is scored.

    Attributes:
        questions: of distinct ids.
        documents: int32 [C] ids of all documents, however long.
        tokenizer: of both.
        scorings: ways of scoring, each of `SCORINGS`.
        shuffles: orders in which the options are shown.
        seed: of those orders.
    """

    questions: Sequence[Question]
    documents: np.ndarray
    tokenizer: Tokenizer
    scorings: tuple[str, ...] = SCORINGS
    shuffles: int = 1
    seed: int = 0

    def plan(self) -> list[Key]:
        """Every answer to give under one setting."""
        return [
            Key(question.number, scoring, shuffle)
            for question in self.questions
            for shuffle in range(self.shuffles)
            for scoring in self.scorings
        ]

    def context(self, setting: Setting) -> np.ndarray:
        """What is read before the questions: an instruction and the documents, their tail cut where the reserve begins.

        Returns:
            int32 [C]; without documents the instruction alone.
        """
        if not setting.window:
            return np.array(self.tokenizer.encode(WITHOUT_DOCUMENTS), np.int32)
        return np.concatenate([self._opening(), self.documents])[: setting.window - RESERVE]

    def evidence(self) -> dict[int, tuple[int, int] | None]:
        """Where each question's evidence is in the context, were it not cut; None if no evidence is given.

        Returns:
            First token and the one after the last, by question.

        Raises:
            ValueError: if evidence that is given is not in the documents.
        """
        spans: dict[int, tuple[int, int] | None] = dict.fromkeys(question.number for question in self.questions)
        if any(question.evidence is not None for question in self.questions):
            passages, before = Passages(self.documents, self.tokenizer), len(self._opening())
            for question in self.questions:
                if question.evidence is None:
                    continue
                span = passages.find(question.evidence)
                if span is None:
                    raise ValueError(
                        f"the evidence of question {question.number}, {question.evidence[:60]!r}, is not in the "
                        "documents: quote them, or leave it out"
                    )
                spans[question.number] = (before + span[0], before + span[1])
        return spans

    def _opening(self) -> np.ndarray:
        return np.array(self.tokenizer.encode(WITH_DOCUMENTS), np.int32)

    def fingerprint(self) -> str:
        """Equal for two benchmarks that ask the same of the same documents in the same way."""
        asked = [dataclasses.asdict(question) for question in self.questions]
        how = [self.scorings, self.shuffles, self.seed, WITH_DOCUMENTS, WITHOUT_DOCUMENTS, RESERVE]
        digest = hashlib.sha256(json.dumps([asked, how, self.tokenizer.fingerprint]).encode())
        digest.update(np.ascontiguousarray(self.documents, "<i4").tobytes())
        return digest.hexdigest()


def run_id(benchmark: Benchmark, setting: Setting) -> str:
    """Twelve hexadecimal digits that name a setting of a benchmark."""
    text = benchmark.fingerprint() + json.dumps(dataclasses.asdict(setting), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def evaluate(
    benchmark: Benchmark,
    settings: Iterable[Setting],
    make_reader: Callable[[Setting], Reader],
    results: ResultFile,
    *,
    progress: bool = True,
) -> None:
    """Answers every question under every setting, going on where the result file ends.

    Args:
        benchmark: what is asked.
        settings: configurations, in order.
        make_reader: the model under a setting; called only for settings with something left to answer.
        results: where rows are added as soon as they are known.
        progress: whether to show a bar.

    Raises:
        ValueError: if a prompt does not fit into the reserve, or evidence is not in the documents.
    """
    spans, done = benchmark.evidence(), results.keys()
    asked = {question.number: question for question in benchmark.questions}
    for setting in tqdm.tqdm(list(settings), unit="setting", disable=not progress):
        run = run_id(benchmark, setting)
        todo = [key for key in benchmark.plan() if (run, key) not in done]
        if not todo:
            continue
        reader = make_reader(setting)
        context = benchmark.context(setting)
        began = time.perf_counter()
        state = reader.prefill(context)
        prefill_seconds = time.perf_counter() - began
        context_length = len(context) if setting.window else 0
        common = {
            "Model": setting.model,
            "RoPE_Type": setting.rope,
            "RIS_Mode": setting.mode,
            "Window": setting.window,
            "Density": setting.density,
            "Seeds": setting.seeds,
            "Base_Seed": setting.base_seed,
            "Run_ID": run,
            "Real_Density": round(reader.real_density(state), 6) if setting.window else 0.0,
            "Prefill_Seconds": round(prefill_seconds, 3),
        }
        for key in tqdm.tqdm(todo, unit="answer", leave=False, disable=not progress):
            question, span = asked[key.question], spans[key.question] if setting.window else None
            results.append(
                common | _answer(benchmark, reader, state, question, key) | _visibility(question, span, context_length)
            )


def _answer(benchmark: Benchmark, reader: Reader, state, question: Question, key: Key) -> dict:
    order = orders(len(question.options), benchmark.shuffles, benchmark.seed, question.number)[key.shuffle]
    options = [question.options[place] for place in order]
    prompt, follow = candidates(benchmark.tokenizer, question.prompt(order), options, key.scoring)
    if (needed := len(prompt) + max(map(len, follow))) > RESERVE:
        raise ValueError(f"question {question.number} takes {needed} tokens, {RESERVE} are kept for it: shorten it")
    began = time.perf_counter()
    found = score(reader, state, prompt, follow)
    expected = LETTERS[order.index(question.answer)]
    return {
        "Timestamp": datetime.datetime.now().isoformat(sep=" ", timespec="seconds"),
        "Question_ID": question.number,
        "Expected": expected,
        "Predicted": LETTERS[found.chosen],
        "Correct": int(LETTERS[found.chosen] == expected),
        "Prob_Winner": round(found.probability, 4),
        "Scoring": key.scoring,
        "Shuffle": key.shuffle,
        "Order": "".join(LETTERS[place] for place in order),
        "Option_Logits": " ".join(f"{value:.6g}" for value in found.values),
        "Seconds": round(time.perf_counter() - began, 4),
    }


def _visibility(question: Question, span: tuple[int, int] | None, context: int) -> dict:
    """The published filter by position, stated or else measured, and whether the evidence was read whole."""
    start, end = ("", "") if span is None else span
    position = question.position if question.position is not None or span is None else start
    return {
        "Pos_Limit_Met": position is not None and position < LIMIT * context,
        "Evidence_Start": start,
        "Evidence_End": end,
        "Visible": "" if span is None else end <= context,
    }
