"""The report of a trial of certificates: counts, costs, and each bound against what it bounds."""

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.certify_run import Trial
from plga_jax.audit import plots
from plga_jax.audit.report import environment, markdown_table, write_json, write_text
from ris_jax.stats import wilson

PROVED = {
    "linear": "The remainder of a linear bound is checked at both ends of the way from frozen to new operators, "
    "not proved; the allowance for rounding is measured.",
    "ball": "The bound is proved in exact arithmetic for each prefix and its two sets of operators; the allowance for "
    "rounding is measured.",
    "lipschitz": "The bound is proved in exact arithmetic for every input of this model; the allowance for rounding is "
    "measured.",
}


def summary(found: Sequence[dict]) -> dict[str, float | int]:
    """Counts over all tokens.

    Args:
        found: of `run_trial`.

    Returns:
        tokens, certified, wrong (certified, and another token), alarms (not certified), false_alarms (not certified,
        and the same token), same, exceeded (deviations above their bound), and largest numbers.
    """
    certified, same = (np.concatenate([row[name] for row in found]).astype(bool) for name in ("certified", "same"))
    deviation, bound = (np.concatenate([row[name] for row in found]) for name in ("deviation", "bound"))
    return {
        "tokens": certified.size,
        "certified": int(certified.sum()),
        "wrong": int((certified & ~same).sum()),
        "alarms": int((~certified).sum()),
        "false_alarms": int((~certified & same).sum()),
        "same": int(same.sum()),
        "exceeded": int((deviation > bound).sum()),
        "largest_deviation": float(deviation.max()),
        "median_bound": float(np.median(bound)),
    }


def write(out: pathlib.Path, trial: Trial, found: Sequence[dict], *, subject: str) -> str:
    """Writes certify.json, certify.md and certify.png.

    Args:
        out: folder.
        trial: what was certified.
        found: of `run_trial`.
        subject: names the model.

    Returns:
        The report in Markdown.
    """
    counts, seconds = summary(found), found[0]["seconds"]
    figure(found).savefig(out / "certify.png", dpi=120)
    text = markdown(trial, counts, seconds, subject)
    write_text(out / "certify.md", text)
    record = {"setting": found[0]["setting"], **counts, "seconds": seconds, "environment": environment()}
    write_json(out / "certify.json", record)
    return text


def markdown(trial: Trial, counts: dict, seconds: dict, subject: str) -> str:
    """The table and what is and is not proved."""

    def share(part: str, whole: str) -> str:
        if not counts[whole]:
            return f"0 of 0 {whole}"
        low, high = wilson(counts[part], counts[whole])
        return f"{counts[part]} of {counts[whole]} ({counts[part] / counts[whole]:.1%}; 95 %: {low:.1%} – {high:.1%})"

    rows = [
        ("certified (coverage)", share("certified", "tokens")),
        ("**wrong**: certified, but recomputing says another token", share("wrong", "certified")),
        ("alarms: not certified", share("alarms", "tokens")),
        ("false alarms: not certified, but the same token", share("false_alarms", "alarms")),
        ("tokens that recomputing leaves as they are", share("same", "tokens")),
        ("deviations above their bound", share("exceeded", "tokens")),
        ("largest deviation of a logit", counts["largest_deviation"]),
        ("median bound", counts["median_bound"]),
        ("certifying / recomputing, time", seconds["certify"] / seconds["recompute"]),
        ("recomputing / cache, time", seconds["recompute"] / seconds["cache"]),
    ]
    return "\n".join(
        [
            f"# Certificates of the G-cache of {subject}\n",
            f"{trial.prompts} prompts of {trial.prompt_tokens} tokens, {trial.new_tokens} new ones each, greedy, mode "
            f"`{trial.mode}`. {PROVED[trial.mode]} The operators of every prefix are made to know the difference, so a "
            "certificate explains a cache and does not make it cheaper.\n",
            markdown_table(("", "measured"), rows),
            "![](certify.png)\n",
        ]
    )


def figure(found: Sequence[dict]) -> Figure:
    """Each token's bound against its deviation, and its margin against twice its bound.

    Args:
        found: of `run_trial`.

    Returns:
        Two scatter plots on logarithmic axes; below the line a bound fails, left of it a token is certified.
    """
    columns = ("deviation", "bound", "margin", "certified", "same")
    deviation, bound, margin, certified, same = (np.concatenate([row[name] for row in found]) for name in columns)
    certified, same = certified.astype(bool), same.astype(bool)
    shown = np.maximum(deviation, 1e-9)
    drawn = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = drawn.subplots(1, 2)
    groups = (
        ("certified", certified, plots.COLOURS[0], "o"),
        ("false alarm", ~certified & same, plots.COLOURS[5], "s"),
        ("true alarm", ~certified & ~same, plots.COLOURS[1], "^"),
        ("wrong", certified & ~same, plots.COLOURS[6], "X"),
    )
    for label, chosen, colour, marker in groups:
        style = {
            "color": colour,
            "marker": marker,
            "ls": "",
            "ms": 3.5,
            "alpha": 0.6,
            "label": f"{label} ({chosen.sum()})",
        }
        left.plot(shown[chosen], bound[chosen], **style)
        right.plot(2 * bound[chosen], margin[chosen], **style)
    for axes, x, y in ((left, shown, bound), (right, 2 * bound, margin)):
        ends = [min(x.min(), y[y > 0].min()), max(x.max(), y.max())]
        axes.plot(ends, ends, color="0.4", lw=1)
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    left.set(xlabel="largest change of a logit by recomputing", ylabel="bound B", title="Bounds fail below the line")
    right.set(xlabel="2B", ylabel="margin", title="Certified above the line")
    right.legend(fontsize="small")
    return drawn
