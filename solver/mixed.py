"""A setting of a cluster of several groups of nodes: the same problem, priced on each of them.

Layouts are one decision for all stages: ops of a kind of block have one option wherever the block
lies. The layout is solved for as it costs on each kind of nodes, and what takes least where all
blocks were on every stage once is kept. What is a bound on every kind of nodes is put together
stage by stage: on a stage that lies across groups a block takes no less than on any of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.ir.plan import RecomputeName
from autopar.solver.bounds import StageTimes
from autopar.solver.candidates import Candidate
from autopar.solver.costs.memory import Itemsizes
from autopar.solver.facts import BlockCosts, Floats, Part
from autopar.solver.hardware import Cluster
from autopar.solver.layout.frontier import FrontierPoint
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.outer import AxisTyping
from autopar.solver.layout.problem import MemoryLimit, Problem, Solution
from autopar.solver.layout.solve import ProblemSolver
from autopar.solver.settings import NOTHING_AGAIN, Setting
from autopar.solver.sites import Sites
from autopar.solver.typed_axes import TypedAxes


@dataclass(slots=True, kw_only=True, eq=False)
class MixedSetting:
    """``Setting`` for stages on several kinds of nodes; ``settings`` are those on each."""

    sites: Sites
    settings: Mapping[Cluster, Setting]
    _least: BlockCosts | None = None
    _whole: BlockCosts | None = None
    _offered: BlockCosts | None = None
    _tight: BlockCosts | None = None
    _times: dict[tuple[str, RecomputeName], StageTimes] = field(default_factory=dict)
    _costs: dict[int, tuple[Solution, BlockCosts]] = field(default_factory=dict)
    _priced: dict[tuple[float, float], Floats] = field(default_factory=dict)

    @property
    def _any(self) -> Setting:
        return next(iter(self.settings.values()))

    @property
    def facts(self) -> ModelFacts:
        return self._any.facts

    @property
    def axes(self) -> TypedAxes:
        return self._any.axes

    @property
    def problem(self) -> Problem:
        """Of one of the kinds of nodes: all have the same options."""
        return self._any.problem

    @property
    def least(self) -> BlockCosts:
        """What no layout is below."""
        if self._least is None:
            self._least = self._joined_least({c: s.least for c, s in self.settings.items()})
        return self._least

    @property
    def whole(self) -> BlockCosts:
        """See ``Setting``."""
        if self._whole is None:
            self._whole = self._joined_least({c: s.whole for c, s in self.settings.items()})
        return self._whole

    def offered(self) -> BlockCosts:
        """See ``Setting``."""
        if self._offered is None:
            self._offered = self._joined_least({c: s.offered() for c, s in self.settings.items()})
        return self._offered

    @property
    def loss_chunks(self) -> int:
        """See ``Setting``."""
        return self._any.loss_chunks

    def tight(self) -> BlockCosts:
        """See ``Setting``."""
        if self._tight is None:
            self._tight = self._joined_least({c: s.tight() for c, s in self.settings.items()})
        return self._tight

    def solution(self, recompute: RecomputeName, limits: Sequence[MemoryLimit] = ()) -> Solution:
        """The layout that is fastest of those that are on some kind of nodes."""
        return self._fastest([s.solution(recompute, limits) for s in self.settings.values()])

    def part_solvers(self) -> Mapping[Part, ProblemSolver]:
        """Of one of the kinds of nodes: all have the same parts."""
        return self._any.part_solvers()

    def priced_solution(self, price: float, part: Part = NOTHING_AGAIN) -> Solution:
        """See ``Setting``."""
        found = [s.priced_solution(price, part) for s in self.settings.values()]
        return self._fastest(found, part)

    def _fastest(self, found: Sequence[Solution], part: Part = NOTHING_AGAIN) -> Solution:
        able = [solution for solution in found if solution.status != "infeasible"]
        if not able:
            return found[0]
        by_layout: dict[object, Solution] = {}
        for solution in able:
            by_layout.setdefault((solution.choices, solution.states), solution)

        def seconds(solution: Solution) -> float:
            costs = self.costs(solution)
            again = sum(own.again_s.sum() for own in costs.parts if own.key == part)
            return float((costs.forward_s + costs.backward_s).sum() + again)

        return min(by_layout.values(), key=seconds)

    def costs(self, solution: Solution) -> BlockCosts:
        """What blocks cost under a solution on each stage."""
        if id(solution) not in self._costs:
            costs = {c: setting.costs(solution) for c, setting in self.settings.items()}
            self._costs[id(solution)] = solution, join_costs(self.sites, costs)
        return self._costs[id(solution)][1]

    def chunked_costs(
        self,
        solution: Solution,
        num_chunks: int,
        data: AxisTyping,
        candidate: Candidate,
        sizes: Itemsizes,
    ) -> BlockCosts | None:
        """See ``Setting``."""
        costs = {
            cluster: setting.chunked_costs(solution, num_chunks, data, candidate, sizes)
            for cluster, setting in self.settings.items()
        }
        found = {cluster: own for cluster, own in costs.items() if own is not None}
        return join_costs(self.sites, found) if len(found) == len(costs) else None

    def never_fits(self, cluster: Cluster) -> bool:
        """See ``Setting``: on no group of nodes."""
        return all(self._any.never_fits(group) for group in cluster.groups)

    def roofline_times(self, recompute: RecomputeName) -> StageTimes:
        """See ``Setting``."""
        return self._times_of("roofline", recompute, lambda s: s.roofline_times(recompute))

    def least_times(self, recompute: RecomputeName) -> StageTimes:
        """See ``Setting``."""
        return self._times_of("least", recompute, lambda s: s.least_times(recompute))

    def part_times(self, recompute: RecomputeName) -> StageTimes:
        """See ``Setting``."""
        return self._times_of("part", recompute, lambda s: s.part_times(recompute))

    def joint_times(self, recompute: RecomputeName) -> StageTimes:
        """See ``Setting``; for a single stage. Only sums bound, so that they are those of the
        slowest kind of nodes.
        """
        assert not self.sites.is_mixed
        found = [setting.joint_times(recompute) for setting in self.settings.values()]
        return max([*found, self.least_times(recompute)], key=lambda times: float(times.both.sum()))

    def _times_of(
        self, name: str, recompute: RecomputeName, times: Callable[[Setting], StageTimes]
    ) -> StageTimes:
        if (name, recompute) not in self._times:
            found = {cluster: times(setting) for cluster, setting in self.settings.items()}
            both = self.sites.most(lambda cluster: found[cluster].both)
            backward = self.sites.most(lambda cluster: found[cluster].both - found[cluster].forward)
            forward = self.sites.most(lambda cluster: found[cluster].both - found[cluster].backward)
            self._times[name, recompute] = StageTimes(
                both=both,
                forward=both - backward,
                backward=both - forward,
                input=self.sites.most(lambda cluster: found[cluster].input),
                early=self.sites.most(lambda cluster: found[cluster].early),
                weight=self.sites.most(lambda cluster: found[cluster].weight),
            )
        return self._times[name, recompute]

    def trades(self) -> Iterator[tuple[BlockCosts, Floats]]:
        """See ``Setting``: on each kind of nodes a layout takes no less than what keeps no more."""
        least = self.least_times("none").both
        frontiers = {cluster: setting.frontiers() for cluster, setting in self.settings.items()}
        kinds = {
            tuple(blocks): sorted(
                {point.num_bytes for own in frontiers.values() for point in _points(own, blocks)}
            )
            for own in frontiers.values()
            for blocks, _ in own
        }
        for chosen in itertools.product(*kinds.values()):
            held = self.tight().held_bytes.copy()
            more = dict.fromkeys(self.settings, np.zeros(len(held)))
            for blocks, num_bytes in zip(kinds, chosen, strict=True):
                held[list(blocks)] = np.maximum(held[list(blocks)], num_bytes)
                for cluster, own in frontiers.items():
                    more[cluster] = more[cluster].copy()
                    more[cluster][list(blocks)] = _seconds_at(_points(own, blocks), num_bytes)
            costs = replace(self.tight(), held_bytes=held)
            yield costs, np.maximum(least, self.sites.most(more.__getitem__))

    def priced(self, price: float, waiting: float = 0.0) -> Floats:
        """See ``Setting``."""
        if (price, waiting) not in self._priced:
            found = self.sites.most(lambda c: self.settings[c].priced(price, waiting))
            self._priced[price, waiting] = found
        return self._priced[price, waiting]

    def prices(self) -> tuple[float, ...]:
        """Those on each kind of nodes."""
        found = (setting.prices() for setting in self.settings.values())
        return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))

    def _joined_least(self, costs: Mapping[Cluster, BlockCosts]) -> BlockCosts:
        """Costs that no layout is below."""
        held = np.max([own.held_bytes for own in costs.values()], axis=0)
        joined = join_costs(self.sites, costs)
        parts = tuple(
            replace(part, held_bytes=np.max([own.parts[n].held_bytes for own in costs.values()], 0))
            for n, part in enumerate(joined.parts)
        )
        return replace(joined, held_bytes=held, parts=parts)


AnySetting = Setting | MixedSetting


def join_costs(sites: Sites, costs: Mapping[Cluster, BlockCosts]) -> BlockCosts:
    """Costs of blocks on each stage, from those on each kind of nodes, which differ in seconds."""
    one = next(iter(costs.values()))

    def part_s(number: int) -> Floats:
        return sites.most(lambda cluster: costs[cluster].parts[number].again_s)

    parts = tuple(replace(part, again_s=part_s(n)) for n, part in enumerate(one.parts))
    return replace(
        one,
        parts=parts,
        forward_s=sites.most(lambda cluster: costs[cluster].forward_s),
        backward_s=sites.most(lambda cluster: costs[cluster].backward_s),
        forward_comm_s=sites.most(lambda cluster: costs[cluster].forward_comm_s),
        backward_comm_s=sites.most(lambda cluster: costs[cluster].backward_comm_s),
        input_s=sites.most(lambda cluster: costs[cluster].input_s),
        weight_s=sites.most(lambda cluster: costs[cluster].weight_s),
        step_s=sites.most(lambda cluster: costs[cluster].step_s),
    )


_Frontiers = Sequence[tuple[list[int], tuple[FrontierPoint, ...]]]


def _points(frontiers: _Frontiers, blocks: Sequence[int]) -> tuple[FrontierPoint, ...]:
    return next((points for own, points in frontiers if tuple(own) == tuple(blocks)), ())


def _seconds_at(points: Sequence[FrontierPoint], num_bytes: float) -> float:
    """The least seconds of a layout that keeps ``num_bytes`` or less, or up to the next point."""
    return min((point.seconds for point in points if point.num_bytes <= num_bytes), default=0.0)
