"""Warm starts: the candidates that are nearest to the decisions of an old plan."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from autopar.ir.plan import Plan
from autopar.solver.candidates import Candidate

NUM_STARTS = 4
"""So many are tried until one fits."""


def warm_candidates(old: Plan, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those of ``candidates`` that decide most like ``old``, nearest first.

    What is kept, in this order: the degrees that layouts and stages depend on, how work is ordered,
    the ZeRO stage, the micro-batch size, and recomputation. The data degrees follow from the others
    and the GPUs there are: they are kept where they can be, and so are unequal shares. ``old`` may
    be for another cluster, batch or model.
    """
    nearest = heapq.nsmallest(NUM_STARTS, candidates, key=lambda found: _distance(old, found))
    members = [own for candidate in nearest for own in candidate.members()]
    return tuple(sorted(members, key=lambda own: _distance(old, own))[:NUM_STARTS])


def _distance(old: Plan, candidate: Candidate) -> tuple[float, ...]:
    mesh, schedule = old.mesh, old.schedule
    covered = schedule.recompute in ("none", "full", "selective_op")
    blocks = "blocks" if covered else schedule.recompute
    depths = candidate.depths or (candidate.extra_in_flight,)
    return (
        _factor(candidate.tp, mesh.tp)
        + _factor(candidate.pp, mesh.pp)
        + _factor(candidate.cp, mesh.cp)
        + _factor(candidate.ep, mesh.ep),
        float(candidate.schedule != schedule.name)
        + _factor(candidate.virtual_stages, schedule.virtual_stages),
        float(candidate.zero_stage != schedule.zero_stage and not candidate.zero_open),
        _factor(candidate.micro_batch_size, old.batch.micro_batch_size),
        float(candidate.recompute not in (schedule.recompute, blocks)),
        min(_factor(own.dp_shard, mesh.dp_shard) for own in candidate.placements or (candidate,)),
        float(bool(candidate.shares) != bool(old.batch.shares)),
        float(candidate.axis_order != mesh.axis_order and not candidate.placements),
        min(abs(depth - schedule.extra_in_flight) for depth in depths),
    )


def _factor(one: int, other: int) -> float:
    """How many times larger one is than the other, as doublings."""
    return abs(math.log2(one / other))
