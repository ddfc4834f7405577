"""A setting is what a layout depends on: degrees of the context, expert and tensor axis, and a
micro-batch size; with its problem, bounds and layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.ir.kernels import parse_kernels
from autopar.ir.loss_region import LossKind, LossRegion, loss_region
from autopar.ir.mesh import DATA_AXIS, TENSOR_AXIS
from autopar.ir.plan import RecomputeName
from autopar.solver.again_steps import steps_of
from autopar.solver.bounds import StageTimes
from autopar.solver.candidates import Candidate, Way
from autopar.solver.costs.comm import Links, group_of
from autopar.solver.costs.kernels import Kernels
from autopar.solver.costs.memory import Itemsizes
from autopar.solver.costs.parameters import ParameterCosts
from autopar.solver.facts import (
    BlockCosts,
    Floats,
    Part,
    PartCosts,
    layout_costs,
    least_costs,
    least_kind_costs,
    with_parts,
)
from autopar.solver.hardware import Cluster
from autopar.solver.layout.check import kind_costs
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.frontier import FrontierPoint
from autopar.solver.layout.make import computed_again, make_problem
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.outer import AxisTyping, OuterAxes
from autopar.solver.layout.outer_comm import OuterComm
from autopar.solver.layout.problem import (
    TIE_BREAK_S_PER_BYTE,
    MemoryLimit,
    Problem,
    Solution,
    Weights,
)
from autopar.solver.layout.solve import ProblemSolver
from autopar.solver.layout.state import AxisRule
from autopar.solver.loss_chunks import (
    NUMBERS,
    ChunkedCost,
    chunked_cost,
    least_in_chunks,
    loss_layout,
    with_loss,
)
from autopar.solver.typed_axes import TypedAxes

_PRICE = 1e-9
"""Seconds for a kept byte, where nothing else counts: about what seconds of an op are."""

NOTHING_AGAIN: Part = (False, False)

_SHARES = (0.0, 0.25, 0.5, 1.0)
"""Of what a block keeps at the least that does nothing again, beyond one that gathers again."""

_MOST_FRONTIERS = 2
"""Kinds of blocks whose trade of seconds for bytes is known."""


@dataclass(slots=True, kw_only=True, eq=False)
class Setting:
    """What candidates of the same degrees and micro-batch size share; solved when asked for."""

    facts: ModelFacts
    cluster: Cluster
    axes: TypedAxes
    cp: int
    ep: int
    tp: int
    micro_batch_size: int
    coster: Coster
    problem: Problem
    least: BlockCosts
    whole: BlockCosts  # ``least`` where the loss is in one chunk
    way: Way
    strides: tuple[int, int, int]  # by how much neighbors on the three axes differ
    _solutions: dict[tuple[RecomputeName, tuple[MemoryLimit, ...]], Solution] = field(
        default_factory=dict
    )
    _solver: ProblemSolver | None = field(default=None, repr=False)
    _part_solvers: dict[Part, ProblemSolver] | None = field(default=None, repr=False)
    _ops: dict[Part, ProblemSolver] | None = field(default=None, repr=False)
    _times: dict[RecomputeName, StageTimes] = field(default_factory=dict)
    _part_times: dict[RecomputeName, StageTimes] = field(default_factory=dict)
    _least_of: dict[Hashable, float] = field(default_factory=dict)
    _priced_solutions: dict[tuple[float, Part], Solution] = field(default_factory=dict)
    _costs: dict[int, tuple[Solution, BlockCosts]] = field(default_factory=dict, repr=False)
    _offered: BlockCosts | None = field(default=None, repr=False)
    _tight: BlockCosts | None = field(default=None, repr=False)
    _kind_frontiers: tuple[tuple[list[int], tuple[FrontierPoint, ...]], ...] | None = None
    _priced: dict[tuple[float, float], Floats] = field(default_factory=dict)
    _prices: tuple[float, ...] | None = None
    _chunked: dict[tuple[int, bool, int], tuple[Solution, ChunkedCost | None]] = field(
        default_factory=dict, repr=False
    )

    @property
    def loss_chunks(self) -> int:
        """In how many chunks the loss is computed; 0: in any number."""
        return self.way.loss_chunks

    def solution(self, recompute: RecomputeName, limits: Sequence[MemoryLimit] = ()) -> Solution:
        """The layout that computes all blocks once in the least time, within memory limits."""
        key = (recompute, tuple(limits))
        if key not in self._solutions:
            weights = self.weights(recompute, self.problem.counts)
            self._solutions[key] = self.solver().solve(weights, limits)
        return self._solutions[key]

    def priced_solution(self, price: float, part: Part = NOTHING_AGAIN) -> Solution:
        """The layout with the least time where a kept byte costs ``price`` seconds, of blocks that
        do nothing, or a part, again.
        """
        if (price, part) not in self._priced_solutions:
            weights = self.weights("none", self.problem.counts)
            held = tuple(price * count for count in self.problem.counts)
            found = self._solver_of(part).solve(replace(weights, held=held), ())
            self._priced_solutions[price, part] = found
        return self._priced_solutions[price, part]

    def solver(self) -> ProblemSolver:
        """What solves the problem."""
        if self._solver is None:
            self._solver = ProblemSolver(problem=self.problem)
        return self._solver

    def part_solvers(self) -> Mapping[Part, ProblemSolver]:
        """What solves the problems of blocks that do a part again, of those that are open: they
        have the same choices.
        """
        if self._part_solvers is None:
            ops = (False, True) if self.way.recompute == "none" else (False,)
            gathers = (False, True) if self.way.gather_again is None else (False,)
            found = dict(self._op_solvers())
            for part in itertools.product(ops, gathers):
                problem = self._doing_again(part) if any(part) and part not in found else None
                if problem is not None:
                    found[part] = ProblemSolver(problem=problem)
            self._part_solvers = found
        return self._part_solvers

    def _doing_again(self, part: Part) -> Problem | None:
        """The problem where blocks do a part again; None where no layout gathers."""
        by_op, gathers = part
        again = self.coster.again
        if by_op:
            again = self.facts.computed_again("selective_op", parse_kernels(self.way.kernels))
        outside = typed_outside(self.axes, self.coster, self.strides, cp=self.cp, ep=self.ep)
        coster = replace(
            self.coster, again=again, gathers_again=gathers or self.coster.gathers_again
        )
        axis = tensor_axis(self.coster, self.way)
        problem = computed_again(self.problem, self.facts, axis, coster, *outside)
        is_any = not gathers or any(held.rebuilt_bytes for held in problem.held)
        return problem if is_any else None

    def _solver_of(self, part: Part) -> ProblemSolver:
        return self.part_solvers()[part] if any(part) else self.solver()

    def costs(self, solution: Solution) -> BlockCosts:
        """What blocks cost under a solution, collectives of all layout axes but dp included."""
        if id(solution) not in self._costs:
            kinds = kind_costs(self.problem, solution)
            solvers = self.part_solvers().items()
            parts = {part: kind_costs(solver.problem, solution) for part, solver in solvers}
            costs = layout_costs(self.facts, self.problem, kinds, parts, solution.states)
            self._costs[id(solution)] = solution, costs
        return self._costs[id(solution)][1]

    @property
    def _may_gather(self) -> bool:
        """Whether it is open to blocks to gather again."""
        return self.way.gather_again is None and self.tp > 1

    def _op_solvers(self) -> Mapping[Part, ProblemSolver]:
        """Those of ``part_solvers`` that bounds are made of."""
        if self._ops is None:
            part = (True, False)
            problem = self._doing_again(part) if self.way.recompute == "none" else None
            self._ops = {} if problem is None else {part: ProblemSolver(problem=problem)}
        return self._ops

    def offered(self) -> BlockCosts:
        """``least``, with what blocks cost whose ops are computed again; all may gather again."""
        if self._offered is None:
            solvers, least = self._op_solvers().items(), self.least
            parts = {
                part: least_kind_costs(solver.problem, may_gather=self._may_gather)
                for part, solver in solvers
            }
            if self._may_gather:
                kinds = least_kind_costs(self.problem, may_gather=True)
                own = least_costs(self.facts, self.problem, kinds).held_bytes
                least = replace(least, held_bytes=np.minimum(least.held_bytes, own))
            self._offered = with_parts(least, self.facts, parts)
        return self._offered

    def chunked_costs(
        self,
        solution: Solution,
        num_chunks: int,
        data: AxisTyping,
        candidate: Candidate,
        sizes: Itemsizes,
    ) -> BlockCosts | None:
        """``costs`` with the loss in so many chunks; None where that cannot be.

        Args:
            data: Typing on the data axis.
            candidate: One of this setting.
            sizes: Of gradients that are added up.
        """
        key = (id(solution), candidate.dp > 1, num_chunks)
        if key not in self._chunked:
            cost = self._chunked_cost(solution, num_chunks, data, candidate)
            self._chunked[key] = solution, cost
        found = self._chunked[key][1]
        if found is None:
            return None
        adding_s = ParameterCosts(self.cluster.hardware, sizes).adding_s(
            (num_chunks - 1) * found.num_parameters,
            (num_chunks - 1) * found.numel,
            num_micro_batches=num_chunks,
        )
        return with_loss(self.costs(solution), self.facts.loss_block, found, adding_s)

    def _chunked_cost(
        self, solution: Solution, num_chunks: int, data: AxisTyping, candidate: Candidate
    ) -> ChunkedCost | None:
        own = self.facts.loss
        if not isinstance(own, LossKind):
            return None
        typed = {DATA_AXIS: data, **self.axes.typings(cp=self.cp, ep=self.ep)}
        region = loss_region(
            own,
            loss_layout(self.facts, own, self.problem, solution, typed),
            self.facts.rules[own.kind.name],
            degrees=candidate.mesh().degrees(),
            batch=self.micro_batch_size * candidate.batch_ranks,
            num_chunks=num_chunks,
        )
        if not isinstance(region, LossRegion):
            return None
        batch = self.micro_batch_size
        comm = self.axes.comm(
            cp=self.cp,
            ep=self.ep,
            tp=self.tp,
            micro_batch_size=batch,
            strides=self.strides[:2],
        )
        return chunked_cost(
            own, region, self.problem, solution, self.coster, comm, num_chunks=num_chunks
        )

    def never_fits(self, cluster: Cluster) -> bool:
        """Whether one block by itself, its parameters sharded away, is too large for a rank of
        ``cluster``, which may have other memory than the setting's.
        """
        blocks = self.least.held_bytes + self.least.temporary_bytes
        memory = cluster.hardware.memory
        needed = float(blocks.max()) * (1 + memory.fragmentation) + memory.context_bytes
        return needed > cluster.usable_bytes

    def weights(self, recompute: RecomputeName, counts: Sequence[int]) -> Weights:
        """Seconds of ``counts`` blocks of each kind; a recomputed forward runs twice."""
        return Weights(
            forward=tuple(
                count * (1 + self._repeated(kind, recompute)) for kind, count in enumerate(counts)
            ),
            backward=tuple(map(float, counts)),
            step=0.0,
            held=tuple(TIE_BREAK_S_PER_BYTE * count for count in counts),
            parameters=(0.0,) * len(self.problem.classes),
        )

    def _repeated(self, kind: int, recompute: RecomputeName) -> float:
        """The share of a kind's blocks that are computed twice."""
        again = self.facts.repeated_blocks(recompute)[self._blocks_of(kind)]
        return float(again.mean())

    def _blocks_of(self, kind: int) -> list[int]:
        name = self.problem.kinds[kind]
        return [block.index for block in self.facts.model.blocks if block.kind == name]

    def roofline_times(self, recompute: RecomputeName) -> StageTimes:
        """Every op at its fastest, without any move: cheap, and below every layout."""
        forward, backward = self.least.forward_s, self.least.backward_s
        again = forward * self.least.again(recompute)
        inputs, backward = self.least.input_s + again, backward + again
        return StageTimes(
            both=forward + backward,
            forward=forward,
            backward=backward,
            input=inputs,
            early=forward + inputs,
            weight=self.least.weight_s,
        )

    def least_times(self, recompute: RecomputeName) -> StageTimes:
        """Below every layout; tight where a kind alone is no faster than in the whole model."""
        if recompute not in self._times:
            roofline = self.roofline_times(recompute)
            both = roofline.both.copy()
            forward, backward = self.least.forward_s.copy(), both - roofline.forward
            again = self.facts.repeated_blocks(recompute)
            for kind in range(len(self.problem.kinds) if self.tp > 1 else 0):
                blocks = np.array(self._blocks_of(kind))
                for repeated in sorted(set(again[blocks].tolist())):
                    own = blocks[again[blocks] == repeated]
                    both[own] = np.maximum(both[own], self._least(kind, 1 + repeated, 1.0))
                    forward[own] = np.maximum(forward[own], self._least(kind, 1.0, 0.0))
                    backward[own] = np.maximum(backward[own], self._least(kind, repeated, 1.0))
            if self.loss_chunks != 1:  # its forward may come in backward
                forward[self.facts.loss_block] = 0.0
            self._times[recompute] = replace(
                roofline, both=both, forward=both - backward, backward=both - forward
            )
        return self._times[recompute]

    def part_times(self, recompute: RecomputeName) -> StageTimes:
        """``least_times``, tight for the parts of backwards in two."""
        if recompute not in self._part_times:
            least = self.least_times(recompute)
            inputs, early = least.input.copy(), least.early.copy()
            again = self.facts.repeated_blocks(recompute)
            for kind in range(len(self.problem.kinds) if self.tp > 1 else 0):
                blocks = np.array(self._blocks_of(kind))
                for repeated in sorted(set(again[blocks].tolist())):
                    own = blocks[again[blocks] == repeated]
                    found = self._least(kind, repeated, 0.0, inputs=1.0)
                    inputs[own] = np.maximum(inputs[own], found)
                    found = self._least(kind, 1 + repeated, 0.0, inputs=1.0)
                    early[own] = np.maximum(early[own], found)
            self._part_times[recompute] = replace(least, input=inputs, early=early)
        return self._part_times[recompute]

    def joint_times(self, recompute: RecomputeName) -> StageTimes:
        """``least_times``, with a sum that no layout of the whole model is below.

        Kinds by themselves may want different states at their border; together they cannot. Only
        the sum over all blocks is a bound, so that this serves a single stage.
        """
        least = self.least_times(recompute)
        if self.tp == 1:
            return least
        joint = self.solution(recompute).bound - TIE_BREAK_S_PER_BYTE * self._most_bytes()
        more = least.both * max(0.0, joint / float(least.both.sum()) - 1)
        return least.plus(more)

    def _most_bytes(self) -> float:
        """No layout has more bytes that break ties."""
        kept = sum(held.num_bytes for held in self.problem.held)
        return float(kept * max(self.problem.counts))

    def tight(self) -> BlockCosts:
        """``offered``, with what a block of each kind takes forward and keeps at the least as a
        whole, and not op by op.
        """
        if self._tight is None:
            costs = self.offered()
            forward, held = costs.forward_s.copy(), costs.held_bytes.copy()
            parts = {part.key: part.held_bytes.copy() for part in costs.parts}
            for kind in range(len(self.problem.kinds) if self.tp > 1 else 0):
                own = self._blocks_of(kind)
                forward[own] = np.maximum(forward[own], self._least(kind, 1.0, 0.0))
                if self.loss_chunks == 1 or self.facts.loss_block not in own:
                    held[own] = np.maximum(held[own], self._least(kind, 0.0, 0.0, _PRICE) / _PRICE)
                    for part, kept in parts.items():
                        found = self._least(kind, 0.0, 0.0, _PRICE, part=part) / _PRICE
                        kept[own] = np.maximum(kept[own], found)
            tight = tuple(replace(part, held_bytes=parts[part.key]) for part in costs.parts)
            self._tight = replace(costs, forward_s=forward, held_bytes=held, parts=tight)
        return self._tight

    def trades(self) -> Iterator[tuple[BlockCosts, Floats]]:
        """Costs of blocks, and their seconds at the least for a forward and a backward: every
        layout keeps no less and takes no less than one of them.
        """
        least, tight = self.least_times("none").both, self.tight()
        for points in itertools.product(*(points for _, points in self.frontiers())):
            held, both = tight.held_bytes.copy(), least.copy()
            for (blocks, _), point in zip(self.frontiers(), points, strict=True):
                held[blocks] = np.maximum(held[blocks], point.num_bytes)
                both[blocks] = np.maximum(both[blocks], point.seconds)
            parts = tight.parts
            if self._may_gather:
                nothing = np.zeros(len(held))
                gathers = PartCosts(
                    by_op=False,
                    gathers=True,
                    again_s=nothing,
                    held_bytes=tight.held_bytes,
                    rebuilt_bytes=nothing,
                )
                every = [self._beside(both, part) for part in (gathers, *parts)]
                parts = tuple(itertools.chain.from_iterable(every))
            yield replace(tight, held_bytes=held, parts=parts), both

    def _beside(self, both: Floats, part: PartCosts) -> Iterator[PartCosts]:
        """What blocks cost that do a part again, beyond ``both`` seconds, where they may gather
        again, too: no less than some of these, the more seconds the less they keep.
        """
        limits = [
            (blocks, points[-1].num_bytes - part.held_bytes[blocks[0]])
            for blocks, points in self.frontiers()
        ]
        for share, limit in itertools.zip_longest(_SHARES, _SHARES[1:]):
            again, held = part.again_s.copy(), part.held_bytes.copy()
            for blocks, more in limits:
                least = part.held_bytes[blocks[0]]
                most = math.inf if limit is None else float(least + limit * max(0.0, more))
                seconds = self._least_within(blocks[0], part.key, most)
                again[blocks] = np.maximum(again[blocks], seconds - both[blocks])
                held[blocks] += share * max(0.0, more)
            yield replace(part, again_s=again, held_bytes=held)

    def _least_within(self, block: int, part: Part, num_bytes: float) -> float:
        """Seconds at the least of a forward and a backward of a block that does a part again, and
        may gather again, and keeps no more than so many bytes.
        """
        kind = self.problem.kinds.index(self.facts.model.blocks[block].kind)
        found = self._least(kind, 1.0, 1.0, part=part)
        for price in self.prices() if math.isfinite(num_bytes) else ():
            found = max(found, self._least(kind, 1.0, 1.0, price, part=part) - price * num_bytes)
        return found

    def frontiers(self) -> tuple[tuple[list[int], tuple[FrontierPoint, ...]], ...]:
        """Blocks and frontier of the kinds that keep most in all their blocks."""
        if self._kind_frontiers is None:
            counts, least = self.problem.counts, self.tight().held_bytes
            kept = {
                kind: count * float(least[self._blocks_of(kind)[0]])
                for kind, count in enumerate(counts)
                if count > 1
            }
            found = []
            for kind in sorted(kept, key=lambda kind: -kept[kind])[:_MOST_FRONTIERS]:
                points = self.solver().frontier(kind)
                if points is not None:
                    found.append((self._blocks_of(kind), points))
            self._kind_frontiers = tuple(found)
        return self._kind_frontiers

    @property
    def main_kind(self) -> int:
        """The kind of block that repeats most."""
        return max(range(len(self.problem.kinds)), key=lambda kind: self.problem.counts[kind])

    def main_blocks(self) -> list[int]:
        """The blocks of ``main_kind``."""
        return self._blocks_of(self.main_kind)

    def priced(self, price: float, waiting: float = 0.0) -> Floats:
        """Of each block what no layout is below: a forward and a backward, with either another
        forward or a ``price`` in seconds for each byte that it keeps, with a part again or none;
        and with so many for each byte ``waiting`` between the parts of a backward.

        The last block is not computed again, and pays nothing.
        """
        if (price, waiting) not in self._priced:
            roofline, tight = self.least_times("none").both, self.tight()
            once = roofline + waiting * tight.waiting_bytes
            again, kept = once + tight.forward_s, once + price * tight.held_bytes
            parts = {
                part.key: once + part.again_s + price * part.held_bytes for part in tight.parts
            }
            for kind in range(len(self.problem.kinds)):
                own = self._blocks_of(kind)
                found = self._least(kind, 1.0, 1.0, price, waiting=waiting)
                kept[own] = np.maximum(kept[own], found)
                again[own] = np.maximum(again[own], self._least(kind, 2.0, 1.0, waiting=waiting))
                for part, values in parts.items():
                    found = self._least(kind, 1.0, 1.0, price, waiting=waiting, part=part)
                    values[own] = np.maximum(values[own], found)
            able = self.facts.repeated_blocks("full") > 0
            least = np.min([kept, again, *parts.values()], axis=0)
            self._priced[price, waiting] = np.where(able, least, roofline)
        return self._priced[price, waiting]

    def prices(self) -> tuple[float, ...]:
        """Prices of a kept byte at which a kind does a part, or all, of it again: of what repeats
        most, as it is fastest and as it keeps least.
        """
        if self._prices is None:
            block, fastest = self.main_blocks()[0], self.costs(self.solution("none"))
            seconds = tuple(fastest.part_seconds[:, block].tolist())
            rates = []
            for costs in (fastest, self.tight()):
                kept = float(costs.held_bytes[block])
                freed = {part.by_op: kept - float(part.held_bytes[block]) for part in costs.parts}
                ways = [freed.get(part.by_op, 0.0) for part in fastest.parts]
                if costs is fastest:
                    ways = [kept - float(part.held_bytes[block]) for part in costs.parts]
                rates += [step.rate for step in steps_of((*ways, kept), seconds)]
            self._prices = tuple(dict.fromkeys(rates))
        return self._prices

    def _least(
        self,
        kind: int,
        forward: float,
        backward: float,
        held: float = 0.0,
        *,
        inputs: float = 0.0,
        waiting: float = 0.0,
        part: Part = NOTHING_AGAIN,
    ) -> float:
        """Seconds of so many forwards, backwards and input parts of a block of a kind, and of its
        kept bytes at ``held`` seconds each, those between the parts at ``waiting``, whatever others
        do; where its ops are computed again if ``part`` says so. It may gather again if that is
        open.
        """
        key = (kind, forward, backward, held, inputs, waiting, part)
        if key not in self._least_of:
            num = len(self.problem.kinds)
            weights = Weights(
                forward=(forward,) * num,
                backward=(backward,) * num,
                step=0.0,
                held=(held,) * num,
                parameters=(0.0,) * len(self.problem.classes),
                input=(inputs,) * num,
                waiting=(waiting,) * num,
            )
            solver = self._op_solvers()[True, False] if part[0] else self.solver()
            self._least_of[key] = solver.least(weights, [kind], may_gather=self._may_gather)
        return self._least_of[key]


