"""The search over candidates whose backwards are in two parts, and what no step of theirs is below.

With f, i and w seconds of a forward, an input part and a weight part (t = f + i + w) of a stage,
n its micro-batches in flight before the first input part, and M in all:

(A) Σ_{s' < s} f + messages down to s + M · t_s
    the first forward has to arrive; nobody waits for weight parts, so that nothing has to follow
(B) Σ f + Σ_{s' > s} i + messages down, and from the end to s + M · t_s − n · f_s
    the first input part waits for all stages behind, while only n forwards may run
(E) Σ_{s' < s} (f + i) + messages down to s and back + M · t_s − (s + 1) · w_s
    when the last input part comes, s + 1 weight parts of the stage are left, its own among them (s
    counts from 0); then the input parts of the stages before follow
(C) the reduction of the stage's first block (of all, as one segment) after its last weight part,
    then the optimizer
(D) the communication stream: all gathers and reductions one after the other
"""

from __future__ import annotations

import functools
import math

import numpy as np

from autopar.solver.bounds import AgainSeconds, StageBounds, StageTimes, exact_times
from autopar.solver.candidates import Candidate
from autopar.solver.cuts import best_cuts
from autopar.solver.facts import Floats
from autopar.solver.passing import least_prefix
from autopar.solver.reach import Floor, Reach
from autopar.solver.recomputing import again_s
from autopar.solver.runs import Runs
from autopar.solver.search import Search
from autopar.solver.stages import Stager
from autopar.solver.windows import Windows


