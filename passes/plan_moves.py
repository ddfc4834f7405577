"""Plan moves: what a layout makes the ranks send, as data for the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from autopar.ir.graph import ModelGraph, info
from autopar.ir.layout import Layout, operands_of
from autopar.ir.mesh import Mesh
from autopar.ir.moves import Collective, backward_of, collective_of, move
from autopar.ir.placement import local_shape, parse_state
from autopar.ir.plan import MovePlan
from autopar.ir.program import axis_name
from autopar.passes.base import TypedKind
from autopar.passes.pipeline import place


def plan_moves(
    model: ModelGraph, layout: Layout, *, mesh: Mesh, micro_batch_size: int
) -> tuple[MovePlan, ...]:
    """The moves inside the kinds of ``model``, in the order of kinds and nodes.

    ``bytes`` are those of the larger end of a move, as one rank holds it. A value without gradient
    has no backward.

    Raises:
        PlacementError: The layout does not type-check.
    """
    batch = micro_batch_size * mesh.batch_ranks
    typed = place(model, layout, mesh=mesh, batch=batch)
    return tuple(plan for kind in typed.values() for plan in _moves_of(kind, mesh, batch))


def _moves_of(typed: TypedKind, mesh: Mesh, batch: int) -> Iterator[MovePlan]:
    for node in typed.kind.graph.nodes:
        if node.target is move:
            yield _describe(node, typed, mesh, batch)


def _describe(node: fx.Node, typed: TypedKind, mesh: Mesh, batch: int) -> MovePlan:
    _, handle, source_text, target_text = node.args
    assert isinstance(handle, fx.Node)
    source, target = parse_state(str(source_text)), parse_state(str(target_text))
    tensor = info(node).tensor
    forward, backward = collective_of(source, target), Collective.NONE
    if tensor.requires_grad:
        backward = collective_of(*backward_of(source, target))
    sizes = mesh.layout_sizes()
    typing = typed.layout[node.name]
    ends = (typing.operands[0], typing.results[0])
    elements = max(math.prod(local_shape(tensor.shape_at(batch), end, sizes)) for end in ends)
    return MovePlan(
        kind=typed.kind.name,
        value=_moved_value(node).name,
        axis=axis_name(handle),
        source=str(source),
        target=str(target),
        forward=forward.value,
        backward=backward.value,
        bytes=elements * tensor.dtype.itemsize,
    )


def _moved_value(node: fx.Node) -> fx.Node:
    """What the path of moves that ends at ``node`` starts from."""
    while node.target is move:
        (node,) = operands_of(node)
    return node
