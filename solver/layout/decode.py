"""From the choices of a solution to the typing of every node on its axis."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from autopar.ir.graph import BlockKind, ModelGraph
from autopar.ir.layout import Layout, NodeTyping
from autopar.ir.placement import State
from autopar.solver.layout.classes import Classes
from autopar.solver.layout.problem import Problem, Solution

AxisTyping = Mapping[str, Mapping[str, tuple[tuple[State, ...], tuple[State, ...]]]]
"""Kind → node → states of its operands and of its results, on one axis."""


def axis_typing(
    model: ModelGraph, classes: Classes, problem: Problem, solution: Solution
) -> AxisTyping:
    """What each node demands and gives on the axis of ``problem``."""
    chosen = {
        (problem.kinds[op.kind], op.node): op.options[choice].option
        for op, choice in zip(problem.ops, solution.choices, strict=True)
    }

    def state_of(kind: str, side: str, index: int) -> State:
        number = classes.of[kind, side, index]
        return problem.classes[number].states[solution.states[number]]

    def of_kind(kind: BlockKind) -> dict[str, tuple[tuple[State, ...], tuple[State, ...]]]:
        found: dict[str, tuple[tuple[State, ...], tuple[State, ...]]] = {}
        placeholders = {node: index for index, node in enumerate(kind.placeholders)}
        for node in kind.graph.nodes:
            if node in placeholders:
                found[node.name] = ((), (state_of(kind.name, "in", placeholders[node]),))
            elif node.op == "output":
                delivered = range(len(kind.outputs))
                found[node.name] = (tuple(state_of(kind.name, "out", i) for i in delivered), ())
            elif node.target is operator.getitem:
                source, element = node.args
                assert isinstance(source, fx.Node)
                assert isinstance(element, int)
                found[node.name] = ((), (found[source.name][1][element],))
            else:
                option = chosen[kind.name, node.name]
                found[node.name] = (option.operands, option.results)
        return found

    return {name: of_kind(kind) for name, kind in model.kinds.items()}


def join_axes(outer: AxisTyping, inner: AxisTyping) -> Layout:
    """The layout over two axes."""
    return {
        kind: {
            node: NodeTyping(
                operands=tuple(zip(operands, inner[kind][node][0], strict=True)),
                results=tuple(zip(results, inner[kind][node][1], strict=True)),
            )
            for node, (operands, results) in nodes.items()
        }
        for kind, nodes in outer.items()
    }
