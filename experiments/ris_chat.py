"""A conversation with a pretrained model about documents longer than dense attention affords.

    python -m experiments.ris_chat --context report.txt minutes.txt
    printf 'Who signed?\nWhen?\n' | python -m experiments.ris_chat --context=report.txt --greedy --log=chat.json

The documents are read once, the conversation stays in the model's memory until its window is full. Ctrl-C ends an
answer as if it had not been asked for. /help lists the commands. Answers go to standard output.
"""

import sys
import time
from collections.abc import Iterator

from absl import flags

from experiments import ris_flags
from experiments.cli import run
from plga_jax.audit.report import write_text
from ris_jax.session import Session

_BUFFER = flags.DEFINE_integer("buffer", 4096, "Tokens kept free for the conversation.")

HELP = """/undo         forgets the last question and its answer
/reset        forgets the conversation; the documents stay
/history      shows what the model remembers
/save FILE    writes that to a text file
/help         shows this
exit          ends; so do quit and the end of input"""


def main() -> None:
    """Plans, reads, converses."""
    begun = time.perf_counter()
    session = ris_flags.open_session(question_room=_BUFFER.value)
    config = ris_flags.answer_config()
    with ris_flags.logged(session):
        ris_flags.read(session)
        ris_flags.say("/help lists the commands")
        for line in lines():
            if line in ("exit", "quit", "/exit", "/quit"):
                break
            if line.startswith("/"):
                ris_flags.say(command(session, *line.split(maxsplit=1)))
                continue
            try:
                for piece in session.chat(line, config):
                    print(piece, end="", flush=True)
                print(flush=True)
                ris_flags.write_log(session, time.perf_counter() - begun)
            except KeyboardInterrupt:
                session.cancel()
                ris_flags.say("\nthis question is forgotten")
            except (ValueError, RuntimeError) as error:
                session.cancel()
                ris_flags.say(f"error: {error}")


def lines() -> Iterator[str]:
    """What the user types, without blank lines; Ctrl-C begins a line anew."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else input()
        except EOFError:
            return
        except KeyboardInterrupt:
            ris_flags.say("\nexit ends the conversation")
            continue
        if line.strip():
            yield line.strip()


def command(session: Session, name: str, argument: str = "") -> str:
    """Does what a command says; returns what to tell the user."""
    if name == "/undo":
        turn = session.undo()
        return "there is nothing to undo" if turn is None else f"forgotten: {turn.question}"
    if name == "/reset":
        session.reset()
        return "the conversation is forgotten"
    if name == "/history":
        return history(session) or "nothing has been said"
    if name == "/save":
        try:
            write_text(argument or "", history(session) + "\n")
            return f"saved in {argument}"
        except (OSError, ValueError) as error:
            return f"error: not saved ({error})"
    return HELP if name == "/help" else f"{name} is no command\n{HELP}"


def history(session: Session) -> str:
    """The conversation as text."""
    return "\n\n".join(f"> {turn.question}\n\n{turn.answer}" for turn in session.history)


if __name__ == "__main__":
    run(main, many=["context"])
