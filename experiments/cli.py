"""What every binary of this folder shares: flags that fail in one line, errors without tracebacks."""

import itertools
import sys
from collections.abc import Callable, Collection, Sequence

from absl import app, flags, logging

_DEBUG = flags.DEFINE_bool("debug", False, "On an error, print the traceback instead of one line.")

USER_ERRORS = (ValueError, OSError, FloatingPointError)
"""What wrong input raises: bad values, missing or unreadable files, training that diverged."""


def run(main: Callable[[], int | None], *, many: Collection[str] = ()) -> None:
    """Parses the flags, runs `main` and exits.

    Args:
        main: takes nothing, since there are no positional arguments; its result is the exit code,
            None being 0.
        many: flags that may be repeated and then take several values at once: --name a b c.

    Bad flags, unknown arguments and `USER_ERRORS` end with one line on stderr and exit code 2.
    `--help` prints the docstring of the program and its flags.
    """
    logging.set_verbosity(logging.WARNING)
    app.run(lambda argv: _guarded(main, argv), flags_parser=lambda argv: _parse(_spread(argv, many)))


def fail(message: str) -> None:
    """Prints one line and exits with code 2."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def _parse(argv: Sequence[str]) -> list[str]:
    if {"--help", "-help", "-h"} & set(argv[1:]):
        app.usage(shorthelp=True, writeto_stdout=True)
        sys.exit(0)
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        fail(f"{error} (--help lists the flags)")


def _spread(argv: Sequence[str], many: Collection[str]) -> list[str]:
    """Repeats the name of a flag that takes several values before each of them."""
    spread, name = [], None
    for argument, following in itertools.zip_longest(argv, argv[1:], fillvalue="-"):
        if name is not None and not argument.startswith("-"):
            spread.append(f"--{name}={argument}")
            continue
        flag, given, _ = argument.partition("=")
        name = flag.lstrip("-") if flag.startswith("-") and flag.lstrip("-") in many else None
        if name is None or given:
            spread.append(argument)
        elif following.startswith("-"):
            spread.append(f"--{name}=")  # No value at all: not the next flag's name, which absl would take for one.
    return spread


def _guarded(main: Callable[[], int | None], argv: Sequence[str]) -> int | None:
    if argv[1:]:
        fail(f"unexpected argument {argv[1]!r}: every option is a flag (--help lists them)")
    try:
        return main()
    except USER_ERRORS as error:
        if _DEBUG.value:
            raise
        fail(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
