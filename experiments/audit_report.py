"""The report of an audit: audit.json, audit.md and figures; every number with its label and its controls."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.audit_run import Audit
from plga_jax.audit import plots
from plga_jax.audit.quantities import Quantity
from plga_jax.audit.report import environment, markdown_table, write_json, write_text

TITLES = {
    "spectra": "Spectra, ranks, sameness of rows and heads",
    "operators": "Operators and the rotary embedding",
    "order": "Order parameters",
    "gram": "The Gram: LayerNorm's ε, twirl, stationarity",
    "row_map": "Contraction of the row map",
    "dag": "Acyclicity values and their floors",
    "decoding": "Cached against recomputed decoding",
    "prefix": "Historical rows, padding, repeats",
    "losses": "Block against sequential loss",
    "scoring": "Scoring protocols",
    "budget": "Perturbation budget",
}

LEGEND = (
    "*measured*: read off this model on these prompts; *bound*: a limit that holds given the stated inputs; *proxy*: "
    "cheaper, and only correlated with what is meant. Columns `init …` are medians over fresh models of the same sizes "
    "under each initialisation law, on the same prompts.\n"
)


def write(out: pathlib.Path, audit: Audit, *, subject: str, prompts: Sequence[str]) -> str:
    """Writes audit.json, audit.md and the figures.

    Args:
        out: folder.
        audit: what was found.
        subject: names what was audited.
        prompts: the texts.

    Returns:
        The report in Markdown.
    """
    figures = _figures(audit)
    for name, figure in figures.items():
        figure.savefig(out / name, dpi=120)
    record = {
        "subject": subject,
        "prompts": list(prompts),
        "provenance": audit.provenance,
        "environment": environment(),
        "sections": _records(audit.model),
        "controls": {law: _records(found) for law, found in audit.controls.items()},
    }
    text = _markdown(audit, subject, prompts, list(figures))
    write_text(out / "audit.md", text)
    write_json(out / "audit.json", record)
    return text


def _records(found: Mapping[str, Sequence[Quantity]]) -> dict:
    return {name: [quantity.as_dict() for quantity in quantities] for name, quantities in found.items()}


def _markdown(audit: Audit, subject: str, prompts: Sequence[str], figures: Sequence[str]) -> str:
    ids, where = audit.provenance.get("prompt_ids"), environment()
    versions = ", ".join(f"{name} {where[name]}" for name in where if name not in ("machine", "cores"))
    parts = [f"# Audit of {subject}\n"]
    if ids:
        parts.append(
            f"{len(ids)} prompts of {len(ids[0])} tokens, seed {audit.provenance['settings']['seed']}; raw instances "
            "in `raw/`.\n"
        )
    parts.append(LEGEND)
    for name, quantities in audit.model.items():
        controls = {law: {q.name: q for q in found.get(name, ())} for law, found in audit.controls.items()}
        parts.append(f"## {TITLES.get(name, name)}\n\n{section_table(quantities, controls)}")
    parts.append("## Figures\n\n" + "".join(f"![]({name})\n" for name in figures))
    if ids:
        listed = "".join(f"{i}. {text}\n" for i, text in enumerate(prompts, 1))
        parts.append(f"## Prompts, cut to {len(ids[0])} tokens\n\n{listed}")
    parts.append(f"## Where\n\n{where['machine']}, {where['cores']} cores; {versions}.\n")
    return "\n".join(parts)


def section_table(quantities: Sequence[Quantity], controls: Mapping[str, Mapping[str, Quantity]]) -> str:
    """One row per quantity: label, instances, least, median, largest, medians by layer, medians of the controls.

    Args:
        quantities: of one section.
        controls: from a law to the quantities of its fresh model, by name.

    Returns:
        Markdown; reasons and notes stand under the table.
    """
    laws = [law for law, found in controls.items() if found]
    header = ("quantity", "label", "instances", "min", "median", "max", "median by layer", *(f"init {x}" for x in laws))
    rows, notes = [], []
    for quantity in quantities:
        summary = quantity.summary
        if quantity.note:
            notes.append(f"* `{quantity.name}`{'' if summary else ' not taken'}: {quantity.note}\n")
        if summary is None:
            rows.append((quantity.name, quantity.label, *("–",) * (len(header) - 2)))
            continue
        numbers = (summary.get(name, "–") for name in ("instances", "min", "median", "max"))
        by_layer = quantity.per_layer
        fresh = [(q.summary or {}).get("median", "–") if (q := controls[x].get(quantity.name)) else "–" for x in laws]
        rows.append((quantity.name, quantity.label, *numbers, "" if by_layer is None else by_layer, *fresh))
        if "undefined" in summary:
            notes.append(f"* `{quantity.name}`: {summary['undefined']} of {summary['instances']} are undefined\n")
    return markdown_table(header, rows) + ("\n" + "".join(notes) if notes else "")


def _figures(audit: Audit) -> dict[str, Figure]:
    """The figures that the sections taken allow, by file name."""
    found = {q.name: q for quantities in audit.model.values() for q in quantities if q.values is not None}
    fresh = {
        law: {q.name: q for quantities in sections.values() for q in quantities if q.values is not None}
        for law, sections in audit.controls.items()
    }
    figures = {}
    tensors = [name for name in ("A", "A_LM", "G_LM") if f"{name}.singular_values" in found]
    if tensors:
        figures["spectra.png"] = plots.spectra(
            {
                name: {"audited": found[f"{name}.singular_values"].values}
                | {f"init {law}": q[f"{name}.singular_values"].values for law, q in fresh.items()}
                for name in tensors
            }
        )
    panels = {}
    for name, title in _BY_LAYER.items():
        if name in found:
            panels[title] = {"audited": _layers(found[name])} | {
                f"init {law}": _layers(q[name]) for law, q in fresh.items() if name in q
            }
    if (control := found.get("G_LM.commutant_residual_control")) is not None:
        panels[_BY_LAYER["G_LM.commutant_residual"]]["control planes"] = _layers(control)
    if panels:
        figures["layers.png"] = plots.by_layer(panels)
    if "decode.margin" in found:
        figures["decoding.png"] = plots.margins(found["decode.logit_deviation"].values, found["decode.margin"].values)
    if "loss.gap" in found:
        figures["losses.png"] = plots.gaps(found["loss.gap"].values)
    return figures


_BY_LAYER = {
    "A.m_runs": "m(A), two sampled runs",
    "A.m_prompts": "m(A), between prompts",
    "A.rank_one_ratio": "σ2/σ1 of A",
    "A.cross_head_rms": "cross-head RMS of A",
    "G_LM.commutant_residual": "commutant residual of G",
    "row_map.sigma_max": "σ_max of the row map's Jacobian",
}


def _layers(quantity: Quantity) -> np.ndarray:
    """[L, instances]."""
    values = np.moveaxis(np.asarray(quantity.values, np.float64), quantity.axes.index("layer"), 0)
    return values.reshape(len(values), -1)
