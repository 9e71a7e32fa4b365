"""Append-only JSON lines that survive being killed, and their rewinding when a run is resumed."""

import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any


class Records:
    """One file of JSON objects, one a line, each with an integer "step"."""

    def __init__(self, path: str | os.PathLike):
        """Opens nothing yet.

        Args:
            path: of the file; made on the first write.
        """
        self.path = pathlib.Path(path)

    def append(self, record: dict[str, Any]) -> None:
        """Adds one line.

        Args:
            record: "step" and JSON values; a float that is not finite is written as null, since
                JSON has no NaN.
        """
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite, allow_nan=False, ensure_ascii=False) + "\n")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records that were written whole; a last line cut off by a kill is left out."""
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                if not line.endswith("\n"):
                    return
                yield json.loads(line)

    def rewind(self, step: int) -> None:
        """Drops every record after `step`, so that a resumed run writes no line twice.

        Args:
            step: the last step to keep.
        """
        if not self.path.exists():
            return
        kept = [json.dumps(r, ensure_ascii=False) + "\n" for r in self if r["step"] <= step]
        temporary = self.path.with_suffix(self.path.suffix + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self.path)
