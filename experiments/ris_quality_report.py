"""Rows of `ris_quality` as a CSV, a Markdown table with intervals, and a figure."""

import csv
import io
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from plga_jax.audit.plots import COLOURS, MARKERS
from plga_jax.audit.report import environment, markdown_table, write_text
from ris_jax.quality import Contestant
from ris_jax.stats import Interval, bootstrap

Row = dict[str, Any]


def key(seed: int, plan: Contestant) -> str:
    """What names a row: equal keys are equal measurements, within one setting."""
    return json.dumps([seed, plan.family, plan.target, plan.geometry.fingerprint()])


def row_key(row: Row) -> str:
    """The `key` of a row."""
    return json.dumps([row[name] for name in ("seed", "family", "target", "fingerprint")])


def row(setting: Mapping[str, Any], seed: int, plan: Contestant, found: Mapping[str, Any]) -> Row:
    """One measurement as it is recorded."""
    names = {"seed": seed, "family": plan.family, "target": plan.target, "fingerprint": plan.geometry.fingerprint()}
    return {**names, **found, "geometry": plan.geometry.to_config(), "setting": dict(setting)}


def check_setting(rows: Iterable[Row], setting: Mapping[str, Any], out: pathlib.Path) -> None:
    """Refuses to mix what cannot be compared.

    Args:
        rows: recorded before.
        setting: of this run.
        out: where they are.

    Raises:
        ValueError: rows of another setting.
    """
    wanted = json.loads(json.dumps(setting))
    for earlier in rows:
        if odd := [name for name in wanted if earlier["setting"].get(name) != wanted[name]]:
            told = ", ".join(f"{name} {earlier['setting'].get(name)}" for name in odd)
            raise ValueError(f"{out} holds results of another setting ({told}): name another folder with --out.")


