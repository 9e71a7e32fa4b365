"""The numbers of the RIS paper, and those it leaves out, computed from its per-question results."""

import itertools
import statistics
from collections.abc import Mapping

import numpy as np

from ris_jax import density, stats
from ris_jax.published_results import (
    CLIQUE,
    Config,
    Group,
    Groups,
    Results,
    against,
    group,
    setup_times,
    untouched_by_settings,
)

DENSE_32K = 23
"""Right answers of dense attention at 32k as the paper states them; no row of that run was released."""
LONG = 65536
NATIVE = 32768
LOCAL_KEYS, ANCHORS = 1025, 256
"""Keys of the benchmark's window, the row itself included, and of its anchors."""
BINS = (0.06, 0.15, 0.30, 0.45, 0.60, 0.75, 0.90)
"""Where the share of causal pairs is cut for the table of accuracy against it."""


def all_tables(results: Results) -> dict[str, dict]:
    """Everything there is to know from the four files.

    Args:
        results: of `load`.

    Returns:
        Tables by name, of JSON values; keys that are densities or seeds are strings.
    """
    return {
        "headline": headline(results),
        "grid_32k": grid_32k(results),
        "grid_64k": {name: _cells(found) for name, found in long_grids(results).items()},
        "sub_percent": _cells(results.sub_percent),
        "native_windows": native_windows(results),
        "table_1": table_1(results),
        "table_2": table_2(results),
        "table_3": table_3(results),
        "table_5": table_5(results),
        "mcnemar": mcnemar(results),
        "answer_key": answer_key(results),
        "agreement": agreement(results),
        "blank_modes": blank_modes(results),
        "tinyllama": tinyllama(results),
        "coverage": coverage(),
        "setup": setup(results),
        "share_of_pairs": share_of_pairs(results),
    }


def long_grids(results: Results) -> dict[str, Groups]:
    """The three grids at 64k."""
    return {
        "stochastic linear": results.grid("linear"),
        "stochastic yarn": results.grid("yarn"),
        "structural yarn": results.structural,
    }


def headline(results: Results) -> dict[str, dict]:
    """Floors and peaks, with Wilson intervals."""
    stochastic, structural = results.grid("yarn"), results.structural
    found = {
        "64k without documents": (results.floor.right, results.floor.asked),
        "32k without documents": (results.control_floor.right, results.control_floor.asked),
        "32k dense (stated, no rows)": (DENSE_32K, results.control_floor.asked),
        "32k stochastic, best": _score(best(results.control_stochastic)[0]),
        "32k structural, best": _score(best(results.control_structural)[0]),
        "64k stochastic, best": _score(best(stochastic)[0]),
        "64k structural, best": _score(best(structural)[0]),
    }
    return {name: _interval(right, asked) for name, (right, asked) in found.items()}


def grid_32k(results: Results) -> dict[str, dict]:
    """Right answers at the native length, and the share of the gap from the floor to dense that they recover."""
    floor = results.control_floor.right
    grids = {"stochastic": results.control_stochastic, "structural": results.control_structural}
    return {
        name: {
            "right": _cells(found),
            "recovery": {
                density: {seeds: stats.gap_recovery(right, floor, DENSE_32K) for seeds, right in row.items()}
                for density, row in _cells(found).items()
            },
        }
        for name, found in grids.items()
    }


def native_windows(results: Results) -> dict[str, dict]:
    """Best and worst configuration of each window without RoPE scaling, the unbalanced key."""
    rows = {}
    for window in (4096, 8192, 16384, 32768):
        found = results.grid("linear", window)
        scores = [g.right for g in found.values()]
        rows[str(window)] = {
            "configurations": len(found),
            "asked": next(iter(found.values())).asked,
            "best": max(scores),
            "best_at": [_where(g) for g in best(found)],
            "worst": min(scores),
        }
    return rows


