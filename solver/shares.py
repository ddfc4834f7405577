"""Unequal shares of the batch: data ranks on faster nodes have more micro-batches.

Every data rank has as many micro-batches as all others of its group of nodes, of the same size. So
ranks do different work between the same collectives, which has to be all that they share: it is
searched without a pipeline, where parameters are gathered and gradients reduced once a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autopar.ir.mesh import Mesh
from autopar.ir.plan import SharePlan
from autopar.solver.candidates import Candidate
from autopar.solver.hardware import Cluster

MOST_SHARES = 8
"""Shares that are searched for a mesh and a micro-batch size: those in which the ranks that have
most to do for their peak FLOP/s have least.
"""


def data_ranks(cluster: Cluster, mesh: Mesh) -> tuple[int, ...]:
    """Data ranks on each group of nodes; () where some are on two, or not all GPUs are used."""
    each = mesh.cp * mesh.ep * mesh.tp
    numbers = [group.num_gpus // each for group in cluster.groups]
    is_whole = all(group.num_gpus % each == 0 for group in cluster.groups)
    return tuple(numbers) if is_whole and sum(numbers) == mesh.dp else ()


def unequal_shares(
    cluster: Cluster, mesh: Mesh, global_batch_size: int, micro_batch_size: int
) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of a data rank of each group, by which the batch is divided; not all alike."""
    ranks = data_ranks(cluster, mesh) if cluster.is_mixed and mesh.pp == 1 else ()
    each = micro_batch_size * mesh.ep
    if not ranks or global_batch_size % each:
        return ()
    peaks = [max_flops(group) for group in cluster.groups]

    def busiest(shares: Sequence[int]) -> float:
        return max(number / peak for number, peak in zip(shares, peaks, strict=True))

    found = [s for s in _divided(ranks, global_batch_size // each) if len(set(s)) > 1]
    return tuple(sorted(found, key=lambda shares: (busiest(shares), shares))[:MOST_SHARES])


def max_flops(group: Cluster) -> float:
    """Dense peak FLOP/s of a GPU, at its best."""
    peaks = group.hardware.chip.peak_flops
    return max(peaks.bf16, peaks.fp32, peaks.float64)


def _divided(ranks: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """All numbers from 1 on, one for each of ``ranks``, whose products with them add up."""
    *others, last = ranks
    most = [range(1, total // number + 1) for number in others]
    for chosen in itertools.product(*most):
        left = total - sum(n * m for n, m in zip(others, chosen, strict=True))
        if left > 0 and left % last == 0:
            yield (*chosen, left // last)


def share_plans(cluster: Cluster, candidate: Candidate) -> tuple[SharePlan, ...]:
    """The shares of a candidate as a plan has them."""
    if not candidate.shares:
        return ()
    ranks = data_ranks(cluster.reordered(candidate.group_order), candidate.mesh())
    pairs = zip(ranks, candidate.shares, strict=True)
    return tuple(SharePlan(data_ranks=num, num_micro_batches=own) for num, own in pairs)
