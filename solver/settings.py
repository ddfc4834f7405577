"""A setting is what a layout depends on: degrees of the context, expert and tensor axis, and a
micro-batch size; with its problem, bounds and layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from autopar.ir.graph import Block, ModelGraph
from autopar.ir.kernels import KernelSet, parse_kernels
from autopar.ir.mesh import TENSOR_AXIS
from autopar.ir.plan import RecomputeName
from autopar.ir.recompute import recomputed_nodes
from autopar.solver.bounds import StageTimes
from autopar.solver.candidates import Way
from autopar.solver.costs.comm import Links, group_of
from autopar.solver.costs.kernels import Kernels
from autopar.solver.facts import (
    BlockCosts,
    layout_costs,
    least_costs,
    least_kind_costs,
    repeated_blocks,
)
from autopar.solver.hardware import Cluster
from autopar.solver.layout.build import Model, build
from autopar.solver.layout.check import kind_costs
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.decode import axis_typing
from autopar.solver.layout.make import make_problem
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.problem import (
    TIE_BREAK_S_PER_BYTE,
    KindCost,
    MemoryLimit,
    MoveCost,
    Problem,
    Solution,
    Weights,
)
from autopar.solver.layout.solve import solve_model
from autopar.solver.layout.state import AxisRule
from autopar.solver.typed_axes import TypedAxes

_SMALL_KIND = 0.05
"""Kinds of block with less of the step than this are bounded without an ILP."""


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
    problem: Problem
    least_kinds: tuple[KindCost, ...]
    least: BlockCosts
    _solutions: dict[tuple[RecomputeName, tuple[MemoryLimit, ...]], Solution] = field(
        default_factory=dict
    )
    _model: Model | None = None
    _times: dict[RecomputeName, StageTimes] = field(default_factory=dict)

    def solution(self, recompute: RecomputeName, limits: Sequence[MemoryLimit] = ()) -> Solution:
        """The layout that computes all blocks once in the least time, within memory limits."""
        key = (recompute, tuple(limits))
        if key not in self._solutions:
            weights = self.weights(recompute, self.problem.counts)
            model = build(self.problem, limits) if limits else self.model()
            self._solutions[key] = solve_model(model, weights)
        return self._solutions[key]

    def model(self) -> Model:
        """The problem without memory limits, as a model: built once."""
        if self._model is None:
            self._model = build(self.problem)
        return self._model

    def costs(self, solution: Solution) -> BlockCosts:
        """What blocks cost under a solution, collectives of all layout axes but dp included."""
        kinds = kind_costs(self.problem, solution)
        if self.cp * self.ep > 1:
            typing = axis_typing(self.facts.model, self.facts.classes, self.problem, solution)
            comm = self.axes.comm(
                cp=self.cp,
                ep=self.ep,
                tp=self.tp,
                micro_batch_size=self.micro_batch_size,
                tensor=typing,
            )
            kinds = tuple(
                _with_comm(kind, comm[name])
                for name, kind in zip(self.problem.kinds, kinds, strict=True)
            )
        return layout_costs(self.facts, self.problem, kinds, solution.states)

    def least_bytes(self) -> float:
        """No plan needs less memory: one block by itself, its parameters sharded away."""
        blocks = self.least.held_bytes + self.least.temporary_bytes
        memory = self.cluster.hardware.memory
        return float(blocks.max()) * (1 + memory.fragmentation) + memory.context_bytes

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
        again = repeated_blocks(self.facts.model, recompute)
        blocks = self._blocks_of(kind)
        return sum(float(again[block.index]) for block in blocks) / len(blocks)

    def _blocks_of(self, kind: int) -> list[Block]:
        name = self.problem.kinds[kind]
        return [block for block in self.facts.model.blocks if block.kind == name]

    def roofline_times(self, recompute: RecomputeName) -> StageTimes:
        """Every op at its fastest, without any move: cheap, and below every layout."""
        forward, backward = self.least.forward_s, self.least.backward_s
        backward = backward + forward * self.least.again(recompute)
        return StageTimes(both=forward + backward, forward=forward, backward=backward)

    def least_times(self, recompute: RecomputeName) -> StageTimes:
        """Below every layout; tight where a kind alone is no faster than in the whole model."""
        if recompute not in self._times:
            roofline = self.roofline_times(recompute)
            both = roofline.both.copy()
            for kind, least in enumerate(self._least_of_kinds(recompute, both)):
                for block in self._blocks_of(kind):
                    both[block.index] = max(both[block.index], least)
            self._times[recompute] = StageTimes(
                both=both, forward=both - roofline.backward, backward=both - roofline.forward
            )
        return self._times[recompute]

    def joint_times(self, recompute: RecomputeName) -> StageTimes:
        """``least_times``, with a sum that no layout of the whole model is below.

        Kinds by themselves may want different states at their border; together they cannot. Only
        the sum over all blocks is a bound, so that this serves a single stage.
        """
        least = self.least_times(recompute)
        if self.tp == 1:
            return least
        kept = sum(held.num_bytes for held in self.problem.held) * max(self.problem.counts)
        joint = self.solution(recompute).bound - TIE_BREAK_S_PER_BYTE * kept
        both = least.both * max(1.0, joint / float(least.both.sum()))
        roofline = self.roofline_times(recompute)
        return StageTimes(
            both=both, forward=both - roofline.backward, backward=both - roofline.forward
        )

    def _least_of_kinds(self, recompute: RecomputeName, roofline: np.ndarray) -> list[float]:
        """Seconds of a block of each kind, whatever the others do."""
        found: list[float] = []
        total = float(roofline.sum())
        for kind in range(len(self.problem.kinds)):
            blocks = [block.index for block in self._blocks_of(kind)]
            mixed = self._repeated(kind, recompute) not in (0.0, 1.0)
            small = float(roofline[blocks].sum()) < _SMALL_KIND * total
            if self.tp == 1 or small or mixed:
                found.append(0.0)
                continue
            counts = [int(other == kind) for other in range(len(self.problem.kinds))]
            weights = replace(self.weights(recompute, counts), held=(0.0,) * len(counts))
            found.append(solve_model(self.model(), weights).bound)
        return found


def _with_comm(kind: KindCost, comm: MoveCost) -> KindCost:
    return replace(
        kind,
        forward_s=kind.forward_s + comm.forward_s,
        backward_s=kind.backward_s + comm.backward_s,
        forward_comm_s=kind.forward_comm_s + comm.forward_s,
        backward_comm_s=kind.backward_comm_s + comm.backward_s,
    )


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
) -> Setting:
    """The setting of these degrees, a micro-batch size, and a way of computing."""
    coster = layout_coster(
        facts,
        cluster,
        tp=tp,
        micro_batch_size=micro_batch_size,
        reduce_itemsize=reduce_itemsize,
        way=way,
    )
    problem = layout_problem(facts, axes, coster, cp=cp, ep=ep, way=way)
    least_kinds = least_kind_costs(problem)
    return Setting(
        facts=facts,
        cluster=cluster,
        axes=axes,
        cp=cp,
        ep=ep,
        tp=tp,
        micro_batch_size=micro_batch_size,
        problem=problem,
        least_kinds=least_kinds,
        least=least_costs(facts, problem, least_kinds),
    )


def layout_coster(
    facts: ModelFacts,
    cluster: Cluster,
    *,
    tp: int,
    micro_batch_size: int,
    reduce_itemsize: int,
    way: Way,
) -> Coster:
    """Costs on the tensor axis, by the kernels of ``way``."""
    kernels = parse_kernels(way.kernels)
    return Coster(
        Kernels(cluster.hardware),
        Links(cluster),
        group_of(cluster, size=tp, stride=1),
        micro_batch_size,
        reduce_itemsize,
        facts.styles(kernels),
        _computed_again(facts.model, way.recompute, kernels),
    )


def layout_problem(
    facts: ModelFacts, axes: TypedAxes, coster: Coster, *, cp: int, ep: int, way: Way
) -> Problem:
    """The problem of the tensor axis, for ranks that cost what ``coster`` says."""
    axis = AxisRule(
        name=TENSOR_AXIS,
        shards_parameters=True,
        idle=coster.group.size == 1,
        sequence_parallel=way.sequence_parallel,
        loss_parallel=way.loss_parallel,
    )
    return make_problem(facts, axis, coster, axes.outer(cp=cp, ep=ep))


def _computed_again(
    model: ModelGraph, recompute: RecomputeName, kernels: KernelSet
) -> frozenset[fx.Node]:
    """Nodes that backward computes again one by one, in all kinds but the one with the loss."""
    last = model.blocks[model.producer(model.loss)[0]].kind
    return frozenset().union(
        *(
            recomputed_nodes(kind.graph, recompute, kernels.attention)
            for kind in model.kinds.values()
            if kind.name != last
        )
    )
