"""How many micro-batches of each virtual stage are forwarded and not yet backwarded."""

from __future__ import annotations

import functools

import numpy as np

from autopar.ir.orders import (
    chunks_of,
    interleaved_order,
    most_forwards,
    zero_bubble_order,
)
from autopar.ir.schedule import RETURNING, ActionKind
from autopar.ir.schedules import DEEPENED, modular_stages
from autopar.solver.candidates import Candidate
from autopar.solver.facts import Floats


def in_flight(candidate: Candidate, stage: int) -> Floats:
    """The fullest moments of ``stage``: a row for each, a column for each of its virtual stages.

    What a moment holds is the row times what a micro-batch of each virtual stage holds; the most
    is held in one of the rows. The last segment of a layered schedule holds one micro-batch.
    """
    num, pp, virtual = candidate.num_micro_batches, candidate.pp, candidate.virtual_stages
    extra = candidate.extra_in_flight
    if candidate.schedule == "layered":
        return np.full((1, virtual), float(num))
    if candidate.schedule in DEEPENED and virtual == 1:
        return np.full((1, 1), float(most_forwards(pp, stage, num, extra)))
    if candidate.has_parts:
        return _flying(pp, virtual, num if extra else _enough(num, pp), stage, extra)
    return _interleaved(pp, virtual, _enough(num, pp), stage)[:, :virtual]


def most_in_flight(candidate: Candidate) -> int:
    """No stage has more micro-batches of one block in flight."""
    num, pp = candidate.num_micro_batches, candidate.pp
    if candidate.schedule == "layered":
        return num
    if candidate.schedule in DEEPENED and candidate.virtual_stages == 1:
        return most_forwards(pp, 0, num, candidate.extra_in_flight)
    return int(in_flight(candidate, 0).max())


def most_virtual_in_flight(candidate: Candidate, stage: int) -> int:
    """No more virtual stages' micro-batches are in flight on a stage of an interleaved order, or of
    one in two parts.
    """
    num, pp, virtual = candidate.num_micro_batches, candidate.pp, candidate.virtual_stages
    extra = candidate.extra_in_flight if candidate.has_parts else pp - 1
    longest_round = -(-num // max(1, num // pp))
    turning = most_forwards(pp, stage, num * virtual, extra)
    return min(num * virtual, turning + (virtual - 1) * longest_round)


def in_parts(candidate: Candidate, stage: int) -> Floats:
    """The same for backwards in two parts: micro-batches of each virtual stage in flight, then in
    as many columns those between the parts.
    """
    num, pp, extra = candidate.num_micro_batches, candidate.pp, candidate.extra_in_flight
    if candidate.virtual_stages == 1:
        return _in_parts(pp, stage, num, extra)
    enough = num if extra else _enough(num, pp)
    return _interleaved(pp, candidate.virtual_stages, enough, stage, extra)


@functools.lru_cache(maxsize=4096)
def _in_parts(pp: int, stage: int, num: int, extra: int) -> Floats:
    """Before and after the first input parts: once so many wait, nothing is fuller."""
    flying = most_forwards(pp, stage, num, extra)
    moments: dict[tuple[int, ...], None] = {}
    for done in range(min(num - 1, stage) + 1):
        left = min(num, flying + done) - done
        moments |= {(left, done): None, (left - 1, done + 1): None}
    return _most(np.array(list(moments), dtype=np.float64))


def _enough(num_micro_batches: int, pp: int) -> int:
    """As many micro-batches as have the same moments: where p divides M, all rounds are alike, and
    the warm-up of less than v + 1 rounds of a virtual stage is over after two.
    """
    return num_micro_batches if num_micro_batches % pp else min(num_micro_batches, 4 * pp)


@functools.lru_cache(maxsize=4096)
def _interleaved(
    pp: int, virtual_stages: int, num_micro_batches: int, stage: int, extra: int | None = None
) -> Floats:
    """Columns of both kinds, those between the parts empty for whole backwards (``extra`` None)."""
    stages = modular_stages(pp, virtual_stages)
    own = {chunk: n for n, chunk in enumerate(c for c in chunks_of(stages) if c[0] % pp == stage)}
    live = [0] * (2 * virtual_stages)
    moments: dict[tuple[int, ...], None] = {}
    passes = interleaved_order(stages, stage, num_micro_batches)
    if extra is not None:
        passes = zero_bubble_order(stages, stage, num_micro_batches, extra)
    for kind, chunk, _, _ in passes:
        place = own[chunk]
        live[place] += kind is ActionKind.FORWARD
        live[place] -= kind in RETURNING
        live[virtual_stages + place] += kind is ActionKind.BACKWARD_INPUT
        live[virtual_stages + place] -= kind is ActionKind.BACKWARD_WEIGHT
        if kind is ActionKind.FORWARD or kind is ActionKind.BACKWARD_INPUT:
            moments[tuple(live)] = None
    return _most(np.array(list(moments), dtype=np.float64))


@functools.lru_cache(maxsize=4096)
def _flying(pp: int, virtual_stages: int, num_micro_batches: int, stage: int, extra: int) -> Floats:
    moments = _interleaved(pp, virtual_stages, num_micro_batches, stage, extra)
    return _most(moments[:, :virtual_stages])


def _most(found: Floats) -> Floats:
    """The rows that are nowhere below another one."""
    found = np.unique(found, axis=0)
    no_more = np.all(found[:, None] <= found[None], axis=-1)  # of each moment than of another
    kept = found[no_more.sum(axis=1) == 1]  # moments are distinct: of itself only
    kept.flags.writeable = False
    return kept
