"""Verify shapes: run a local graph on meta tensors and hold it against what was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.axis_group import Reduction
from autopar.ir.errors import PlacementError
from autopar.ir.graph import BlockKind, info
from autopar.ir.mesh import LAYOUT_AXES, Mesh
from autopar.ir.program import AXIS_HANDLE
from autopar.ir.shapes import makes_from_nothing


def verify_shapes(kind: BlockKind, mesh: Mesh) -> None:
    """Check the shape and dtype of every node of the local graph of ``kind``.

    Raises:
        PlacementError: A node gives another shape than its ``NodeInfo`` says, or refuses its
            operands: the local form
            of its op is wrong.
    """
    groups = {AXIS_HANDLE.format(axis): ShapeGroup(axis, mesh.size(axis)) for axis in LAYOUT_AXES}
    values: dict[fx.Node, Any] = {}
    with torch.device("meta"), torch.no_grad():
        for node in kind.graph.nodes:
            if node.op == "placeholder":
                tensor = info(node).tensor
                values[node] = torch.empty(tensor.shape_at(1), dtype=tensor.dtype)
            elif node.op == "get_attr":
                values[node] = groups[node.target]
            elif node.op == "call_function":
                values[node] = _call(node, values)
                _compare(node, values[node], kind.name)


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = dict(fx.map_arg(node.kwargs, values.__getitem__))
    if makes_from_nothing(node):
        kwargs["device"] = "meta"
    assert callable(node.target)
    try:
        return node.target(*args, **kwargs)
    except Exception as error:
        raise PlacementError(
            f"the local form of {node.name} refuses its operands: {error}", where=info(node).source
        ) from error


def _compare(node: fx.Node, value: Any, kind: str) -> None:
    found = tuple(value) if info(node).is_tuple else (value,)
    expected = info(node).tensors
    for tensor, given in zip(expected, found, strict=True):
        if tuple(given.shape) != tensor.shape or given.dtype != tensor.dtype:
            raise PlacementError(
                f"the local form of {node.name} in {kind} gives {given.dtype} "
                f"{tuple(given.shape)}, "
                f"not {tensor.dtype} {tensor.shape}",
                where=info(node).source,
            )


@dataclass(frozen=True, slots=True)
class ShapeGroup:
    """An ``AxisGroup`` without ranks: its collectives only have the right shapes."""

    name: str
    size: int
    rank: int = 0

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        return torch.empty_like(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    def all_to_all_uneven(
        self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        return tensor.new_empty((sum(received), *tensor.shape[1:]))
