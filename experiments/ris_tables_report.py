"""The recomputed RIS benchmark as Markdown, JSON and figures."""

import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure

from plga_jax.audit.plots import COLOURS, MARKERS
from plga_jax.audit.report import markdown_table, write_json, write_text
from ris_jax import stats
from ris_jax.published_results import Groups, Results
from ris_jax.published_tables import DENSE_32K, all_tables, long_grids


def write_report(out: pathlib.Path, results: Results) -> str:
    """Writes the figures, tables.md and, last of all, tables.json.

    Args:
        out: the folder, which exists.
        results: the four released files.

    Returns:
        The tables in Markdown.
    """
    tables = all_tables(results)
    always = tables["answer_key"]["majority_right"]
    grid_figure(
        {"stochastic": results.control_stochastic, "structural": results.control_structural},
        {"without documents": results.control_floor.right, "dense, as stated": DENSE_32K},
        "32k, Qwen2's own length: 32 questions, balanced key",
    ).savefig(out / "grid_32k.png", dpi=120)
    grid_figure(
        long_grids(results),
        {"without documents": results.floor.right, "always B": always},
        "64k: 64 questions, 38 of them with the answer B",
    ).savefig(out / "grid_64k.png", dpi=120)
    share_figure(
        tables["share_of_pairs"]["points"],
        {"without documents": results.floor.right, "always B": always},
        results.floor.asked,
    ).savefig(out / "share_of_pairs.png", dpi=120)
    text = markdown(tables)
    write_text(out / "tables.md", text)
    write_json(out / "tables.json", tables)
    return text


