"""From the choices of a solution to the typing of every node on its axis."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from autopar.ir.graph import BlockKind, ModelGraph
from autopar.ir.layout import Layout, NodeTyping
from autopar.ir.mesh import LAYOUT_AXES
from autopar.ir.placement import INVARIANT, Placement, State
from autopar.solver.layout.classes import Classes
from autopar.solver.layout.outer import AxisTyping
from autopar.solver.layout.problem import Problem, Solution


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


def join_axes(typings: Mapping[str, AxisTyping]) -> Layout:
    """The layout over all layout axes, from typings of some; on the others everything is ``I``."""
    first = next(iter(typings.values()))

    def joined(kind: str, node: str, side: int) -> tuple[Placement, ...]:
        count = len(first[kind][node][side])
        return tuple(
            tuple(
                typings[axis][kind][node][side][index] if axis in typings else INVARIANT
                for axis in LAYOUT_AXES
            )
            for index in range(count)
        )

    return {
        kind: {
            node: NodeTyping(operands=joined(kind, node, 0), results=joined(kind, node, 1))
            for node in nodes
        }
        for kind, nodes in first.items()
    }