def table_1(results: Results) -> dict[str, dict]:
    """Linear scaling against YaRN, stochastic at 64k: the peaks as searched in the paper, and over equal grids."""
    linear, yarn = _by_density(results.grid("linear")), _by_density(results.grid("yarn"))
    rows = {}
    for level in linear:
        upto_50 = {config: found for config, found in linear[level].items() if config.seeds <= 50}
        matched = [
            (found, yarn[level][config._replace(rope="yarn")], config.seeds) for config, found in linear[level].items()
        ]
        rows[str(level)] = {
            "linear_upto_50_seeds": _peak(upto_50),
            "linear": _peak(linear[level]),
            "yarn": _peak(yarn[level]),
            "yarn_minus_linear": {str(seeds): b.right - a.right for a, b, seeds in matched},
            "p": {str(seeds): against(b, a).p for a, b, seeds in matched},
        }
    return rows


def table_2(results: Results) -> dict[str, dict]:
    """Mean, median and peak over seeds at 64k with YaRN."""
    return {
        name: {str(level): _summary(found) for level, found in _by_density(groups).items()}
        for name, groups in (("stochastic", results.grid("yarn")), ("structural", results.structural))
    }


def table_3(results: Results) -> dict[str, dict]:
    """Structural densities below a hundredth, and the hundredth at the two seed counts that both have."""
    rows = {
        str(level): {
            "clique": round(level * LONG),
            **_summary(found),
            "gain_150_to_200": found[_find(found, 200)].right - found[_find(found, 150)].right,
        }
        for level, found in _by_density(results.sub_percent).items()
    }
    hundredth = {c: g for c, g in results.structural.items() if c.density == 0.01 and c.seeds in (50, 100)}
    rows["0.01"] = {"clique": round(CLIQUE * LONG), **_summary(hundredth)}
    top, floor = best(results.structural)[0].right, results.floor.right
    below = max(g.right for c, g in results.sub_percent.items() if c.density <= 0.005)
    rows["kept_at_half_a_percent"] = {
        "of_the_best": below / top,
        "of_the_best_above_the_floor": stats.gap_recovery(below, floor, top),
    }
    return rows


def table_5(results: Results) -> dict[str, dict]:
    """The cells at 32k whose values the paper gives twice, differently."""
    cells = {
        "stochastic": (results.control_stochastic, "0.01 × 10, 0.01 × 50, 0.01 × 70, 0.01 × 80, 0.05 × 1, 0.05 × 10"),
        "structural": (results.control_structural, "0.01 × 10, 0.02 × 10, 0.01 × 40, 0.02 × 40, 0.05 × 10"),
    }
    return {
        name: {_where(g): _interval(*_score(g)) for g in found.values() if _where(g) in wanted.split(", ")}
        for name, (found, wanted) in cells.items()
    }


def mcnemar(results: Results) -> dict[str, dict]:
    """The paper's four paired tests, RoPE at matched seeds, and every configuration against its floor."""
    stochastic, structural = best(results.grid("yarn")), best(results.structural)[0]
    pairs = {
        "32k stochastic, best, against no documents": [
            (found, results.control_floor) for found in best(results.control_stochastic)
        ],
        "64k structural, best, against no documents": [(structural, results.floor)],
        "64k stochastic, best, against no documents": [(found, results.floor) for found in stochastic],
        "64k structural against stochastic, best": [(structural, found) for found in stochastic],
    }
    tests = {
        name: [
            {
                "configurations": [_where(a), _where(b)],
                "right": [a.right, b.right],
                "discordant": [t.first_only, t.second_only],
                "p": t.p,
            }
            for a, b, t in ((a, b, against(a, b)) for a, b in compared)
        ]
        for name, compared in pairs.items()
    }
    return {"tests": tests, "against_the_floor": against_the_floor(results)}


def against_the_floor(results: Results) -> dict[str, dict]:
    """Each grid against its floor: smallest p, corrected for the size of the grid, and what p < 0.05 is made of."""
    grids = {
        "32k stochastic": (results.control_stochastic, results.control_floor),
        "32k structural": (results.control_structural, results.control_floor),
    } | {f"64k {name}": (found, results.floor) for name, found in long_grids(results).items()}
    grids["64k structural yarn, sub-percent"] = (results.sub_percent, results.floor)
    rows = {}
    for name, (found, floor) in grids.items():
        p = np.array([against(g, floor).p for g in found.values()])
        gain = np.array([g.right - floor.right for g in found.values()])
        rows[name] = {
            "configurations": len(found),
            "smallest_p": p.min(),
            "bonferroni": stats.bonferroni(p).min(),
            "holm": stats.holm(p).min(),
            "smallest_p_of_a_gain": p[gain > 0].min() if (gain > 0).any() else 1.0,
            "significant_harm": int(((p < 0.05) & (gain < 0)).sum()),
            "significant_gain": int(((p < 0.05) & (gain > 0)).sum()),
            "below_the_floor": int((gain < 0).sum()),
        }
    return rows


