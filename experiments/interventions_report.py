"""Losses of a model whose operators were changed, and their report."""

import itertools
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from plga_jax.audit import commutant, plots
from plga_jax.audit.interventions import mix_operators, operators_from_metric, project_rows
from plga_jax.audit.report import environment, markdown_table, write_json, write_text
from plga_jax.audit.sequential import negative_log_likelihood
from plga_jax.audit.subject import deduce
from plga_jax.models.pldr import PLDR
from plga_jax.tokenizers import Tokenizer
from plga_jax.train.data import Corpus
from ris_jax.stats import bootstrap

KEPT_ROWS = (0, 1, 2, 4)
"""Rows of A left alone by the centroid projection, where a head has so many."""


def cut_windows(corpus: Corpus, tokenizer: Tokenizer, *, count: int, length: int, validation: float = 0.05):
    """Stretches of held-out text, spread over all of it.

    Args:
        corpus: the text.
        tokenizer: the model's.
        count: W.
        length: T.
        validation: share that training held out.

    Returns:
        int32 [W, T + 1].

    Raises:
        ValueError: too little text.
    """
    _, held_out = corpus.split(validation)
    tokens = np.array(tokenizer.encode("\n".join(held_out.documents)), np.int32)
    if len(tokens) <= length:
        raise ValueError(f"{held_out.name} has {len(tokens)} tokens, {length + 1} are needed: give more text")
    starts = np.linspace(0, len(tokens) - length - 1, count).astype(int)
    return np.stack([tokens[start : start + length + 1] for start in starts])


def measure(
    model: PLDR, windows: np.ndarray, *, strengths: Sequence[float], seeds: Sequence[int], progress: bool = True
) -> dict:
    """Losses under every change.

    Args:
        model: of learned operators.
        windows: int32 [W, T + 1].
        strengths: λ of the moves of G.
        seeds: of the random directions.
        progress: whether to show a bar.

    Returns:
        "own" loss per window; "moves", a dict per direction, strength and seed with "loss" per window and the median
        "residual"; "centroid", a dict per number of rows kept.

    Raises:
        ValueError: constant operators.
    """
    if model.config.operator != "learned":
        raise ValueError("the model has constant operators; the interventions change those that it makes")
    inputs, layout = jnp.asarray(windows[:, :-1]), model.config.rope_layout
    out = deduce(model, inputs, ("A", "G_LM"))
    A, G = np.asarray(out.A, np.float64), np.asarray(out.G_LM, np.float64)

    def loss(operators) -> list[float]:
        scores = np.asarray(_logits_under(model, inputs, jnp.asarray(operators, jnp.float32)))
        return negative_log_likelihood(scores, windows[:, 1:]).mean(axis=1).tolist()

    moves = [("commutant", strength, 0) for strength in strengths]
    moves += list(itertools.product(("complement", "random"), strengths, seeds))
    kept = [keep for keep in KEPT_ROWS if keep <= model.config.head_width]
    found = {"own": loss(G), "moves": [], "centroid": []}
    with tqdm(total=len(moves) + len(kept), disable=not progress, ncols=100) as bar:
        for direction, strength, seed in moves:
            bar.set_description(f"{direction} {strength:g}")
            moved = mix_operators(G, strength, direction=direction, layout=layout, seed=seed)
            residual = float(np.median(commutant.residual(moved, layout=layout)))
            found["moves"].append(
                {"direction": direction, "strength": strength, "seed": seed, "loss": loss(moved), "residual": residual}
            )
            bar.update()
        for keep in kept:
            bar.set_description(f"centroid, {keep} rows kept")
            operators = operators_from_metric(model, project_rows(A, keep=keep))
            found["centroid"].append({"keep": keep, "loss": loss(operators)})
            bar.update()
    return found


@jax.jit
def _logits_under(model: PLDR, tokens, operators):
    return model(tokens, operators=operators)[0]


def write(out: pathlib.Path, found: dict, *, subject: str) -> str:
    """Writes interventions.json, interventions.md and interventions.png.

    Args:
        out: folder.
        found: of `measure`.
        subject: names the model.

    Returns:
        The report in Markdown.
    """
    figure(found).savefig(out / "interventions.png", dpi=120)
    rows = [
        (direction, strength, residual, _change(found, losses))
        for direction, strength, residual, losses in _grouped(found)
    ]
    centroid = [(row["keep"], _change(found, [row["loss"]])) for row in found["centroid"]]
    text = "\n".join(
        [
            f"# Interventions on the operators of {subject}\n",
            f"Loss of {len(found['own'])} held-out windows as they are: {np.mean(found['own']):.4f} nats per token. "
            "Changes are means over windows (and seeds) with bootstrap 95 % intervals over windows.\n",
            markdown_table(("direction", "λ", "commutant residual, median", "change of loss, nats"), rows),
            markdown_table(("rows of A kept, others made their mean", "change of loss, nats"), centroid),
            "![](interventions.png)\n",
        ]
    )
    write_text(out / "interventions.md", text)
    write_json(out / "interventions.json", found | {"subject": subject, "environment": environment()})
    return text


def _grouped(found: dict) -> list[tuple[str, float, float, list[list[float]]]]:
    """(direction, strength, median residual, losses of each seed)."""
    groups: dict[tuple[str, float], list[dict]] = {}
    for move in found["moves"]:
        groups.setdefault((move["direction"], move["strength"]), []).append(move)
    return [
        (*key, float(np.median([move["residual"] for move in moves])), [move["loss"] for move in moves])
        for key, moves in groups.items()
    ]


def _difference(found: dict, losses: list[list[float]]) -> np.ndarray:
    """Change of each window's loss, the mean over seeds."""
    return np.mean(losses, axis=0) - np.array(found["own"])


def _change(found: dict, losses: list[list[float]]) -> str:
    change = _difference(found, losses)
    low, high = bootstrap(change)
    return f"{change.mean():+.4f} [{low:+.4f}, {high:+.4f}]"


def figure(found: dict) -> Figure:
    """Change of the loss over λ for each direction, with intervals over windows.

    Args:
        found: of `measure`.

    Returns:
        A figure of one axis.
    """
    drawn = Figure(figsize=(7, 4.6), layout="constrained")
    axes = drawn.subplots()
    rows = _grouped(found)
    for index, direction in enumerate(dict.fromkeys(row[0] for row in rows)):
        chosen = [row for row in rows if row[0] == direction]
        change = [_difference(found, losses) for *_, losses in chosen]
        ends = np.array([bootstrap(one) for one in change])
        middle = np.array([one.mean() for one in change])
        axes.errorbar(
            [row[1] for row in chosen],
            middle,
            yerr=np.abs(ends.T - middle),
            color=plots.COLOURS[index],
            marker=plots.MARKERS[index],
            capsize=3,
            label=direction,
        )
    axes.axhline(0, color="0.4", lw=1)
    axes.set(xlabel="λ", ylabel="change of loss, nats per token", title="Operators moved equally far")
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn
