"""Which bound a candidate has: that of its schedule."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar.solver.bounds import AgainSeconds, StageBounds, StageTimes
from autopar.solver.candidates import Candidate
from autopar.solver.facts import Floats
from autopar.solver.in_flight import most_in_flight
from autopar.solver.passing import least_of, least_prefix, least_share
from autopar.solver.stages import Stager
from autopar.solver.zero_bubble import PartBounds, parts_scalar_s


def stage_bounds(
    stager: Stager,
    times: StageTimes,
    again: AgainSeconds | None = None,
    priced: Mapping[float, Floats] | None = None,
) -> StageBounds:
    """The bounds of stages under the candidate's schedule; its arguments are ``StageBounds``'."""
    kind = PartBounds if stager.candidate.has_parts else StageBounds
    return kind(stager, times, again, priced)


def any_order_s(candidate: Candidate, forward: Floats, both: Floats) -> float:
    """No cuts and no schedule are faster: work spread evenly over the stages, and each block after
    the forwards of those before it.
    """
    num, before = candidate.num_micro_batches, least_prefix(forward)[:-1]
    arrived = float((before + num * least_of(both)).max())
    return max(num * least_share(both, candidate.pp), arrived)


def scalar_bound_s(candidate: Candidate, times: StageTimes) -> float:
    """No cuts are faster: work spread evenly over the stages, and each block on its stage.

    A block of t = f + g seconds, of whose micro-batches at most w + 1 are in flight, takes M·t
    after the blocks before it, and their backwards follow. Its first backward waits for all blocks
    behind, while w more forwards may run: Σ t + (M − 1)·t − w·f.
    """
    if candidate.has_parts:
        return parts_scalar_s(candidate, times)
    both, num, least = times.both, candidate.num_micro_batches, least_of(times.both)
    before = np.concatenate([[0.0], np.cumsum(least)[:-1]])
    ahead = most_in_flight(candidate.deepest) - 1
    own = (num - 1) * both + (both - least) - ahead * times.forward
    waiting = float(least.sum()) + least_of(own)
    arrived = float(np.maximum(before + num * least, waiting).max())
    return max(num * least_share(both, candidate.pp), arrived)