def answer_key(results: Results) -> dict[str, object]:
    """How far always giving the same letter gets."""
    key = results.floor.key
    letter, right = stats.majority(key)
    scores = [g.right for found in long_grids(results).values() for g in found.values()]
    top = best(results.structural)[0]
    test = stats.mcnemar(top.correct, [wanted == letter for wanted in key])
    return {
        "64k": stats.always_one_letter(key),
        "32k": stats.always_one_letter(results.control_floor.key),
        "majority_letter": letter,
        "majority_right": right,
        "configurations": len(scores),
        "above_majority": sum(score > right for score in scores),
        "equal_to_majority": sum(score == right for score in scores),
        "best_structural_against_majority": {
            "right": [top.right, right],
            "discordant": [test.first_only, test.second_only],
            "p": test.p,
        },
        "recall_of_best_structural": stats.recall_by_letter(top.key, top.given),
        "recall_without_documents": stats.recall_by_letter(results.floor.key, results.floor.given),
    }


def agreement(results: Results) -> dict[str, float]:
    """Of the letters given by 64k YaRN stochastic configurations with 40 seeds or more."""
    found = [g.given for c, g in results.grid("yarn").items() if c.seeds >= 40]
    return {"configurations": len(found), "agreement": stats.agreement(found)}


def blank_modes(results: Results) -> dict[str, dict]:
    """Peaks of linear scaling, and what they become when rows with a blank mode are lost."""
    kept = group(answer for answer in results.answers if answer.mode)
    rows = {}
    for window in (8192, 16384, 65536):
        whole = best(results.grid("linear", window))[0]
        half = best({c: g for c, g in kept.items() if c[:3] == ("qwen2", "linear", window)})[0]
        rows[str(window)] = {
            name: {"right": g.right, "asked": g.asked, "share": g.right / g.asked}
            for name, g in (("all_rows", whole), ("blank_rows_lost", half))
        }
    return rows


def tinyllama(results: Results) -> dict[str, object]:
    """Best scores, and the question that decides the experiment: did any setting change anything?"""
    found = {config: g for config, g in results.main.items() if config.model == "tinyllama"}
    windows = sorted({config.window for config in found})
    of_window = {window: [g for c, g in found.items() if c.window == window] for window in windows}
    same, pairs = untouched_by_settings(found, lambda answer: (answer.predicted, answer.probability))
    return {
        "best": {str(window): list(_score(max(rows, key=lambda g: g.right))) for window, rows in of_window.items()},
        "configurations": {str(window): len(rows) for window, rows in of_window.items()},
        "window_question_pairs": pairs,
        "identical_in_every_configuration": same,
    }


def coverage() -> dict[str, dict]:
    """Eq. (1) of the paper, and the same with the draws that the program makes at 64k."""
    rows = {}
    for level, seeds in ((0.01, 10), (0.01, 70), (0.01, 100), (0.05, 10), (0.05, 40), (0.05, 70)):
        rows[f"{level:g} × {seeds}"] = {
            "formula": 1 - (1 - level) ** seeds,
            "as_drawn": density.union_probability(LONG, samples=samples(level), clique=0, seeds=seeds),
        }
    return rows


def setup(results: Results) -> dict[str, object]:
    """Time from the last answer of a run to the first one of the next, linear scaling: loading, geometry, prefill."""
    times = setup_times(results.answers, "qwen2", "linear")
    by_window = {
        window: [time.seconds for time in times if time.config.window == window]
        for window in sorted({time.config.window for time in times})
    }
    median = {window: statistics.median(seconds) for window, seconds in by_window.items()}
    return {
        "runs": {str(window): len(seconds) for window, seconds in by_window.items()},
        "median_s": {str(window): seconds for window, seconds in median.items()},
        "largest_deviation": {
            str(window): max(abs(s / median[window] - 1) for s in seconds) for window, seconds in by_window.items()
        },
        "exponents": {
            f"{a}–{b}": density.growth_exponent([a, b], [median[a], median[b]])
            for a, b in itertools.pairwise(by_window)
        },
        "64k": {
            f"{t.config.density:g} × {t.config.seeds}": {"seconds": t.seconds, "share": share(t.config, "stochastic")}
            for t in times
            if t.config.window == LONG
        },
    }


