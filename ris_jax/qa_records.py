"""The CSV of a multiple-choice benchmark: the published columns and more, a row for each answer once it is known."""

import csv
import io
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from ris_jax.published_results import COLUMNS as PUBLISHED

COLUMNS = (
    *PUBLISHED, "Run_ID", "Base_Seed", "Scoring", "Shuffle", "Order", "Real_Density", "Prefill_Seconds", "Seconds",
    "Option_Logits", "Evidence_Start", "Evidence_End", "Visible",
)  # fmt: skip
"""The published columns first, so that whatever reads the published files reads these."""


class Key(NamedTuple):
    """What names an answer within a run."""

    question: int
    """Its id."""
    scoring: str
    """How options are scored."""
    shuffle: int
    """Which order they are shown in; 0 is as written."""


class ResultFile:
    """One CSV file, only ever appended to. A row cut off by a kill is ignored, and dropped before the next is added."""

    def __init__(self, path: str | os.PathLike):
        """Looks whether there is a file, and whether it is one of these.

        Args:
            path: of the file; its folder is made on the first write.

        Raises:
            ValueError: if the file has other columns.
        """
        self.path = pathlib.Path(path)
        self._repaired = False
        header = self._whole().partition("\n")[0]
        if header and header.rstrip("\r").split(",") != list(COLUMNS):
            raise ValueError(f"{self.path} has other columns than these results: name another file")

    def rows(self) -> list[dict[str, str]]:
        """The rows that were written whole, by column."""
        return list(csv.DictReader(io.StringIO(self._whole(), newline="")))

    def keys(self) -> set[tuple[str, Key]]:
        """Run and key of every row."""
        return {
            (row["Run_ID"], Key(int(row["Question_ID"]), row["Scoring"], int(row["Shuffle"]))) for row in self.rows()
        }

    def append(self, row: Mapping[str, object]) -> None:
        """Adds a row.

        Args:
            row: a value for every column.

        Raises:
            ValueError: if columns are missing or unknown, or a value has a line break.
        """
        if odd := set(COLUMNS) ^ set(row):
            raise ValueError(f"columns {sorted(odd)} are missing or unknown; a row has {', '.join(COLUMNS)}")
        cells = [str(row[name]) for name in COLUMNS]
        if any("\n" in cell or "\r" in cell for cell in cells):
            raise ValueError(f"a value of {cells} has a line break, which tells rows apart: leave it out")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self._repaired:
            self._repair(writer)
        writer.writerow(cells)
        with self.path.open("ab") as file:
            file.write(text.getvalue().encode())

    def _repair(self, writer) -> None:
        """Before the first row: makes the folder, drops what a kill cut off, begins an empty file with a header."""
        whole = self._whole()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(len(whole.encode()))
        if not whole:
            writer.writerow(COLUMNS)
        self._repaired = True

    def _whole(self) -> str:
        """The text up to its last line break."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return ""
        return text[: text.rfind(b"\n") + 1].decode()
