"""Ops without a factor rule: every rank repeats them whole, and the plan says so with the cost."""

from __future__ import annotations

from autopar.ir.families import op_text
from autopar.ir.graph import ModelGraph, info
from autopar.ir.layout import operands_of
from autopar.ir.placement import REPLICATED
from autopar.ir.plan import ReplicatedOp
from autopar.ir.rules.core import Option
from autopar.ir.rules.registry import has_rule
from autopar.ir.typecheck import is_op
from autopar.solver.costs.comm import Group, Links
from autopar.solver.costs.kernels import Kernels
from autopar.solver.hardware import Cluster
from autopar.solver.layout.costing import Coster, OpSeconds
from autopar.solver.layout.outer import OuterAxes


def replicated_ops(
    model: ModelGraph, cluster: Cluster, *, sequences: int, num_micro_batches: int
) -> tuple[ReplicatedOp, ...]:
    """The ops of ``model`` that have no rule, by target and source line, the costliest first.

    Args:
        sequences: Of a micro-batch on all data ranks: every rank computes them all.
        num_micro_batches: Of a step.

    Where nodes differ, seconds are those on the slowest.
    """
    alone = Group(size=1, per_node=1, sharing=1)
    costers = [
        Coster(Kernels(group.hardware), Links(group), alone, sequences) for group in cluster.groups
    ]
    copies = model.multiplicity()
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for kind in model.kinds.values():
        for node in kind.graph.nodes:
            if not is_op(node) or has_rule(node):
                continue
            option = Option(
                operands=(REPLICATED,) * len(operands_of(node)),
                results=(REPLICATED,) * len(info(node).tensors),
            )
            view = OuterAxes().view(kind, node)
            seconds = max(_seconds(coster.op(node, view, option)) for coster in costers)
            key = (op_text(node), info(node).source)
            count, total = found.get(key, (0, 0.0))
            each = seconds * num_micro_batches
            found[key] = (count + copies[kind.name], total + each * copies[kind.name])
    ops = [
        ReplicatedOp(op=op, source=source, count=count, seconds=seconds)
        for (op, source), (count, seconds) in found.items()
    ]
    return tuple(sorted(ops, key=lambda op: (-op.seconds, op.op, op.source)))


def _seconds(cost: OpSeconds) -> float:
    return cost.forward_s + cost.backward_s
