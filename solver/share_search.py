"""The search over candidates whose data ranks have unequal shares of the batch.

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
from autopar.solver.facts import BlockCosts
from autopar.solver.hardware import Cluster
from autopar.solver.hardware.spec import Overlap
from autopar.solver.layout.problem import Solution
from autopar.solver.mixed import MixedSetting
from autopar.solver.search import Search, priced_layouts
from autopar.solver.settings import Setting
from autopar.solver.solved import Solved, solved_together
from autopar.solver.stages import Stager


class ShareSearch(Search):
    """``Search`` that knows candidates with unequal shares, too."""

    def rough_bound(self, candidate: Candidate) -> float:
        if not candidate.shares:
            return super().rough_bound(candidate)
        if not self.data_axis.divides_all():  # ranks need each other within a micro-batch
            return math.inf
        return self._most(candidate, Search.rough_bound)

    def scalar_bound(self, candidate: Candidate) -> float:
        if not candidate.shares:
            return super().scalar_bound(candidate)
        return self._most(candidate, Search.scalar_bound)

    def bound(self, candidate: Candidate) -> float:
        if not candidate.shares:
            return super().bound(candidate)
        return self._most(candidate, Search.bound)

    def layout_bound(self, candidate: Candidate) -> float:
        if not candidate.shares:
            return super().layout_bound(candidate)
        return self._most(candidate, Search.layout_bound)

    def solve(self, candidate: Candidate) -> Solved | None:
        if not candidate.shares:
            return super().solve(candidate)
        found = (self._fitting(candidate, layout) for layout in self._layouts(candidate))
        return min(filter(None, found), key=lambda solved: solved.step_s, default=None)

    def solve_anyway(self, candidate: Candidate) -> Solved:
        if not candidate.shares:
            return super().solve_anyway(candidate)
        solution = self.setting(candidate).solution(candidate.recompute)
        return self.simulated(candidate, solution)

    def made_again(self, candidate: Candidate, solution: Solution, cuts: tuple[int, ...]) -> Solved:
        if not candidate.shares:
            return super().made_again(candidate, solution, cuts)
        return self.simulated(candidate, solution)

    def simulated(self, candidate: Candidate, solution: Solution) -> Solved:
        """With a layout, and with the blocks that the candidate computes again."""
        stagers = self.stagers(candidate, solution)
        return solved_together(candidate, self.setting(candidate), solution, stagers)

    def fits(self, candidate: Candidate, solution: Solution) -> bool:
        """Whether the ranks of every group of nodes have room for a layout."""
        stagers = self.stagers(candidate, solution)
        return all(stager.fits((0, stager.costs.num_blocks)) for stager in stagers)

    def stagers(self, candidate: Candidate, solution: Solution) -> list[Stager]:
        """Costs of a layout on each group of nodes, with the micro-batches of its data ranks."""
        settings = self._settings(candidate)
        return [
            Stager(cluster, own, self._costs(own, settings.settings[cluster], solution), self.sizes)
            for cluster, own in _alone(candidate, settings)
        ]

    def _costs(self, own: Candidate, setting: Setting, solution: Solution) -> BlockCosts:
        """Of a layout, with the loss in as many chunks as are pinned."""
        number, data = own.loss_chunks, self.data_axis.typing()
        found = None
        if number > 1:
            found = setting.chunked_costs(solution, number, data, own, self.sizes)
        return setting.costs(solution) if found is None else found

    def _settings(self, candidate: Candidate) -> MixedSetting:
        setting = self.setting(candidate)
        assert isinstance(setting, MixedSetting), "shares are those of groups of nodes"
        return setting

    def _most(self, candidate: Candidate, bound: Callable[[Search, Candidate], float]) -> float:
        """The largest bound on any group of nodes."""
        settings, most = self._settings(candidate), 0.0
        for cluster, own in _alone(candidate, settings):
            search = self._alone_on(cluster)
            search.use(own, settings.settings[cluster])
            most = max(most, bound(search, own))
        return most

    def _alone_on(self, cluster: Cluster) -> Search:
        """A search on one group of nodes, whose communication slows nothing down."""
        if cluster not in self._searches:
            hardware = replace(cluster.hardware, overlap=Overlap(slowdown=0.0))
            free = cluster.with_hardware(hardware, "nothing is slowed down")
            self._searches[cluster] = Search(self.facts, free, self.sizes, self.divisible)
        return self._searches[cluster]

    def _layouts(self, candidate: Candidate) -> Iterator[Solution]:
        """The fastest, and those that keep less where blocks may be computed again instead."""
        setting = self.setting(candidate)
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


def _alone(candidate: Candidate, settings: MixedSetting) -> Iterator[tuple[Cluster, Candidate]]:
    """The candidate on each group of nodes."""
    (site,) = settings.sites.of_stage
    for cluster, number in zip(site, candidate.shares, strict=True):
        yield cluster, replace(candidate, shares=(), group_order=(), num_micro_batches=number)
