"""The per-question results released with the RIS paper: reading them, and grouping them as the paper does.

Two habits of the paper are needed to arrive at its numbers. The mode is blank in half of the rows of results_64.csv,
all of which are stochastic: grouping by it would lose them. And the structural density label leaves out the clique,
which is a further hundredth of the window, except in the sub-percent file.
"""

import collections
import csv
import dataclasses
import datetime
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ris_jax import stats

COLUMNS = (
    "Timestamp", "Model", "RoPE_Type", "RIS_Mode", "Window", "Density", "Seeds", "Question_ID", "Expected", "Predicted",
    "Correct", "Prob_Winner", "Pos_Limit_Met",
)  # fmt: skip
"""Columns of a result file; their order varies."""

CLIQUE = 0.01
"""What the structural label leaves out: the clique's share of the window."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One row of a result file."""

    time: datetime.datetime
    """When the question was answered."""
    model: str
    """ "qwen2" or "tinyllama"."""
    rope: str
    """ "linear" or "yarn"."""
    mode: str
    """ "stochastic" or "structural"; "" where the file leaves it blank."""
    window: int
    """Tokens; 0 without documents."""
    density: float
    """As labelled in the file."""
    seeds: int
    """Redundant samplings."""
    question: int
    """Its number, from 1."""
    expected: str
    """The right letter."""
    predicted: str
    """The letter given."""
    correct: bool
    """Whether they are equal."""
    probability: float
    """Of the letter given, among the five."""
    within_limit: bool
    """Whether the question's stated position lies within the first 85 % of the documents."""


class Config(NamedTuple):
    """What a configuration is named by, densities in total."""

    model: str
    rope: str
    window: int
    density: float
    seeds: int


@dataclasses.dataclass(frozen=True)
class Group:
    """All answers of one configuration, by question."""

    config: Config
    answers: tuple[Answer, ...]

    @functools.cached_property
    def correct(self) -> np.ndarray:
        """bool [questions]."""
        return np.array([answer.correct for answer in self.answers])

    @functools.cached_property
    def key(self) -> list[str]:
        """Right letters."""
        return [answer.expected for answer in self.answers]

    @functools.cached_property
    def given(self) -> list[str]:
        """Letters given."""
        return [answer.predicted for answer in self.answers]

    @property
    def right(self) -> int:
        """Right answers."""
        return int(self.correct.sum())

    @property
    def asked(self) -> int:
        """Questions."""
        return len(self.answers)


Groups = Mapping[Config, Group]


def read_answers(path: str | os.PathLike) -> list[Answer]:
    """Reads a result file.

    Args:
        path: a CSV with `COLUMNS` in any order.

    Returns:
        Its rows, in their order.

    Raises:
        ValueError: if the file is missing, lacks a column, or a row cannot be read or contradicts itself.
    """
    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}); give the folder of the released results") from error
    reader = csv.DictReader(text.splitlines())
    if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
        raise ValueError(f"{path} lacks the columns {missing}; a result file has {', '.join(COLUMNS)}")
    answers = []
    for row in reader:
        try:
            answers.append(_answer(row))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}; it was damaged, or made otherwise") from error
    return answers


def _answer(row: Mapping[str, str]) -> Answer:
    answer = Answer(
        time=datetime.datetime.fromisoformat(row["Timestamp"]),
        model=row["Model"],
        rope=row["RoPE_Type"],
        mode=row["RIS_Mode"],
        window=int(row["Window"]),
        density=float(row["Density"]),
        seeds=int(row["Seeds"]),
        question=int(row["Question_ID"]),
        expected=row["Expected"],
        predicted=row["Predicted"],
        correct={"0": False, "1": True}[row["Correct"]],
        probability=float(row["Prob_Winner"]),
        within_limit={"False": False, "True": True}[row["Pos_Limit_Met"]],
    )
    if answer.correct != (answer.expected == answer.predicted):
        raise ValueError(f"{answer.predicted!r} is counted as {row['Correct']} where {answer.expected!r} is expected")
    return answer