def write_csv(out: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes results.csv: one line a row, lists joined by spaces, the geometry as JSON.

    Args:
        out: the folder.
        rows: recorded so far, one at least. Of rows of one seed, family and target, the last counts.
    """
    rows, text = _latest(rows), io.StringIO()
    columns = [name for name in rows[0] if name not in ("setting", "step", "fingerprint")]
    sizes = [name for name in rows[0]["setting"] if name not in columns]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*sizes, *columns])
    for each in rows:
        writer.writerow([_cell(x) for x in (*(each["setting"][s] for s in sizes), *(each[c] for c in columns))])
    write_text(out / "results.csv", text.getvalue())


def write(out: pathlib.Path, rows: Sequence[Row]) -> str:
    """Writes report.md and quality.png.

    Args:
        out: the folder.
        rows: as for `write_csv`.

    Returns:
        The Markdown.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("Nothing was measured: name a seed, a share and a family.")
    rows = _latest(rows)
    groups = _groups(rows)
    text = _markdown(groups, rows)
    write_text(out / "report.md", text)
    figure(groups).savefig(out / "quality.png", dpi=120)
    return text


def figure(groups: Mapping[tuple[str, float], Sequence[Row]]) -> Figure:
    """Copy loss, divergence and seconds against the share of dense attention's products, ranking included.

    Args:
        groups: (family, target) -> the rows of its seeds.

    Returns:
        The figure. Whiskers are 95 % bootstrap intervals; dense attention is a line across.
    """
    panels = (
        ("copy NLL at a distance, nats per token", "copy_each", "linear"),
        ("KL from dense, nats", "kl_parts", "log"),
        ("seconds of reading, median", "seconds", "linear"),
    )
    families = list(dict.fromkeys(family for family, _ in groups if family != "dense"))
    drawn = Figure(figsize=(15.0, 6.0), layout="constrained")
    for axes, (title, name, scale) in zip(drawn.subplots(1, 3), panels):
        for (family, _), rows in groups.items():
            if family == "dense" and name != "kl_parts":
                mean, (low, high) = _estimate(rows, name)
                axes.axhline(mean, color="0.3", ls=(0, (4, 3)), lw=1.2, label="dense")
                axes.axhspan(low, high, color="0.3", alpha=0.1, lw=0)
        for index, family in enumerate(families):
            points = sorted(
                (_price(rows), *_estimate(rows, name)) for (label, _), rows in groups.items() if label == family
            )
            x, mean = np.array([p[0] for p in points]), np.array([p[1] for p in points])
            low, high = np.array([p[2] for p in points]).T
            colour, ablated = COLOURS[index % len(COLOURS)], ", " in family
            axes.errorbar(
                x,
                mean,
                yerr=np.maximum([mean - low, high - mean], 0),
                color=colour,
                marker=MARKERS[index % len(MARKERS)],
                ms=6 if family == "probe" else 4.5,
                lw=2.2 if family == "probe" else 1.2,
                ls=":" if ablated else "-",
                mfc="white" if index >= len(COLOURS) else colour,
                elinewidth=0.8,
                capsize=2,
                label=family,
            )
        axes.set(
            title=title, xscale="log", yscale=scale, xlabel="share of dense attention's products, ranking included"
        )
        ticks = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
        axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
        axes.minorticks_off()
        prices = [_price(rows) for (family, _), rows in groups.items() if family != "dense"] or [1.0]
        axes.set_xlim(0.85 * min(prices), 1.15 * max(prices))
        if scale == "linear":
            axes.set_ylim(bottom=0)
        else:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
            axes.yaxis.set_minor_formatter(lambda value, _: f"{value:.2g}")
        axes.grid(True, which="both", color="0.92", lw=0.6)
    labelled = drawn.axes[0].get_legend_handles_labels()
    drawn.legend(*labelled, loc="outside lower center", ncols=7, fontsize=9, frameon=False)
    return drawn


def _groups(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    groups: dict[tuple[str, float], list[Row]] = {}
    for each in rows:
        groups.setdefault((each["family"], each["target"]), []).append(each)
    return dict(sorted(groups.items(), key=lambda item: (-item[0][1] if item[0][0] == "dense" else 0, item[0][1])))


def _price(rows: Sequence[Row]) -> float:
    """Pairs and ranking over dense attention's products."""
    return float(np.mean([row["real_share"] + row["ranking_share"] for row in rows]))


def _estimate(rows: Sequence[Row], name: str) -> tuple[float, Interval]:
    """The mean of what the rows hold, lists put together, and its interval."""
    values = np.concatenate([np.atleast_1d(row[name]) for row in rows]).astype(np.float64)
    return float(values.mean()), bootstrap(values)


def _markdown(groups: Mapping[tuple[str, float], Sequence[Row]], rows: Sequence[Row]) -> str:
    setting = rows[0]["setting"]
    bins = setting["bins"]
    header = (
        *("family", "target", "pairs", "with ranking", "NLL all", *(f"≥{first}" for first in bins)),
        *("KL to dense", "top-1", "copy NLL", "copy − dense", "keys NLL", "passkey rank", "exact", "NLL"),
        *("seconds", "CPU s", "compile s"),
    )
    dense = {row["seed"]: row for (family, _), members in groups.items() if family == "dense" for row in members}
    cells = []
    for (family, target), members in groups.items():
        mean = {name: float(np.mean([row[name] for row in members])) for name in ("nll", "top1", "real_share")}
        draws = {name: np.concatenate([row[f"passkey_{name}"] for row in members]) for name in ("rank", "exact", "nll")}
        ranks = draws["rank"]
        best = f"{np.mean(ranks == 1):.0%} first of {setting['choices']}, mean {ranks.mean():.1f}" if ranks.size else ""
        cells.append(
            (
                *(family, f"{target:.1%}", f"{mean['real_share']:.2%}", f"{_price(members):.2%}", mean["nll"]),
                *(float(np.mean([row[f"nll_{first}"] for row in members])) for first in bins),
                *(_shown(members, "kl_parts", 4), f"{mean['top1']:.1%}", _shown(members, "copy_each", 2)),
                *(_beyond(members, dense), _shown(members, "key_each", 2)),
                best,
                f"{draws['exact'].sum():.0f}/{ranks.size}",
                f"{draws['nll'].mean():.2f}" if ranks.size else "",
                *(f"{np.median([row[name] for row in members]):.1f}" for name in ("seconds", "cpu_seconds")),
                f"{np.median([row['compile_seconds'] for row in members]):.1f}",
            )
        )
    where, seeds = environment(), sorted({row["seed"] for row in rows})
    distances = rows[0]["copy_distance"]
    return "\n".join(
        (
            "# Quality against real density\n",
            f"{setting['model']}, window {setting['length']}, texts of {setting['context']} tokens in chunks of "
            f"{setting['chunk']} ({setting['corpus']}), RoPE scaling {setting['rope']}, seeds "
            f"{', '.join(map(str, seeds))}. Losses are in nats per token, with 95 % bootstrap intervals: over passages "
            f"and keys and, for KL, stretches of the text ({setting['positions']} positions from {bins[0]} on).\n",
            f"Passages of {setting['passage']} tokens at distances {min(distances)} to {max(distances)}, "
            f"begun again with {setting['prompt']}; {setting['keys']} keys in one text; one passkey at distance "
            f"{setting['context'] // 2}.\n",
            'Pairs: read over the causal ones, counted. "With ranking" adds the products made only to choose keys, '
            "over those of dense attention, which makes two a pair. Published geometries, strides and random blocks "
            "are computed as masked dense products: their seconds are not what their pairs would allow.\n",
            markdown_table(header, cells),
            "![](quality.png)\n",
            f"{where['machine']}, {where['cores']} cores; "
            + ", ".join(f"{name} {where[name]}" for name in ("jax", "jaxlib", "numpy"))
            + ".\n",
        )
    )


def _shown(rows: Sequence[Row], name: str, digits: int) -> str:
    mean, (low, high) = _estimate(rows, name)
    return f"{mean:.{digits}f} ({low:.{digits}f} … {high:.{digits}f})"


def _beyond(rows: Sequence[Row], dense: Mapping[int, Row]) -> str:
    """The copy loss beyond dense attention's, paired by passage."""
    if any(row["seed"] not in dense for row in rows):
        return ""
    extra = np.concatenate([np.subtract(row["copy_each"], dense[row["seed"]]["copy_each"]) for row in rows])
    low, high = bootstrap(extra)
    return f"{extra.mean():+.2f} ({low:+.2f} … {high:+.2f})"


def _latest(rows: Iterable[Row]) -> list[Row]:
    return list({(row["seed"], row["family"], row["target"]): row for row in rows}.values())


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    if isinstance(value, list | tuple):
        return " ".join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
