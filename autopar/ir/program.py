"""What the passes make and the runtime runs: local graphs of the kinds, and the segments built of
them.

A program is the same on every rank: ranks differ only in the axis groups that they attach
(``axis_<name>``).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.axis_group import AxisGroup
from autopar.ir.graph import ValueId
from autopar.ir.placement import Placement
from autopar.ir.shapes import makes_from_nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """A value as one rank holds it: local shape for one full micro-batch, and its placement."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A run of blocks on one pipeline stage.

    ``module`` calls the local graph modules of its blocks (submodules named after the kinds, shared
    by all segments of a program); it takes the values ``arguments`` in order and returns the values
    ``results`` as a tuple. ``received`` are the activations among the arguments that come from the
    previous segment, in the order in which the previous segment's ``sent`` lists them; a value that
    a later segment needs is passed through. The last segment's results include the loss and its
    weight.
    """

    index: int
    stage: int
    blocks: tuple[int, ...]
    module: fx.GraphModule
    arguments: tuple[ValueId, ...]
    results: tuple[ValueId, ...]
    received: tuple[ValueId, ...]
    sent: tuple[ValueId, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """The local form of a model under a plan, at one size of micro-batch.

    ``rest`` is the same model at the size of the last micro-batch, if that is another.
    """

    kinds: Mapping[str, fx.GraphModule]
    segments: tuple[Segment, ...]
    values: Mapping[ValueId, LocalTensor]
    parameters: Mapping[str, LocalTensor]
    rest: Program | None = None


AXIS_HANDLE = "axis_{}"
"""Name of the ``get_attr`` node (and attribute of a kind's graph module) that holds an axis group.
"""


def axis_handle(graph: fx.Graph, axis: str) -> fx.Node:
    """The node of ``graph`` that holds the group of ``axis``; made after the placeholders where
    missing.
    """
    name = AXIS_HANDLE.format(axis)
    for node in graph.nodes:
        if node.op == "get_attr" and node.target == name:
            return node
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        return graph.create_node("get_attr", name, name=name)


def axis_name(handle: fx.Node) -> str:
    """The axis whose group ``handle`` holds."""
    return str(handle.target).removeprefix(AXIS_HANDLE.format(""))


_binding = threading.Lock()  # fx renames the nodes of a graph while it generates code from it


def bind_axes(
    program: Program, groups: Mapping[str, AxisGroup], device: torch.device | None = None
) -> Program:
    """The program of one rank: the same graphs in modules of its own, which hold the rank's groups.

    Args:
        groups: The group of each layout axis; an axis of one rank may be left out.
        device: Where ops make tensors that are made from no other; default: torch's.
    """
    with _binding:
        kinds = {name: _bound(module, groups, device) for name, module in program.kinds.items()}
        segments = tuple(
            dataclasses.replace(segment, module=_with_kinds(segment.module, kinds))
            for segment in program.segments
        )
    rest = None if program.rest is None else bind_axes(program.rest, groups, device)
    return dataclasses.replace(program, kinds=kinds, segments=segments, rest=rest)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A module of its own with a copy of the graph of ``module``, which others may share."""
    with _binding:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        handles = {
            str(node.target): getattr(module, str(node.target))
            for node in graph.nodes
            if node.op == "get_attr"
        }
        return fx.GraphModule(handles, graph, class_name=type(module).__name__)


def _bound(
    module: fx.GraphModule, groups: Mapping[str, AxisGroup], device: torch.device | None
) -> fx.GraphModule:
    attributes = {AXIS_HANDLE.format(axis): group for axis, group in groups.items()}
    graph = module.graph if device is None else _on_device(module.graph, device)
    return fx.GraphModule(attributes, graph, class_name=type(module).__name__)


def _on_device(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """``graph``, or a copy in which ops that make tensors from nothing make them on ``device``."""
    if not any(map(makes_from_nothing, graph.nodes)):
        return graph
    placed = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = placed.node_copy(node, copies.__getitem__)
        if makes_from_nothing(node):
            copies[node].update_kwarg("device", device)
    return placed


def _with_kinds(module: fx.GraphModule, kinds: Mapping[str, fx.GraphModule]) -> fx.GraphModule:
    return fx.GraphModule(dict(kinds), module.graph, class_name=type(module).__name__)
