"""What was measured of the rows of tables, beside the layouts that are read of them."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from autopar.estimation import EstimateRow, read_rows
from autopar.ir.errors import InputError

_DOUBTFUL = ("LOW", "SUSPECT", "INCONSISTENT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run with what was measured of it.

    Attributes:
        dataset: Name of the file.
        series: What its source calls the experiment.
        step_s: None where the run has no time, or a doubtful one.
        out_of_memory: None where nobody says.
        used_gib: What tools showed of the fullest rank.
    """

    row: EstimateRow
    dataset: str
    series: str
    step_s: float | None
    out_of_memory: bool | None
    used_gib: float | None


def read_measured(folder: Path) -> list[Measured]:
    """All runs of the tables of a folder, but doubtful ones; tables of other things are left out.

    Raises:
        InputError: A row of a table cannot be read.
    """
    found: list[Measured] = []
    for path in sorted(folder.glob("*.csv")):
        try:
            table = read_rows(path)
        except InputError:
            continue
        if table.problems:
            raise InputError(f"rows cannot be read: {table.problems[0]}", where=str(path))
        with path.open(encoding="utf-8-sig", newline="") as file:
            cells = {of["id"]: of for of in csv.DictReader(file)}
        found += [
            _measured(row, path.stem, cells[row.id])
            for row in table.rows
            if not _is_doubtful(cells[row.id])
        ]
    return found


def _is_doubtful(cells: dict[str, str]) -> bool:
    said = cells.get("config_confidence") or ""
    return any(word in said for word in _DOUBTFUL) or _number(cells.get("suspect")) == 1


def _measured(row: EstimateRow, dataset: str, cells: dict[str, str]) -> Measured:
    outcome = cells.get("outcome", "")
    return Measured(
        row=row,
        dataset=dataset,
        series=cells.get("series", ""),
        step_s=_number(cells.get("step_time_s")) if outcome == "ok" else None,
        out_of_memory=outcome == "oom" if outcome in ("ok", "oom") else None,
        used_gib=_number(cells.get("mem_gb")),
    )


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
