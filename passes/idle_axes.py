"""Settle idle axes: on an axis of one rank all states are the same, and ``I`` stands for all."""

from __future__ import annotations

from autopar.ir.layout import Layout, NodeTyping
from autopar.ir.mesh import LAYOUT_AXES, Mesh
from autopar.ir.placement import INVARIANT, Placement


def settle_idle_axes(layout: Layout, mesh: Mesh) -> Layout:
    """Any layout → the same, with ``I`` on axes of one rank: well-typed there, without moves."""
    idle = tuple(mesh.size(axis) == 1 for axis in LAYOUT_AXES)
    if not any(idle):
        return layout

    def settled(placement: Placement) -> Placement:
        if len(placement) != len(idle):
            return placement  # the type checker says what is wrong with it
        return tuple(
            INVARIANT if alone else state for state, alone in zip(placement, idle, strict=True)
        )

    return {
        kind: {
            node: NodeTyping(
                operands=tuple(map(settled, typing.operands)),
                results=tuple(map(settled, typing.results)),
            )
            for node, typing in nodes.items()
        }
        for kind, nodes in layout.items()
    }
