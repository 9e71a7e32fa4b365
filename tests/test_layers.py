"""Imports run downward only, and ops know nothing but JAX: the contracts of setup.cfg."""

import pathlib
import subprocess
import sys


def test_import_contracts():
    root = pathlib.Path(__file__).parent.parent
    # A process of its own: the linter's console keeps the stream it was first imported with.
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--config", "setup.cfg", "--no-cache"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "0 broken" in done.stdout, done.stdout + done.stderr
