"""Localize: from what a kind of block computes globally to what one rank computes."""

from __future__ import annotations

import dataclasses

from torch import fx

from autopar.ir.errors import PlacementError
from autopar.ir.graph import BlockKind, NodeInfo, info, set_info
from autopar.ir.layout import KindLayout
from autopar.ir.mesh import Mesh
from autopar.ir.placement import local_shape
from autopar.ir.rules.local import localize_node
from autopar.ir.typecheck import chosen_options
from autopar.passes.base import TypedKind, copy_graph, with_graph
from autopar.passes.verify_shapes import verify_shapes


def localize(typed: TypedKind, *, mesh: Mesh, batch: int) -> BlockKind:
    """The local form of a kind whose placements are met by moves.

    Ops get their local form and every ``NodeInfo`` the shapes of one rank, as ints. The result is
    verified by running it on meta tensors.

    Args:
        batch: Sequences in the global micro-batch: micro-batch size × data ranks.

    Raises:
        PlacementError: A dim does not divide, options exclude each other, or a local form is wrong.
    """
    graph, copies = copy_graph(typed.kind.graph)
    infos = {
        node: local_info(node, typed.layout, mesh, batch)
        for node in copies.values()
        if node.op not in ("get_attr", "output")
    }
    degrees = mesh.degrees()
    options = chosen_options(typed.kind, typed.layout, degrees=degrees, batch=batch)
    for node in copies.values():
        if node.name in options:
            shapes = [tensor.shape_at(batch) for tensor in infos[node].tensors]
            localize_node(graph, node, options[node.name], shapes)
    for node, local in infos.items():
        set_info(node, local)
    kind = with_graph(typed.kind, graph)
    verify_shapes(kind, mesh)
    return kind


def local_info(node: fx.Node, layout: KindLayout, mesh: Mesh, batch: int) -> NodeInfo:
    """The facts of ``node`` with the shapes of one rank."""
    given = info(node)
    sizes = mesh.layout_sizes()
    try:
        tensors = tuple(
            dataclasses.replace(tensor, shape=local_shape(tensor.shape_at(batch), placement, sizes))
            for tensor, placement in zip(given.tensors, layout[node.name].results, strict=True)
        )
    except PlacementError as error:
        raise PlacementError(f"{node.name}: {error.what}", where=given.source or None) from None
    return dataclasses.replace(given, tensors=tensors)