def group(answers: Iterable[Answer], *, clique: float = 0.0) -> dict[Config, Group]:
    """Groups answers by configuration, whatever their mode says.

    Args:
        answers: of one file, or of one mode.
        clique: added to every density label.

    Returns:
        The groups, sorted by configuration.

    Raises:
        ValueError: if a configuration has two answers to one question.
    """
    found = collections.defaultdict(list)
    for answer in answers:
        # Labels have three decimals; the sum is rounded so that equal densities are equal keys.
        density = round(answer.density + clique, 4)
        found[Config(answer.model, answer.rope, answer.window, density, answer.seeds)].append(answer)
    for config, rows in found.items():
        if len({answer.question for answer in rows}) != len(rows):
            raise ValueError(f"{config} has two answers to one question: give one file of one run")
    return {
        config: Group(config, tuple(sorted(found[config], key=lambda answer: answer.question)))
        for config in sorted(found)
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """The four released files.

    Attributes:
        main: results_64.csv: Qwen2 at 4k to 64k and TinyLlama, stochastic, and 64k without documents.
        structural: results_structural_64.csv, Qwen2 with YaRN at 64k.
        sub_percent: results_structural_sweet_spot_64.csv, the same below a hundredth; labels taken as totals.
        control_stochastic: results_baseline_32k.csv, at Qwen2's own length, with a balanced key.
        control_structural: the same, structural.
        control_floor: the same without documents.
        answers: rows of results_64.csv as they are.
    """

    main: Groups
    structural: Groups
    sub_percent: Groups
    control_stochastic: Groups
    control_structural: Groups
    control_floor: Group
    answers: tuple[Answer, ...]

    @property
    def floor(self) -> Group:
        """Qwen2 without documents on the 64 questions."""
        return next(g for c, g in self.main.items() if c.window == 0 and c.rope == "yarn")

    def grid(self, rope: str, window: int = 65536, model: str = "qwen2") -> dict[Config, Group]:
        """Stochastic configurations of results_64.csv."""
        return {c: g for c, g in self.main.items() if (c.model, c.rope, c.window) == (model, rope, window)}


def load(folder: str | os.PathLike) -> Results:
    """Reads the released files.

    Args:
        folder: that holds the four of them.

    Returns:
        Their groups; structural densities are totals, clique included.

    Raises:
        ValueError: if a file is missing or damaged, or lacks the runs without documents.
    """
    folder = pathlib.Path(folder)
    main = read_answers(folder / "results_64.csv")
    control = read_answers(folder / "results_baseline_32k.csv")

    def of_mode(mode: str) -> list[Answer]:
        return [answer for answer in control if answer.window and answer.mode == mode]

    floors = list(group(answer for answer in control if not answer.window).values())
    if len(floors) != 1 or not any(a.window == 0 and a.rope == "yarn" for a in main):
        raise ValueError(f"{folder} lacks the runs without documents (window 0), or has several; take the whole files")
    return Results(
        main=group(main),
        structural=group(read_answers(folder / "results_structural_64.csv"), clique=CLIQUE),
        sub_percent=group(read_answers(folder / "results_structural_sweet_spot_64.csv")),
        control_stochastic=group(of_mode("stochastic")),
        control_structural=group(of_mode("structural"), clique=CLIQUE),
        control_floor=floors[0],
        answers=tuple(main),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Time between two runs: loading, geometry and prefill of the later one.

    Attributes:
        config: of the later run.
        seconds: from the last answer of the run before to its first one.
    """

    config: Config
    seconds: float


def setup_times(answers: Iterable[Answer], model: str, rope: str) -> list[Setup]:
    """Times between runs that followed each other without a break.

    A run counts if it was answered from its first question to its last without another in between, and so was the run
    before, at the same window.

    Args:
        answers: of one file.
        model: whose runs to return.
        rope: likewise.

    Returns:
        In order of time.
    """
    answers = sorted(answers, key=lambda answer: answer.time)
    sizes = {config: found.asked for config, found in group(answers).items()}
    runs = [
        (config, list(rows))
        for config, rows in itertools.groupby(
            answers, key=lambda a: Config(a.model, a.rope, a.window, round(a.density, 4), a.seeds)
        )
    ]
    return [
        Setup(config=config, seconds=(rows[0].time - before_rows[-1].time).total_seconds())
        for (before, before_rows), (config, rows) in itertools.pairwise(runs)
        if (config.model, config.rope) == (model, rope)
        and before.window == config.window
        and len(rows) == sizes[config]
        and len(before_rows) == sizes[before]
    ]


def untouched_by_settings(groups: Groups, what: Callable[[Answer], object]) -> tuple[int, int]:
    """How many (window, question) pairs give the same in every configuration.

    Args:
        groups: of one model.
        what: to compare, of an answer.

    Returns:
        (pairs without any difference, pairs).
    """
    seen = collections.defaultdict(set)
    for config, found in groups.items():
        for answer in found.answers:
            seen[config.window, answer.question].add(what(answer))
    return sum(len(values) == 1 for values in seen.values()), len(seen)


def against(first: Group, second: Group) -> stats.McNemar:
    """Exact McNemar test of two configurations, paired by question.

    Raises:
        ValueError: if they did not answer the same questions.
    """
    if [a.question for a in first.answers] != [a.question for a in second.answers] or first.key != second.key:
        raise ValueError(f"{first.config} and {second.config} did not answer the same questions")
    return stats.mcnemar(first.correct, second.correct)
