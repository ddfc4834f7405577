"""From the choices of a solution to the typing of every node on its axis."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from autopar.ir.graph import BlockKind, ModelGraph
from autopar.ir.layout import KindLayout, Layout, NodeTyping
from autopar.ir.mesh import LAYOUT_AXES
from autopar.ir.placement import INVARIANT, Placement, State
from autopar.solver.layout.classes import Classes
from autopar.solver.layout.outer import AxisTyping, KindStates
from autopar.solver.layout.problem import Problem, Solution


def axis_typing(
    model: ModelGraph, classes: Classes, problem: Problem, solution: Solution
) -> AxisTyping:
    """What each node demands and gives on the axis of ``problem``."""
    return {
        name: kind_typing(kind, classes, problem, solution) for name, kind in model.kinds.items()
    }


def kind_typing(
    kind: BlockKind, classes: Classes, problem: Problem, solution: Solution
) -> KindStates:
    """``axis_typing`` of one kind."""
    chosen = {
        op.node: op.options[choice].option
        for op, choice in zip(problem.ops, solution.choices, strict=True)
        if problem.kinds[op.kind] == kind.name
    }

    def state_of(side: str, index: int) -> State:
        number = classes.of[kind.name, side, index]
        return problem.classes[number].states[solution.states[number]]

    found: dict[str, tuple[tuple[State, ...], tuple[State, ...]]] = {}
    placeholders = {node: index for index, node in enumerate(kind.placeholders)}
    for node in kind.graph.nodes:
        if node in placeholders:
            found[node.name] = ((), (state_of("in", placeholders[node]),))
        elif node.op == "output":
            delivered = range(len(kind.outputs))
            found[node.name] = (tuple(state_of("out", i) for i in delivered), ())
        elif node.target is operator.getitem:
            source, element = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(element, int)
            found[node.name] = ((), (found[source.name][1][element],))
        else:
            option = chosen[node.name]
            found[node.name] = (option.operands, option.results)
    return found


def join_axes(typings: Mapping[str, AxisTyping]) -> Layout:
    """The layout over all layout axes, from typings of some; on the others everything is ``I``."""
    first = next(iter(typings.values()))
    return {
        kind: join_kind({axis: typing[kind] for axis, typing in typings.items()}) for kind in first
    }


def join_kind(typings: Mapping[str, KindStates]) -> KindLayout:
    """``join_axes`` of one kind."""
    first = next(iter(typings.values()))

    def joined(node: str, side: int) -> tuple[Placement, ...]:
        return tuple(
            tuple(
                typings[axis][node][side][index] if axis in typings else INVARIANT
                for axis in LAYOUT_AXES
            )
            for index in range(len(first[node][side]))
        )

    return {node: NodeTyping(operands=joined(node, 0), results=joined(node, 1)) for node in first}
