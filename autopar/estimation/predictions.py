"""What is predicted of the rows of a table, as a table."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence

from autopar.solver.estimate import Estimate

COLUMNS = (
    "id",
    "pred_time_s",
    "pred_mem_gib",
    "pred_oom",
    "error",
    "mfu",
    "tokens_per_s",
    "time_stage",
    "mem_stage",
)
"""The first columns; those of the breakdown follow (``cause_column``)."""

Record = Mapping[str, str | int | float]
"""Values of a row by column; a row without an estimate has only its ``id`` and ``error``."""

_GIB = 2**30


def cause_column(cause: str, unit: str) -> str:
    """The column of a cause of seconds (``s``) or bytes (``gib``): ``gather buffers`` is
    ``gather_buffers_gib``.
    """
    return f"{re.sub(r'[^a-z0-9]+', '_', cause.lower())}_{unit}"


def record_of(row_id: str, estimate: Estimate) -> Record:
    """The record of a row: ``time_stage`` waits least for others, and its seconds are told;
    ``mem_stage`` is the fullest, and its bytes are told. ``pred_oom`` is 1 where it has no room.
    """
    found = estimate.prediction
    critical, fullest = found.critical, found.fullest
    seconds, sizes = critical.seconds_by_cause, fullest.bytes_by_cause
    return {
        "id": row_id,
        "pred_time_s": found.step_s,
        "pred_mem_gib": estimate.reserved_bytes / _GIB,
        "pred_oom": int(not estimate.fits),
        "error": "",
        "mfu": found.mfu,
        "tokens_per_s": found.tokens_per_s,
        "time_stage": critical.stage,
        "mem_stage": fullest.stage,
        **{cause_column(cause, "s"): amount for cause, amount in seconds.items()},
        **{cause_column(cause, "gib"): size / _GIB for cause, size in sizes.items()},
    }


def to_csv(records: Sequence[Record]) -> str:
    """A CSV file with a header; numbers read back exactly."""
    columns = dict.fromkeys((*COLUMNS, *(name for record in records for name in record)))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
