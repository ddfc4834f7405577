"""Which sequences a micro-batch has.

Each of the ranks that divide the batch (*parts*, in order of their batch coordinate) has a run of
its rows, and micro-batch m is the m-th run of ``micro_batch_size`` of these; the last one has what
is left. Runs are equal, unless the plan gives data ranks unequal shares: then some have fewer
micro-batches, and no rows in the others.
"""

from __future__ import annotations

from autopar.ir.mesh import Mesh
from autopar.ir.plan import BatchPlan

NOBODY = -1
"""Stands for a sequence where a rank has none."""


def run_of(batch: BatchPlan, mesh: Mesh, part: int) -> slice:
    """The rows of the global batch that a part has."""
    if not batch.shares:
        per_part = batch.global_batch_size // mesh.batch_ranks
        return slice(part * per_part, (part + 1) * per_part)
    sizes = [
        batch.micro_batch_size * batch.micro_batches_of(other // mesh.ep)
        for other in range(part + 1)
    ]
    return slice(sum(sizes[:-1]), sum(sizes))


def own_rows(batch: BatchPlan, mesh: Mesh, part: int, micro_batch: int) -> slice:
    """The rows of a micro-batch within a part's run; none where the part has fewer."""
    run = run_of(batch, mesh, part)
    num, start = run.stop - run.start, micro_batch * batch.micro_batch_size
    return slice(min(start, num), min(start + batch.micro_batch_size, num))


def sequences(batch: BatchPlan, mesh: Mesh, micro_batch: int) -> tuple[int, ...]:
    """Indices in the global batch of the rows of the global micro-batch: all parts' own ones, in
    order; ``NOBODY`` for each row that a part does not have.
    """
    found: list[int] = []
    for part in range(mesh.batch_ranks):
        begins = run_of(batch, mesh, part).start
        rows = own_rows(batch, mesh, part, micro_batch)
        own = [begins + row for row in range(rows.start, rows.stop)]
        found += own or [NOBODY] * batch.micro_batch_size
    return tuple(found)
