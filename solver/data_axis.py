"""The data axis: inputs enter sharded by sequence, weights are used whole, and the rest follows, by
the same problem that places tensors on the tensor axis.

Its typing is the same for every number of data ranks: dims that grow with the batch are sharded,
and nothing else is. An op that cannot divide its sequences (one without a rule, say) has them
gathered, and every data rank repeats it for all: that is costed here, beside the tensor axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.ir.errors import AutoparError
from autopar.ir.graph import TensorInfo, info
from autopar.ir.layout import operands_of
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import State
from autopar.solver.costs.comm import Links, group_of
from autopar.solver.costs.kernels import Kernels
from autopar.solver.facts import BlockCosts
from autopar.solver.hardware import Cluster
from autopar.solver.layout.check import kind_costs
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.decode import axis_typing
from autopar.solver.layout.make import make_problem
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.outer import AxisTyping
from autopar.solver.layout.problem import KindCost, Problem, Solution, all_blocks_once
from autopar.solver.layout.solve import solve_problem
from autopar.solver.layout.state import AxisRule
from autopar.solver.sites import Sites

_RANKS = 2


@dataclass(slots=True, kw_only=True, eq=False)
class DataAxis:
    """The typing of a model on the data axis, and the work that its ranks cannot divide."""

    facts: ModelFacts
    cluster: Cluster
    _typing: AxisTyping | None = None
    _divides_all: bool | None = None
    _undivided: dict[tuple[Cluster, int, int, int], tuple[KindCost, ...]] = field(
        default_factory=dict
    )

    def typing(self) -> AxisTyping:
        """States of every node: the least traffic, then the least work."""
        if self._typing is None:
            problem, solution = self._solve(self.cluster, _RANKS, 1, _RANKS)
            self._typing = axis_typing(self.facts.model, self.facts.classes, problem, solution)
        return self._typing

    def divides_all(self) -> bool:
        """Whether every op works on its own data rank's sequences only."""
        if self._divides_all is None:
            self._divides_all = self._find_divides_all()
        return self._divides_all

    def _find_divides_all(self) -> bool:
        typing = self.typing()
        return not any(
            _is_whole(tensors, states)
            for kind in self.facts.model.kinds.values()
            for node in kind.graph.nodes
            if node.op == "call_function"
            for tensors, states in (
                ([info(o).tensor for o in operands_of(node)], typing[kind.name][node.name][0]),
                (info(node).tensors, typing[kind.name][node.name][1]),
            )
        )

    def add_undivided(
        self, costs: BlockCosts, sites: Sites, *, dp: int, stride: int, micro_batch_size: int
    ) -> BlockCosts:
        """``costs`` with what a micro-batch costs beyond its own sequences, at ``dp`` data ranks of
        stages at ``sites``, neighbors ``stride`` ranks apart.

        The work of such ops is taken as undivided by the tensor axis, too.
        """
        if dp == 1 or self.divides_all():
            return costs
        more = {c: self._more(c, dp, stride, micro_batch_size) for c in sites.clusters}
        any_more = more[sites.clusters[0]]
        return replace(
            costs,
            forward_s=costs.forward_s
            + sites.most(lambda c: np.array([cost.forward_s for cost in more[c]])),
            backward_s=costs.backward_s
            + sites.most(lambda c: np.array([cost.backward_s for cost in more[c]])),
            held_bytes=costs.held_bytes + [cost.held_bytes for cost in any_more],
            parts=tuple(
                replace(part, held_bytes=part.held_bytes + [cost.held_bytes for cost in any_more])
                for part in costs.parts
            ),
            temporary_bytes=costs.temporary_bytes + [cost.transient_bytes for cost in any_more],
        )

    def _more(
        self, cluster: Cluster, dp: int, stride: int, micro_batch_size: int
    ) -> list[KindCost]:
        """Of each block."""
        key = (cluster, dp, stride, micro_batch_size)
        if key not in self._undivided:
            whole = kind_costs(*self._solve(cluster, dp, stride, micro_batch_size * dp))
            alone = kind_costs(*self._solve(cluster, 1, stride, micro_batch_size))
            self._undivided[key] = tuple(map(_difference, whole, alone))
        order = {name: number for number, name in enumerate(self.facts.model.kinds)}
        return [self._undivided[key][order[block.kind]] for block in self.facts.model.blocks]

    def _solve(
        self, cluster: Cluster, dp: int, stride: int, batch: int
    ) -> tuple[Problem, Solution]:
        group = group_of(cluster, size=dp, stride=stride)
        coster = Coster(Kernels(cluster.hardware), Links(cluster), group, batch)
        problem = make_problem(self.facts, AxisRule(name=DATA_AXIS, shards_batch=True), coster)
        solution = solve_problem(problem, all_blocks_once(problem))
        if solution.status == "infeasible":
            raise AutoparError("the model has no data-parallel typing: some op mixes its sequences")
        return problem, solution


def _is_whole(tensors: Sequence[TensorInfo], states: Sequence[State]) -> bool:
    """Whether one of the tensors grows with the batch and is whole on every rank."""
    return any(
        state.is_whole and not all(isinstance(size, int) for size in tensor.shape)
        for tensor, state in zip(tensors, states, strict=True)
    )


def _difference(whole: KindCost, alone: KindCost) -> KindCost:
    return KindCost(
        forward_s=max(0.0, whole.forward_s - alone.forward_s),
        backward_s=max(0.0, whole.backward_s - alone.backward_s),
        forward_comm_s=0.0,
        backward_comm_s=0.0,
        held_bytes=max(0, whole.held_bytes - alone.held_bytes),
        transient_bytes=max(0, whole.transient_bytes - alone.transient_bytes),
    )