class PartSearch(Search):
    """``Search`` that knows bounds of backwards in two parts, for candidates that have them."""

    def rough_bound(self, candidate: Candidate) -> float:
        bound = super().rough_bound(candidate)
        if not has_parts(candidate) or math.isinf(bound):
            return bound
        least = self.setting(candidate).least
        return any_parts_s(candidate, least.forward_s, least.forward_s + least.backward_s)

    def scalar_bound(self, candidate: Candidate) -> float:
        if not has_parts(candidate):
            return super().scalar_bound(candidate)
        setting = self.setting(candidate)
        adding = self.stager(candidate, setting.least).adding_s()
        times = setting.least_times(candidate.recompute).plus_backward(adding)
        return any_parts_s(candidate, setting.tight().forward_s, times.both)

    def _bound(self, candidate: Candidate) -> float:
        if not has_parts(candidate):
            return super()._bound(candidate)
        if candidate.virtual_stages > 1:
            return self.scalar_bound(candidate)
        setting = self.setting(candidate)
        stager = self.stager(candidate, setting.tight())
        times = setting.least_times(candidate.recompute).plus_backward(stager.adding_s())
        again = functools.partial(again_s, stager, exact=False)
        bounds = PartBounds(stager, times, again)
        return best_cuts(bounds, bounds.reach)[0]

    def layout_bound(self, candidate: Candidate) -> float:
        if not has_parts(candidate):
            return super().layout_bound(candidate)
        if candidate.virtual_stages == 1:
            return 0.0
        setting = self.setting(candidate)
        stager = self.layout_stager(candidate, setting, setting.solution(candidate.recompute))
        chosen = [(self._within(stager, cuts), cuts) for cuts in self._cuts(candidate, stager)]
        return min((_cut_s(fits, cuts) for fits, cuts in chosen if fits), default=math.inf)

    def _cuts(
        self, candidate: Candidate, stager: Stager, times: StageTimes | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Those that are best by the bounds of either kind: neither follows a step closely."""
        others = super()._cuts(candidate, stager, times)
        if not has_parts(candidate) or candidate.cuts == "even" or candidate.virtual_stages > 1:
            return others
        bounds = PartBounds(stager, exact_times(stager) if times is None else times)
        bound, cuts = best_cuts(bounds, bounds.reach)
        own = (cuts,) if math.isfinite(bound) else ()
        return tuple(dict.fromkeys((*own, *others)))


def has_parts(candidate: Candidate) -> bool:
    """Whether its backwards are in two parts."""
    return candidate.schedule == "zero_bubble"


def any_parts_s(candidate: Candidate, forward: Floats, both: Floats) -> float:
    """No cuts are faster: work spread evenly over the stages, and each block after the forwards of
    those before it.

    Args:
        candidate: In two parts.
        forward, both: Of each block, which no layout is below.
    """
    num = candidate.num_micro_batches
    before = np.concatenate([[0.0], np.cumsum(forward)[:-1]])
    return max(num * float(both.sum()) / candidate.pp, float((before + num * both).max()))


def _cut_s(stager: Stager, cuts: tuple[int, ...]) -> float:
    """(A) of a layout with virtual stages, of which the first ones are waited for."""
    candidate, times = stager.candidate, exact_times(stager)
    starts = np.array(cuts[:-1])
    forward, both = (
        np.add.reduceat(values, starts).reshape(-1, candidate.pp)
        for values in (stager.costs.forward_s, times.both)
    )
    before = np.concatenate([[0.0], np.cumsum(forward[0])[:-1]])
    return float((before + candidate.num_micro_batches * both.sum(axis=0)).max())


class PartBounds(StageBounds):
    """The bounds of stages of a candidate in two parts; for the arguments see ``StageBounds``."""

    def __init__(
        self, stager: Stager, times: StageTimes, again: AgainSeconds | None = None
    ) -> None:
        super().__init__(stager, times, again)
        costs = stager.costs
        self.forward = np.minimum(costs.forward_s, times.both)
        self.input = np.maximum(0.0, costs.backward_s - costs.weight_s)

    @property
    def reach(self) -> Reach:
        stager, stages = self.stager, self.stager.candidate.pp
        before = least_prefix(self.times.both)
        work = np.tile(stager.candidate.num_micro_batches * before, (stages, 1))
        first = work - np.concatenate([[0.0], np.cumsum(self.forward)])
        return Reach(
            seconds=(Floor(first=first, end=work),),  # (A)
            priced=(),
            memory=(stager.least_run_bytes().floor(),),
        )

    def __call__(self, windows: Windows) -> Floats:
        """Of every stage in the windows: with it no step is faster; inf where it does not fit."""
        runs, stager = windows.runs, self.stager
        num, stage = stager.candidate.num_micro_batches, runs.stage
        needed = self.again(runs)
        again = np.where(np.isfinite(needed), needed, 0.0)
        down = self.messages[0] / 2
        before = np.concatenate([[0.0], np.cumsum(self.forward)])
        behind = np.append(np.cumsum(self.input[::-1])[::-1], 0.0)
        arrived = before[runs.first] + down - self.messages[stage] / 2
        work = num * (runs.sums(self.times.both) + again)
        bound = np.maximum(arrived, self._first_gather_s(runs)) + work  # (A)
        returned = before[-1] + behind[runs.end] + down + self.messages[stage] / 2
        backward = self.times.both - self.times.forward
        flying = stager.flying[stage]
        after = (num - flying) * runs.sums(self.times.both) + flying * runs.sums(backward)
        bound = np.maximum(bound, returned + after + num * again)  # (B)
        left = np.minimum(num, 1 + stage)  # weight parts after the last input part
        early = np.minimum(self.times.both, self.forward + self.input)
        leaves = np.concatenate([[0.0], np.cumsum(early)])[runs.first] + 2 * down
        leaves = leaves - self.messages[stage] + num * again
        leaves = leaves + (num - left) * runs.sums(self.times.both)
        last = leaves + left * runs.sums(early)  # (E)
        once = runs.sums(stager.once_s()) + stager.sites.step_s[stage]
        bound = np.maximum(bound + self._last_reduction_s(runs), self._stream_s(runs)) + once
        bound = np.maximum(bound, last)
        return np.where(np.isfinite(needed), bound, np.inf)

    def _first_gather_s(self, runs: Runs) -> Floats:
        gather = self.stager.gather_s()
        return gather[runs.first] if self.stager.candidate.per_block else runs.sums(gather)

    def _last_reduction_s(self, runs: Runs) -> Floats:
        """(C): weight parts go upwards, so that the first block's comes last."""
        reduce = self.stager.reduce_s()
        return reduce[runs.first] if self.stager.candidate.per_block else runs.sums(reduce)

    def _stream_s(self, runs: Runs) -> Floats:
        """(D)."""
        stager, candidate = self.stager, self.stager.candidate
        gather, reductions = stager.gather_s(), runs.sums(stager.reduce_s())
        gathers, num = runs.sums(gather), candidate.num_micro_batches
        if candidate.zero_stage <= 1:
            return gathers + reductions
        if candidate.zero_stage == 2 or not candidate.per_block:
            return gathers + num * reductions
        again = np.maximum(0.0, 2 * (gathers - runs.maxima(gather)))
        return num * (again + reductions)
