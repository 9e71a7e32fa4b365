"""Asks a pretrained model about documents longer than dense attention affords.

    python -m experiments.ris_ask --context report.txt minutes.txt --prompt "Who signed the contract?"
    python -m experiments.ris_ask --context=report.txt --prompt="Who signed?" --prompt="When?" --greedy --log=run.json
    python -m experiments.ris_ask --context=books/ --prompt_file=question.txt --geometry=window --local=512 --out=a.txt

Prints what will be computed, reads the documents, and streams an answer to each question from them alone.
Documents are read once: the second question, and the next run on the same files, start from what was kept. --stored
lists that. Answers go to standard output, everything else to standard error.
"""

import pathlib
import sys
import time

from absl import flags

from experiments import ris_flags
from experiments.cli import run
from plga_jax.audit.report import markdown_table, write_text

_PROMPT = flags.DEFINE_multi_string("prompt", [], "Question; may be repeated; - reads standard input.")
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "Text file with a question.")
_OUT = flags.DEFINE_string("out", None, "Text file for the answers.")
_GRAPH = flags.DEFINE_string("graph", None, "Draw what the last document token samples: a .dot or .graphml file.")
_STORED = flags.DEFINE_bool("stored", False, "List what was read before and kept; do nothing else.")


def main() -> None:
    """Plans, reads, answers."""
    if _STORED.value:
        return print(stored(), end="")
    questions = prompts()
    session = ris_flags.open_session(questions)
    config = ris_flags.answer_config()
    with ris_flags.logged(session):
        if _GRAPH.value:
            session.recall_star().write(_GRAPH.value)
        ris_flags.read(session)
        for question in questions:
            for piece in session.ask(question, config):
                print(piece, end="", flush=True)
            print(flush=True)
            turn = session.turns[-1]
            rate = f", then {turn.tokens_per_s:.1f} tokens/s" if turn.tokens_per_s else ""
            ris_flags.say(
                f"answer: {turn.answer_tokens} tokens, {turn.ended}; first after {turn.seconds[0]:.1f} s{rate}"
            )
            if _OUT.value:
                write_text(_OUT.value, "\n\n".join(turn.answer for turn in session.turns) + "\n")


def prompts() -> list[str]:
    """The questions of the flags."""
    found = [sys.stdin.read() if text == "-" else text for text in _PROMPT.value]
    if _PROMPT_FILE.value:
        found.append(pathlib.Path(_PROMPT_FILE.value).read_text(encoding="utf-8"))
    if not found or not all(text.strip() for text in found):
        raise ValueError("there is no question: give a --prompt or --prompt_file that is not empty")
    if _OUT.value and not pathlib.Path(_OUT.value).absolute().parent.is_dir():
        raise ValueError(f"--out={_OUT.value} lies in no folder that exists; make it first")
    return found


def stored() -> str:
    """What the store holds, as a table."""
    rows = [
        (
            entry.path.name[:12],
            f"{entry.size / 1e6:.1f} MB",
            "-" if entry.problem else entry.num_tokens,
            entry.problem or entry.fields["geometry"]["kind"],
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)),
        )
        for entry in ris_flags.store().entries()
    ]
    header = ("file", "size", "tokens", "geometry", "last used")
    return f"{ris_flags.store().folder}\n" + markdown_table(header, rows)


if __name__ == "__main__":
    run(main, many=["context"])