def grid_figure(grids: Mapping[str, Groups], levels: Mapping[str, int], title: str) -> Figure:
    """Accuracy against redundant samplings, one panel per grid and one line per density, Wilson intervals of 95 %.

    Args:
        grids: by the panels' titles; all configurations answered the same number of questions.
        levels: right answers to draw a line at, by name.
        title: of the figure.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(1.5 + 4.2 * len(grids), 4.6), layout="constrained")
    panels = figure.subplots(1, len(grids), sharey=True, squeeze=False)[0]
    for axes, (name, groups) in zip(panels, grids.items()):
        densities = sorted({config.density for config in groups})
        for place, (density, colour, marker) in enumerate(zip(densities, COLOURS, MARKERS)):
            found = [group for config, group in groups.items() if config.density == density]
            share = [100 * group.right / group.asked for group in found]
            ends = [stats.wilson(group.right, group.asked) for group in found]
            axes.errorbar(
                # Side by side, so that intervals of one x can be told apart.
                [group.config.seeds + 2.2 * (place - (len(densities) - 1) / 2) for group in found],
                share,
                yerr=[
                    [s - 100 * end.low for s, end in zip(share, ends)],
                    [100 * end.high - s for s, end in zip(share, ends)],
                ],
                color=colour,
                marker=marker,
                ms=4.5,
                lw=1.2,
                elinewidth=0.6,
                capsize=1.5,
                label=f"{100 * density:g} %",
            )
        asked = next(iter(groups.values())).asked
        for right, (label, dash) in zip(levels.values(), zip(levels, ("--", ":"))):
            axes.axhline(100 * right / asked, color="0.25", ls=dash, lw=1.3, label=f"{label}: {right}/{asked}")
        axes.set(title=name, xlabel="redundant samplings (seeds)", ylim=(0, 100))
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("right answers, %")
    panels[0].legend(fontsize="small", title="density", loc="lower right", ncols=2)
    figure.suptitle(title)
    return figure


def share_figure(points: Mapping[str, list], levels: Mapping[str, int], asked: int) -> Figure:
    """Right answers against the share of causal pairs that is computed.

    Args:
        points: [share, right] of each configuration, by geometry.
        levels: right answers to draw a line at, by name.
        asked: questions.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    for (name, rows), colour, marker in zip(points.items(), COLOURS, MARKERS):
        axes.plot(
            [100 * share for share, _ in rows],
            [right for _, right in rows],
            color=colour,
            marker=marker,
            ms=5,
            ls="",
            alpha=0.8,
            label=name,
        )
    for (name, right), dash in zip(levels.items(), ("--", ":")):
        axes.axhline(right, color="0.25", ls=dash, lw=1.3, label=f"{name}: {right}")
    axes.set(
        xlabel="expected share of causal pairs computed, %",
        ylabel=f"right answers of {asked}",
        title="64k with YaRN: right answers follow the share of pairs computed",
        xlim=(0, 102),
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")
    return figure


def markdown(tables: Mapping[str, dict]) -> str:
    """All tables as one Markdown text.

    Args:
        tables: of `all_tables`.

    Returns:
        Markdown.
    """
    return "\n".join(f"## {title}\n\n{render(tables)}" for title, render in _SECTIONS.items())


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _intervals(rows: Mapping[str, dict]) -> str:
    return markdown_table(
        ("", "right", "%", "95 % interval"),
        [
            (name, f"{r['right']}/{r['asked']}", _percent(r["share"]), f"{100 * r['low']:.1f}–{100 * r['high']:.1f}")
            for name, r in rows.items()
        ],
    )


def _grid(cells: Mapping[str, Mapping[str, Mapping[str, object]]], show=str) -> str:
    seeds = sorted({seeds for rows in cells.values() for row in rows.values() for seeds in row}, key=int)
    return markdown_table(
        ("seeds", *seeds),
        [
            (f"{name} {100 * float(density):g} %".strip(), *(show(row[s]) if s in row else "–" for s in seeds))
            for name, rows in cells.items()
            for density, row in rows.items()
        ],
    )


def _native(tables) -> str:
    rows = []
    for window, row in tables["native_windows"].items():
        places = row["best_at"]
        where = ", ".join(places) if len(places) < 4 else f"{len(places)} configurations"
        rows.append((window, row["configurations"], f"{row['best']}/{row['asked']}", where, row["worst"]))
    return markdown_table(("window", "configurations", "best", "at (density × seeds)", "worst"), rows)


def _table_1(tables) -> str:
    def peak(row) -> str:
        return f"{_percent(row['share'])} ({', '.join(map(str, row['seeds']))})"

    found = tables["table_1"]
    peaks = markdown_table(
        ("density", "linear peak, seeds ≤ 50", "linear peak", "YaRN peak"),
        [(level, peak(r["linear_upto_50_seeds"]), peak(r["linear"]), peak(r["yarn"])) for level, r in found.items()],
    )
    differences = {
        level: {seeds: f"{r['yarn_minus_linear'][seeds]:+d} (p {r['p'][seeds]:.3f})" for seeds in r["p"]}
        for level, r in found.items()
    }
    return f"{peaks}\nYaRN minus linear, right answers of 64 at equal seeds:\n\n{_grid({'': differences})}"


def _table_2(tables) -> str:
    return markdown_table(
        ("geometry", "density", "mean", "median", "peak"),
        [
            (name, density, *(f"{row[key]:.3f}" for key in ("mean", "median", "peak")))
            for name, rows in tables["table_2"].items()
            for density, row in rows.items()
        ],
    )


def _table_3(tables) -> str:
    found = dict(tables["table_3"])
    kept = found.pop("kept_at_half_a_percent")
    rows = [
        (density, row["clique"], row["best"], f"{row['mean']:.2f}", row.get("gain_150_to_200", "–"))
        for density, row in found.items()
    ]
    return markdown_table(("density", "clique", "best of 64", "mean %", "right, 150 → 200 seeds"), rows) + (
        f"\nUp to 0.5 % keeps {_percent(kept['of_the_best'])} % of the best score, and "
        f"{_percent(kept['of_the_best_above_the_floor'])} % of what the best one adds to no documents.\n"
    )


def _table_5(tables) -> str:
    return _intervals({f"{n} {cell}": row for n, rows in tables["table_5"].items() for cell, row in rows.items()})


def _mcnemar(tables) -> str:
    tests = markdown_table(
        ("comparison", "density × seeds", "right", "first only / second only", "exact p"),
        [
            (
                name,
                "{} vs {}".format(*row["configurations"]),
                "{} vs {}".format(*row["right"]),
                "{} / {}".format(*row["discordant"]),
                f"{row['p']:.6f}",
            )
            for name, rows in tables["mcnemar"]["tests"].items()
            for row in rows
        ],
    )
    keys = (
        "configurations", "smallest_p", "bonferroni", "holm", "smallest_p_of_a_gain", "significant_gain",
        "significant_harm", "below_the_floor",
    )  # fmt: skip
    floors = markdown_table(
        ("grid", *(key.replace("_", " ") for key in keys)),
        [(name, *(row[key] for key in keys)) for name, row in tables["mcnemar"]["against_the_floor"].items()],
    )
    return f"{tests}\nEvery configuration against no documents (gains and harms at uncorrected p < 0.05):\n\n{floors}"


def _answer_key(tables) -> str:
    found = tables["answer_key"]
    test = found["best_structural_against_majority"]
    letters = markdown_table(
        ("right if always", *found["64k"]),
        [("64k", *found["64k"].values()), ("32k", *found["32k"].values())],
    )
    recall = markdown_table(
        ("right / asked by letter of the key", *found["recall_of_best_structural"]),
        [
            (name, *(f"{right}/{asked}" for right, asked in found[key].values()))
            for name, key in (
                ("64k structural, best", "recall_of_best_structural"),
                ("64k without documents", "recall_without_documents"),
            )
        ],
    )
    return (
        f"{letters}\nOf {found['configurations']} configurations at 64k, {found['above_majority']} beat always "
        f"{found['majority_letter']} and {found['equal_to_majority']} equal it. The best structural one against it: "
        f"{test['right'][0]} vs {test['right'][1]}, discordant {test['discordant'][0]} / {test['discordant'][1]}, "
        f"p = {test['p']:.3f}.\n\n{recall}"
    )


def _agreement(tables) -> str:
    found = tables["agreement"]
    return (
        f"Two of the {found['configurations']} stochastic YaRN configurations at 64k with 40 seeds or more give the "
        f"same letter to {100 * found['agreement']:.1f} % of the questions.\n"
    )


def _blank_modes(tables) -> str:
    def cell(row) -> str:
        return f"{row['right']}/{row['asked']} = {_percent(row['share'])}"

    return markdown_table(
        ("window", "peak of linear scaling", "the same when rows without a mode are lost"),
        [(w, cell(row["all_rows"]), cell(row["blank_rows_lost"])) for w, row in tables["blank_modes"].items()],
    )


def _tinyllama(tables) -> str:
    found = tables["tinyllama"]
    rows = [(w, "/".join(map(str, best)), found["configurations"][w]) for w, best in found["best"].items()]
    return markdown_table(("window", "best", "configurations"), rows) + (
        f"\nLetter and probability are the same in every configuration for {found['identical_in_every_configuration']} "
        f"of {found['window_question_pairs']} pairs of window and question.\n"
    )


def _coverage(tables) -> str:
    return markdown_table(
        ("density × seeds", "1 − (1 − d)^S, %", "as drawn at 64k, %"),
        [(name, _percent(r["formula"]), _percent(r["as_drawn"])) for name, r in tables["coverage"].items()],
    )


def _setup(tables) -> str:
    found = tables["setup"]
    windows = markdown_table(
        ("window", "runs", "median s", "largest deviation, %", "local exponent to the next"),
        [
            (w, found["runs"][w], found["median_s"][w], f"{100 * found['largest_deviation'][w]:.1f}", exponent)
            for w, exponent in zip(found["runs"], [*found["exponents"].values(), ""])
        ],
    )
    runs = markdown_table(
        ("64k, density × seeds", "s", "share of causal pairs, %"),
        [(name, row["seconds"], f"{100 * row['share']:.1f}") for name, row in found["64k"].items()],
    )
    return f"{windows}\n{runs}"


def _share(tables) -> str:
    found = tables["share_of_pairs"]
    names = [name for name in found["spearman"] if name != "all"]
    rows = [
        (f"{100 * r['from']:.0f}–{100 * r['to']:.0f} %", *("–" if r[n] is None else f"{r[n]:.1f}" for n in names))
        for r in found["bins"]
    ]
    correlations = ", ".join(f"{name} {value:.2f}" for name, value in found["spearman"].items())
    return markdown_table(("share of causal pairs", *(f"{n}, mean right of 64" for n in names)), rows) + (
        f"\nSpearman over {found['configurations']} configurations: {correlations}.\n"
    )


def _recovery(tables) -> str:
    return _grid({n: rows["recovery"] for n, rows in tables["grid_32k"].items()}, lambda share: f"{100 * share:.0f}")


_SECTIONS = {
    "Floors and peaks": lambda tables: _intervals(tables["headline"]),
    "32k, right answers of 32": lambda tables: _grid({n: rows["right"] for n, rows in tables["grid_32k"].items()}),
    "32k, gap to dense recovered, %": _recovery,
    "64k, right answers of 64": lambda tables: _grid(tables["grid_64k"]),
    "64k structural below 1 %, right answers of 64": lambda tables: _grid({"structural": tables["sub_percent"]}),
    "Windows within the native length": _native,
    "Table 1: linear scaling against YaRN, 64k stochastic": _table_1,
    "Table 2: 64k with YaRN over 11 seed counts, %": _table_2,
    "Table 3: structural below 1 %": _table_3,
    "Table 5: cells that the paper gives twice": _table_5,
    "Exact McNemar tests": _mcnemar,
    "The answer key": _answer_key,
    "Agreement": _agreement,
    "Rows without a mode": _blank_modes,
    "TinyLlama": _tinyllama,
    "Coverage, eq. (1)": _coverage,
    "Time before the first answer": _setup,
    "Right answers against computed pairs": _share,
}
