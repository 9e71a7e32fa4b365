"""Recomputes the published RIS benchmark from its per-question results, with what the paper leaves out.

    python -m experiments.ris_tables --results FOLDER

FOLDER holds the four released files: results_64.csv, results_structural_64.csv,
results_structural_sweet_spot_64.csv and results_baseline_32k.csv. Writes tables.md, tables.json and three figures into
--out, and prints the tables.
"""

import pathlib

from absl import flags

from experiments.cli import run
from experiments.ris_tables_report import write_report
from ris_jax.published_results import load

_RESULTS = flags.DEFINE_string("results", None, "Folder of the four released CSV files.", required=True)
_OUT = flags.DEFINE_string("out", "runs/ris_tables", "Folder for everything that is written.")


def main() -> int:
    """Reads, computes, writes."""
    results = load(_RESULTS.value)
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    print(write_report(out, results))
    print(f"everything is in {out}")
    return 0


if __name__ == "__main__":
    run(main)
