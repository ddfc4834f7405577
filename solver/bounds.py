"""Lower bounds on a step's seconds, from what one stage has to do.

For a stage s of p with M micro-batches, t, f and g its seconds per micro-batch (t = f + g, with
recompute in g) and w + 1 its forwards before the first backward (w = min(M, p − s) − 1 for 1F1B):

(A) Σ_{s' < s} t + M · t_s
    the first forward has to arrive, and the last backward has to leave
(B) Σ_{s' ≠ s} t + M · t_s − w · f_s + messages down and up
    1F1B: the first backward waits for all stages behind, while only w + 1 forwards may run
(F) Σ_{s' < s} t + ⌈M / (w + 1)⌉ · (Σ_{s' ≥ s} t + messages from s to the end and back)
    1F1B: forward w + 2 waits for the first backward, and so on
(G) Σ t + (M − w − 2) · t_s + Σ_{s' ≥ s} t + messages down and up, and from s to the end and back
    1F1B, M ≥ w + 2: after the first backward come M − w − 1 backwards and M − w − 2 forwards, then
    the last forward, which has to reach the end and come back
(C) gathers and reductions that nothing can hide: the first block's gather and the last block's
    reduction; in 1F1B all that exceeds the first forward, or the last backward. Then the optimizer.
    Forwards of the stages before hide the gathers, their last backwards reductions and optimizer
(D) the communication stream: all gathers and reductions one after the other
(E) what is hidden slows compute down: reductions of all but the last micro-batch, and gathers of
    all but the first and the last, run while the stage computes or waits after its first backward,
    in (A) and (B), as (F) and (G) count that waiting; on a single stage, which waits for no other,
    all of them do. With ZeRO 0 and 1 the gathers of the first stage slow the first forward down,
    and the reductions of every stage that the last micro-batch passes on its way back slow its
    backward there down
(H) on a single stage with ZeRO 3 and 1F1B, what it waits for between two micro-batches (``turns``)
(I) copies of offloaded activations of all micro-batches, to the host or back, one after the other

Every form is a sum over the blocks of the stage plus a constant, so that ``cuts`` finds the cuts
that minimize the largest of them. Where stages are on nodes of different kinds, the constant is the
least that other stages can have, whatever their cuts (``passing``). With the exact times of a
layout this guides the choice of cuts. With times that no layout is below it bounds every layout and
every cut: each form is increasing in t, t − f and t − g, so that these three are what is bounded
below (``StageTimes``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.cuts import best_cuts
from autopar.solver.facts import Floats
from autopar.solver.passing import Passing, least_of, least_prefix, least_share
from autopar.solver.reach import Floor, Reach
from autopar.solver.recomputing import again_s, least_with_again
from autopar.solver.runs import Runs, on_stage, prefixes
from autopar.solver.stages import Stager
from autopar.solver.turns import LOOKED_AT, turn_s
from autopar.solver.windows import Windows
from autopar.solver.zero_bounds import OpenStages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds of each block per micro-batch; where stages differ, a row for each stage.

    Attributes:
        both: Forward and backward, t (a lower bound of it).
        forward: f = t − (lower bound of t − f).
        backward: g = t − (lower bound of t − g).
        input, early: Of backwards in two parts, lower bounds of the input part i, and of f + i.
        weight: A lower bound of the weight part.
    """

    both: Floats
    forward: Floats
    backward: Floats
    input: Floats
    early: Floats
    weight: Floats

    def plus(self, seconds: Floats) -> StageTimes:
        """With a forward and a backward that take so much longer together, either part maybe."""
        return replace(
            self,
            both=self.both + seconds,
            forward=self.forward + seconds,
            backward=self.backward + seconds,
        )

    def plus_backward(self, seconds: Floats) -> StageTimes:
        """With a backward that is longer by so much."""
        return replace(self, both=self.both + seconds, backward=self.backward + seconds)


def exact_times(stager: Stager) -> StageTimes:
    """The times of a layout."""
    forward, backward = stager.costs.forward_s, stager.backward_s()
    weight = stager.weight_s()
    return StageTimes(
        both=forward + backward,
        forward=forward,
        backward=backward,
        input=backward - weight,
        early=forward + backward - weight,
        weight=weight,
    )


_MOST_RUNS = 400_000
"""Work limit: models of hundreds of blocks have more runs where windows are wide."""


def stage_rows(values: Floats, num_stages: int) -> Floats:
    """A row for each stage, of values of one stage or rows of each."""
    return np.array(np.broadcast_to(values, (num_stages, values.shape[-1])))


AgainSeconds = Callable[[Runs], Floats]
"""Seconds per micro-batch of what runs compute again so that they fit; inf where they do not."""


