"""Candidates whose data ranks have equal shares of the batch: how they are refined and solved."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from autopar.ir.plan import RecomputeName
from autopar.solver.bounds import exact_times
from autopar.solver.candidates import Candidate
from autopar.solver.cheap_bounds import CheapBounds
from autopar.solver.chunk_choice import ChunkChoice
from autopar.solver.cuts import best_cuts
from autopar.solver.layout.problem import Solution
from autopar.solver.memory_limits import memory_limits
from autopar.solver.mixed import AnySetting
from autopar.solver.pricer import Pricer
from autopar.solver.refinement import Refinement, nothing_left
from autopar.solver.schedule_bounds import stage_bounds
from autopar.solver.settings import NOTHING_AGAIN
from autopar.solver.solved import Solved, simulate_cuts
from autopar.solver.tight_bounds import TightBounds
from autopar.solver.zero_choice import with_stages_chosen

_MOST_NEAR = 24
"""Cuts near the best plan's that are simulated."""


def equal_refinement(pricer: Pricer) -> Refinement:
    """How candidates without ``shares`` are refined."""
    cheap = CheapBounds(pricer)
    tight = TightBounds(cheap)
    return Refinement(
        rough=cheap.rough,
        scalar=cheap.scalar,
        stages=tight.stages,
        layouts=tight.layouts,
        fitted=tight.fitted,
        solver=EqualSolver(pricer),
    )


