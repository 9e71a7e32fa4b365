"""The report of the two phases: claims with their criteria, tables, figures and the machine-readable record."""

import dataclasses
import json
import pathlib
import time

import numpy as np

from experiments.phases import Phase, Probes, Study
from plga_jax.audit import plots
from plga_jax.audit.collapse import COLLAPSED_BELOW, Collapse
from plga_jax.audit.report import Claim, claims_table, environment, markdown_table, show, write_json, write_text
from plga_jax.audit.ways import WAYS
from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.data import Corpus

GAP_BELOW = 1e-3
"""Nats per token within which block and sequential loss count as equal."""
TIMES_LARGER = 10
"""How many times one number must exceed another to count as of another size."""


def write_report(
    out: pathlib.Path,
    study: Study,
    corpus: Corpus,
    tokenizer: ByteTokenizer,
    probes: Probes,
    phases: dict[str, Phase],
    start: tuple[Collapse, dict[str, np.ndarray]],
    began: float,
) -> str:
    """Writes metrics.jsonl, the figures, report.md and, last of all, report.json.

    Args:
        out: the folder.
        study: what decided the numbers.
        corpus: the text.
        tokenizer: its tokenizer.
        probes: what was measured on.
        phases: "collapsed" and "uncollapsed", named by what is expected of them; the claims say whether they are.
        start: the probe and the singular values before training, as `Phase.collapse` and `Phase.values`.
        began: when the program did, by `time.perf_counter`.

    Returns:
        The report in Markdown.
    """
    lines = [{"run": name} | line for name, phase in phases.items() for line in phase.lines]
    write_text(out / "metrics.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    _write_figures(out, phases, start[1])
    found = claims(start[0], phases["collapsed"], phases["uncollapsed"])
    record = {name: _record(phase) for name, phase in phases.items()}
    record["decode"] = _decodes(phases["collapsed"])
    record["decode_uncollapsed"] = _decodes(phases["uncollapsed"])
    record["start"] = start[0].as_dict()
    record["claims"] = [dataclasses.asdict(claim) for claim in found]
    record["study"] = dataclasses.asdict(study)
    record["corpus"] = corpus.name
    record["environment"] = environment()
    record["seconds"] = round(time.perf_counter() - began, 2)
    text = _markdown(record, found, study, phases, _samples(tokenizer, probes, phases))
    write_text(out / "report.md", text)
    write_json(out / "report.json", record)
    return text


def claims(start: Collapse, collapsed: Phase, uncollapsed: Phase) -> list[Claim]:
    """What the paper says of the two phases, judged on two runs.

    Args:
        start: the probe before training.
        collapsed: the run expected to have collapsed.
        uncollapsed: the one expected not to have.

    Returns:
        The claims, in the order of the story.
    """
    c, u = collapsed.collapse, uncollapsed.collapse
    fell, stayed = (start.m_A / np.maximum(found.m_A, np.finfo(np.float64).tiny) for found in (c, u))
    gap, other_gap = abs(collapsed.scores.gap), abs(uncollapsed.scores.gap)
    kv_g, constant = collapsed.decodes["kv_g"], collapsed.decodes["constant_g"]
    deviation, other = kv_g.forced.largest_deviation, uncollapsed.decodes["kv_g"].forced.largest_deviation
    positive = np.median(_ratio(collapsed.values["A_LM"]), axis=(1, 2))
    speeds = [[phase.decodes[way].tokens_per_s for way in WAYS[:3]] for phase in (collapsed, uncollapsed)]
    same = [np.array_equal(p.decodes["kv"].tokens, p.decodes["kv_g"].tokens) for p in (collapsed, uncollapsed)]
    where = f"the layers with m(A) < {COLLAPSED_BELOW:g} (at least one)"

    def in_collapsed_layers(test: np.ndarray) -> bool:
        return bool(c.collapsed.any() and test[c.collapsed].all())

    return [
        Claim(
            statement=f"η_max = {collapsed.eta_max:g} brings m(A) down in some layer",
            criterion=f"m(A) below 1/{TIMES_LARGER} of its start in at least one layer",
            measured=f"fell by factors {show(fell)}",
            holds=bool((fell > TIMES_LARGER).any()),
        ),
        Claim(
            statement=f"η_max = {uncollapsed.eta_max:g} brings it down in none",
            criterion=f"m(A) above 1/{TIMES_LARGER} of its start in every layer",
            measured=f"fell by factors {show(stayed)}",
            holds=bool((stayed < TIMES_LARGER).all()),
        ),
        Claim(
            statement=f"η_max = {collapsed.eta_max:g} collapses every layer",
            criterion=f"m(A) < {COLLAPSED_BELOW:g} in every layer",
            measured=f"m(A) = {show(c.m_A)}",
            holds=bool(c.collapsed.all()),
        ),
        Claim(
            statement=f"η_max = {uncollapsed.eta_max:g} collapses none",
            criterion=f"m(A) ≥ {COLLAPSED_BELOW:g} in every layer",
            measured=f"m(A) = {show(u.m_A)}",
            holds=not u.collapsed.any(),
        ),
        Claim(
            statement="a collapsed A is of rank one",
            criterion=f"σ2/σ1 of A < {COLLAPSED_BELOW:g} in {where}",
            measured=f"σ2/σ1 = {show(c.rank_one_ratio)}; m(A) = {show(c.m_A)}",
            holds=in_collapsed_layers(c.rank_one_ratio < COLLAPSED_BELOW),
        ),
        Claim(
            statement="all heads share a collapsed A",
            criterion=f"cross-head RMS < {COLLAPSED_BELOW:g} in {where}",
            measured=f"RMS = {show(c.cross_head_rms)}; m(A) = {show(c.m_A)}",
            holds=in_collapsed_layers(c.cross_head_rms < COLLAPSED_BELOW),
        ),
        Claim(
            statement="A_LM keeps more directions than a collapsed A",
            criterion=f"σ2/σ1 of A_LM > {TIMES_LARGER} × that of A in {where}",
            measured=f"{show(positive)} against {show(c.rank_one_ratio)}",
            holds=in_collapsed_layers(positive > TIMES_LARGER * c.rank_one_ratio),
        ),
        Claim(
            statement="collapsed: a block call scores like one call per prefix",
            criterion=f"|block − sequential| < {GAP_BELOW:g} nats per token",
            measured=f"{gap:.2e} nats",
            holds=gap < GAP_BELOW,
        ),
        Claim(
            statement="uncollapsed: the block call profits from later tokens",
            criterion=f"|block − sequential| > {TIMES_LARGER} × the collapsed run's",
            measured=f"{other_gap:.2e} against {gap:.2e} nats",
            holds=other_gap > TIMES_LARGER * gap,
        ),
        Claim(
            statement="collapsed: the G-cache changes no token",
            criterion="KV+G generates the tokens of no cache, on every prompt",
            measured=f"agreement {show(kv_g.free)}",
            holds=kv_g.free == 1.0,
        ),
        Claim(
            statement="collapsed: no margin is small enough for it to",
            criterion="2 × largest logit deviation of KV+G < smallest top-2 margin",
            measured=f"2 × {deviation:.2e} against {kv_g.forced.smallest_margin:.2e}",
            holds=kv_g.forced.certified,
        ),
        Claim(
            statement="collapsed: one constant G serves every prompt",
            criterion="v510G with the first prompt's G generates the tokens of no cache, on every prompt",
            measured=f"agreement {show(constant.free)}",
            holds=constant.free == 1.0,
        ),
        Claim(
            statement="uncollapsed: freezing G moves the logits more",
            criterion=f"largest deviation of KV+G > {TIMES_LARGER} × the collapsed run's",
            measured=f"{other:.2e} against {deviation:.2e}",
            holds=other > TIMES_LARGER * deviation,
        ),
        Claim(
            statement="either phase: KV and KV+G generate the same",
            criterion="all tokens equal, in both runs",
            measured=f"equal: {show(same)}",
            holds=all(same),
        ),
        Claim(
            statement="each cache is faster than the one before",
            criterion="tokens/s: none < KV < KV+G, in both runs",
            measured="; ".join(show([round(speed) for speed in row]) for row in speeds),
            holds=all(none < kv < kv_g for none, kv, kv_g in speeds),
        ),
    ]


def _ratio(values: np.ndarray) -> np.ndarray:
    return values[..., 1] / np.maximum(values[..., 0], np.finfo(np.float64).tiny)


def _record(phase: Phase) -> dict:
    """One run for report.json. A number for all layers is the largest of the layers'."""
    layers: Collapse = phase.collapse
    return {
        "eta_max": phase.eta_max,
        "steps": phase.fit.step,
        "m_A": layers.m_A.max(),
        "m_G": layers.m_G.max(),
        "rank_one_ratio": layers.rank_one_ratio.max(),
        "val_loss": phase.fit.metrics["val_loss"],
        "block_minus_sequential": phase.scores.gap,
        "block_minus_sequential_largest": phase.scores.largest_gap,
        "layers": layers.as_dict(),
        "resumed_from": phase.fit.resumed_from,
        "train_seconds": round(phase.fit.seconds, 2),
        "first_step_seconds": phase.fit.first_step_seconds,
    }


def _decodes(phase: Phase) -> dict[str, dict[str, float]]:
    return {
        way: {
            "tokens_per_s": decode.tokens_per_s,
            "agree_with_none": decode.free,
            "max_logit_dev": decode.forced.largest_deviation,
            "min_margin": decode.forced.smallest_margin,
            "forced_agree_with_none": decode.forced.token_agreement,
        }
        for way, decode in phase.decodes.items()
    }


def _write_figures(out: pathlib.Path, phases: dict[str, Phase], initial: dict[str, np.ndarray]) -> None:
    curves = plots.training_curves({_label(p): _series(p.lines) for p in phases.values()}, COLLAPSED_BELOW)
    curves.savefig(out / "loss_and_order.png", dpi=120)
    tensors = {
        name: {"at the start": values} | {_label(phase): phase.values[name] for phase in phases.values()}
        for name, values in initial.items()
    }
    plots.spectra(tensors).savefig(out / "spectra.png", dpi=120)
    for name, phase in phases.items():
        title = f"Operators G of one input after training, {_label(phase)}"
        plots.operator_maps(phase.operators, title).savefig(out / f"operators_{name}.png", dpi=120)


def _label(phase: Phase) -> str:
    return f"η_max = {phase.eta_max:g}"


def _series(lines: list[dict]) -> dict[str, list]:
    """The lines of one run as the columns that `plots.training_curves` draws."""
    trained = [line for line in lines if "loss" in line and line["loss"] is not None]
    validated = [line for line in lines if "val_loss" in line]
    probed = [line for line in lines if "m_A.0" in line]
    layers = [name for name in probed[0] if name.startswith("m_A.")]
    return {
        "loss_steps": [line["step"] for line in trained],
        "loss": [line["loss"] for line in trained],
        "val_steps": [line["step"] for line in validated],
        "val_loss": [line["val_loss"] for line in validated],
        "steps": [line["step"] for line in probed],
        "m_A": [[line[name] for name in layers] for line in probed],
    }


def _markdown(record: dict, found: list[Claim], study: Study, phases: dict[str, Phase], samples: str) -> str:
    names = list(phases)
    rows = [(title, *(record[name][key] for name in names), "") for title, key in _ROWS]
    rows += [
        (f"{title}, by layer", *(record[name]["layers"][key] for name in names), record["start"][key])
        for title, key in _LAYER_ROWS
    ]
    train, heads = study.run.train, [f"{name} (η_max = {phases[name].eta_max:g})" for name in names]
    held = sum(claim.holds for claim in found)
    where = record["environment"]
    versions = ", ".join(f"{name} {where[name]}" for name in where if name not in ("machine", "cores"))
    resumed = [name for name in names if record[name]["resumed_from"] is not None]
    parts = [
        "# Power-law graph attention on either side of the collapse\n",
        f"Two PLDR-LLMs of {phases[names[0]].model.num_parameters:,} parameters from the same weights, "
        f"{train.steps} steps of {train.batch_size} × {study.length} tokens of the {record['corpus']}, "
        f"η_max = {study.eta_collapsed:g} and {study.eta_uncollapsed:g}. Everything took {record['seconds']:.0f} s.\n",
        f"The training of {' and '.join(resumed)} went on from an earlier start.\n" if resumed else "",
        f"## What holds: {held} of {len(found)}\n\n{claims_table(found)}",
        f"## The two runs\n\n{markdown_table(('', *heads, 'at the start'), rows)}",
        *(
            f"## Decoding, {name}\n\n{_decode_table(record[key])}"
            for name, key in zip(names, ("decode", "decode_uncollapsed"))
        ),
        "The reference is decoding without cache. Tokens are compared between free greedy runs; logits and margins "
        "on one forced continuation, since free runs read different prefixes once they disagree. Speed is of one "
        "prompt at a time, prefill included, compilation not.\n",
        f"## What they write\n\n{samples}",
        "## Figures\n\n" + "".join(f"![]({path})\n" for path in _FIGURES),
        f"## Where\n\n{where['machine']}, {where['cores']} cores; {versions}; seed {train.seed}. m is the relative RMS "
        f"difference between two inputs, the median of {study.pairs} fixed pairs of held-out windows; spectra and "
        f"heads are medians over the same inputs. Losses are compared on {study.scored} held-out windows.\n",
    ]
    return "\n".join(part for part in parts if part)


_ROWS = (
    ("steps", "steps"),
    ("validation loss, nats per byte", "val_loss"),
    ("block − sequential loss, nats", "block_minus_sequential"),
    ("the same, largest of one token", "block_minus_sequential_largest"),
)
_LAYER_ROWS = (
    ("m(A)", "m_A"),
    ("m(A), least of the pairs", "m_A_least"),
    ("m(A), most of the pairs", "m_A_most"),
    ("m(G)", "m_G"),
    ("σ2/σ1 of A", "rank_one_ratio"),
    ("cross-head RMS of A", "cross_head_rms"),
)
_FIGURES = ("loss_and_order.png", "spectra.png", "operators_collapsed.png", "operators_uncollapsed.png")
_WAY_NAMES = {"none": "no cache", "kv": "KV", "kv_g": "KV + G", "constant_g": "constant G (v510G)"}


def _decode_table(decodes: dict[str, dict[str, float]]) -> str:
    header = ("way", "tokens/s", "same tokens as no cache", "same on a forced continuation", "max Δlogit", "min margin")
    keys = ("tokens_per_s", "agree_with_none", "forced_agree_with_none", "max_logit_dev", "min_margin")
    return markdown_table(header, [(_WAY_NAMES[way], *(row[key] for key in keys)) for way, row in decodes.items()])


def _samples(tokenizer: ByteTokenizer, probes: Probes, phases: dict[str, Phase]) -> str:
    """The first prompt and what each run adds to it, greedily and without cache."""
    shown = [("prompt", probes.prompts[0]), *((name, p.decodes["none"].tokens[0]) for name, p in phases.items())]
    return "".join(f"    {name:>12}  {tokenizer.decode(ids.tolist())!r}\n" for name, ids in shown)
