"""The report of operators carried between sandpile domains, and what of the paper's law it bears out."""

import pathlib

import numpy as np
from matplotlib.figure import Figure

from experiments.transfer_run import DOMAINS, LAWS, Study
from plga_jax.audit import plots
from plga_jax.audit.collapse import COLLAPSED_BELOW
from plga_jax.audit.report import Claim, claims_table, environment, markdown_table, write_json, write_text
from ris_jax.stats import bootstrap

SMALL_RESIDUAL = 0.1
"""Below it the second model's queries and keys are those of the first in another basis, near enough to carry G."""


def claims(found: dict) -> list[Claim]:
    """The statements that the run can judge.

    Args:
        found: of `run_transfer`.

    Returns:
        The claims.
    """
    judged = []
    for name in DOMAINS:
        law, control = found["power_laws"][name], found["power_laws"][f"{name}, dissipative"]
        judged.append(
            Claim(
                statement=f"avalanches of the {name} pile follow a power law, those of its dissipative twin do not",
                criterion="likelihood ratio against an exponential: z > 2 for the pile, z < −2 for the twin",
                measured=f"τ = {law['exponent']:.3f} [{law['low']:.3f}, {law['high']:.3f}], z {law['ratio_z']:.1f}; "
                f"twin z {control['ratio_z']:.1f}",
                holds=bool(law["holds"] and control["ratio_z"] < -2),
            )
        )
    for record in found["rates"]:
        transfer, rate = record["transfer"], record["rate"]
        fallen = [max(record["models"][name]["m_A"]) < COLLAPSED_BELOW for name in DOMAINS]
        residual = float(np.median(transfer["residuals"]))
        errors = {law: float(np.median([e[law] for e in transfer["errors"]])) for law in ("congruence", "similarity")}
        losses = {law: float(np.mean(transfer["losses"][law])) for law in LAWS}
        judged += [
            Claim(
                statement=f"η_max {rate:g}: the two models are one in another basis, so that operators can be carried",
                criterion=f"median residual of S below {SMALL_RESIDUAL}",
                measured=f"{residual:.3f}; collapsed: {', '.join(map(str, fallen))}",
                holds=residual < SMALL_RESIDUAL,
            ),
            Claim(
                statement=f"η_max {rate:g}: the congruence gives the first model's scores better than the similarity",
                criterion="smaller median relative error of q₁ᵀG₁k₁ over heads",
                measured=f"{errors['congruence']:.3g} against {errors['similarity']:.3g}",
                holds=errors["congruence"] < errors["similarity"],
            ),
            Claim(
                statement=f"η_max {rate:g}: carried by the congruence, G serves the second model as its own does",
                criterion="loss with it within 0.01 nats of that with the own operators",
                measured=f"{losses['congruence']:.4f} against {losses['own']:.4f}; identity {losses['identity']:.4f}",
                holds=losses["congruence"] - losses["own"] < 0.01,
            ),
            Claim(
                statement=f"η_max {rate:g}: rank and signature survive the congruence",
                criterion="both equal in every head",
                measured=f"{sum(e['same_rank'] for e in transfer['errors'])} and "
                f"{sum(e['same_signature'] for e in transfer['errors'])} of {len(transfer['errors'])} heads",
                holds=all(e["same_rank"] and e["same_signature"] for e in transfer["errors"]),
            ),
        ]
    return judged


def write(out: pathlib.Path, study: Study, found: dict) -> str:
    """Writes transfer.json, transfer.md and transfer.png.

    Args:
        out: folder.
        study: what was run.
        found: of `run_transfer`.

    Returns:
        The report in Markdown.
    """
    figure(found).savefig(out / "transfer.png", dpi=120)
    rows = []
    for record in found["rates"]:
        for law in LAWS:
            values = np.array(record["transfer"]["losses"][law])
            low, high = bootstrap(values)
            rows.append((f"{record['rate']:g}", law, f"{values.mean():.4f} [{low:.4f}, {high:.4f}]"))
    models = [
        (f"{record['rate']:g}", name, record["models"][name]["m_A"], float(np.mean(record["models"][name]["loss"])))
        for record in found["rates"]
        for name in DOMAINS
    ]
    judged = claims(found)
    text = "\n".join(
        [
            "# Operators between two critical domains\n",
            f"Sandpiles of {study.size} × {study.size} sites, {study.documents} texts of {study.length} avalanches; "
            f"models of {study.steps} steps, seed {study.seed}, from {'the same' if study.same_start else 'different'} "
            "weights. One seed: no interval speaks of other models.\n",
            f"## What holds: {sum(c.holds for c in judged)} of {len(judged)}\n\n{claims_table(judged)}",
            "## The models\n\n" + markdown_table(("η_max", "domain", "m(A) by layer", "loss, nats"), models),
            "## The second model on its own domain, with constant operators\n\n"
            + markdown_table(("η_max", "operators", "loss [95 % over windows]"), rows),
            "![](transfer.png)\n",
        ]
    )
    write_text(out / "transfer.md", text)
    write_json(out / "transfer.json", found | {"environment": environment()})
    return text


def figure(found: dict) -> Figure:
    """Residuals of S and losses by law.

    Args:
        found: of `run_transfer`.

    Returns:
        A figure of two axes.
    """
    drawn = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = drawn.subplots(1, 2)
    for index, record in enumerate(found["rates"]):
        style = {"color": plots.COLOURS[index], "marker": plots.MARKERS[index], "label": f"η_max {record['rate']:g}"}
        left.plot(sorted(record["transfer"]["residuals"]), ls="", **style)
        losses = [record["transfer"]["losses"][law] for law in LAWS]
        means = np.array([np.mean(values) for values in losses])
        ends = np.array([bootstrap(np.array(values)) for values in losses]).T
        right.errorbar(np.arange(len(LAWS)) + 0.1 * index, means, yerr=np.abs(ends - means), ls="", capsize=3, **style)
    left.axhline(SMALL_RESIDUAL, color="0.4", lw=1)
    left.set(
        xlabel="head, by residual", ylabel="residual of S", ylim=(0, 1.05), title="Is one model the other's basis?"
    )
    right.set(xticks=range(len(LAWS)), xticklabels=LAWS, ylabel="loss, nats", title="The second model with G of …")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    return drawn
