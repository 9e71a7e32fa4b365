"""What the answers of a multiple-choice benchmark say: accuracies with intervals, floors, paired tests and controls."""

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from plga_jax.audit.report import markdown_table
from ris_jax import stats
from ris_jax.qa_records import ResultFile
from ris_jax.questions import LETTERS

Row = Mapping[str, str]
Answers = Mapping[int, Row]
"""Rows of one run, one scoring and one order, by question."""

SETTING = ("Model", "RoPE_Type", "RIS_Mode", "Window", "Density", "Seeds")
"""Columns that name a setting but for the seed of its samples."""


def summarise(results: ResultFile, *, seed: int = 0) -> dict[str, list[dict]]:
    """Summarises a result file.

    Args:
        results: of one benchmark.
        seed: of the bootstrap.

    Returns:
        JSON values. "runs": for each scoring and run its accuracy, all of it from the options as written, with Wilson
        and bootstrap intervals, its tests against both floors and Holm's correction over the runs of that scoring,
        and how stable it is when options change places. "geometries": for each scoring and setting the mean and
        spread of accuracy over base seeds. "baselines": for each scoring what always giving one letter scores.
    """
    groups: dict[tuple[str, str], dict[int, dict[int, Row]]] = collections.defaultdict(
        lambda: collections.defaultdict(dict)
    )
    for row in results.rows():
        groups[row["Scoring"], row["Run_ID"]][int(row["Shuffle"])][int(row["Question_ID"])] = row
    found: dict[str, list[dict]] = {"runs": [], "geometries": [], "baselines": []}
    for scoring in sorted({scoring for scoring, _ in groups}):
        runs = {run: orders for (name, run), orders in groups.items() if name == scoring and orders.get(0)}
        summaries = [_run(scoring, run, orders, runs, seed) for run, orders in runs.items()]
        for floor in ("without_documents", "dense"):
            tested = [summary for summary in summaries if summary[f"against_{floor}"] is not None]
            corrected = stats.holm([summary[f"against_{floor}"]["p"] for summary in tested])
            for summary, p in zip(tested, corrected.tolist(), strict=True):
                summary[f"against_{floor}"]["holm"] = p
        found["runs"] += summaries
        found["geometries"] += _geometries(summaries)
        if runs:
            found["baselines"].append(_baselines(scoring, next(iter(runs.values()))[0]))
    return found


def _run(scoring: str, run: str, orders: Mapping[int, Answers], runs: Mapping[str, Mapping], seed: int) -> dict:
    answers = orders[0]
    first = next(iter(answers.values()))
    right = _right(answers)
    floor = _floor(runs, first, "none")
    dense = _floor(runs, first, "dense")
    counted = [row for row in answers.values() if row["Pos_Limit_Met"] == "True"]
    located = [row for row in answers.values() if row["Visible"]]
    visible = [row for row in located if row["Visible"] == "True"]
    return {
        "scoring": scoring,
        "run": run,
        **{name: first[name] for name in SETTING},
        "base_seed": int(first["Base_Seed"]),
        "real_density": float(first["Real_Density"]),
        "prefill_seconds": float(first["Prefill_Seconds"]),
        "answer_seconds": statistics.fmean(float(row["Seconds"]) for row in answers.values()),
        "right": int(right.sum()),
        "asked": len(right),
        "accuracy": float(right.mean()),
        "wilson": list(stats.wilson(int(right.sum()), len(right))),
        "bootstrap": list(stats.bootstrap(right, seed=seed)),
        "within_limit": _count(counted),
        "evidence_visible": _count(visible),
        "evidence_cut": _count([row for row in located if row["Visible"] == "False"]),
        "against_without_documents": _against(answers, floor),
        "against_dense": _against(answers, dense),
        "gap_recovery": _recovery(answers, floor, dense),
        "recall": stats.recall_by_letter(_column(answers, "Expected"), _column(answers, "Predicted")),
        "shuffles": _shuffles(orders),
    }


def _right(answers: Answers) -> np.ndarray:
    return np.array([row["Correct"] == "1" for row in answers.values()])


def _column(answers: Answers, name: str) -> list[str]:
    return [row[name] for row in answers.values()]


def _count(rows: Sequence[Row]) -> list[int]:
    """Right and asked."""
    return [sum(row["Correct"] == "1" for row in rows), len(rows)]


def _floor(runs: Mapping[str, Mapping[int, Answers]], of: Row, mode: str) -> Answers | None:
    """The floor of a run, unless it is one itself."""
    if of["RIS_Mode"] in ("none", mode):
        return None
    same = ("Model",) if mode == "none" else ("Model", "RoPE_Type", "Window")
    for orders in runs.values():
        row = next(iter(orders[0].values()))
        if row["RIS_Mode"] == mode and all(row[name] == of[name] for name in same):
            return orders[0]
    return None


