"""Every measurement of the collapse on a PLDR-LLM, in one command: spectra, order parameters, contraction, caches.

    python -m experiments.audit_pldr --checkpoint=runs/tiny --out=runs/audit
    python -m experiments.audit_pldr --checkpoint=PLDR-LLM-v51-110M/ --tokenizer=spm.model --prompts=prompts.txt
    python -m experiments.audit_pldr --operators=glm.npz --out=runs/audit_operators

Takes a run of train_pldr, a Hugging Face folder, a native .pth file, or operators alone. Writes audit.json, audit.md
and figures, and all instances to raw/*.npz. Fresh models under each initialisation law are measured beside it. Sections
that are done are kept: the same command goes on after Ctrl-C. On CPU the same inputs give the same bits.
"""

import pathlib

from absl import flags

from experiments import audit_report
from experiments.audit_prompts import PROMPTS
from experiments.audit_run import Audit, cut_prompts, run_audit
from experiments.cli import run
from experiments.loading import load
from plga_jax.audit.sections import SECTIONS
from plga_jax.audit.subject import AuditSettings
from plga_jax.audit.tensor_sections import describe_operators
from plga_jax.interop.pldr import load_operators
from plga_jax.modules.initializers import INIT_LAWS
from plga_jax.ops.rope import LAYOUTS

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Run of train_pldr, Hugging Face folder, or .pth file.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "byte, or path of a SentencePiece model; default: as trained.")
_OPERATORS = flags.DEFINE_string("operators", None, "An .npz of operators G: audits them alone, without a checkpoint.")
_LAYOUT = flags.DEFINE_enum("layout", "interleaved", LAYOUTS, "Rotary planes that --operators belong to.")
_PROMPTS = flags.DEFINE_string("prompts", None, "Text file, one prompt a line; default: eight that come with it.")
_LENGTH = flags.DEFINE_integer("prompt_tokens", 40, "The most tokens of a prompt.", lower_bound=2)
_OUT = flags.DEFINE_string("out", "runs/audit", "Folder for everything that is written.")
_SECTIONS = flags.DEFINE_list("sections", list(SECTIONS), "What to measure.")
_CONTROLS = flags.DEFINE_list("controls", list(INIT_LAWS), "Initialisation laws of the fresh models; empty: none.")
_SEED = flags.DEFINE_integer("seed", 0, "Of sampled tokens, rows, pairs, and the controls' weights.")
_DECODED = flags.DEFINE_integer("decoded", AuditSettings.decoded, "Tokens decoded after each of four prompts.")
_SAMPLED = flags.DEFINE_integer("sampled", AuditSettings.sampled, "Tokens drawn twice after each prompt.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")


def main() -> int:
    """Loads, measures, reports."""
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    if _OPERATORS.value and not _CHECKPOINT.value:
        G = load_operators(_OPERATORS.value)
        found = describe_operators(G, layout=_LAYOUT.value, axes=("layer", "head"), alone=True)
        audit = Audit(model={"operators": found}, controls={}, provenance={"operators": _OPERATORS.value})
        print(audit_report.write(out, audit, subject=_OPERATORS.value, prompts=()))
        return 0
    model, tokenizer = load(_CHECKPOINT.value, tokenizer=_TOKENIZER.value, operators=_OPERATORS.value)
    texts = PROMPTS
    if _PROMPTS.value:
        lines = pathlib.Path(_PROMPTS.value).read_text(encoding="utf-8").splitlines()
        texts = tuple(line.strip() for line in lines if line.strip())
    settings = AuditSettings(seed=_SEED.value, decoded=_DECODED.value, sampled=_SAMPLED.value)
    audit = run_audit(
        model,
        cut_prompts(texts, tokenizer, _LENGTH.value),
        settings,
        out,
        sections=_SECTIONS.value,
        laws=_CONTROLS.value,
        progress=_PROGRESS.value,
    )
    print(audit_report.write(out, audit, subject=_CHECKPOINT.value, prompts=texts))
    return 0


if __name__ == "__main__":
    run(main)
