"""Best-first search over candidates, with a bound for each: the incumbent and what is proved of it.

A candidate is refined step by step (``refinement``), each time when its bound is the lowest of all.
The search ends when no bound is below the best simulated step, or after a fixed number of solved
candidates, and one of each order of work beside them: where bounds are loose, those of one order
may all be lower than the others'. What is then proved is the lowest bound of all candidates, solved
ones included.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence

from autopar.solver.candidates import Candidate
from autopar.solver.costs.memory import Itemsizes
from autopar.solver.hardware import Cluster
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.refiner import Refiner
from autopar.solver.search_result import SearchResult
from autopar.solver.solved import Solved

Progress = Callable[[str], None]

MAX_SOLVED = 48
"""Work limit of the search, in solved candidates."""

_MEETING = 1024
"""Steps of refinement between two meetings with another search."""

_OPENED = 4
"""Step of refinement after which a candidate that stands for several is split."""

_FIRST_MESHES = 4
"""Meshes of which one candidate is solved before its turn: what is slower than a plan that is known
need not be known exactly.
"""


class Search:
    """Searches candidates of a model on a cluster for the fastest step."""

    def __init__(
        self,
        facts: ModelFacts,
        cluster: Cluster,
        sizes: Itemsizes,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.refiner = Refiner(facts, cluster, sizes)
        self.pricer = self.refiner.pricer
        self.progress = progress or (lambda _: None)

    def run(
        self,
        candidates: Sequence[Candidate],
        *,
        first: Sequence[Candidate] = (),
        cutoff_s: float = math.inf,
        stop_at_s: float = math.inf,
        meet: Callable[[float], float] | None = None,
    ) -> SearchResult:
        """The fastest candidate, and a bound on all of them.

        Args:
            candidates: What is searched.
            first: Those of them to solve before all others, in order, until one fits: there is an
                answer from then on, and it is the one without ``first`` unless a limit ends the
                search.
            cutoff_s: Steps that are longer are of no use: the search ends where all are.
            stop_at_s: ``time.perf_counter()`` after which none is begun, once one was found.
            meet: Called now and then with the shortest step so far, for one that is known elsewhere
                and serves as ``cutoff_s``.
        """
        run = _Run(self.refiner, self.progress, candidates, cutoff_s)
        run.solve_first(first)
        if math.isinf(cutoff_s) and run.start is None:
            run.dive()
        while run.is_open(stop_at_s):
            if meet is not None:
                run.meet(meet)
            run.refine_lowest()
        if len(run.solved) >= MAX_SOLVED:
            run.look_around(stop_at_s)
        return run.result()


class _Run:
    """A search on its way: what is open, lowest bound first, and what is known."""

    def __init__(
        self,
        refiner: Refiner,
        progress: Progress,
        candidates: Sequence[Candidate],
        cutoff_s: float,
    ) -> None:
        self.refiner, self.progress = refiner, progress
        self.candidates, self.cutoff_s = list(candidates), cutoff_s
        self.num_candidates = sum(candidate.num_members for candidate in candidates)
        self.refine = (refiner.scalar, refiner.stages, refiner.layouts, refiner.fitted)
        order = sorted(range(len(candidates)), key=lambda n: (candidates[n].micro_batch_size, n))
        self.queue = [(refiner.rough(candidates[number]), number, 0) for number in order]
        heapq.heapify(self.queue)
        self.started: dict[Candidate, Solved | None] = {}  # solved before their turn
        self.start: Solved | None = None  # the fastest of these
        self.solved: list[Solved] = []
        self.bounds: dict[Candidate, float] = {}
        self.unsettled: list[Candidate] = []
        self.best: tuple[Candidate, Solved] | None = None
        self.elsewhere_s = math.inf
        self.num_steps = 0

    @property
    def best_s(self) -> float:
        return math.inf if self.best is None else self.best[1].step_s

    @property
    def useful_s(self) -> float:
        """Longer steps are of no use, whatever is found here."""
        return min(self.cutoff_s, self.elsewhere_s)

    def solve_first(self, first: Sequence[Candidate]) -> None:
        """``first`` up to the one that fits."""
        for candidate in first:
            if self.refiner.may_fit(candidate):
                self.progress(f"solving {candidate}")
                if self._start(candidate):
                    return

    def dive(self) -> None:
        """Solve a candidate of a few meshes: of the smallest micro-batches, as they fit best."""
        smallest = min((found.micro_batch_size for found in self.candidates), default=0)
        meshes: dict[tuple[int, ...], list[Candidate]] = {}
        for bound, number, _ in sorted(self.queue):
            candidate = self.candidates[number]
            is_small = candidate.micro_batch_size == smallest and candidate.virtual_stages == 1
            if is_small and math.isfinite(bound):
                mesh = (candidate.pp, candidate.cp, candidate.ep, candidate.tp)
                meshes.setdefault(mesh, []).append(candidate)
        for own in list(meshes.values())[:_FIRST_MESHES]:
            for candidate in sorted(own, key=lambda found: found.zero_stage != 1)[:2]:
                if self._start(candidate.members()[0]):
                    break

    def _start(self, candidate: Candidate) -> bool:
        """Solve a candidate before its turn; whether it fits."""
        if candidate not in self.started:
            solved = self.started[candidate] = self.refiner.solve(candidate)
            if solved is not None and (self.start is None or solved.step_s < self.start.step_s):
                self.start, self.cutoff_s = solved, min(self.cutoff_s, solved.step_s)
        return self.started[candidate] is not None

    def is_open(self, stop_at_s: float) -> bool:
        """Whether something may still be better, and limits leave time for it."""
        if len(self.solved) >= MAX_SOLVED or not self._may_improve():
            return False
        is_found = self.best is not None or self.start is not None
        is_found = is_found or math.isfinite(self.elsewhere_s)
        return not is_found or time.perf_counter() < stop_at_s

    def look_around(self, stop_at_s: float) -> None:
        """Solve one candidate of each order of work of which none was solved."""
        known = {_order_of(solved.candidate) for solved in self.solved}
        queues: dict[tuple[str, int], list[tuple[float, int, int]]] = {}
        for entry in self.queue:
            queues.setdefault(_order_of(self.candidates[entry[1]]), []).append(entry)
        left: list[tuple[float, int, int]] = []
        for order, self.queue in queues.items():
            heapq.heapify(self.queue)
            num = len(self.solved)
            while order not in known and self._may_improve() and len(self.solved) == num:
                if time.perf_counter() >= stop_at_s:
                    break
                self.refine_lowest()
            left += self.queue
        self.queue = left

    def _may_improve(self) -> bool:
        if not self.queue:
            return False
        bound = self.queue[0][0]
        return math.isfinite(bound) and bound < self.best_s and bound <= self.useful_s

    def meet(self, meet: Callable[[float], float]) -> None:
        """Now and then: tell the shortest step so far, and hear of another one."""
        if self.num_steps % _MEETING == 0:
            start_s = math.inf if self.start is None else self.start.step_s
            self.elsewhere_s = min(self.elsewhere_s, meet(min(self.best_s, start_s)))

    def refine_lowest(self) -> None:
        """Take what has the lowest bound a step on."""
        self.num_steps += 1
        bound, number, step = heapq.heappop(self.queue)
        candidate = self.candidates[number]
        if step == _OPENED and candidate.stands_for_several:
            self.split(bound, candidate)
            return
        if step < len(self.refine):
            bound = max(bound, self.refine[step](candidate, min(self.best_s, self.useful_s)))
            heapq.heappush(self.queue, (bound, number, step + 1))
            return
        self.progress(f"solving {candidate}")
        known = candidate in self.started
        solved = self.started[candidate] if known else self.refiner.solve(candidate)
        self.bounds[candidate] = bound
        if solved is None:
            self.unsettled.append(candidate)
            return
        if self.refiner.is_best(candidate, solved):
            self.bounds[candidate] = solved.step_s
        self.solved.append(solved)
        if solved.step_s < self.best_s:
            self.best = candidate, solved

    def split(self, bound: float, candidate: Candidate) -> None:
        """Search all that a candidate stands for; none is below its bound."""
        for own in candidate.members():
            heapq.heappush(self.queue, (bound, len(self.candidates), 0))
            self.candidates.append(own)

    def result(self) -> SearchResult:
        """What was found in the end."""
        best, solved = None, list(self.solved)
        if self.best is not None:
            candidate, found = self.best
            best = self.refiner.improved(candidate, found)
            solved = [best if other is found else other for other in solved]
        if self.start is not None and (best is None or self.start.step_s < best.step_s):
            best = self.start  # a limit ended the search
            solved.append(best)
        left = [(bound, step, self.candidates[number]) for bound, number, step in self.queue]
        lowest = [bound for bound, _, _ in left] + list(self.bounds.values())
        if best is not None:
            lowest.append(best.step_s)
        return SearchResult(
            best=best,
            bound_s=min(lowest, default=math.inf),
            solved=solved,
            bounds=self.bounds,
            num_candidates=self.num_candidates,
            left=left,
            unsettled=self.unsettled,
        )


def _order_of(candidate: Candidate) -> tuple[str, int]:
    """The order of its work."""
    return candidate.schedule, candidate.virtual_stages
