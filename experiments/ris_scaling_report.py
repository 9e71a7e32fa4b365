"""The points of `ris_scaling` as a table with fitted exponents, and a figure."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from plga_jax.audit.plots import COLOURS, MARKERS
from plga_jax.audit.report import environment, markdown_table
from ris_jax.density import causal_pairs, growth_exponent

Point = dict[str, Any]


def markdown(points: Sequence[Point]) -> str:
    """The report.

    Args:
        points: of `benchmarks.ris_point`, each with its "kind".

    Returns:
        Markdown: a line a point, then a line a geometry with exponents over its lengths (two or more).
    """
    where = environment()
    cells = [
        (
            point["kind"],
            point["length"],
            f"{point['real_share']:.2%}",
            f"{point['build_seconds'] + point['recall_seconds']:.1f}",
            f"{point['prefill_seconds']:.1f}",
            f"{point['prefill_cpu_seconds']:.1f}",
            f"{point['decode_tokens_per_s']:.1f}" if point.get("decode_tokens_per_s") else "-",
            f"{point['peak_rss_mb'] / 1024:.2f}",
        )
        for point in sorted(points, key=lambda point: (point["kind"], point["length"]))
    ]
    header = ("geometry", "tokens", "pairs", "build s", "prefill s", "CPU s", "decode tokens/s", "peak RSS GiB")
    fits = [
        (kind, f"{ordered[0]['length']} … {ordered[-1]['length']}", *(f"{value:.2f}" for value in exponents(ordered)))
        for kind, ordered in by_kind(points).items()
        if len(ordered) > 1
    ]
    columns = ("geometry", "tokens", "prefill wall", "prefill CPU", "pairs read", "peak RSS")
    return "\n".join(
        [
            "# Time and memory against length\n",
            markdown_table(header, cells),
            "Exponents fitted over all lengths of a geometry; 1 is linear. Pairs do not count ranking.\n",
            markdown_table(columns, fits),
            "![](scaling.png)\n",
            f"{where['machine']}, {where['cores']} cores; Python {where['python']}, jax {where['jax']}.\n",
        ]
    )


def by_kind(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points by geometry, in order of length."""
    kinds = sorted({point["kind"] for point in points})
    return {
        kind: sorted((point for point in points if point["kind"] == kind), key=lambda point: point["length"])
        for kind in kinds
    }


def exponents(points: Sequence[Point]) -> tuple[float, ...]:
    """Growth of prefill seconds, processor seconds, pairs read and peak memory with the length."""
    lengths = [point["length"] for point in points]
    series = (
        [point["prefill_seconds"] for point in points],
        [point["prefill_cpu_seconds"] for point in points],
        [point["real_share"] * causal_pairs(point["length"]) for point in points],
        [point["peak_rss_mb"] for point in points],
    )
    return tuple(growth_exponent(lengths, values) for values in series)


def figure(points: Sequence[Point]) -> Figure:
    """Prefill seconds, decoding rate and peak memory against length, a line a geometry."""
    panels = (
        ("prefill, seconds", "prefill_seconds", 1.0),
        ("decoding, tokens per second", "decode_tokens_per_s", 1.0),
        ("peak memory, GiB", "peak_rss_mb", 1 / 1024),
    )
    drawing = Figure(figsize=(15, 5), layout="constrained")
    for axes, (title, name, factor) in zip(drawing.subplots(1, 3), panels):
        for index, (kind, ordered) in enumerate(by_kind(points).items()):
            known = [point for point in ordered if point.get(name)]
            axes.plot(
                [point["length"] for point in known],
                [point[name] * factor for point in known],
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                label=kind,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log") if name == "prefill_seconds" else axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    drawing.axes[0].legend()
    return drawing
