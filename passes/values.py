"""The values that pass between blocks, as one rank holds them: each has one placement."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.ir.errors import PlacementError
from autopar.ir.graph import ModelGraph, ValueId, activation, info
from autopar.ir.layout import describe
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, local_shape
from autopar.ir.program import LocalTensor
from autopar.passes.base import TypedKind, normal_placement


def local_values(
    model: ModelGraph, typed: Mapping[str, TypedKind], *, mesh: Mesh, batch: int
) -> dict[ValueId, LocalTensor]:
    """Every parameter, input, constant and activation of ``model`` as one rank holds it.

    Args:
        typed: The kinds by name, with their moves inserted.
        batch: Sequences in the global micro-batch.

    Raises:
        PlacementError: Two blocks disagree on the placement of a value, or a dim does not divide.
    """
    axis_sizes = mesh.layout_sizes()
    found: dict[ValueId, LocalTensor] = {}

    def see(value: ValueId, node: fx.Node, placement: Placement, path: str) -> None:
        tensor = info(node).tensor
        placed = normal_placement(placement, tensor)
        known = found.get(value)
        if known is None:
            found[value] = LocalTensor(
                shape=local_shape(tensor.shape_at(batch), placed, axis_sizes),
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
                placement=placed,
            )
        elif normal_placement(known.placement, tensor) != placed:
            raise PlacementError(
                f"{value} is placed {describe(known.placement)}, but {describe(placed)} in block "
                f"{path}",
                where=info(node).source or None,
                hint="a value that passes between blocks has one placement",
            )

    for block in model.blocks:
        kind, layout = typed[block.kind].kind, typed[block.kind].layout
        for value, node in zip(block.bindings, kind.placeholders, strict=True):
            see(value, node, layout[node.name].results[0], block.path)
        demands = layout[kind.graph.output_node().name].operands
        for index, (node, placement) in enumerate(zip(kind.outputs, demands, strict=True)):
            see(activation(block.index, index), node, placement, block.path)
    return found