def make_setting(
    facts: ModelFacts,
    cluster: Cluster,
    axes: TypedAxes,
    *,
    cp: int,
    ep: int,
    tp: int,
    micro_batch_size: int,
    reduce_itemsize: int,
    way: Way,
    strides: tuple[int, int, int] | None = None,
) -> Setting:
    """The setting of these degrees, a micro-batch size, and a way of computing; ``strides``: by how
    much neighbors on the context, expert and tensor axis differ, the last inside the others by
    default.
    """
    strides = strides or (ep * tp, tp, 1)
    coster = layout_coster(
        facts,
        cluster,
        tp=tp,
        micro_batch_size=micro_batch_size,
        reduce_itemsize=reduce_itemsize,
        way=way,
        stride=strides[2],
    )
    problem = layout_problem(facts, axes, coster, strides, cp=cp, ep=ep, way=way)
    whole = least = least_costs(facts, problem, least_kind_costs(problem))
    if way.loss_chunks != 1:
        least = least_in_chunks(facts, problem, least, way.loss_chunks or min(NUMBERS))
    return Setting(
        facts=facts,
        cluster=cluster,
        axes=axes,
        cp=cp,
        ep=ep,
        tp=tp,
        micro_batch_size=micro_batch_size,
        coster=coster,
        problem=problem,
        least=least,
        whole=whole,
        way=way,
        strides=strides,
    )


