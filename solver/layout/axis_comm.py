"""What the collectives of a typed axis cost, by code that knows no solver."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from autopar.ir.graph import BlockKind, ModelGraph
from autopar.ir.layout import operands_of
from autopar.ir.rules.core import Option
from autopar.ir.typecheck import is_op
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.outer import AxisTyping, OuterAxes
from autopar.solver.layout.problem import MoveCost


def axis_comm(
    model: ModelGraph, typing: AxisTyping, coster: Coster, others: OuterAxes
) -> Mapping[str, MoveCost]:
    """Seconds of the moves and helpers of an axis in a block of each kind, per micro-batch.

    Args:
        typing: States on the axis.
        coster: Costs for the ranks of the axis, at the sequences of all of them together.
        others: All other axes.
    """
    return {name: _of_kind(kind, typing, coster, others) for name, kind in model.kinds.items()}


def _of_kind(kind: BlockKind, typing: AxisTyping, coster: Coster, others: OuterAxes) -> MoveCost:
    states = typing[kind.name]
    moved: dict[tuple[fx.Node, int, object], MoveCost] = {}
    forward = backward = 0.0
    for node in kind.graph.nodes:
        if node.op != "output" and not is_op(node):
            continue
        for operand, demanded in zip(operands_of(node), states[node.name][0], strict=True):
            given = states[operand.name][1][0]
            tensor = others.view(kind, operand).results[0]
            moved[(*_value(operand), demanded)] = coster.move(tensor, given, demanded)
        if node.target is torch.ops.autopar.routed_experts.default:
            view = others.view(kind, node)
            operands, results = states[node.name]
            sends = operands[0].is_sharded and results[0].is_sharded
            helper = "expert_dispatch" if sends and operands[3].is_sharded else None
            option = Option(operands=operands, results=results, helper=helper)
            seconds = coster.op(node, view, option)
            forward += seconds.forward_comm_s
            backward += seconds.backward_comm_s
    return MoveCost(
        forward + sum(cost.forward_s for cost in moved.values()),
        backward + sum(cost.backward_s for cost in moved.values()),
    )


def _value(node: fx.Node) -> tuple[fx.Node, int]:
    """A value is a result of a node, or the element of one that ``getitem`` reads."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        return source, index
    return node, 0
