"""The fastest measured layouts beside those that the cost model picks among the same runs:

    python -m benchmarks.papers.measured ../shared/data/hagemann.csv

Reads a table of runs that docs/reference/rows.md describes, with the columns ``series``,
``outcome`` and ``step_time_s``. Nothing of it is kept: the runs of the paper may not be
distributed under this project's licence.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.api.estimate_rows import estimate_rows
from autopar.estimation import EstimateRow, read_rows
from benchmarks.papers.pages import table


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured run and its estimate."""

    series: str
    row: EstimateRow
    measured_s: float
    estimated_s: float
    fits: bool

    @property
    def words(self) -> str:
        """Micro-batch, tp and pp; SP where it shards positions, R where it recomputes."""
        row = self.row
        more = (" SP" if row.seq_parallel else "") + ("" if row.act_ckpt == "none" else " R")
        return f"{row.micro_batch}, {row.tp}, {row.pp}{more}"


def read_runs(path: Path) -> Sequence[Run]:
    """All runs that have a time and an estimate."""
    with path.open(newline="") as file:
        known = {record["id"]: record for record in csv.DictReader(file)}
    rows = [row for row in read_rows(path).rows if known[row.id]["outcome"] == "ok"]
    timed = [row for row in rows if known[row.id]["step_time_s"]]
    return [
        Run(
            series=known[row.id]["series"],
            row=row,
            measured_s=float(known[row.id]["step_time_s"]),
            estimated_s=float(record["pred_time_s"]),
            fits=not record["pred_oom"],
        )
        for row, record in zip(timed, estimate_rows(timed), strict=True)
        if not record["error"]
    ]


def picks(runs: Sequence[Run]) -> str:
    """A line for each series and kernel: the fastest run, and the one with the fastest estimate."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.series, run.row.kernel), []).append(run)
    rows: list[Sequence[object]] = []
    for (series, kernel), group in groups.items():
        fitting = [run for run in group if run.fits]
        if len(group) < 2 or not fitting:
            continue
        fastest = min(group, key=lambda run: run.measured_s)
        pick = min(fitting, key=lambda run: run.estimated_s)
        rows.append(
            (
                series,
                kernel,
                len(group),
                fastest.words,
                f"{fastest.measured_s:.1f}",
                f"{fastest.estimated_s:.1f}",
                pick.words,
                f"{pick.measured_s / fastest.measured_s:.3f}",
            )
        )
    head = ("series", "kernel", "runs", "fastest: mb, tp, pp", "s", "estimate", "pick", "over it")
    return table(head, rows)


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    if len(arguments) != 1:
        sys.exit("usage: python -m benchmarks.papers.measured RUNS.csv")
    print(picks(read_runs(Path(arguments[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])
