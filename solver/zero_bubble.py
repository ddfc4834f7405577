"""Lower bounds on a step's seconds of backwards in two parts, as ``bounds`` has of whole ones.

With f, i and w seconds of a forward, an input part and a weight part of a stage (t = f + i + w,
e = f + i), n its micro-batches in flight before the first input part, M in all, and
l = min(M, s + 1) weight parts that are left on stage s (from 0) when its last input part is done:

(A) Σ_{s' < s} f + messages down to s + M · t_s
    the first forward has to arrive; nobody waits for weight parts, so that nothing has to follow
(B) Σ_{s' ≤ s} f + Σ_{s' > s} e + messages to the end and back to s + M · t_s − n · f_s
    the first input part waits for all stages behind, while only n forwards may run
(C) the reductions of the stage after its last weight part, then the optimizer
(D) the communication stream: all gathers and reductions one after the other
(E) what is hidden slows compute down; a first forward by the gathers of the blocks behind it. In
    ZeRO 3 the third block of a forward waits for its gather, which waits for the reductions of the
    first two after the weight part before: of these two blocks it may count in place of compute

The last input part goes on through the stages before, and then comes the end of the first stage,
its last weight part and its reductions. That is added to

(P) Σ e + messages down and up + (M − 1) · i_s + (M − n) · f_s + (M − l) · w_s
    (B) up to the last input part
(Q) Σ_{s' < s} e + messages to s and back + M · t_s − l · w_s
    (A) up to the last input part
(R) Σ e + Σ_{s' > s} e + messages down and up, and from s to the end and back
    + (M − n) · e_s + (M − n − s) · w_s, M > n
    (P) up to the last forward, which has to reach the end and come back
(F) Σ_{s' < s} e + ⌈M / n⌉ · Σ_{s' ≥ s} e + messages
    forward n + 1 waits for input part 1, and so on

Sums of parts are bounded by those of what no layout is below: t, f, g = i + w, e and i.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopar.solver.bounds import AgainSeconds, StageBounds, StageTimes, stage_rows
from autopar.solver.candidates import Candidate
from autopar.solver.facts import Floats
from autopar.solver.in_flight import most_in_flight
from autopar.solver.passing import least_of, least_prefix, least_share
from autopar.solver.reach import Floor, Reach
from autopar.solver.recomputing import least_with_again
from autopar.solver.runs import Runs, on_stage, prefixes
from autopar.solver.stages import Stager
from autopar.solver.windows import Windows


def parts_scalar_s(candidate: Candidate, times: StageTimes) -> float:
    """No cuts are faster: work spread evenly over the stages, each block after the forwards of
    those before it, and (P).
    """
    num, both = candidate.num_micro_batches, least_of(times.both)
    before = least_prefix(np.maximum(0.0, times.both - times.backward))[:-1]
    arriving = float((before + num * both).max())
    bound = max(num * least_share(times.both, candidate.pp), arriving)
    if candidate.virtual_stages > 1:
        return bound
    most = min(num, max(most_in_flight(candidate.deepest), candidate.pp))
    waiting = (num - most) * both + (most - 1) * least_of(times.input)
    waiting_s = max(float(waiting.sum()) / candidate.pp, float(waiting.max()))
    return max(bound, float(least_of(times.early).sum()) + waiting_s)


class PartBounds(StageBounds):
    """The bounds of stages of a candidate in two parts; for the arguments see ``StageBounds``.

    Where stages are on nodes of different kinds, what is on others counts as on the fastest.
    """

    def __init__(
        self,
        stager: Stager,
        times: StageTimes,
        again: AgainSeconds | None = None,
        priced: Mapping[float, Floats] | None = None,
    ) -> None:
        super().__init__(stager, times, again, priced)
        candidate, self.num = stager.candidate, stager.candidate.num_micro_batches
        self.left = np.minimum(self.num, 1 + np.arange(candidate.pp))
        self.way = (self.messages[0] - self.messages) / 2  # messages down to a stage
        self.forward = np.maximum(0.0, times.both - times.backward)
        self.whole = np.maximum(0.0, times.both - times.forward)
        self.num_blocks = times.both.shape[-1]

    @functools.cached_property
    def slower(self) -> Floats:
        """(E): by how much its gather slows the first forward of the block before each, if that is
        neither the first of its stage, nor on another.
        """
        gather, slowdown = self.stager.gather_s(), self.stager.sites.slowdown
        found = np.zeros(np.broadcast_shapes(gather.shape, self.forward.shape))
        if self.stager.candidate.per_block:
            found[..., 1:] = np.minimum(gather[..., 1:], self.forward[..., :-1])
        return found * (slowdown[:, None] if found.ndim == 2 else slowdown[0])

    @property
    def reach(self) -> Reach:
        stager, stages = self.stager, self.stager.candidate.pp
        work = self.num * prefixes(stage_rows(self.times.both, stages))
        flying, left = stager.flying_at_most[:, None], self.left[:, None]
        waiting = self._returning(self.times, self.whole, flying, left)
        waiting = prefixes(stage_rows(waiting, stages))
        before = least_prefix(self.forward)
        all_s = float(least_of(self.times.early).sum() + self.messages[0])
        return Reach(
            seconds=(
                Floor(first=work - before, end=work),  # (A)
                Floor(first=waiting, end=waiting + all_s),  # (P)
            ),
            priced=least_with_again(stager, self.times.both, before),
            memory=(stager.least_run_bytes().floor(),),
        )

    def _returning(self, times: StageTimes, whole: Floats, flying: Floats, left: Floats) -> Floats:
        """(M − 1) · i + (M − n) · f + (M − l) · w."""
        found = (self.num - np.maximum(flying, left)) * times.both
        found = found + np.maximum(0.0, flying - left) * whole
        found = found + np.maximum(0.0, left - flying) * times.early
        return found + (np.minimum(flying, left) - 1) * times.input

    def __call__(self, windows: Windows) -> Floats:
        """Of every stage in the windows: with it no step is faster; inf where it does not fit."""
        runs, num, stage = windows.runs, self.num, windows.runs.stage
        needed = self.again(runs)
        again = np.where(np.isfinite(needed), needed, 0.0)
        others = windows.least_sum(needed) if again.any() else 0.0
        flying, left = self.stager.flying_at_most[stage], self.left[stage]
        sums = StageTimes(
            both=runs.sums(self.times.both),
            forward=runs.sums(self.times.forward),
            backward=runs.sums(self.times.backward),
            input=runs.sums(self.times.input),
            early=runs.sums(self.times.early),
            weight=runs.sums(self.times.weight),
        )
        whole, traffic = runs.sums(self.whole), _Traffic(self, runs)
        first, end = self._first_gather_s(windows), self._end_s(windows)
        first_s = first + self._slower_s()
        early = least_prefix(self.times.early)
        early_before, early_after = early[runs.first], early[-1] - early[runs.end]
        down, loop = self.way[stage], early_after + self.messages[stage]
        # what follows the last input part of the stage
        queued = np.maximum(0, num - flying - stage) * traffic.queued
        back = least_prefix(self.times.input)[runs.first] + down + end

        all_s = early[-1] + self.messages[0] + first_s + np.maximum(again, others)
        found = (
            all_s + (num - 1) * again + self._returning(sums, whole, flying, left) + queued
        )  # (P)
        hidden = num * traffic.reductions + (2 * num - flying - 1) * traffic.gathers
        slowdown = self.stager.sites.slowdown[
            stage
        ]  # what takes longer than what follows ends later
        bound = found + end + slowdown * np.maximum(0.0, hidden - back)

        more = num * traffic.reductions + (2 * num - 2) * traffic.gathers
        found = early_before + 2 * down + first + traffic.slower + num * again
        found = found + (num - left) * sums.both + left * sums.early + queued  # (Q)
        bound = np.maximum(bound, found + end + slowdown * np.maximum(0.0, more - back))

        missing = np.minimum(stage, num - flying)  # weight parts before the last forward
        found = all_s + (num - flying) * again + loop + queued
        found = found + (num - flying - missing) * sums.both + missing * sums.early  # (R)
        slow = slowdown * np.maximum(0.0, hidden - (loop + sums.input + back))
        found = found + end + slow
        bound = np.where(num > flying, np.maximum(bound, found), bound)

        loops = np.ceil(num / flying) * (loop + sums.early + again)
        bound = np.maximum(bound, early_before + 2 * down + loops + end)  # (F)

        forward_before = least_prefix(self.forward)[runs.first]
        arrived = np.maximum(forward_before + down + first, traffic.first_gather) + traffic.slower
        returned = forward_before + loop + down + first_s
        more = self._more_s(runs, again)
        # with all weight parts, or with the last reductions after the last input part
        for begin, works, gathers in (
            (arrived, (num * sums.both, (num - 1) * sums.both + sums.early), 2 * num - 2),  # (A)
            (returned, self._first_returned(sums, whole, flying), 2 * num - flying - 1),  # (B)
        ):
            beside = (num - 1) * traffic.reductions + gathers * traffic.gathers
            begin = begin + num * again + slowdown * beside + queued + more
            bound = np.maximum(bound, begin + works[0] + traffic.last_end)
            bound = np.maximum(bound, begin + works[1] + traffic.all_end)
        bound = np.maximum(bound, traffic.stream)
        return np.where(np.isfinite(needed), bound, np.inf)

    def _more_s(self, runs: Runs, again: Floats) -> Floats | float:
        """(E) of ZeRO stages that are open, with what is computed again beyond ``again``."""
        if self.open is None or not self.stager.candidate.per_block:
            return 0.0
        counted = np.maximum(0.0, 2 * self.num - self.stager.flying_at_most - 1)
        slowdown = self.stager.sites.slowdown
        gather, reduce = self.traffic_rows()
        more = self.open.least_s(
            runs,
            (slowdown * counted)[:, None] * gather,
            (slowdown * (self.num - 1))[:, None] * reduce,
        )
        kept = (slowdown * counted)[runs.stage] * runs.maxima(self.stager.gather_s())
        return np.maximum(0.0, more - kept - self.num * again)

    def _first_returned(
        self, sums: StageTimes, whole: Floats, flying: Floats
    ) -> tuple[Floats, Floats]:
        """f + M · t − n · f, and the same without the last weight part."""
        found = (self.num - flying + 1) * sums.both
        without = np.where(
            flying > 1,
            found + (flying - 2) * whole + sums.input,
            (self.num - 1) * sums.both + sums.early,
        )
        return found + (flying - 1) * whole, without

    def _slower_s(self) -> float:
        """(E) of all first forwards; of each stage two gathers come before its first one."""
        slower = least_of(self.slower)
        most = 2 * self.stager.candidate.pp * float(slower.max())
        return max(0.0, float(slower.sum()) - most)

    def _first_gather_s(self, windows: Windows) -> float:
        """Before the first forward of the first stage."""
        gather = on_stage(self.stager.gather_s(), 0)
        return float(gather[: 1 if self.stager.candidate.per_block else windows.low[1]].sum())

    def _end_s(self, windows: Windows) -> float:
        """From the last input part of the first stage, which has as many blocks at the least as the
        windows say.
        """
        stager = self.stager
        reduce, weight, once = (
            on_stage(values, 0)[: windows.low[1]]
            for values in (stager.reduce_s(), self.times.weight, stager.once_s())
        )
        last = reduce[:1] if stager.candidate.per_block else reduce
        end = max(float(weight.sum() + last.sum()), float(reduce.sum()))
        return end + float(once.sum() + stager.sites.step_s[0])


class _Traffic:
    """Gathers and reductions of runs.

    Attributes:
        gathers, reductions: Seconds for a forward or an input part in ZeRO 3, the last one kept
            from before; and for a weight part in ZeRO 2 and 3.
        first_gather: Before the first forward.
        slower: The first forward, by the gathers beside it.
        queued: A forward after a weight part, by the gather of its third block (E).
        last_end: After the last weight part, the optimizer included.
        all_end: The same if nothing is reduced before it but the model's last segment.
        stream: (D), and the optimizer.
    """

    def __init__(self, bounds: PartBounds, runs: Runs) -> None:
        stager, candidate = bounds.stager, bounds.stager.candidate
        gather, reduce = stager.gather_s(), stager.reduce_s()
        gathers, reductions = runs.sums(gather), runs.sums(reduce)
        once = runs.sums(stager.once_s()) + stager.sites.step_s[runs.stage]
        regathered = gather * (stager.regathered if candidate.per_block else 0.0)
        self.gathers = np.maximum(0.0, runs.sums(regathered) - runs.maxima(regathered))
        self.reductions = runs.sums(reduce * stager.reduced_each)
        self.slower = np.maximum(0.0, runs.sums(bounds.slower) - 2 * runs.maxima(bounds.slower))
        self.queued = np.zeros(gathers.shape)
        if candidate.per_block and stager.regathered.all():
            self.queued = self._queued_s(bounds, runs)
        num = bounds.num
        self.stream = reductions + (num - 1) * self.reductions + once
        self.stream = self.stream + gathers - runs.sums(regathered) + 2 * num * self.gathers
        if not candidate.per_block:
            self.first_gather, self.last_end = gathers, reductions + once
            self.all_end = self.last_end
            return
        # the loss has its backward whole, and is reduced before the weight parts of its stage
        is_last = (runs.end == bounds.num_blocks) & (runs.length > 1)
        first, last = runs.at_first(reduce), on_stage(reduce, candidate.pp - 1)[-1]
        reductions = reductions - np.where(is_last, last, 0.0)
        self.first_gather, self.all_end = runs.at_first(gather), reductions + once
        slow = stager.sites.slowdown[runs.stage] * np.maximum(0.0, reductions - first)
        self.last_end = first + slow + once

    def _queued_s(self, bounds: PartBounds, runs: Runs) -> Floats:
        gather, reduce = bounds.stager.gather_s(), bounds.stager.reduce_s()
        times, last = bounds.times, bounds.num_blocks - 1
        second, third = (
            replace(runs, first=np.minimum(runs.first + number, last)) for number in (1, 2)
        )
        waited = runs.at_first(reduce) + second.at_first(reduce) + third.at_first(gather)
        replaced = runs.at_first(times.both - times.input)
        replaced = replaced + second.at_first(times.both - bounds.whole)
        left = 1 - bounds.stager.sites.slowdown[runs.stage]
        found = np.maximum(0.0, left * waited - np.maximum(0.0, replaced))
        return np.where(runs.length >= 3, found, 0.0)