def _common(*answers: Answers) -> list[np.ndarray]:
    """Which of the questions that all of them answered each got right."""
    questions = [q for q in answers[0] if all(q in others for others in answers[1:])]
    return [np.array([found[q]["Correct"] == "1" for q in questions], bool) for found in answers]


def _against(answers: Answers, floor: Answers | None) -> dict | None:
    if floor is None:
        return None
    test = stats.mcnemar(*_common(answers, floor))
    return {"this_only": test.first_only, "floor_only": test.second_only, "p": test.p}


def _recovery(answers: Answers, floor: Answers | None, dense: Answers | None) -> float | None:
    """None where there is no gap, or a floor is missing."""
    if floor is None or dense is None:
        return None
    accuracy, low, high = (right.mean() if len(right) else 0.0 for right in _common(answers, floor, dense))
    return None if low == high else float(stats.gap_recovery(accuracy, low, high))


def _shuffles(orders: Mapping[int, Answers]) -> dict | None:
    """Accuracy in each order, and how often two orders lead to the same option; None with one order."""
    whole = [answers for answers in orders.values() if set(answers) == set(orders[0])]
    if len(whole) < 2:
        return None
    options = [
        [row["Order"][LETTERS.index(row["Predicted"])] for _, row in sorted(answers.items())] for answers in whole
    ]
    return {
        "accuracy": [float(_right(answers).mean()) for answers in whole],
        "agreement": stats.agreement(options),
    }


def _geometries(summaries: Iterable[dict]) -> list[dict]:
    groups = collections.defaultdict(list)
    for summary in summaries:
        groups[tuple(summary[name] for name in ("scoring", *SETTING))].append(summary)
    return [
        {
            **dict(zip(("scoring", *SETTING), names)),
            "base_seeds": len(found),
            "real_density": statistics.fmean(summary["real_density"] for summary in found),
            "accuracy": statistics.fmean(summary["accuracy"] for summary in found),
            "deviation": statistics.stdev(summary["accuracy"] for summary in found) if len(found) > 1 else None,
        }
        for names, found in groups.items()
    ]


def _baselines(scoring: str, answers: Answers) -> dict:
    key = _column(answers, "Expected")
    letter, right = stats.majority(key)
    return {
        "scoring": scoring,
        "always": stats.always_one_letter(key, LETTERS),
        "majority": letter,
        "right": right,
        "asked": len(key),
    }


def markdown(summary: Mapping[str, Sequence[dict]]) -> str:
    """A summary as Markdown tables.

    Args:
        summary: of `summarise`.

    Returns:
        Markdown.
    """
    parts = []
    for baseline in summary["baselines"]:
        scoring = baseline["scoring"]
        runs = [run for run in summary["runs"] if run["scoring"] == scoring]
        always = f"Always {baseline['majority']}: {baseline['right']}/{baseline['asked']}."
        parts += [f"## Scored by {scoring}\n", f"{always}\n", markdown_table(_HEADER, [_cells(run) for run in runs])]
        repeated = [g for g in summary["geometries"] if g["scoring"] == scoring and g["base_seeds"] > 1]
        if repeated:
            rows = [
                (
                    *(g[n] for n in (*SETTING[2:], "base_seeds")),
                    *(f"{100 * g[n]:.1f}" for n in ("accuracy", "deviation")),
                )
                for g in repeated
            ]
            header = ("mode", "window", "density", "seeds", "base seeds", "mean %", "standard deviation")
            parts += ["Repeated with other samples:\n", markdown_table(header, rows)]
    return "\n".join(parts)


_HEADER = (
    "mode", "RoPE", "window", "density", "seeds", "base seed", "real density", "right", "95 % interval", "within limit",
    "evidence visible", "p no documents (Holm)", "p dense (Holm)", "gap recovered", "orders: % right, agreement",
    "prefill s",
)  # fmt: skip


def _cells(run: dict) -> tuple:
    def test(name: str) -> str:
        found = run[f"against_{name}"]
        if found is None:
            return "–"
        return f"{found['p']:.3f} ({found['holm']:.3f}), {found['this_only']}/{found['floor_only']}"

    low, high = run["wilson"]
    orders = run["shuffles"]
    return (
        run["RIS_Mode"],
        run["RoPE_Type"],
        run["Window"],
        run["Density"],
        run["Seeds"],
        run["base_seed"],
        f"{run['real_density']:.3f}",
        f"{run['right']}/{run['asked']}",
        f"{100 * low:.1f}–{100 * high:.1f}",
        "{}/{}".format(*run["within_limit"]),
        "{}/{}".format(*run["evidence_visible"]),
        test("without_documents"),
        test("dense"),
        "–" if run["gap_recovery"] is None else f"{100 * run['gap_recovery']:.0f} %",
        "–"
        if orders is None
        else f"{100 * statistics.fmean(orders['accuracy']):.1f}, {100 * orders['agreement']:.0f} %",
        f"{run['prefill_seconds']:.1f}",
    )
