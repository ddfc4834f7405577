"""Candidates whose data ranks have unequal shares of the batch: how they are refined and solved.

On each group of nodes such a candidate is one with as many micro-batches as its data ranks have
there; the step is that of the slowest, and all begin their collectives together. So no bound of any
of them is above the step, if communication slows nothing down: where it comes later, because ranks
wait for others, it may slow down less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.solver.candidates import Candidate
from autopar.solver.choose_again import NOTHING, again_on
from autopar.solver.equal_shares import equal_refinement, priced_layouts
from autopar.solver.facts import BlockCosts
from autopar.solver.hardware import Cluster
from autopar.solver.hardware.spec import Overlap
from autopar.solver.layout.problem import Solution
from autopar.solver.mixed import MixedSetting
from autopar.solver.pricer import Pricer
from autopar.solver.refinement import Bound, Refinement, nothing_left
from autopar.solver.settings import Setting
from autopar.solver.solved import Solved, solved_together
from autopar.solver.stages import Stager


def unequal_refinement(pricer: Pricer) -> Refinement:
    """How candidates with ``shares`` are refined."""
    groups = _Groups(pricer)
    return Refinement(
        rough=groups.rough,
        scalar=lambda candidate, _: groups.most(candidate, lambda own: own.scalar),
        stages=lambda candidate, _: groups.most(candidate, lambda own: own.stages),
        layouts=lambda candidate, _: groups.most(candidate, lambda own: own.layouts),
        fitted=lambda candidate, _: groups.most(candidate, lambda own: own.fitted),
        solver=UnequalSolver(pricer),
    )


class _Groups:
    """Bounds by those on each group of nodes, whose communication slows nothing down."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self._alone: dict[Cluster, tuple[Pricer, Refinement]] = {}

    def rough(self, candidate: Candidate) -> float:
        """See ``Refinement``."""
        if not self.pricer.data_axis.divides_all():  # ranks need each other within a micro-batch
            return math.inf
        return self.most(candidate, lambda own: lambda part, _: own.rough(part))

    def most(self, candidate: Candidate, bound_of: Callable[[Refinement], Bound]) -> float:
        """The largest bound on any group of nodes."""
        setting, most = _setting(self.pricer, candidate), 0.0
        for cluster, own in _alone(candidate, setting):
            pricer, refinement = self._on(cluster)
            pricer.settings.use(own, setting.settings[cluster])
            most = max(most, bound_of(refinement)(own, math.inf))
        return most

    def _on(self, cluster: Cluster) -> tuple[Pricer, Refinement]:
        """What bounds candidates on one group of nodes."""
        if cluster not in self._alone:
            hardware = replace(cluster.hardware, overlap=Overlap(slowdown=0.0))
            free = cluster.with_hardware(hardware, "nothing is slowed down")
            pricer = Pricer(self.pricer.facts, free, self.pricer.sizes)
            self._alone[cluster] = pricer, equal_refinement(pricer)
        return self._alone[cluster]


class UnequalSolver:
    """``Solver`` of candidates with ``shares``."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer

    def solve(self, candidate: Candidate) -> Solved | None:
        """See ``Solver``."""
        found = (self._fitting(candidate, layout) for layout in self._layouts(candidate))
        return min(filter(None, found), key=lambda solved: solved.step_s, default=None)

    def solve_anyway(self, candidate: Candidate) -> Solved:
        """See ``Solver``."""
        solution = self.pricer.setting(candidate).solution(candidate.recompute)
        return self.simulated(candidate, solution)

    def made_again(self, candidate: Candidate, solution: Solution, cuts: tuple[int, ...]) -> Solved:
        """See ``Solver``."""
        return self.simulated(candidate, solution)

    def is_best(self, candidate: Candidate, solved: Solved) -> bool:
        """See ``Solver``."""
        return nothing_left(candidate, solved)

    def improved(self, candidate: Candidate, solved: Solved) -> Solved:
        """See ``Solver``: one stage has no cuts."""
        return solved

    def simulated(self, candidate: Candidate, solution: Solution) -> Solved:
        """With a layout, and with the blocks that the candidate computes again."""
        stagers = self.stagers(candidate, solution)
        return solved_together(candidate, self.pricer.setting(candidate), solution, stagers)

    def fits(self, candidate: Candidate, solution: Solution) -> bool:
        """Whether the ranks of every group of nodes have room for a layout."""
        stagers = self.stagers(candidate, solution)
        return all(stager.fits((0, stager.costs.num_blocks)) for stager in stagers)

    def stagers(self, candidate: Candidate, solution: Solution) -> list[Stager]:
        """Costs of a layout on each group of nodes, with the micro-batches of its data ranks."""
        setting, sizes = _setting(self.pricer, candidate), self.pricer.sizes
        return [
            Stager(cluster, own, self._costs(own, setting.settings[cluster], solution), sizes)
            for cluster, own in _alone(candidate, setting)
        ]

    def _costs(self, own: Candidate, setting: Setting, solution: Solution) -> BlockCosts:
        """Of a layout, with the loss in as many chunks as are pinned."""
        number, data = own.loss_chunks, self.pricer.data_axis.typing()
        found = None
        if number > 1:
            found = setting.chunked_costs(solution, number, data, own, self.pricer.sizes)
        return setting.costs(solution) if found is None else found

    def _layouts(self, candidate: Candidate) -> Iterator[Solution]:
        """The fastest, and those that keep less where blocks may be computed again instead."""
        setting = self.pricer.setting(candidate)
        yield setting.solution(candidate.recompute)
        is_open = candidate.tp > 1 and candidate.sequence_parallel is None
        if is_open and candidate.recompute == "blocks":
            yield from priced_layouts(setting)

    def _fitting(self, candidate: Candidate, solution: Solution) -> Solved | None:
        """With the blocks that some group of nodes has to compute again; None where that is too
        little.
        """
        if candidate.recompute == "blocks":
            again = NOTHING
            for stager in self.stagers(candidate, solution):
                found = again_on(stager, 0, (0, stager.costs.num_blocks))
                if found is None:
                    return None
                again = again.joined(found)
            candidate = again.of(candidate)
        return self.simulated(candidate, solution) if self.fits(candidate, solution) else None


def _setting(pricer: Pricer, candidate: Candidate) -> MixedSetting:
    setting = pricer.setting(candidate)
    assert isinstance(setting, MixedSetting), "shares are those of groups of nodes"
    return setting


def _alone(candidate: Candidate, setting: MixedSetting) -> Iterator[tuple[Cluster, Candidate]]:
    """The candidate on each group of nodes."""
    (site,) = setting.sites.of_stage
    for cluster, number in zip(site, candidate.shares, strict=True):
        yield cluster, replace(candidate, shares=(), group_order=(), num_micro_batches=number)
