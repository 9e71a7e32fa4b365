"""The report of a training that was probed: the steps at which its quantities fell, their curves, the record."""

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from plga_jax.audit import plots
from plga_jax.audit.emergence import BY_LAYER, Emergence, falls, series
from plga_jax.audit.report import environment, markdown_table, write_json, write_text
from plga_jax.train.records import Records

TITLES = {
    "m_A": "m(A) between inputs",
    "m_G": "m(G) between inputs",
    "rank_one_ratio": "σ2/σ1 of A",
    "cross_head_rms": "cross-head RMS of A",
    "row_map_sigma_max": "σ_max of the row map's Jacobian",
    "commutant_residual": "commutant residual of G",
    "historical_fraction": "historical rows: share of logits that move",
    "block_less_sequential": "|block − sequential loss|, nats",
}


def write(workdir: pathlib.Path, probe: Emergence, *, train_seconds: float) -> str:
    """Writes emergence.json, emergence.md and emergence.png beside the metrics.

    Args:
        workdir: of the run.
        probe: that went along.
        train_seconds: wall time of this start without the probes.

    Returns:
        The table in Markdown.
    """
    steps, values = series(list(Records(workdir / "metrics.jsonl")))
    fell = falls(steps, values, below=probe.config.fallen)
    curves(steps, values, fell).savefig(workdir / "emergence.png", dpi=120)
    cost = {
        "probes": probe.probes,
        "seconds_each": probe.seconds / max(probe.probes - 1, 1),
        "share_of_training": probe.share(train_seconds),
    }
    text = markdown(steps, values, fell, probe, cost)
    write_text(workdir / "emergence.md", text)
    record = {
        "fallen_below": probe.config.fallen,
        "steps": steps.tolist(),
        "values": {name: rows.tolist() for name, rows in values.items()},
        "fell_at": fell,
        "cost": cost,
        "environment": environment(),
    }
    write_json(workdir / "emergence.json", record)
    return text


def markdown(steps, values, fell, probe: Emergence, cost: dict) -> str:
    """A row per quantity."""
    rows = [
        (
            title,
            values[name][0],
            values[name][-1],
            ", ".join("not" if step is None else f"{step}" for step in fell[name]),
        )
        for name, title in TITLES.items()
    ]
    return "\n".join(
        [
            "# How the collapse came about\n",
            f"{len(steps)} probes up to step {steps[-1]}. A quantity has fallen at the first probe from which on it "
            f"stays below {probe.config.fallen:g} of its first size; values of one row are those of the layers.\n",
            markdown_table(("quantity", f"at step {steps[0]}", f"at step {steps[-1]}", "fell at step"), rows),
            f"A probe took {cost['seconds_each']:.2f} s, every {probe.config.every} steps: "
            f"{cost['share_of_training']:.1%} of the time of training without them.\n",
            "![](emergence.png)\n",
        ]
    )


def curves(steps, values: dict[str, np.ndarray], fell: dict[str, Sequence[int | None]]) -> Figure:
    """A panel per quantity, a line per layer, a mark where it fell.

    Args:
        steps: [p].
        values: of `series`.
        fell: of `falls`.

    Returns:
        A figure; value axes are logarithmic but for the commutant residual and the share of logits.
    """
    figure = Figure(figsize=(15, 6.6), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 4, sharex=True).ravel(), TITLES.items()):
        linear = name in ("commutant_residual", "historical_fraction")
        for layer, column in enumerate(np.abs(values[name]).T):
            style = {"color": plots.COLOURS[layer % len(plots.COLOURS)], "marker": "o", "ms": 3}
            shown = column if linear else np.where(column > 0, column, np.nan)
            axes.plot(steps, shown, label=f"layer {layer}" if name in BY_LAYER else "whole model", **style)
            if (at := fell[name][layer]) is not None:
                axes.axvline(at, color=style["color"], ls=":", lw=1.2)
        axes.set(title=title, yscale="linear" if linear else "log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.supxlabel("optimiser step; dotted: fallen for good")
    return figure