class StageBounds:
    """The bounds of stages of one candidate.

    Args:
        stager: With the costs of a layout, or the least.
        times: The same.
        again: What stages compute again; default: ``again_s``, exactly.
        priced: See ``OpenStages``.
    """

    def __init__(
        self,
        stager: Stager,
        times: StageTimes,
        again: AgainSeconds | None = None,
        priced: Mapping[float, Floats] | None = None,
    ) -> None:
        self.stager, self.times = stager, times
        self.again = again or functools.partial(again_s, stager)
        self.open = OpenStages(stager, priced) if stager.candidate.zero_open else None
        self.passing = Passing(times.both)
        self.messages = self._messages()

    @property
    def reach(self) -> Reach:
        """Which stages may be within a threshold."""
        candidate, stager = self.stager.candidate, self.stager
        num, stages = candidate.num_micro_batches, candidate.pp
        both = self.times.both
        more = (num - 1) * both if both.ndim == 1 else num * both - least_of(both)
        waiting = stage_rows(more, stages)
        if candidate.schedule == "1f1b":  # (B)
            ahead = stager.flying_at_most[:, None] - 1
            waiting = prefixes(np.maximum(0.0, waiting - ahead * self.times.forward))
        else:
            waiting[:-1] = 0.0
            waiting = prefixes(waiting)
        before, work = least_prefix(both), num * prefixes(stage_rows(both, stages))
        all_s = float(least_of(both).sum()) + float(self.messages[0])
        values, largest = self._stream()
        stream = prefixes(stage_rows(values + stager.once_s(), stages))
        kept_s = float((stager.gather_s() * stager.regathered).max())
        once = stager.sites.step_s[:, None] - largest * kept_s
        return Reach(
            seconds=(
                Floor(first=work - before, end=work),
                Floor(first=waiting, end=waiting + all_s),
                Floor(first=stream, end=stream + once),  # (D)
            ),
            priced=least_with_again(stager, both, before),
            memory=(stager.least_run_bytes().floor(),),
        )

    def best_s(self, *, guess_s: float = 0.0, enough_s: float = math.inf) -> float:
        """No cuts are faster; for the arguments see ``best_cuts``."""
        candidate = self.stager.candidate
        if self.times.both.ndim == 2:
            share_s = least_share(self.times.both, candidate.pp)
            guess_s = max(guess_s, candidate.num_micro_batches * share_s)
        return best_cuts(
            self, self.reach, guess_s=guess_s, enough_s=enough_s, most_runs=_MOST_RUNS
        )[0]

    def __call__(self, windows: Windows) -> Floats:
        """Of every stage in the windows: with it no step is faster; inf where it does not fit."""
        runs, candidate = windows.runs, self.stager.candidate
        num, stage = candidate.num_micro_batches, runs.stage
        needed = self.again(runs)
        again = np.where(np.isfinite(needed), needed, 0.0)
        run = runs.sums(self.times.both) + again
        whole = total = self.passing.through(runs, run, again)
        if again.any():
            total = np.maximum(total, self.passing.total + windows.least_sum(needed))
        added, beside, stream = self._communicate(runs, again)
        before = self.passing.before(runs)
        bound = before + num * run + beside  # (A)
        if candidate.schedule == "1f1b":
            ahead = self.stager.flying_at_most[stage] - 1
            waiting = total + (num - 1) * run - ahead * runs.sums(self.times.forward)
            waiting = waiting + self.messages[0] + self._beside_s(runs, beside, ahead)
            bound = np.maximum(bound, waiting)  # (B)
            loop = whole - before + self.messages[stage]
            bound = np.maximum(bound, before + np.ceil(num / (ahead + 1)) * loop)  # (F)
            returned = total + (num - ahead - 2) * run + self.messages[0]
            returned = returned + loop + self._slower_beyond_s(runs)
            bound = np.where(num >= ahead + 2, np.maximum(bound, returned), bound)  # (G)
        else:
            waiting = total + (num - 1) * run + self.messages[0] + beside
            bound = np.where(stage == candidate.pp - 1, np.maximum(bound, waiting), bound)
        bound = np.maximum(bound + added, stream)  # (C), (D)
        bound = np.maximum(bound, num * self.stager.run_copy_s(runs))  # (I)
        return np.where(np.isfinite(needed), bound, np.inf)

    def _messages(self) -> Floats:
        """For each stage, least seconds of the messages of a micro-batch to the end and back."""
        stager = self.stager
        borders = stager.costs.sent_bytes[1:]
        least = float(borders.min()) if len(borders) else 0.0
        hops = [stager.message_s(least, s) for s in range(stager.candidate.pp - 1)]
        return np.append(2 * np.cumsum(hops[::-1])[::-1], 0.0)

    @functools.cached_property
    def _slower(self) -> Floats:
        """By how much the reduction of each block slows the last backward of the block before it,
        if that is on the same stage.
        """
        candidate, reduce = self.stager.candidate, self.stager.reduce_s()
        each = self.stager.reduced_each.any()
        if candidate.schedule != "1f1b" or each or not candidate.per_block:
            return np.zeros(reduce.shape)
        backward = np.maximum(0.0, self.times.both - self.times.forward)
        slowdown = self.stager.sites.slowdown
        ahead = np.zeros(backward.shape)
        ahead[..., 1:] = backward[..., :-1]
        if ahead.ndim == 2:
            return slowdown[:, None] * np.minimum(reduce, ahead)
        return slowdown[0] * np.minimum(reduce, ahead)

    def _slower_before_s(self, runs: Runs) -> Floats:
        """By how much the last micro-batch comes back later through the stages before, at the
        least; the first block of each slows nothing.
        """
        slower = least_of(self._slower)
        before = np.concatenate([[0.0], np.cumsum(slower)])
        largest = np.concatenate([[0.0], np.maximum.accumulate(slower)])
        return np.maximum(0.0, before[runs.first] - runs.stage * largest[runs.first])

    def _slower_beyond_s(self, runs: Runs) -> Floats:
        """The same of the stages after."""
        slower = least_of(self._slower)[::-1]
        after = np.append(np.cumsum(slower)[::-1], 0.0)
        largest = np.append(np.maximum.accumulate(slower)[::-1], 0.0)
        stages = self.stager.candidate.pp - 1 - runs.stage
        return np.maximum(0.0, after[runs.end] - stages * largest[runs.end])

    def _beside_s(self, runs: Runs, beside: Floats, ahead: Floats) -> Floats:
        """What is left of (E) where a stage waits after its first forwards for its first backward:
        their gathers run meanwhile.
        """
        candidate, gather = self.stager.candidate, self.stager.gather_s() * self.stager.regathered
        if candidate.pp == 1 or not gather.any():
            return beside
        slowdown = self.stager.sites.slowdown[runs.stage]
        early = np.minimum(ahead, candidate.num_micro_batches - 2)
        each = np.maximum(0.0, 2 * (runs.sums(gather) - runs.maxima(gather)))
        return np.maximum(0.0, beside - slowdown * np.maximum(0.0, early) * each)

    def _passed_s(self, runs: Runs, part: Floats) -> Floats:
        """Seconds of forwards, or backwards, of the blocks before each run and of messages, at the
        most of what ``times.both`` counts: all but what the other part takes at the least.
        """
        way, both = self.messages[0] / 2, self.times.both
        if both.ndim == 1:
            found: Floats = np.concatenate([[0.0], np.cumsum(part)[:-1] + way])[runs.first]
            return found
        others = Passing(np.maximum(0.0, both - part)).before(runs)
        return np.where(runs.first > 0, self.passing.before(runs) - others + way, 0.0)

    @functools.cached_property
    def _turn_s(self) -> float:
        """(H), where ZeRO stages are decided; 0 where they are open."""
        return 0.0 if self.open is not None else self._turn_of(self.stager.zero_stages.tolist())

    def _turn_of(self, zero_stages: Sequence[int]) -> float:
        """(H) of a single stage whose blocks have these stages."""
        if self.stager.candidate.schedule != "1f1b":
            return 0.0
        return turn_s(
            zero_stages[:LOOKED_AT],
            gather=on_stage(self.stager.gather_s(), 0),
            reduce=on_stage(self.stager.reduce_s(), 0),
            forward=on_stage(self.times.forward, 0),
            backward=on_stage(self.times.backward, 0),
            slowdown=float(self.stager.sites.slowdown[0]),
        )

    def _communicate(self, runs: Runs, again: Floats) -> tuple[Floats, Floats, Floats]:
        """(C) added to what a stage computes, (E) to what it computes or waits in between, and (D);
        ``again`` lengthens backward.
        """
        stager, candidate = self.stager, self.stager.candidate
        gather, reduce = stager.gather_s(), stager.reduce_s()
        gathers, reductions = runs.sums(gather), runs.sums(reduce)
        num, again_each = candidate.num_micro_batches, gather * stager.regathered
        slowdown = stager.sites.slowdown[runs.stage]
        each = np.maximum(0.0, 2 * (runs.sums(again_each) - runs.maxima(again_each)))
        # what happens before a stage meanwhile hides it: first forwards, last backwards, messages
        passed = self._passed_s(runs, self.times.forward)
        returned = self._passed_s(runs, self.times.backward)
        values, largest = self._stream()
        whole = stream = runs.sums(values) - largest * runs.maxima(again_each)
        slow = np.zeros(gathers.shape)
        first, last, behind = gathers, reductions, slow
        if candidate.per_block:
            first, last = runs.at_first(gather) + slow, runs.at_first(reduce) + slow
            sums_whole = not stager.reduced_each.any()
            if candidate.schedule == "1f1b" and sums_whole:
                own = runs.sums(self._slower) - runs.at_first(self._slower)
                beside = np.where(runs.first == 0, slowdown * (gathers - first), 0.0)
                behind = self._slower_before_s(runs) + own + on_stage(reduce, 0)[0]
                first, last = first + beside, last + own
                if num >= candidate.pp + 1:
                    first = np.maximum(first, gathers - runs.sums(self.times.forward))
                    last = np.maximum(last, reductions - runs.sums(self.times.backward) - again)
            if candidate.schedule == "1f1b" and not sums_whole:  # (E)
                queued = np.where(runs.first > 0, returned, 0.0)  # behind the last backward
                reduced = runs.sums(reduce * stager.reduced_each)
                slow = slowdown * np.maximum(0.0, (num - 1) * reduced - queued)
                slow = slow + slowdown * max(0, num - 2) * each
            elif candidate.schedule == "layered" and candidate.zero_stage >= 1:
                slow = slowdown * (gathers + reductions - first - last + each / 2)
        more = np.zeros(gathers.shape)
        if self.open is not None and candidate.per_block:
            more, streamed = self._open_s(self.open, runs, again, returned)
            slow, stream = slow + more, stream + streamed
        once = runs.sums(stager.once_s()) + stager.sites.step_s[runs.stage]
        added = np.maximum(0.0, first - passed) + np.maximum(behind, last + once - returned)
        if candidate.pp == 1 and candidate.per_block:  # nothing to wait for: hidden or exposed
            firsts = runs.at_first(gather) + runs.at_first(reduce)
            hidden = more + slowdown * np.maximum(0.0, whole - firsts)
            hidden = hidden + (1 - slowdown) * (num - 1) * self._turn_s
            added, slow = np.maximum(added + slow, firsts + hidden + once), np.zeros(slow.shape)
        return added, slow, stream + once

    def _open_s(
        self, stages: OpenStages, runs: Runs, again: Floats, returned: Floats
    ) -> tuple[Floats, Floats]:
        """(E) of ZeRO stages that are open, with what is computed again beyond ``again``, and (D):
        beyond those of ZeRO 1.
        """
        candidate, stager = self.stager.candidate, self.stager
        num = candidate.num_micro_batches if candidate.schedule == "1f1b" else 1
        slowdown, gather, reduce = stager.sites.slowdown[:, None], *self.traffic_rows()
        counted = np.full((candidate.pp, 1), 2.0 * num - 1)  # of gathers beyond one
        if candidate.pp == 1:
            counted = np.full(gather.shape, 2.0 * num - 1)
            counted[0, -1] = num - 1  # kept from a forward to its backward
            counted[0, 0] -= num - 1  # and from a backward to the next forward
            turns = (num - 1) * (1 - float(slowdown[0, 0]))
            more = stages.single_s(
                runs,
                slowdown * counted * gather,
                slowdown * (num - 1) * reduce,
                lambda zero_stages: turns * self._turn_of(zero_stages),
            )
        else:
            if candidate.schedule == "1f1b":
                ahead = np.minimum(self.stager.flying_at_most - 1, num - 2)
                counted = np.maximum(0.0, 2.0 * (num - 2 - np.maximum(0.0, ahead)))[:, None]
            more = stages.least_s(runs, slowdown * counted * gather, slowdown * (num - 1) * reduce)
            kept = counted[runs.stage, 0] * runs.maxima(gather)
            queued = np.where(runs.first > 0, returned, 0.0) if num > 1 else 0.0
            more = more - stager.sites.slowdown[runs.stage] * (kept + queued)
        counted = np.full((candidate.pp, 1), 2.0 * num - 1)
        stream = stages.least_s(runs, counted * gather, (num - 1) * reduce, computes=False)
        stream = stream - counted[runs.stage, 0] * runs.maxima(gather)
        more = more - candidate.num_micro_batches * again
        return np.maximum(0.0, more), np.maximum(0.0, stream)

    def traffic_rows(self) -> tuple[Floats, Floats]:
        """Seconds of gathers and reductions of blocks, a row for each stage."""
        num = self.stager.candidate.pp
        return stage_rows(self.stager.gather_s(), num), stage_rows(self.stager.reduce_s(), num)

    def _stream(self) -> tuple[Floats, int]:
        """Seconds of the gathers and reductions of each block in a step; in a stage they are so
        many times less the longest gather of its blocks, which is kept from one pass to the next.
        """
        stager, candidate = self.stager, self.stager.candidate
        gather, reduce = stager.gather_s(), stager.reduce_s()
        if not candidate.per_block:
            return gather + reduce, 0
        again = candidate.num_micro_batches if candidate.schedule == "1f1b" else 1
        gathers = 1 + (2 * again - 1) * stager.regathered
        reductions = 1 + (again - 1) * stager.reduced_each
        return gathers * gather + reductions * reduce, 2 * again
