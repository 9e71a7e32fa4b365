"""The report of a phase diagram: a table with intervals over seeds, heat maps, and the record."""

import math
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from experiments.phase_grid import LABELS, Grid, digest
from plga_jax.audit.report import environment, markdown_table, show, write_json, write_text
from ris_jax import stats

QUANTITIES: dict[str, tuple[str, Callable[[dict], float]]] = {
    "m_A": ("m(A), largest of the layers", lambda run: max(run["m_A"])),
    "val_loss": ("held-out loss, nats per byte", lambda run: run["val_loss"]),
    "historical_fraction": ("historical rows: share of logits that move", lambda run: run["historical_fraction"]),
    "rank_one_ratio": ("σ2/σ1 of A, largest of the layers", lambda run: max(run["rank_one_ratio"])),
}
"""What is told of a run, by name: title and how it is read from a member's record."""


def summary(points: Sequence[dict]) -> list[dict]:
    """Each point with its phases and, for each quantity, mean, bootstrap interval, least and largest over seeds.

    Args:
        points: of `run_grid`.

    Returns:
        One dict per point; diverged runs count in `labels` and in nothing else.
    """
    found = []
    for point in points:
        sound = [run for run in point["members"] if run["label"] != "diverged"]
        row = {
            "learning_rate": point["learning_rate"],
            "warmup": point["warmup"],
            "labels": {label: n for label in LABELS if (n := Counter(r["label"] for r in point["members"])[label])},
        }
        for name, (_, read) in QUANTITIES.items():
            values = np.array([read(run) for run in sound], np.float64)
            if values.size:
                low, high = stats.bootstrap(values)
                row[name] = {
                    "mean": float(values.mean()),
                    "low": low,
                    "high": high,
                    "least": float(values.min()),
                    "largest": float(values.max()),
                    "runs": int(values.size),
                }
        found.append(row)
    return found


def write(out: pathlib.Path, grid: Grid, points: Sequence[dict], *, seconds: float, cpu_seconds: float) -> str:
    """Writes phase_diagram.json, phase_diagram.md and phase_diagram.png.

    Args:
        out: folder.
        grid: what was run.
        points: what came out.
        seconds: wall time of this start, training and measuring.
        cpu_seconds: CPU time of it.

    Returns:
        The report in Markdown.
    """
    rows = summary(points)
    heat_maps(grid, rows).savefig(out / "phase_diagram.png", dpi=120)
    record = {
        "setting": points[0]["setting"],
        "setting_sha256": digest(points[0]["setting"]),
        "points": rows,
        "environment": environment(),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
    }
    text = markdown(grid, rows, record)
    write_text(out / "phase_diagram.md", text)
    write_json(out / "phase_diagram.json", record)
    return text


def markdown(grid: Grid, rows: Sequence[dict], record: dict) -> str:
    """The table and what it means."""
    header = ("η_max", "T_w", "phases", *(title for title, _ in QUANTITIES.values()))
    cells = [
        (
            f"{row['learning_rate']:g}",
            row["warmup"],
            ", ".join(f"{n} {label}" for label, n in row["labels"].items()),
            *(_interval(row.get(name)) for name in QUANTITIES),
        )
        for row in rows
    ]
    run, where = grid.study.run, record["environment"]
    counted = Counter(label for row in rows for label, n in row["labels"].items() for _ in range(n))
    seen = "Both phases occur." if counted["collapsed"] and counted["uncollapsed"] else "**Only one phase occurs.**"
    versions = ", ".join(f"{name} {where[name]}" for name in where if name not in ("machine", "cores"))
    return "\n".join(
        [
            "# Phases of small PLDR-LLMs\n",
            f"{len(rows)} points × {len(grid.seeds)} seeds; {run.train.steps} steps of {run.train.batch_size} × "
            f"{grid.study.length} tokens of the {record['setting']['corpus']}. Fixed before the runs: a layer has "
            f"collapsed when m(A) of its median pair of {grid.study.pairs} is below {grid.criterion.below:g}; a run is "
            "collapsed when all of its layers are, uncollapsed when none is, mixed otherwise.\n",
            f"{seen} {', '.join(f'{counted[label]} {label}' for label in LABELS if counted[label])}.\n",
            markdown_table(header, cells),
            "Mean over seeds [bootstrap 95 %] (least … largest run, where the interval is not that already). "
            f"Resampling {len(grid.seeds)} runs cannot leave their range, and the range holds the median of all runs "
            f"with a probability of {1 - 2.0 ** (1 - len(grid.seeds)):.0%}: read the intervals as the spread. Of the "
            "four rows whose logits are compared the first never moves, so that 0.75 is all.\n",
            "![](phase_diagram.png)\n",
            f"{where['machine']}, {where['cores']} cores; {versions}; seeds {show(list(grid.seeds))}; setting "
            f"{record['setting_sha256'][:12]}. This start took "
            f"{record['seconds']:.0f} s of wall time and {record['cpu_seconds']:.0f} s of CPU time.\n",
        ]
    )


