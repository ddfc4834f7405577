"""Which sequences a micro-batch has.

Each of the ranks that divide the batch has an equal run of its rows, and micro-batch m is the m-th
run of ``micro_batch_size`` of these; the last one has what is left.
"""

from __future__ import annotations

from autopar.ir.plan import BatchPlan


def own_rows(batch: BatchPlan, micro_batch: int, num_parts: int) -> slice:
    """The rows of a micro-batch within a rank's run, of ``num_parts`` runs of the batch."""
    per_part = batch.global_batch_size // num_parts
    start = micro_batch * batch.micro_batch_size
    return slice(start, min(start + batch.micro_batch_size, per_part))


def sequences(batch: BatchPlan, micro_batch: int, num_parts: int) -> tuple[int, ...]:
    """Indices in the global batch of the rows of the global micro-batch: all ranks' own ones, in
    order.
    """
    rows = own_rows(batch, micro_batch, num_parts)
    per_part = batch.global_batch_size // num_parts
    return tuple(
        part * per_part + row for part in range(num_parts) for row in range(rows.start, rows.stop)
    )
