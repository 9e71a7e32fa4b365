"""The command line of every binary, on a program small enough to start at once."""

import subprocess
import sys

import pytest

PROGRAM = '''"""Divides by --by.

    python -m example --by=2
"""
from absl import flags
from experiments.cli import run

WITH = flags.DEFINE_multi_string("with", [], "Words.")
BY = flags.DEFINE_integer("by", 1, "Divisor.")

def main():
    """Prints a quotient."""
    if BY.value == 0:
        raise ValueError("by=0 cannot divide:\\n  choose another number")
    if BY.value == 7:
        raise RuntimeError("a bug")
    if BY.value == 9:
        open("/no/such/file")
    print(12 // BY.value, *WITH.value)

run(main, many=["with"])
'''


def call(tmp_path, *arguments):
    script = tmp_path / "example.py"
    script.write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(pytest.importorskip("experiments").__path__[0] + "/..")},
    )


def test_it_runs(tmp_path):
    done = call(tmp_path, "--by=4")
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by=0"], "by=0 cannot divide: choose another number"),
        (["--by=9"], "No such file or directory: '/no/such/file'"),
        (["--by=x"], "flag --by=x: invalid literal for int()"),
        (["--byy=1"], "Unknown command line flag 'byy'. Did you mean: by ?"),
        (["4"], "unexpected argument '4'"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, arguments, message):
    done = call(tmp_path, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(["--by=0", "--debug"], "ValueError: by=0"), (["--by=7"], "RuntimeError: a bug")],
)
def test_tracebacks_on_request_and_for_bugs(tmp_path, arguments, error):
    done = call(tmp_path, *arguments)
    assert done.returncode == 1 and "Traceback" in done.stderr and error in done.stderr


def test_help(tmp_path):
    done = call(tmp_path, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "python -m example --by=2" in done.stdout and "--by: Divisor." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--with", "a", "b=1", "--by=6"], "2 a b=1"),
        (["--with=a", "b", "--by", "6", "--with", "c"], "2 a b c"),
        (["--with=a,b", "-with", "c"], "12 a,b c"),
        (["--with", "--by=6"], "2 "),
    ],
)
def test_a_flag_of_many_values(tmp_path, arguments, output):
    done = call(tmp_path, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, output + "\n", "")


@pytest.mark.parametrize("arguments", [["--by", "6", "x"], ["--with", "a", "--by", "6", "x"], ["x", "--with", "a"]])
def test_other_flags_take_one_value(tmp_path, arguments):
    done = call(tmp_path, *arguments)
    assert done.returncode == 2 and "unexpected argument 'x'" in done.stderr
