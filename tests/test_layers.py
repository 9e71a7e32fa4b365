"""Imports run downward only, and ops know nothing but JAX: the contracts of setup.cfg."""

import pathlib

from importlinter.cli import lint_imports


def test_import_contracts(monkeypatch, capsys):
    root = pathlib.Path(__file__).parent.parent
    monkeypatch.chdir(root)
    assert lint_imports(config_filename=str(root / "setup.cfg"), no_cache=True) == 0, capsys.readouterr().out