def _interval(cell: dict | None) -> str:
    if cell is None:
        return "–"
    interval, whole = (tuple(f"{cell[end]:.3g}" for end in ends) for ends in (("low", "high"), ("least", "largest")))
    spread = "" if interval == whole else f" ({whole[0]} … {whole[1]})"
    return f"{cell['mean']:.3g} [{interval[0]}, {interval[1]}]{spread}"


def heat_maps(grid: Grid, rows: Sequence[dict]) -> Figure:
    """One map per quantity over η_max and T_w: geometric-scale colours, the number and the collapsed runs in each cell.

    Args:
        grid: gives the axes.
        rows: of `summary`.

    Returns:
        A figure; thick lines part points where most runs collapsed from the others.
    """
    figure = Figure(figsize=(1.5 + 3.1 * len(grid.rates), 1.2 + 4.4 * len(grid.warmups)), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    at = {(row["learning_rate"], row["warmup"]): row for row in rows}
    shape = (len(grid.warmups), len(grid.rates))
    fallen = np.zeros(shape, bool)
    for axes, (name, (title, _)) in zip(panels, QUANTITIES.items()):
        values = np.full(shape, np.nan)
        for i, warmup in enumerate(grid.warmups):
            for j, rate in enumerate(grid.rates):
                row = at[rate, warmup]
                fallen[i, j] = 2 * row["labels"].get("collapsed", 0) > len(grid.seeds)
                if name in row:
                    values[i, j] = row[name]["mean"]
        image = axes.imshow(values, cmap="viridis", norm=_norm(values), aspect="auto", origin="lower")
        for i, warmup in enumerate(grid.warmups):
            for j, rate in enumerate(grid.rates):
                row = at[rate, warmup]
                text = "diverged" if math.isnan(values[i, j]) else f"{values[i, j]:.3g}"
                dark = image.norm(values[i, j]) < 0.6
                count = f"{row['labels'].get('collapsed', 0)}/{len(grid.seeds)}"
                axes.text(j, i, f"{text}\n{count}", ha="center", va="center", color="white" if dark else "black")
        _boundary(axes, fallen)
        axes.set(
            title=title,
            xlabel="η_max",
            ylabel="T_w, updates",
            xticks=range(shape[1]),
            xticklabels=[f"{rate:g}" for rate in grid.rates],
            yticks=range(shape[0]),
            yticklabels=grid.warmups,
        )
        figure.colorbar(image, ax=axes)
    figure.suptitle("Means over seeds; below each, how many runs collapsed")
    return figure


def _norm(values: np.ndarray) -> Normalize:
    known = values[np.isfinite(values)]
    if known.size and known.min() > 0 and known.max() > 10 * known.min():
        return LogNorm(known.min(), known.max())
    return Normalize(known.min() if known.size else 0, known.max() if known.size else 1)


def _boundary(axes, fallen: np.ndarray) -> None:
    style = {"color": "#D55E00", "lw": 3}
    for i, j in np.argwhere(fallen[:, 1:] != fallen[:, :-1]):
        axes.plot([j + 0.5] * 2, [i - 0.5, i + 0.5], **style)
    for i, j in np.argwhere(fallen[1:] != fallen[:-1]):
        axes.plot([j - 0.5, j + 0.5], [i + 0.5] * 2, **style)