class EqualSolver:
    """``Solver`` of candidates without ``shares``."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer

    def solve(self, candidate: Candidate) -> Solved | None:
        """With the layout that is fastest of those that fit. What is too large for the fastest
        layout gets one that keeps less, or computes blocks again.
        """
        setting = self.pricer.setting(candidate)
        solved = self._with_layout(candidate, setting, setting.solution(candidate.recompute))
        pinned = candidate.tp == 1 or candidate.sequence_parallel is not None
        pinned = pinned or candidate.has_one_layout
        if pinned or (solved is not None and _has_room(candidate, solved)):
            return solved  # a pinned layout is not traded for memory
        found = [solved]
        tried: list[RecomputeName] = [candidate.recompute]
        if candidate.recompute == "blocks":
            layouts = priced_layouts(setting)
            found += [self._with_layout(candidate, setting, layout) for layout in layouts]
            tried = [] if any(found) else ["none", "full"]
        found += [
            self._within_memory(replace(candidate, recompute=name), setting) for name in tried
        ]
        return min(filter(None, found), key=lambda other: other.step_s, default=None)

    def solve_anyway(self, candidate: Candidate) -> Solved:
        """See ``Solver``."""
        setting = self.pricer.setting(candidate)
        solution = setting.solution(candidate.recompute)
        candidate = replace(candidate, zero_open=False)
        stager = self.pricer.decided_stager(candidate, setting, solution)
        times = exact_times(stager)
        found = self.pricer.cuts(candidate, stager, times)
        if not found:  # no cuts fit: those that are fastest
            bounds = stage_bounds(stager, times, lambda runs: np.zeros(runs.length.shape))
            found = (best_cuts(bounds, bounds.reach.anywhere())[1],)
        decided = [stager.decided(cuts) for cuts in found]
        return min(
            (
                simulate_cuts(own.candidate, setting, solution, own, cuts)
                for own, cuts in zip(decided, found, strict=True)
            ),
            key=lambda solved: solved.step_s,
        )

    def made_again(self, candidate: Candidate, solution: Solution, cuts: tuple[int, ...]) -> Solved:
        """See ``Solver``."""
        setting = self.pricer.setting(candidate)
        stager = self.pricer.decided_stager(candidate, setting, solution)
        return simulate_cuts(candidate, setting, solution, stager, cuts)

    def is_best(self, candidate: Candidate, solved: Solved) -> bool:
        """See ``Solver``."""
        return candidate.has_one_layout or nothing_left(candidate, solved)

    def improved(self, candidate: Candidate, solved: Solved) -> Solved:
        """With single cuts moved by a block, as long as that is faster: cuts are chosen by bounds,
        which do not see all that the simulator does.
        """
        if candidate.cuts == "even" or candidate.has_one_layout:
            return solved
        choice = self.pricer.chunk_choice(candidate, solved.setting, solved.solution)
        tried, left = {solved.cuts}, _MOST_NEAR
        while left > 0:
            found: list[Solved] = []
            for cuts in _near_cuts(solved)[:left]:
                if cuts not in tried:
                    near = _simulated(choice, solved.setting, solved.solution, cuts)
                    found += [near] if near is not None else []
                tried.add(cuts)
            left -= len(found)
            best = min(found, key=lambda other: other.step_s, default=solved)
            if best.step_s >= solved.step_s:
                return solved
            solved = best
        return solved

    def _within_memory(self, candidate: Candidate, setting: AnySetting) -> Solved | None:
        """With the fastest of the layouts that keep so little that they fit."""
        limits = memory_limits(self.pricer, candidate, setting)
        if limits is None:
            return None
        solution = setting.solution(candidate.recompute, limits)
        if solution.status == "infeasible":
            return None
        return self._with_layout(candidate, setting, solution)

    def _with_layout(
        self, candidate: Candidate, setting: AnySetting, solution: Solution
    ) -> Solved | None:
        choice, found = self.pricer.chunk_choice(candidate, setting, solution), list[Solved]()
        tried = list[tuple[tuple[int, ...], ...]]()
        for variant in _zero_variants(candidate):
            whole = replace(choice, whole=replace(choice.whole, candidate=variant))
            tried.append(self.pricer.cuts(variant, whole.whole))
            if candidate.loss_chunks > 1 or not any(map(whole.is_roomy, tried)):
                tried.append(self.pricer.cuts(variant, whole.roomiest()))
            elif variant.zero_stage == 1:
                break  # with others it has no less to do
        for cuts in dict.fromkeys(itertools.chain.from_iterable(tried)):
            solved = _simulated(choice, setting, solution, cuts)
            found += [solved] if solved is not None else []
        return min(found, key=lambda solved: solved.step_s, default=None)


def priced_layouts(setting: AnySetting) -> list[Solution]:
    """Layouts that are slower and keep less than the fastest: at prices of a kept byte, of blocks
    that do nothing or a part again.
    """
    fastest, found = setting.solution("none"), dict[object, Solution]()
    parts = [NOTHING_AGAIN, *setting.part_solvers()]
    for part, price in itertools.product(parts, setting.prices()):
        solution = setting.priced_solution(price, part)
        found.setdefault((solution.choices, solution.states), solution)
    found.pop((fastest.choices, fastest.states), None)
    return list(found.values())


def _simulated(
    choice: ChunkChoice, setting: AnySetting, solution: Solution, cuts: tuple[int, ...]
) -> Solved | None:
    """With these cuts; None where it does not fit."""
    found = (
        simulate_cuts(chosen.candidate, setting, solution, chosen, cuts)
        for chosen in with_stages_chosen(choice, cuts)
    )
    return min(found, key=lambda solved: solved.step_s, default=None)


def _near_cuts(solved: Solved) -> list[tuple[int, ...]]:
    """Cuts of which one is a block off, those of the busiest stage first."""
    cuts, busy = solved.cuts, solved.simulation.busy_s
    near = []
    for index in range(1, len(cuts) - 1):
        for shift in (1, -1):  # the stage that gets smaller is the one after, or before
            moved = cuts[index] + shift
            if cuts[index - 1] < moved < cuts[index + 1]:
                smaller = index if shift == 1 else index - 1
                near.append((-busy[smaller], (*cuts[:index], moved, *cuts[index + 1 :])))
    return [other for _, other in sorted(near)]


def _zero_variants(candidate: Candidate) -> tuple[Candidate, ...]:
    """A candidate that leaves its ZeRO stages open, with each of them for all blocks."""
    if not candidate.zero_open:
        return (candidate,)
    return tuple(
        replace(candidate, zero_stage=zero, zero_open=False)
        for zero in range(1, candidate.zero_stage + 1)
    )


def _has_room(candidate: Candidate, solved: Solved) -> bool:
    """Whether a layout that keeps less could do no less."""
    found = solved.candidate
    if candidate.zero_open and (found.zero_stage > 1 or found.zero_stages):
        return False
    return not found.recomputes
