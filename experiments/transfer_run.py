"""Two sandpile domains, a model trained on each, and the operators of one in the other."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.configs.pldr import make_run
from experiments.interventions_report import cut_windows
from experiments.phases import Interrupted
from plga_jax.audit.collapse import measure_collapse
from plga_jax.audit.congruence import compare_laws, congruent, fit_basis, similar
from plga_jax.audit.sequential import negative_log_likelihood
from plga_jax.audit.subject import deduce
from plga_jax.audit.tails import fit_power_law
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_transforms import constant_operator_model
from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.data import Corpus
from plga_jax.train.pldr import train_pldr
from plga_jax.train.sandpile import avalanches, sandpile_corpus

DOMAINS = ("square", "triangular")
LAWS = ("own", "congruence", "similarity", "untouched", "identity")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What is simulated and trained.

    Attributes:
        size: sites along an edge of the piles.
        least: smallest avalanche of the range in which the power law is checked.
        most: largest.
        grains: for that check.
        documents: texts of each domain.
        length: characters of each.
        steps: updates of each training.
        rates: η_max: an uncollapsed and a collapsing one.
        context: tokens of a row.
        windows: held-out stretches that are scored.
        seed: of piles, weights and data of the first domain; the second takes the next one.
        same_start: whether both models start from the weights of `seed`: then they begin in one basis, which is half of
            what is to be shown.
        overrides: "section.field=value" for both trainings.
    """

    size: int = 24
    least: int = 2
    most: int = 100
    grains: int = 20_000
    documents: int = 40
    length: int = 4_000
    steps: int = 200
    rates: tuple[float, ...] = (1e-3, 2e-2)
    context: int = 129
    windows: int = 16
    seed: int = 0
    same_start: bool = False
    overrides: tuple[str, ...] = ()


def run_transfer(study: Study, out: pathlib.Path, *, progress: bool = True) -> dict:
    """Everything that is measured.

    Args:
        study: what is run.
        out: folder of the trainings.
        progress: whether to show bars.

    Returns:
        "power_laws" of both domains and the control, and for each rate "models" (collapse and loss of each domain's)
        and "transfer" (residuals, errors of scores and losses by law).

    Raises:
        Interrupted: a signal came.
        ValueError: a domain whose power law does not hold: no ground truth, so nothing to be learned from it.
    """
    found = {"power_laws": _power_laws(study), "rates": []}
    tokenizer = ByteTokenizer()
    corpora = {
        lattice: sandpile_corpus(
            lattice, size=study.size, documents=study.documents, length=study.length, seed=study.seed + index
        )
        for index, lattice in enumerate(DOMAINS)
    }
    windows = {
        name: cut_windows(corpus, tokenizer, count=study.windows, length=study.context - 1)
        for name, corpus in corpora.items()
    }
    for rate in study.rates:
        models = {
            name: _trained(
                study,
                corpora[name],
                tokenizer,
                out / f"{name}_{rate:g}",
                rate,
                study.seed + (0 if study.same_start else index),
                progress,
            )
            for index, name in enumerate(DOMAINS)
        }
        record = {"rate": rate, "models": {name: _describe(models[name], windows[name]) for name in DOMAINS}}
        found["rates"].append(record | {"transfer": _carry(*models.values(), windows[DOMAINS[1]], study.windows // 2)})
    return found


def _power_laws(study: Study) -> dict[str, dict]:
    checked = {}
    for index, lattice in enumerate(DOMAINS):
        for lost in (0, 1):
            sizes = avalanches(lattice, size=study.size, grains=study.grains, lost=lost, seed=study.seed + index)
            fit = fit_power_law(sizes, study.least, study.most)
            checked[f"{lattice}, dissipative" if lost else lattice] = dataclasses.asdict(fit) | {"holds": fit.holds}
    if not all(checked[lattice]["holds"] for lattice in DOMAINS):
        raise ValueError(f"a domain is no power law on {study.least}…{study.most}: {checked}; take larger piles")
    return checked


def _trained(
    study: Study, corpus: Corpus, tokenizer: ByteTokenizer, workdir, rate: float, seed: int, progress: bool
) -> PLDR:
    settings = [f"train.steps={study.steps}", f"data.context={study.context}", "train.sample_every=0"]
    settings += [f"optim.learning_rate={rate}", f"train.seed={seed}", *study.overrides]
    run = make_run("tiny", settings, vocab_size=tokenizer.vocab_size)
    result = train_pldr(run, corpus, tokenizer, workdir=workdir, progress=progress)
    if result.interrupted:
        raise Interrupted(f"{result.interrupted} after step {result.step}: the same command goes on from there")
    return result.state.model


@jax.jit
def _logits(model: PLDR, tokens):
    return model(tokens)[0]


def _loss(model: PLDR, windows: np.ndarray) -> np.ndarray:
    """Nats per token of each window."""
    scores = np.asarray(_logits(model, jnp.asarray(windows[:, :-1])))
    return negative_log_likelihood(scores, windows[:, 1:]).mean(axis=1)


def _describe(model: PLDR, windows: np.ndarray) -> dict:
    out = deduce(model, jnp.asarray(windows[: len(windows) // 2 * 2, :-1]), ("A", "G_LM"))
    collapse = measure_collapse(np.asarray(out.A), np.asarray(out.G_LM))
    return collapse.as_dict() | {"loss": _loss(model, windows).tolist()}


def _carry(first: PLDR, second: PLDR, windows: np.ndarray, fitted: int) -> dict:
    """G of the first model in the second: S from the first `fitted` windows, everything else on the others."""
    tokens = jnp.asarray(windows[:, :-1])
    names = ("G_LM", "q", "k")
    mine, theirs = (
        {name: np.asarray(getattr(deduce(model, tokens, names), name), np.float64) for name in names}
        for model in (first, second)
    )
    # One constant G per head: of the first window, as a cache would freeze it.
    G1, own = mine["G_LM"][:, 0], theirs["G_LM"][:, 0]
    carried = {"own": own, "congruence": np.empty_like(G1), "similarity": np.empty_like(G1), "untouched": G1}
    carried["identity"] = np.broadcast_to(np.eye(G1.shape[-1]), G1.shape)
    errors, residuals = [], []
    for layer, head in np.ndindex(*G1.shape[:2]):

        def rows(side, part, layer=layer, head=head):
            stacked = [side[name][layer, part, :, head].reshape(-1, G1.shape[-1]) for name in ("q", "k")]
            return stacked if part.start else np.concatenate(stacked)

        learn, test = slice(0, fitted), slice(fitted, fitted + 1)
        basis = fit_basis(rows(mine, learn), rows(theirs, learn))
        (q1, k1), (q2, k2) = rows(mine, test), rows(theirs, test)
        found = compare_laws(G1[layer, head], basis, q2, k2, q1 @ G1[layer, head] @ k1.T)
        errors.append(dataclasses.asdict(found) | {"layer": layer, "head": head, "condition": basis.condition})
        residuals.append(basis.residual)
        carried["congruence"][layer, head] = congruent(G1[layer, head], basis.S)
        carried["similarity"][layer, head] = similar(G1[layer, head], basis.S)
    losses = {
        law: _loss(constant_operator_model(second, jnp.asarray(carried[law], jnp.float32)), windows[fitted:]).tolist()
        for law in LAWS
    }
    return {"residuals": residuals, "errors": errors, "losses": losses}
