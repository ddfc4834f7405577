"""``autopar estimate``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from autopar import api
from autopar.estimation import RowTable, read_rows
from autopar.estimation.predictions import Record, to_csv
from autopar.ir.errors import InputError

_MAX_TOLD = 20
"""Rows that are told on stderr; the others are counted."""


def run(arguments: argparse.Namespace) -> int:
    """Estimate the rows of a table; write or print them. 1 if some have no estimate."""
    started = time.perf_counter()
    if arguments.output is not None:
        _check_other(arguments.rows, arguments.output)
        api.check_writable(arguments.output, "estimates")
    table = read_rows(arguments.rows)
    records = api.estimate_rows(
        table.rows,
        jobs=arguments.jobs,
        progress=_progress(len(table.rows)) if sys.stderr.isatty() else None,
    )
    if sys.stderr.isatty():
        _show("")
    if arguments.output is not None:
        api.write_text(arguments.output, to_csv(records), "estimates")
    if arguments.json:
        print(json.dumps([dict(record) for record in records], indent=1))
    elif arguments.output is None:
        print(to_csv(records), end="")
    else:
        num_failed = sum(1 for record in records if record["error"])
        num_shapes = len({row.shape for row in table.rows})
        print(
            f"{arguments.output}: {len(records) - num_failed} rows of {num_shapes} model"
            f"{'s' * (num_shapes != 1)} estimated in {time.perf_counter() - started:.0f} s"
        )
    return _report(table, records)


def _check_other(rows: Path, output: Path) -> None:
    if rows.exists() and output.exists() and rows.samefile(output):
        raise InputError("the estimates would replace the rows", where=str(output))


def _progress(total: int) -> api.RowProgress:
    return lambda done: _show(f"estimated {done} of {total} rows")


def _report(table: RowTable, records: Sequence[Record]) -> int:
    """Say on stderr what is wrong; 1 if anything is."""
    wrong = [str(problem) for problem in table.problems]
    wrong += [
        f"row {row.row} ({row.id}): {record['error']}"
        for row, record in zip(table.rows, records, strict=True)
        if record["error"]
    ]
    if not wrong:
        return 0
    num_rows = len({problem.row for problem in table.problems})
    num_rows += sum(1 for record in records if record["error"])
    print(f"autopar: {num_rows} rows have no estimate:", file=sys.stderr)
    for line in wrong[:_MAX_TOLD]:
        print(f"  {line}", file=sys.stderr)
    if len(wrong) > _MAX_TOLD:
        print(f"  and {len(wrong) - _MAX_TOLD} more", file=sys.stderr)
    return 1


def _show(message: str) -> None:
    print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)
