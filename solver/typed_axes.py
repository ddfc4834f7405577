"""Context and expert axes: each is typed by itself, by the problem that places tensors on the
tensor axis.

The context axis leaves parameters whole and shards anything else but the batch: sequences, as a
rule, with the keys gathered or heads exchanged where attention needs them. The expert axis shards
the batch, and the weights of routed experts. What they send is part of the problem of each axis
that is typed after them: shards send less.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.ir.errors import AutoparError
from autopar.ir.mesh import CONTEXT_AXIS, EXPERT_AXIS
from autopar.solver.costs.comm import Links, group_of
from autopar.solver.costs.kernels import Kernels
from autopar.solver.hardware import Cluster
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.decode import axis_typing
from autopar.solver.layout.make import make_problem
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.outer import AxisTyping, OuterAxes, OuterAxis
from autopar.solver.layout.outer_comm import NO_COMM, OuterComm, OuterTraffic, outer_traffic
from autopar.solver.layout.problem import TIE_BREAK_S_PER_BYTE, all_blocks_once
from autopar.solver.layout.solve import solve_problem
from autopar.solver.layout.state import AxisRule

CONTEXT = AxisRule(name=CONTEXT_AXIS, shards_activations=True)
EXPERT = AxisRule(name=EXPERT_AXIS, shards_batch=True, shards_experts=True)


@dataclass(slots=True, kw_only=True, eq=False)
class TypedAxes:
    """Typings of context and expert axes by degree, solved when asked for.

    Attributes:
        typed: Axes whose typings these have, whatever is best on ``cluster``.
    """

    facts: ModelFacts
    cluster: Cluster
    typed: TypedAxes | None = None
    _context: dict[tuple[int, int], AxisTyping] = field(default_factory=dict)
    _expert: dict[int, AxisTyping] = field(default_factory=dict)
    _outer: dict[tuple[int, int], OuterAxes] = field(default_factory=dict)
    _traffic: dict[tuple[int, int], OuterTraffic] = field(default_factory=dict)

    def on(self, cluster: Cluster) -> TypedAxes:
        """The same typings on other nodes."""
        return TypedAxes(facts=self.facts, cluster=cluster, typed=self)

    def typings(self, *, cp: int, ep: int) -> dict[str, AxisTyping]:
        """Typings of those of the two axes that have several ranks, by name."""
        if self.typed is not None:
            return self.typed.typings(cp=cp, ep=ep)
        found: dict[str, AxisTyping] = {}
        if ep > 1:
            found[EXPERT_AXIS] = self._expert_typing(ep)
        if cp > 1:
            found[CONTEXT_AXIS] = self._context_typing(cp, ep)
        return found

    def outer(self, *, cp: int, ep: int) -> OuterAxes:
        """What the two axes leave of a model to the tensor axis."""
        if self.typed is not None:
            return self.typed.outer(cp=cp, ep=ep)
        if (cp, ep) not in self._outer:
            axes = _axes(self.typings(cp=cp, ep=ep), cp=cp, ep=ep)
            self._outer[cp, ep] = OuterAxes(tuple(axes.values()))
        return self._outer[cp, ep]

    def comm(
        self,
        *,
        cp: int,
        ep: int,
        tp: int,
        micro_batch_size: int,
        strides: tuple[int, int] | None = None,
    ) -> OuterComm:
        """What both axes send, with a tensor axis that is not typed yet: inside them, unless
        ``strides`` says by how much neighbors on the context and the expert axis differ.
        """
        if cp * ep == 1:
            return NO_COMM
        if (cp, ep) not in self._traffic:
            axes = _axes(self.typings(cp=cp, ep=ep), cp=cp, ep=ep)
            self._traffic[cp, ep] = outer_traffic(self.facts.model, axes)
        costers = {}
        of_context, of_experts = strides or (ep * tp, tp)
        if ep > 1:
            costers[EXPERT_AXIS] = self._coster(ep, of_experts, micro_batch_size * ep)
        if cp > 1:
            costers[CONTEXT_AXIS] = self._coster(cp, of_context, micro_batch_size)
        return OuterComm(traffic=self._traffic[cp, ep], costers=costers, size=tp)

    def _expert_typing(self, ep: int) -> AxisTyping:
        if ep not in self._expert:
            coster = self._coster(ep, 1, ep)
            self._expert[ep] = self._solve(EXPERT, coster, OuterAxes(), NO_COMM)
        return self._expert[ep]

    def _context_typing(self, cp: int, ep: int) -> AxisTyping:
        if (cp, ep) not in self._context:
            outer = self.outer(cp=1, ep=ep)
            comm = replace(self.comm(cp=1, ep=ep, tp=1, micro_batch_size=1), size=cp)
            coster = self._coster(cp, ep, 1)
            self._context[cp, ep] = self._solve(CONTEXT, coster, outer, comm)
        return self._context[cp, ep]

    def _coster(self, size: int, stride: int, batch: int) -> Coster:
        group = group_of(self.cluster, size=size, stride=stride)
        return Coster(Kernels(self.cluster.hardware), Links(self.cluster), group, batch)

    def _solve(
        self, axis: AxisRule, coster: Coster, outer: OuterAxes, comm: OuterComm
    ) -> AxisTyping:
        """The typing that computes all blocks once in the least time, and keeps least of those."""
        problem = make_problem(self.facts, axis, coster, outer, comm)
        weights = all_blocks_once(problem, held_s_per_byte=TIE_BREAK_S_PER_BYTE)
        solution = solve_problem(problem, weights)
        if solution.status == "infeasible":
            raise AutoparError(
                f"the model has no typing on {coster.group.size} ranks of axis {axis.name}",
                hint=f"leave {axis.name} open",
            )
        return axis_typing(self.facts.model, self.facts.classes, problem, solution)


def _axes(typings: dict[str, AxisTyping], *, cp: int, ep: int) -> dict[str, OuterAxis]:
    found: dict[str, OuterAxis] = {}
    for name, size in ((CONTEXT_AXIS, cp), (EXPERT_AXIS, ep)):
        if name in typings:
            found[name] = OuterAxis(
                size=size, divides_batch=name == EXPERT_AXIS, typing=typings[name]
            )
    return found
