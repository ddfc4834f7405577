"""Best-first search over candidates, with a bound for each: the incumbent and what is proved of it.

A candidate is refined in five steps, each when its bound is the lowest of all:

0. a bound from rooflines (every op at its fastest, work spread evenly over stages) that all
   candidates with its degrees and micro-batches share;
1. the same at the fastest layout of each kind, for its schedule and virtual stages;
2. the bound of ``bounds`` at the fastest layout of each kind, over all stage cuts by dynamic
   programming, runs that provably exceed memory left out;
3. virtual stages, which have only one layout: the bound of that, with what it computes again; of
   others: the bound over what a layout can trade of time for memory, or over the chunks of the loss
   where tensor ranks have no layouts to choose from;
4. solved: the fastest layout, the best cuts for it, and the simulator.

The search ends when no bound is below the best simulated step, or after a fixed number of solved
candidates. What is then proved is the lowest bound of all candidates, solved ones included.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.ir.loss_region import LossKind
from autopar.ir.plan import RecomputeName
from autopar.solver.bounds import StageTimes, exact_times
from autopar.solver.candidates import Candidate, Divisible, Way
from autopar.solver.chunk_choice import ChunkChoice
from autopar.solver.costs.memory import Itemsizes
from autopar.solver.cuts import best_cuts, layer_cuts
from autopar.solver.data_axis import DataAxis
from autopar.solver.facts import BlockCosts, Floats
from autopar.solver.hardware import Cluster
from autopar.solver.in_flight import in_flight, in_parts
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.problem import MemoryLimit, Solution
from autopar.solver.loss_chunks import NUMBERS
from autopar.solver.mixed import AnySetting, MixedSetting
from autopar.solver.recomputing import again_s, priced_again_s
from autopar.solver.runs import Runs, rounds_of
from autopar.solver.schedule_bounds import any_order_s, scalar_bound_s, stage_bounds
from autopar.solver.settings import Setting, make_setting
from autopar.solver.solved import Solved, simulate_cuts
from autopar.solver.stages import Stager
from autopar.solver.typed_axes import TypedAxes
from autopar.solver.virtual_cuts import (
    compute_bound_s,
    cut_bounds_s,
    least_cut_bound_s,
    virtual_cuts,
)
from autopar.solver.zero_choice import with_stages_chosen

Progress = Callable[[str], None]

MAX_SOLVED = 48
"""Work limit of the search, in solved candidates."""

_MOST_NEAR = 24
"""Cuts near the best plan's that are simulated."""

_MEETING = 1024
"""Steps of refinement between two meetings with another search."""

