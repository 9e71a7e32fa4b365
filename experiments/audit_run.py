"""Runs the sections of an audit on a model and on fresh controls, each kept on disk as soon as it is known."""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from plga_jax.audit.quantities import Quantity, load, store
from plga_jax.audit.sections import CONTROL_SECTIONS, SECTIONS
from plga_jax.audit.subject import AuditSettings, Subject
from plga_jax.models.pldr import PLDR
from plga_jax.modules.initializers import INIT_LAWS
from plga_jax.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found.

    Attributes:
        model: quantities by section.
        controls: the same for a fresh model of each initialisation law, by the law's name.
        provenance: prompts, settings, weights: everything that decides the numbers, for JSON.
    """

    model: dict[str, list[Quantity]]
    controls: dict[str, dict[str, list[Quantity]]]
    provenance: dict


def cut_prompts(texts: Sequence[str], tokenizer: Tokenizer, length: int) -> np.ndarray:
    """The texts as ids of one length, since padding is not the same to every model.

    Args:
        texts: at least one.
        tokenizer: the model's.
        length: the most tokens to keep of each.

    Returns:
        int32 [P, T]: T is `length`, or the tokens of the shortest text.

    Raises:
        ValueError: no text, or one of fewer than two tokens.
    """
    ids = [[token for token in tokenizer.encode(text) if token != tokenizer.pad_id] for text in texts]
    shortest = min(map(len, ids), default=0)
    if shortest < 2:
        raise ValueError(f"there are {len(ids)} prompts, the shortest of {shortest} tokens: give texts of two or more")
    return np.asarray([row[: min(shortest, length)] for row in ids], np.int32)


def weights_digest(model: PLDR) -> str:
    """SHA-256 of all weights with their names, 64 hexadecimal digits."""
    found = hashlib.sha256()
    for path, value in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        array = np.ascontiguousarray(value)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def run_audit(
    model: PLDR,
    prompts: np.ndarray,
    settings: AuditSettings,
    out: str | os.PathLike,
    *,
    sections: Collection[str] = tuple(SECTIONS),
    laws: Collection[str] = INIT_LAWS,
    progress: bool = True,
) -> Audit:
    """Takes every section of a model and of its controls; what is on disk for the same inputs is not taken again.

    Args:
        model: to audit.
        prompts: int32 [P, T].
        settings: see `AuditSettings`.
        out: folder; raw instances go to `raw/NAME.npz` in it.
        sections: names out of `SECTIONS`.
        laws: initialisation laws of the controls; none for a model of constant operators, which has no learner.
        progress: whether to show a bar.

    Returns:
        The audit.

    Raises:
        ValueError: unknown sections, prompts that do not fit, weights that are not finite.
    """
    if unknown := set(sections) - set(SECTIONS):
        raise ValueError(f"sections {sorted(unknown)} are unknown; choose from {', '.join(SECTIONS)}")
    _check_finite(model)
    subject = Subject(model=model, prompts=prompts, settings=settings)
    provenance = {
        "config": json.loads(model.config.to_json()),
        "weights_sha256": weights_digest(model),
        "prompt_ids": subject.prompts.tolist(),
        "settings": dataclasses.asdict(settings),
    }
    raw = pathlib.Path(out) / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    laws = tuple(laws) if model.config.operator == "learned" else ()
    chosen = [name for name in SECTIONS if name in sections]
    controlled = [name for name in CONTROL_SECTIONS if name in sections]
    with tqdm(total=len(chosen) + len(laws) * len(controlled), disable=not progress, ncols=100) as bar:
        found = _take(subject, chosen, provenance, raw, "", bar)
        controls = {}
        for law in laws:
            config = dataclasses.replace(model.config, init=law)
            fresh = PLDR(config, rngs=nnx.Rngs(settings.seed))
            # Weights of the law under the graph of the audited model: its compiled programs serve all of them.
            fresh = Subject(model=nnx.merge(nnx.graphdef(model), nnx.state(fresh)), prompts=prompts, settings=settings)
            key = provenance | {"config": json.loads(config.to_json()), "weights_sha256": f"init {settings.seed}"}
            controls[law] = _take(fresh, controlled, key, raw, f"init_{law}.", bar)
    return Audit(model=found, controls=controls, provenance=provenance)


def _take(
    subject: Subject, names: Sequence[str], provenance: Mapping, raw: pathlib.Path, prefix: str, bar: tqdm
) -> dict[str, list[Quantity]]:
    key = hashlib.sha256(json.dumps(provenance | {"jax": jax.__version__}, sort_keys=True).encode()).hexdigest()
    found = {}
    for name in names:
        bar.set_description(f"{prefix}{name}")
        path = raw / f"{prefix}{name}.npz"
        kept = load(path, key)
        if kept is None:
            with jax.default_matmul_precision("highest"):
                kept = SECTIONS[name](subject)
            store(path, key, kept)
        found[name] = kept
        bar.update()
    return found


def _check_finite(model: PLDR) -> None:
    for path, value in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        bad = int(np.sum(~np.isfinite(np.asarray(value, np.float64))))
        if bad:
            raise ValueError(
                f"{bad} of {value.size} entries of {jax.tree_util.keystr(path)} are not finite: audit the last "
                "finite checkpoint"
            )