def share_of_pairs(results: Results) -> dict[str, object]:
    """Right answers at 64k with YaRN against the expected share of causal pairs that a configuration computes."""
    grids = {
        "stochastic": results.grid("yarn"),
        "structural": results.structural,
        "sub-percent": results.sub_percent,
    }
    points = {name: [(share(config, name), g.right) for config, g in found.items()] for name, found in grids.items()}
    everything = [point for rows in points.values() for point in rows]
    bins = []
    for low, high in itertools.pairwise((0.0, *BINS, 1.0)):
        mean = {
            name: statistics.fmean(inside) if (inside := [r for s, r in rows if low <= s < high]) else None
            for name, rows in points.items()
        }
        bins.append({"from": low, "to": high} | mean)
    return {
        "configurations": len(everything),
        "spearman": {"all": stats.spearman(*zip(*everything))}
        | {name: stats.spearman(*zip(*rows)) for name, rows in points.items()},
        "bins": bins,
        "points": {name: [list(point) for point in rows] for name, rows in points.items()},
    }


def samples(level: float) -> int:
    """What the published program draws for one row and seed at 64k: at least one, also for density 0."""
    return max(1, int(LONG * level))


def share(config: Config, kind: str) -> float:
    """Expected share of the causal pairs that a configuration at 64k computes.

    Args:
        config: its density in total.
        kind: "stochastic"; "structural", with a clique of a hundredth of the window and the rest drawn;
            "sub-percent", all of it clique and one draw.

    Returns:
        Within (0, 1].
    """
    if kind == "stochastic":
        clique, drawn = 0, samples(config.density)
    elif kind == "structural":
        # Rounded, since 0.05 - 0.01 is not quite 0.04.
        clique, drawn = int(CLIQUE * LONG), samples(round(config.density - CLIQUE, 4))
    else:
        clique, drawn = round(config.density * LONG), 1
    p = density.union_probability(LONG, samples=drawn, clique=clique, seeds=config.seeds)
    return density.expected_union(LONG, local=LOCAL_KEYS, anchors=ANCHORS, probability=p).share


def best(groups: Groups) -> list[Group]:
    """The configurations with the largest share of right answers, all of them if equal."""
    top = max(found.right / found.asked for found in groups.values())
    return [found for found in groups.values() if found.right / found.asked == top]


def _score(found: Group) -> tuple[int, int]:
    return found.right, found.asked


def _interval(right: int, asked: int) -> dict[str, float]:
    low, high = stats.wilson(right, asked)
    return {"right": right, "asked": asked, "share": right / asked, "low": low, "high": high}


def _where(found: Group) -> str:
    return "none" if found.config.window == 0 else f"{found.config.density:g} × {found.config.seeds}"


def _by_density(groups: Groups) -> dict[float, Groups]:
    levels = sorted({config.density for config in groups})
    return {level: {c: g for c, g in groups.items() if c.density == level} for level in levels}


def _cells(groups: Groups) -> dict[str, dict[str, int]]:
    return {str(level): {str(c.seeds): g.right for c, g in row.items()} for level, row in _by_density(groups).items()}


def _find(groups: Mapping[Config, Group], seeds: int) -> Config:
    return next(config for config in groups if config.seeds == seeds)


def _peak(groups: Groups) -> dict[str, object]:
    top = best(groups)
    return {"right": top[0].right, "share": top[0].right / top[0].asked, "seeds": [g.config.seeds for g in top]}


def _summary(groups: Groups) -> dict[str, float]:
    shares = [100 * g.right / g.asked for g in groups.values()]
    return {
        "mean": statistics.fmean(shares),
        "median": statistics.median(shares),
        "peak": max(shares),
        "best": best(groups)[0].right,
    }
