"""Bounds of single candidates, over all cuts and layouts, with the memory that they need."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np

from autopar.ir.mesh import MESH_AXES
from autopar.solver.bounds import AgainSeconds, StageTimes, exact_times
from autopar.solver.candidates import Candidate
from autopar.solver.cheap_bounds import CheapBounds
from autopar.solver.chunk_choice import ChunkChoice
from autopar.solver.facts import Floats
from autopar.solver.in_flight import in_parts
from autopar.solver.loss_chunks import NUMBERS
from autopar.solver.mixed import AnySetting
from autopar.solver.recomputing import again_s, priced_again_s
from autopar.solver.runs import Runs
from autopar.solver.schedule_bounds import scalar_bound_s, stage_bounds
from autopar.solver.stages import Stager
from autopar.solver.virtual_cuts import cut_bounds_s, least_cut_bound_s
from autopar.solver.zero_choice import with_stages_chosen


class TightBounds:
    """Steps 2 to 4 of ``refinement``."""

    def __init__(self, cheap: CheapBounds) -> None:
        self.cheap, self.pricer = cheap, cheap.pricer
        self._chosen: dict[tuple[Candidate, tuple[int, ...]], list[Stager]] = {}
        self._cut_bounds: dict[Candidate, list[tuple[float, tuple[int, ...]]]] = {}

    def stages(self, candidate: Candidate, enough_s: float = math.inf) -> float:
        """No layout and no cuts of the candidate are faster; infinite when none fits."""
        pricer = self.pricer
        setting, times = pricer.setting(candidate), pricer.least_times(candidate)
        is_open = candidate.recompute == "blocks"
        stager = pricer.stager(candidate, setting.offered() if is_open else setting.least)
        added = stager.adding_s()
        if candidate.virtual_stages > 1:
            longer = times.plus_backward(added)
            own = least_cut_bound_s(stager, longer, pricer.cuts(candidate, stager))
            return max(scalar_bound_s(candidate, longer), own)
        if candidate.pp == 1:
            times = setting.joint_times(candidate.recompute)
        traded = is_open and candidate.tp > 1
        beyond = dict[float, Floats]()
        if traded or candidate.zero_open:
            beyond = {price: setting.priced(price) - times.both for price in setting.prices()}
        again: AgainSeconds = functools.partial(again_s, stager, exact=False)
        if traded:
            stager = pricer.stager(candidate, setting.tight())
            again = functools.partial(_traded_again_s, stager, beyond)
        bounds = stage_bounds(stager, times.plus_backward(added), again, beyond)
        return bounds.best_s(enough_s=enough_s)

    def layouts(self, candidate: Candidate, enough_s: float = math.inf) -> float:
        """Of a candidate with one layout: with that. Of others: with the memory that a layout needs
        for its speed.
        """
        if candidate.has_one_layout:
            return min(bound for bound, _ in self._bounds_of_cuts(candidate))
        if candidate.tp == 1 and candidate.chunks_open:
            return self._chunks(candidate, enough_s)
        if candidate.recompute == "blocks" and candidate.tp > 1:
            return self._memory(candidate, enough_s)
        return 0.0

    def fitted(self, candidate: Candidate, enough_s: float = math.inf) -> float:
        """Of a candidate with one layout: cuts with what fits them."""
        if not candidate.has_one_layout:
            return 0.0
        choice, best = self.pricer.only_choice(candidate), math.inf
        for bound, cuts in self._bounds_of_cuts(candidate):
            if bound >= min(best, enough_s):
                return min(best, bound)
            for chosen in self._fitting(choice, cuts):
                best = min(best, least_cut_bound_s(chosen, exact_times(chosen), [cuts]))
        return best

    def _fitting(self, choice: ChunkChoice, cuts: tuple[int, ...]) -> list[Stager]:
        """``with_stages_chosen``: where ZeRO stages are decided, of memory only, so that candidates
        that differ in the order of axes have the same.
        """
        candidate = choice.whole.candidate
        if candidate.zero_open:
            return list(with_stages_chosen(choice, cuts))
        key = replace(candidate, axis_order=MESH_AXES, placements=(), depths=()), cuts
        if key not in self._chosen:
            self._chosen[key] = list(with_stages_chosen(choice, cuts))
        own = {name: getattr(candidate, name) for name in ("axis_order", "placements", "depths")}
        return [
            replace(found, candidate=replace(found.candidate, **own)) for found in self._chosen[key]
        ]

    def _bounds_of_cuts(self, candidate: Candidate) -> list[tuple[float, tuple[int, ...]]]:
        """Of a candidate with one layout: its cuts, those with the lowest bound first."""
        if candidate not in self._cut_bounds:
            stager = self.pricer.only_choice(candidate).roomiest()
            all_cuts = self.pricer.cuts(candidate, stager)
            bounds = cut_bounds_s(stager, exact_times(stager), all_cuts).tolist()
            self._cut_bounds[candidate] = sorted(zip(bounds, all_cuts, strict=True))
        return self._cut_bounds[candidate]

    def _chunks(self, candidate: Candidate, enough_s: float) -> float:
        """Over all numbers of chunks, where ranks of the tensor axis have no choice of layouts."""
        choice, best = self.pricer.only_choice(candidate), math.inf
        for number in (1, *NUMBERS):
            stager = choice.stager(number)
            if stager is None:
                continue
            times, least = exact_times(stager), min(best, enough_s)
            bound = scalar_bound_s(candidate, times)
            if bound < least:
                again = functools.partial(again_s, stager, exact=False)
                bound = stage_bounds(stager, times, again).best_s(enough_s=least)
            best = min(best, bound)
        return best

    def _memory(self, candidate: Candidate, enough_s: float) -> float:
        """The larger of two: by a frontier of what blocks keep, and by prices for what they keep
        between the parts of backwards.
        """
        bound = self._frontier(candidate, enough_s)
        if not candidate.has_parts or bound > enough_s:
            return bound
        setting, times = self.pricer.setting(candidate), self.pricer.least_times(candidate)
        stager = self.pricer.stager(candidate, setting.tight())
        again = functools.partial(_least_parts_again_s, stager, setting, times.both)
        bounds = stage_bounds(stager, times.plus_backward(stager.adding_s()), again)
        return max(bound, bounds.best_s(guess_s=bound, enough_s=enough_s))

    def _frontier(self, candidate: Candidate, enough_s: float) -> float:
        """Over all trades of time for memory in the blocks that repeat: what takes least keeps
        most, and more of it is computed again.
        """
        setting, times = self.pricer.setting(candidate), self.pricer.least_times(candidate)
        best, least = math.inf, self.cheap.scalar(candidate)
        for costs, both in setting.trades():
            stager = self.pricer.stager(candidate, costs)
            again = functools.partial(again_s, stager, exact=False)
            longer = _longer(times, both).plus_backward(stager.adding_s())
            bounds = stage_bounds(stager, longer, again)
            best = min(best, bounds.best_s(guess_s=least, enough_s=min(best, enough_s)))
        return best


def _longer(times: StageTimes, both: Floats) -> StageTimes:
    """With forwards and backwards that take so long together, if that is longer."""
    return times.plus(np.maximum(0.0, both - times.both))


def _traded_again_s(stager: Stager, beyond: dict[float, Floats], runs: Runs) -> Floats:
    """What no layout of a candidate is below that computes blocks again; ``beyond``: at prices of a
    kept byte, beyond its seconds.
    """
    return np.maximum(again_s(stager, runs, exact=False), priced_again_s(stager, runs, beyond))


def _least_parts_again_s(stager: Stager, setting: AnySetting, both: Floats, runs: Runs) -> Floats:
    """The same for backwards in two parts, of which stages keep different shares: with a price for
    the bytes between the parts, too.
    """
    found = again_s(stager, runs, exact=False)
    for number, stage in enumerate(runs.stage.ravel().tolist()):
        own = Runs(
            stage=runs.stage[number : number + 1],
            first=runs.first[number : number + 1],
            end=runs.end[number : number + 1],
        )
        still, waiting = in_parts(stager.candidate, stage)[-1].tolist()
        beyond = {
            price: setting.priced(price, price * waiting / still) - both
            for price in setting.prices()
        }
        more = priced_again_s(stager, own, beyond)
        found[number : number + 1] = np.maximum(found[number : number + 1], more)
    return found
