"""A layout: the placement of every operand and result of every node of every kind of block."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.mesh import DATA_AXIS, LAYOUT_AXES, TENSOR_AXIS
from autopar.ir.placement import INVARIANT, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTyping:
    """Placements that a node demands of its operands and gives its results.

    ``operands`` follow ``operands_of(node)``; placeholders have none. The output node has operands
    only. A ``getitem`` has the placement of the element it reads, and no operand of its own.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]


KindLayout = Mapping[str, NodeTyping]
"""Typing of every node of one kind, by node name."""

Layout = Mapping[str, KindLayout]
"""Layout of a model, by name of kind. All blocks of a kind share it."""


def describe(placement: Placement) -> str:
    """A placement for people: ``(dp S(0), tp I)``; further axes only where they are not ``I``."""
    if len(placement) != len(LAYOUT_AXES):
        return "(" + ", ".join(map(str, placement)) + ")"
    return (
        "("
        + ", ".join(
            f"{axis} {state}"
            for axis, state in zip(LAYOUT_AXES, placement, strict=True)
            if axis in (DATA_AXIS, TENSOR_AXIS) or state != INVARIANT
        )
        + ")"
    )


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor operands of ``node``, in order of its arguments; a node used twice appears twice.

    ``getitem`` has none: it is transparent. Axis handles (``get_attr``) are no operands.
    """
    if node.op == "call_function" and node.target is operator.getitem:
        return ()
    found: list[fx.Node] = []

    def visit(argument: object) -> None:
        if isinstance(argument, fx.Node):
            if argument.op != "get_attr":
                found.append(argument)
        elif isinstance(argument, list | tuple):
            for item in argument:
                visit(item)
        elif isinstance(argument, dict):
            for item in argument.values():
                visit(item)

    visit(node.args)
    visit(node.kwargs)
    return tuple(found)
