"""How many micro-batches of each virtual stage are forwarded and not yet backwarded."""

from __future__ import annotations

import functools

import numpy as np

from autopar.ir.orders import chunks_of, interleaved_order, most_forwards, most_waiting
from autopar.ir.schedule import ActionKind
from autopar.ir.schedules import DEEPENED, modular_stages
from autopar.solver.candidates import Candidate
from autopar.solver.facts import Floats


def in_flight(candidate: Candidate, stage: int) -> Floats:
    """The fullest moments of ``stage``: a row for each, a column for each of its virtual stages.

    What a moment holds is the row times what a micro-batch of each virtual stage holds; the most
    is held in one of the rows. The last segment of a layered schedule holds one micro-batch.
    """
    num, pp = candidate.num_micro_batches, candidate.pp
    if candidate.schedule == "layered":
        return np.full((1, candidate.virtual_stages), float(num))
    if candidate.schedule in DEEPENED:
        return np.full((1, 1), float(most_forwards(pp, stage, num, candidate.extra_in_flight)))
    return _interleaved(pp, candidate.virtual_stages, _enough(num, pp), stage)


def most_in_flight(candidate: Candidate) -> int:
    """No stage has more micro-batches of one block in flight."""
    num, pp = candidate.num_micro_batches, candidate.pp
    if candidate.schedule == "layered":
        return num
    if candidate.schedule in DEEPENED:
        return most_forwards(pp, 0, num, candidate.extra_in_flight)
    return int(in_flight(candidate, 0).max())


def in_parts(candidate: Candidate, stage: int) -> tuple[tuple[int, int], ...]:
    """The fullest moments of a stage whose backwards are in two parts: micro-batches in flight, and
    those whose weight part waits. None for other schedules.
    """
    if candidate.schedule != "zero_bubble":
        return ()
    num, extra = candidate.num_micro_batches, candidate.extra_in_flight
    return _in_parts(candidate.pp, stage, num, extra)


@functools.lru_cache(maxsize=4096)
def _in_parts(pp: int, stage: int, num: int, extra: int) -> tuple[tuple[int, int], ...]:
    """Before and after the first input parts: once so many wait, nothing is fuller."""
    flying = most_forwards(pp, stage, num, extra)
    waiting = most_waiting(pp, stage, num, extra)
    moments: set[tuple[int, int]] = set()
    for done in range(min(num - 1, waiting) + 1):
        left = min(num, flying + done) - done
        moments |= {(left, done), (left - 1, done + 1)}
    return tuple(
        sorted(
            one
            for one in moments
            if not any(one != o and one[0] <= o[0] and one[1] <= o[1] for o in moments)
        )
    )


def _enough(num_micro_batches: int, pp: int) -> int:
    """As many micro-batches as have the same moments: where p divides M, all rounds are alike, and
    the warm-up of less than v + 1 rounds of a virtual stage is over after two.
    """
    return num_micro_batches if num_micro_batches % pp else min(num_micro_batches, 4 * pp)


@functools.lru_cache(maxsize=4096)
def _interleaved(pp: int, virtual_stages: int, num_micro_batches: int, stage: int) -> Floats:
    stages = modular_stages(pp, virtual_stages)
    own = {chunk: n for n, chunk in enumerate(c for c in chunks_of(stages) if c[0] % pp == stage)}
    live = [0] * virtual_stages
    moments: dict[tuple[int, ...], None] = {}
    for kind, chunk, _, _ in interleaved_order(stages, stage, num_micro_batches):
        if kind is ActionKind.FORWARD:
            live[own[chunk]] += 1
            moments[tuple(live)] = None
        else:
            live[own[chunk]] -= 1
    found = np.array(list(moments), dtype=np.float64)
    no_more = np.all(found[:, None] <= found[None], axis=-1)  # of each moment than of another
    kept = found[no_more.sum(axis=1) == 1]  # moments are distinct: of itself only
    kept.flags.writeable = False
    return kept