def layout_coster(
    facts: ModelFacts,
    cluster: Cluster,
    *,
    tp: int,
    micro_batch_size: int,
    reduce_itemsize: int,
    way: Way,
    stride: int = 1,
) -> Coster:
    """Costs on the tensor axis, by the kernels of ``way``."""
    kernels = parse_kernels(way.kernels)
    return Coster(
        Kernels(cluster.hardware),
        Links(cluster),
        group_of(cluster, size=tp, stride=stride),
        micro_batch_size,
        reduce_itemsize,
        facts.styles(kernels),
        facts.computed_again(way.recompute, kernels),
        bool(way.gather_again),
    )


def layout_problem(
    facts: ModelFacts,
    axes: TypedAxes,
    coster: Coster,
    strides: tuple[int, int, int],
    *,
    cp: int,
    ep: int,
    way: Way,
) -> Problem:
    """The problem of the tensor axis, for ranks that cost what ``coster`` says."""
    outside = typed_outside(axes, coster, strides, cp=cp, ep=ep)
    return make_problem(facts, tensor_axis(coster, way), coster, *outside)


def tensor_axis(coster: Coster, way: Way) -> AxisRule:
    """What the tensor axis may shard."""
    return AxisRule(
        name=TENSOR_AXIS,
        shards_parameters=True,
        idle=coster.group.size == 1,
        sequence_parallel=way.sequence_parallel,
        loss_parallel=way.loss_parallel,
    )


def typed_outside(
    axes: TypedAxes, coster: Coster, strides: tuple[int, int, int], *, cp: int, ep: int
) -> tuple[OuterAxes, OuterComm]:
    """The axes that are typed before the tensor axis of ``coster``, and what they send."""
    comm = axes.comm(
        cp=cp,
        ep=ep,
        tp=coster.group.size,
        micro_batch_size=coster.batch,
        strides=strides[:2],
    )
    return axes.outer(cp=cp, ep=ep), comm