_FIRST_MESHES = 4
"""Meshes of which one candidate is solved before its turn: what is slower than a plan that is known
need not be known exactly.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class SearchResult:
    """The best solved candidate (None when nothing fits), and the bound of all.

    ``bounds`` are those of candidates that were tried, ``left`` has all others: bound, step of
    refinement, candidate. ``unsettled`` were tried, and neither solved nor proved not to fit.
    """

    best: Solved | None
    bound_s: float
    solved: list[Solved]
    bounds: dict[Candidate, float]
    num_candidates: int
    left: list[tuple[float, int, Candidate]] = field(default_factory=list)
    unsettled: list[Candidate] = field(default_factory=list)

    @property
    def open_bounds(self) -> list[tuple[float, Candidate]]:
        """Of candidates that were bounded by their stages and not tried, lowest first."""
        found = [(bound, candidate) for bound, step, candidate in self.left if step >= 2]
        return sorted(found, key=lambda pair: pair[0])


class Search:
    """Searches ``candidates`` for the fastest step."""

    def __init__(
        self,
        facts: ModelFacts,
        cluster: Cluster,
        sizes: Itemsizes,
        divisible: Divisible,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.facts, self.cluster, self.sizes = facts, cluster, sizes
        self.divisible = divisible
        self.progress = progress or (lambda _: None)
        self.data_axis = DataAxis(facts=facts, cluster=cluster.groups[0])
        self.axes = TypedAxes(facts=facts, cluster=cluster.groups[0])
        self.settings: dict[tuple[int, int, int, int, Way], Setting] = {}
        self.too_large: dict[tuple[object, ...], int] = {}  # by degrees: what never fits
        self._rough: dict[tuple[object, ...], float] = {}
        self._scalar: dict[Candidate, float] = {}
        self._fits: dict[tuple[object, ...], bool] = {}
        self._compute: dict[Candidate, float] = {}  # by candidates of ZeRO 0
        self._virtual_cuts: dict[Candidate, tuple[tuple[int, ...], ...]] = {}  # the same
        self._on: dict[tuple[Cluster, object], Setting] = {}  # for several groups of nodes
        self._mixed: dict[tuple[object, ...], MixedSetting] = {}
        self._searches: dict[Cluster, Search] = {}  # on single groups
        self._enough_s = math.inf  # bounds above it need not be exact

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
        started = self._start(first)
        result = SearchResult(
            best=None, bound_s=math.inf, solved=[], bounds={}, num_candidates=len(candidates)
        )
        queue: list[tuple[float, int, int]] = []
        order = sorted(range(len(candidates)), key=lambda n: (candidates[n].micro_batch_size, n))
        for number in order:
            candidate = candidates[number]
            queue.append((self.rough_bound(candidate), number, 0))
        if math.isinf(cutoff_s) and all(solved is None for solved in started.values()):
            self._dive([candidates[number] for _, number, _ in sorted(queue)], started)
        known = (solved for solved in started.values() if solved is not None)
        start = min(known, key=lambda solved: solved.step_s, default=None)
        enough = self._enough_s = cutoff_s if start is None else min(cutoff_s, start.step_s)
        heapq.heapify(queue)
        refine = (self.scalar_bound, self.bound, self.layout_bound, self.fitted_bound)
        fastest: Candidate | None = None
        num_steps, elsewhere_s = 0, math.inf
        while queue and len(result.solved) < MAX_SOLVED:
            bound, number, step = queue[0]
            if not math.isfinite(bound) or (result.best and bound >= result.best.step_s):
                break
            is_found = result.best or start or math.isfinite(elsewhere_s)
            if bound > enough or (is_found and time.perf_counter() >= stop_at_s):
                break
            if meet is not None and num_steps % _MEETING == 0:
                here = [solved.step_s for solved in (result.best, start) if solved is not None]
                elsewhere_s = meet(min(here, default=math.inf))
                enough, self._enough_s = min(enough, elsewhere_s), min(self._enough_s, elsewhere_s)
            num_steps += 1
            heapq.heappop(queue)
            candidate = candidates[number]
            if step < len(refine):
                heapq.heappush(queue, (max(bound, refine[step](candidate)), number, step + 1))
                continue
            self.progress(f"solving {candidate}")
            solved = started[candidate] if candidate in started else self.solve(candidate)
            is_best = solved is not None and self._is_best(candidate, solved)
            result.bounds[candidate] = solved.step_s if solved and is_best else bound
            if solved is None:
                result.unsettled.append(candidate)
                continue
            result.solved.append(solved)
            if result.best is None or solved.step_s < result.best.step_s:
                result.best, fastest = solved, candidate
                self._enough_s = min(self._enough_s, solved.step_s)
        self._enough_s = math.inf
        if result.best is not None and fastest is not None:
            near = self._with_near_cuts(fastest, result.best)
            result.solved = [near if found is result.best else found for found in result.solved]
            result.best = near
        if start is not None and (result.best is None or start.step_s < result.best.step_s):
            result.best = start  # a limit ended the search
            result.solved.append(start)
        result.left = [(bound, step, candidates[number]) for bound, number, step in queue]
        lowest = [bound for bound, _, _ in queue] + list(result.bounds.values())
        if result.best is not None:
            lowest.append(result.best.step_s)
        result.bound_s = min(lowest, default=math.inf)
        return result

    def _dive(
        self, candidates: Sequence[Candidate], started: dict[Candidate, Solved | None]
    ) -> None:
        """Solve a candidate of a few meshes: of the smallest micro-batches, as they fit best."""
        smallest = min((found.micro_batch_size for found in candidates), default=0)
        small = [found for found in candidates if found.micro_batch_size == smallest]
        meshes: dict[tuple[int, ...], list[Candidate]] = {}
        for candidate in small:
            if math.isfinite(self.rough_bound(candidate)) and candidate.virtual_stages == 1:
                mesh = (candidate.pp, *_layout_degrees(candidate))
                meshes.setdefault(mesh, []).append(candidate)
        for own in list(meshes.values())[:_FIRST_MESHES]:
            for candidate in sorted(own, key=lambda found: found.zero_stage != 1)[:2]:
                if candidate not in started:
                    started[candidate] = self.solve(candidate)
                if started[candidate] is not None:
                    break

    def _start(self, first: Sequence[Candidate]) -> dict[Candidate, Solved | None]:
        """``first`` up to the one that fits, solved."""
        found: dict[Candidate, Solved | None] = {}
        for candidate in first:
            if math.isfinite(self.rough_bound(candidate)) and math.isfinite(self.bound(candidate)):
                self.progress(f"solving {candidate}")
                found[candidate] = self.solve(candidate)
                if found[candidate] is not None:
                    break
        return found

    def setting(self, candidate: Candidate) -> AnySetting:
        if self.cluster.is_mixed:
            return self._mixed_setting(candidate)
        key = self.setting_key(candidate)
        if key not in self.settings:
            self.settings[key] = self._setting_on(self.cluster, self.axes, candidate)
        return self.settings[key]

    @staticmethod
    def setting_key(candidate: Candidate) -> tuple[int, int, int, int, Way]:
        """What candidates with the same layouts and costs of blocks have in common."""
        return (*_layout_degrees(candidate), candidate.micro_batch_size, candidate.way)

    def use(self, candidate: Candidate, setting: Setting) -> None:
        """Take the setting of a candidate from elsewhere, on nodes of one kind."""
        self.settings[self.setting_key(candidate)] = setting

    def _setting_on(self, cluster: Cluster, axes: TypedAxes, candidate: Candidate) -> Setting:
        return make_setting(
            self.facts,
            cluster,
            axes,
            cp=candidate.cp,
            ep=candidate.ep,
            tp=candidate.tp,
            micro_batch_size=candidate.micro_batch_size,
            reduce_itemsize=self.sizes.reduce,
            way=candidate.way,
        )

    def _mixed_setting(self, candidate: Candidate) -> MixedSetting:
        """Of all kinds of nodes that the candidate's stages are on."""
        degrees = (*_layout_degrees(candidate), candidate.micro_batch_size, candidate.way)
        key = (*degrees, candidate.pp, candidate.ranks_per_stage, candidate.group_order)
        if key not in self._mixed:
            sites, settings = candidate.sites(self.cluster), {}
            for cluster in sites.clusters:
                priced = cluster  # where layout axes stay inside a node it has no other links
                if candidate.cp * candidate.ep == 1 and candidate.tp <= cluster.gpus_per_node:
                    priced = sites.own[cluster]
                if (priced, degrees) not in self._on:
                    axes = self.axes.on(priced)
                    self._on[priced, degrees] = self._setting_on(priced, axes, candidate)
                settings[cluster] = self._on[priced, degrees]
            self._mixed[key] = MixedSetting(sites=sites, settings=settings)
        return self._mixed[key]

    def stager(self, candidate: Candidate, costs: BlockCosts) -> Stager:
        return Stager(self.cluster, candidate, costs, self.sizes)

    def layout_stager(
        self, candidate: Candidate, setting: AnySetting, solution: Solution
    ) -> Stager:
        """With the costs of a layout, those of the data axis included, and the loss whole."""
        return self.stager(candidate, self._with_data_axis(candidate, setting.costs(solution)))

    def _with_data_axis(self, candidate: Candidate, costs: BlockCosts) -> BlockCosts:
        return self.data_axis.add_undivided(
            costs,
            candidate.sites(self.cluster),
            dp=candidate.dp,
            tp=candidate.tp,
            micro_batch_size=candidate.micro_batch_size,
        )

    def chunk_choice(
        self, candidate: Candidate, setting: AnySetting, solution: Solution
    ) -> ChunkChoice:
        """The same with the loss in any number of chunks."""

        def costs(num_chunks: int) -> BlockCosts | None:
            found = setting.chunked_costs(
                solution, num_chunks, self.data_axis.typing(), candidate, self.sizes
            )
            return None if found is None else self._with_data_axis(candidate, found)

        whole = self.layout_stager(candidate, setting, solution)
        return ChunkChoice(whole=whole, costs=costs, block=self.facts.loss_block)

    def rough_bound(self, candidate: Candidate) -> float:
        """Of all candidates with its degrees and micro-batches; infinite for what fits nowhere."""
        degrees = (candidate.pp, candidate.dp, *_layout_degrees(candidate))
        batch = (candidate.micro_batch_size, candidate.num_micro_batches)
        key = (*degrees, *batch, candidate.way, candidate.group_order)
        known = self._rough.get(key)
        if known is None:
            known = self._rough[key] = self._rough_bound(candidate)
        return known

    def _rough_bound(self, candidate: Candidate) -> float:
        if candidate.way.recompute != "none":
            return self.rough_bound(_keeping_ops(candidate))
        degrees = (*_layout_degrees(candidate), candidate.way, candidate.group_order)
        if candidate.micro_batch_size >= self.too_large.get(degrees, math.inf):
            return math.inf
        setting = self.setting(candidate)
        if setting.never_fits(self.cluster):
            self.too_large[degrees] = candidate.micro_batch_size
            return math.inf
        forward = setting.least.forward_s
        return any_order_s(candidate, forward, forward + setting.least.backward_s)

    def scalar_bound(self, candidate: Candidate) -> float:
        """``scalar_bound_s`` at the fastest layout of each kind."""
        known = self._scalar.get(candidate)
        if known is None:
            known = self._scalar[candidate] = self._scalar_bound(candidate)
        return known

    def _scalar_bound(self, candidate: Candidate) -> float:
        if candidate.way.recompute != "none":
            keeping_s = self.scalar_bound(_keeping_ops(candidate))
            if keeping_s > self._enough_s:  # the setting of its own need not be made
                return keeping_s
        bound = self._compute_bound(candidate) if candidate.virtual_stages > 1 else 0.0
        if bound > self._enough_s:
            return bound
        stager = self.stager(candidate, self.setting(candidate).least)
        if not self._may_fit(stager):
            return math.inf
        times = self._least_times(candidate).plus_backward(stager.adding_s())
        bound = max(bound, scalar_bound_s(candidate, times))
        if candidate.virtual_stages > 1:
            cuts = self._cuts(candidate, stager)
            fitting = stager.least_cuts_fit(rounds_of(cuts, candidate.pp))
            cuts = tuple(itertools.compress(cuts, fitting.tolist()))
            if not cuts:
                return math.inf
            bound = max(bound, least_cut_bound_s(stager, times, cuts, memory=False))
        return bound

    def _may_fit(self, stager: Stager) -> bool:
        """``stager.may_fit``, asked once for candidates that are alike for it."""
        candidate = stager.candidate
        key = (
            *(candidate.pp, candidate.dp, candidate.num_shards, candidate.zero_stage),
            *(candidate.num_micro_batches if candidate.schedule == "layered" else 0,),
            *(candidate.recompute, candidate.group_order, candidate.zero_stages),
            *self.setting_key(candidate),
        )
        if key not in self._fits:
            self._fits[key] = stager.may_fit()
        return self._fits[key]

    def _compute_bound(self, candidate: Candidate) -> float:
        """``compute_bound_s`` of a candidate with virtual stages, shared by those alike."""
        alike = candidate.of_any_zero
        known = self._compute.get(alike)
        if known is None:
            stager = self.stager(candidate, self.setting(candidate).least)
            times = self._least_times(candidate).plus_backward(stager.adding_s())
            known = compute_bound_s(stager, times, self._cuts(candidate, stager))
            self._compute[alike] = known
        return known

    def _least_times(self, candidate: Candidate) -> StageTimes:
        """Below every layout of the candidate."""
        setting = self.setting(candidate)
        times = setting.part_times if candidate.has_parts else setting.least_times
        return times(candidate.recompute)

    def bound(self, candidate: Candidate) -> float:
        """No layout and no cuts of the candidate are faster; infinite when none fits."""
        setting = self.setting(candidate)
        costs = setting.offered() if candidate.recompute == "blocks" else setting.least
        stager = self.stager(candidate, costs)
        if candidate.virtual_stages > 1:
            times = self._least_times(candidate).plus_backward(stager.adding_s())
            own = least_cut_bound_s(stager, times, self._cuts(candidate, stager))
            return max(scalar_bound_s(candidate, times), own)
        again = functools.partial(again_s, stager, exact=False)
        added = stager.adding_s()
        times = self._least_times(candidate)
        if candidate.pp == 1:
            times = setting.joint_times(candidate.recompute)
        if candidate.recompute == "blocks" and candidate.tp > 1:
            stager = self.stager(candidate, setting.tight())
            again = functools.partial(_least_again_s, stager, setting, times.both)
        priced = _beyond(setting, times.both) if candidate.zero_open else None
        bounds = stage_bounds(stager, times.plus_backward(added), again, priced)
        return bounds.best_s(enough_s=self._enough_s)

    def _memory_bound(self, candidate: Candidate) -> float:
        """The larger of two: by a frontier of what blocks keep, and by prices for what they keep
        between the parts of backwards.
        """
        bound = self.frontier_bound(candidate)
        if not candidate.has_parts or candidate.recompute != "blocks" or bound > self._enough_s:
            return bound
        setting, times = self.setting(candidate), self._least_times(candidate)
        stager = self.stager(candidate, setting.tight())
        again = functools.partial(_least_parts_again_s, stager, setting, times.both)
        bounds = stage_bounds(stager, times.plus_backward(stager.adding_s()), again)
        return max(bound, bounds.best_s(guess_s=bound, enough_s=self._enough_s))

    def frontier_bound(self, candidate: Candidate) -> float:
        """Over all trades of time for memory in the blocks that repeat: what takes least keeps
        most, and more of it is computed again.
        """
        setting = self.setting(candidate)
        times, tight = self._least_times(candidate), setting.tight()
        best, least = math.inf, self.scalar_bound(candidate)
        for held, both in setting.trades():
            stager = self.stager(candidate, replace(tight, held_bytes=held))
            again = functools.partial(again_s, stager, exact=False)
            longer = times.plus(np.maximum(0.0, both - times.both)).plus_backward(stager.adding_s())
            bounds = stage_bounds(stager, longer, again)
            enough_s = min(best, self._enough_s)
            best = min(best, bounds.best_s(guess_s=least, enough_s=enough_s))
        return best

    def layout_bound(self, candidate: Candidate) -> float:
        """Of a candidate with one layout: with that. Of others: with the memory that a layout needs
        for its speed.
        """
        if self._has_one_layout(candidate):
            return min(bound for bound, _ in self._cut_bounds(candidate))
        if candidate.tp == 1 and candidate.chunks_open:
            return self._chunk_bound(candidate)
        if candidate.recompute == "blocks" and candidate.tp > 1:
            return self._memory_bound(candidate)
        return 0.0

    def fitted_bound(self, candidate: Candidate) -> float:
        """Of a candidate with one layout: cuts with what fits them."""
        if not self._has_one_layout(candidate):
            return 0.0
        choice, best = self._only_choice(candidate), math.inf
        for bound, cuts in self._cut_bounds(candidate):
            if bound >= min(best, self._enough_s):
                return min(best, bound)
            for chosen in with_stages_chosen(choice, cuts):
                best = min(best, least_cut_bound_s(chosen, exact_times(chosen), [cuts]))
        return best

    def _cut_bounds(self, candidate: Candidate) -> list[tuple[float, tuple[int, ...]]]:
        """Of a candidate with one layout: its cuts, those with the lowest bound first."""
        stager = self._only_choice(candidate).roomiest()
        all_cuts = self._cuts(candidate, stager)
        bounds = cut_bounds_s(stager, exact_times(stager), all_cuts).tolist()
        return sorted(zip(bounds, all_cuts, strict=True))

    def _only_choice(self, candidate: Candidate) -> ChunkChoice:
        setting = self.setting(candidate)
        return self.chunk_choice(candidate, setting, setting.solution(candidate.recompute))

    def _chunk_bound(self, candidate: Candidate) -> float:
        """Over all numbers of chunks, where ranks of the tensor axis have no choice of layouts."""
        choice, best = self._only_choice(candidate), math.inf
        for number in (1, *NUMBERS):
            stager = choice.stager(number)
            if stager is None:
                continue
            times, enough_s = exact_times(stager), min(best, self._enough_s)
            bound = scalar_bound_s(candidate, times)
            if bound < enough_s:
                again = functools.partial(again_s, stager, exact=False)
                bound = stage_bounds(stager, times, again).best_s(enough_s=enough_s)
            best = min(best, bound)
        return best

    def _is_best(self, candidate: Candidate, solved: Solved) -> bool:
        """Whether no plan of the candidate is faster: on a single stage and tensor rank there are
        neither cuts nor layouts, only blocks that may be computed again.
        """
        is_single = candidate.pp == candidate.tp == 1 and not solved.candidate.recomputes
        is_single = is_single and (not candidate.zero_open or solved.candidate.zero_stage == 1)
        is_single = is_single and not solved.candidate.zero_stages
        is_single = is_single and solved.candidate.loss_chunks == candidate.loss_chunks
        return is_single or self._has_one_layout(candidate)

    def _has_one_layout(self, candidate: Candidate) -> bool:
        """Whether nothing is left but to simulate some cuts: virtual stages are searched with the
        fastest layout, and with ``virtual_cuts``.
        """
        return candidate.virtual_stages > 1

    def solve_anyway(self, candidate: Candidate) -> Solved:
        """The candidate with its fastest layout, whether or not it fits into memory."""
        setting = self.setting(candidate)
        solution = setting.solution(candidate.recompute)
        candidate = replace(candidate, zero_open=False)
        stager = self._decided_stager(candidate, setting, solution)
        times = exact_times(stager)
        found = self._cuts(candidate, stager, times)
        if not found:  # no cuts fit: those that are fastest
            bounds = stage_bounds(stager, times, lambda runs: np.zeros(runs.length.shape))
            found = (best_cuts(bounds, bounds.reach.anywhere())[1],)
        return min(
            (simulate_cuts(candidate, setting, solution, stager, cuts) for cuts in found),
            key=lambda solved: solved.step_s,
        )

    def _decided_stager(
        self, candidate: Candidate, setting: AnySetting, solution: Solution
    ) -> Stager:
        """With the chunks of the loss that the candidate says; whole where they cannot be."""
        choice = self.chunk_choice(candidate, setting, solution)
        return choice.pinned() or choice.whole

    def made_again(self, candidate: Candidate, solution: Solution, cuts: tuple[int, ...]) -> Solved:
        """What was solved elsewhere, of which these are known."""
        setting = self.setting(candidate)
        stager = self._decided_stager(candidate, setting, solution)
        return simulate_cuts(candidate, setting, solution, stager, cuts)

    def solve(self, candidate: Candidate) -> Solved | None:
        """The candidate with the layout that is fastest of those that fit; None when none was
        found.

        What is too large for the fastest layout gets one that keeps less, or computes blocks again.
        """
        setting = self.setting(candidate)
        solved = self._with_layout(candidate, setting, setting.solution(candidate.recompute))
        pinned = candidate.tp == 1 or candidate.sequence_parallel is not None
        pinned = pinned or self._has_one_layout(candidate)
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

    def _within_memory(self, candidate: Candidate, setting: AnySetting) -> Solved | None:
        """With the fastest of the layouts that keep so little that they fit."""
        limits = self._memory_limits(candidate, setting)
        if limits is None:
            return None
        solution = setting.solution(candidate.recompute, limits)
        if solution.status == "infeasible":
            return None
        return self._with_layout(candidate, setting, solution)

    def _with_layout(
        self, candidate: Candidate, setting: AnySetting, solution: Solution
    ) -> Solved | None:
        choice, found = self.chunk_choice(candidate, setting, solution), list[Solved]()
        tried = list[tuple[tuple[int, ...], ...]]()
        for variant in _zero_variants(candidate):
            whole = replace(choice, whole=replace(choice.whole, candidate=variant))
            tried.append(self._cuts(variant, whole.whole))
            if candidate.loss_chunks > 1 or not any(map(whole.is_roomy, tried)):
                tried.append(self._cuts(variant, whole.roomiest()))
            elif variant.zero_stage == 1:
                break  # with others it has no less to do
        for cuts in dict.fromkeys(itertools.chain.from_iterable(tried)):
            solved = self._simulated(choice, setting, solution, cuts)
            found += [solved] if solved is not None else []
        return min(found, key=lambda solved: solved.step_s, default=None)

    def _simulated(
        self, choice: ChunkChoice, setting: AnySetting, solution: Solution, cuts: tuple[int, ...]
    ) -> Solved | None:
        """With these cuts; None where it does not fit."""
        found = (
            simulate_cuts(chosen.candidate, setting, solution, chosen, cuts)
            for chosen in with_stages_chosen(choice, cuts)
        )
        return min(found, key=lambda solved: solved.step_s, default=None)

    def _with_near_cuts(self, candidate: Candidate, solved: Solved) -> Solved:
        """A solved candidate with single cuts moved by a block, as long as that is faster: cuts are
        chosen by bounds, which do not see all that the simulator does.
        """
        if candidate.cuts == "even" or candidate.virtual_stages > 1:
            return solved
        choice = self.chunk_choice(candidate, solved.setting, solved.solution)
        tried, left = {solved.cuts}, _MOST_NEAR
        while left > 0:
            found: list[Solved] = []
            for cuts in _near_cuts(solved)[:left]:
                if cuts not in tried:
                    near = self._simulated(choice, solved.setting, solved.solution, cuts)
                    found += [near] if near is not None else []
                tried.add(cuts)
            left -= len(found)
            best = min(found, key=lambda other: other.step_s, default=solved)
            if best.step_s >= solved.step_s:
                return solved
            solved = best
        return solved

    def _cuts(
        self, candidate: Candidate, stager: Stager, times: StageTimes | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Cuts to try: the best by the bounds, if any fit, or some for virtual stages."""
        if candidate.cuts == "even":
            num = candidate.pp * candidate.virtual_stages
            return (layer_cuts(self.facts.model, num),)
        if candidate.virtual_stages > 1:
            alike = candidate.of_any_zero
            if alike not in self._virtual_cuts:
                whole = self.stager(candidate, self.setting(candidate).whole)
                self._virtual_cuts[alike] = virtual_cuts(whole)
            return self._virtual_cuts[alike]
        times = exact_times(stager) if times is None else times
        bounds = stage_bounds(stager, times)
        bound, cuts = best_cuts(bounds, bounds.reach)
        return (cuts,) if math.isfinite(bound) else ()

    def _memory_limits(
        self, candidate: Candidate, setting: AnySetting
    ) -> tuple[MemoryLimit, ...] | None:
        """Limits for the ILP: what each stage may keep, at the cuts that the least costs allow."""
        stager = self.stager(candidate, setting.least)
        times = setting.roofline_times(candidate.recompute)
        found = self._cuts(candidate, stager, times)
        if not found:
            return None
        cuts = min(found, key=stager.most_missing)
        return tuple(
            self._stage_limit(candidate, setting, stager, stage, cuts)
            for stage in range(candidate.pp)
        )

    def _stage_limit(
        self,
        candidate: Candidate,
        setting: AnySetting,
        stager: Stager,
        stage: int,
        cuts: tuple[int, ...],
    ) -> MemoryLimit:
        """What is left for kept tensors once all else has its least."""
        runs = stager.virtual_stages(stage, cuts)
        blocks = np.concatenate([np.arange(first, last + 1) for first, last in runs])
        causes = stager.bytes_by_cause(stage, cuts)
        share = 1 + stager.sites.memory[stage].fragmentation
        least = stager.costs.held_bytes[blocks]
        once = setting.least.again(candidate.recompute)[blocks]
        lengths = [last + 1 - first for first, last in runs]
        moments = np.repeat(in_flight(candidate, stage), lengths, axis=1)
        flying = moments[np.argmax(moments @ (least * (1 - once)))]
        counted = float((least * once).max() + (least * (1 - once)) @ flying)
        rest = sum(causes.values()) - counted * share
        copies, in_chunks = [], None
        if setting.loss_chunks != 1 and isinstance(self.facts.loss, LossKind):
            in_chunks = self.facts.loss.kind.name
        for name in setting.problem.kinds:
            own = [self.facts.model.blocks[block].kind == name for block in blocks]
            if name == in_chunks:
                copies.append(0.0)  # what it keeps is no longer what the problem says
                continue
            kept = float(((1 - once) * flying)[own].sum())
            copies.append(kept + any(once[own]))
        return MemoryLimit(
            name=f"stage {stage}",
            num_bytes=int((int(stager.sites.usable_bytes[stage]) - rest) / share),
            copies=tuple(copies),
            parameter_bytes=(0.0,) * len(setting.problem.classes),
        )


def _beyond(setting: AnySetting, both: Floats) -> dict[float, Floats]:
    """What no layout is below, beyond ``both``, at prices of a kept byte."""
    return {price: setting.priced(price) - both for price in setting.prices()}


def _least_again_s(stager: Stager, setting: AnySetting, both: Floats, runs: Runs) -> Floats:
    """What no layout of a candidate is below that computes blocks again."""
    priced = {price: setting.priced(price) for price in setting.prices()}
    least = again_s(stager, runs, exact=False)
    return np.maximum(least, priced_again_s(stager, runs, priced, both))


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
        priced = {
            price: setting.priced(price, price * waiting / still) for price in setting.prices()
        }
        more = priced_again_s(stager, own, priced, both)
        found[number : number + 1] = np.maximum(found[number : number + 1], more)
    return found


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


def priced_layouts(setting: AnySetting) -> list[Solution]:
    """Layouts that are slower and keep less than the fastest: at prices of a kept byte, of blocks
    that are computed once or whose ops are computed again.
    """
    fastest, found = setting.solution("none"), dict[object, Solution]()
    for by_op, price in itertools.product((False, True), setting.prices()):
        solution = setting.priced_solution(price, by_op=by_op)
        found.setdefault((solution.choices, solution.states), solution)
    found.pop((fastest.choices, fastest.states), None)
    return list(found.values())


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


def _keeping_ops(candidate: Candidate) -> Candidate:
    """A candidate that takes no more time and no more memory than one that computes ops again."""
    return replace(candidate, recompute="blocks")


def _layout_degrees(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.cp, candidate.ep, candidate.tp
