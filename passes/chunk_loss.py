"""Chunk the loss: the nodes that can run in chunks become one call that runs them so."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.chunked_loss import ChunkedLoss
from autopar.ir.errors import PlacementError
from autopar.ir.graph import BlockKind, ModelGraph, NodeInfo, TensorInfo, info, set_info
from autopar.ir.kernels import KernelSet
from autopar.ir.layout import KindLayout, operands_of
from autopar.ir.loss_region import LossRegion, NoLossRegion, loss_kind, loss_region
from autopar.ir.mesh import Mesh
from autopar.ir.moves import move
from autopar.ir.placement import State
from autopar.ir.rules.local import localize_node
from autopar.ir.typecheck import chosen_options, kind_rules
from autopar.passes.base import TypedKind, with_graph
from autopar.passes.choose_kernels import choose_kernels
from autopar.passes.localize import local_info
from autopar.passes.verify_shapes import verify_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLoss:
    """The local form of a kind → the same, with the nodes of its region in one ``ChunkedLoss``.

    Other kinds, and all of them at one chunk, are left as they are.

    Attributes:
        num_chunks: Slices of the tokens.
        at_most: Take fewer chunks, or one, where so many cannot be had.
    """

    model: ModelGraph
    mesh: Mesh
    batch: int
    num_chunks: int
    kernels: KernelSet
    at_most: bool = False

    def __call__(self, local: BlockKind, typed: TypedKind, layout: KindLayout) -> BlockKind:
        """Args:
            local: The localized kind.
            typed: What it was localized from, with its moves.
            layout: Its typing before moves were inserted.

        Raises:
            PlacementError: Nothing of the loss can be run in so many chunks.
        """
        own = loss_kind(self.model)
        if self.num_chunks == 1:
            return local
        if isinstance(own, NoLossRegion):
            return self._without(local, own)
        if own.kind.name != local.name:
            return local
        rules, failure = kind_rules(own.kind), None
        for num_chunks in range(self.num_chunks, 1, -1):
            region = loss_region(
                own,
                layout,
                rules,
                degrees=self.mesh.degrees(),
                batch=self.batch,
                num_chunks=num_chunks,
            )
            if isinstance(region, LossRegion):
                return self._chunked(local, typed, region, num_chunks)
            failure = failure or region
            if not self.at_most:
                break
        assert failure is not None
        return self._without(local, failure)

    def _without(self, local: BlockKind, failure: NoLossRegion) -> BlockKind:
        if self.at_most:
            return local
        raise PlacementError(
            f"the loss cannot be computed in {self.num_chunks} chunks: {failure.reason}",
            where=failure.where or None,
            hint="loss_chunks=1, or a number that divides the tokens of a rank",
        )

    def _chunked(
        self, local: BlockKind, typed: TypedKind, region: LossRegion, num_chunks: int
    ) -> BlockKind:
        states = _states(typed.kind.graph, region)
        entries = _entries(typed.kind.graph, states, region)
        chunk = self._chunk(typed, states, entries, num_chunks)
        handles = [str(node.target) for node in chunk.graph.nodes if node.op == "get_attr"]
        sums = [node for node in dict.fromkeys(typed.kind.outputs) if node.name in states]
        facts = tuple(info(node).tensor for node in sums)
        call = ChunkedLoss(
            _as_function(chunk.graph, [node.name for node in sums]),
            num_chunks=num_chunks,
            dims=[*(_dim(state) for state in entries.values()), *(None for _ in handles)],
            shapes=[tensor.shape_at(self.batch) for tensor in facts],
            dtypes=[tensor.dtype for tensor in facts],
            learned=[tensor.requires_grad for tensor in facts],
        )
        graph = _with_call(local.graph, states, tuple(entries), handles, call, sums, facts)
        chunked = with_graph(local, graph)
        verify_shapes(chunked, self.mesh)
        return chunked

    def _chunk(
        self,
        typed: TypedKind,
        states: Mapping[str, tuple[State, ...]],
        entries: Mapping[str, State],
        num_chunks: int,
    ) -> BlockKind:
        """The nodes of the region as one rank computes them of a chunk."""
        degrees = self.mesh.degrees()
        options = chosen_options(typed.kind, typed.layout, degrees=degrees, batch=self.batch)
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        infos: dict[fx.Node, NodeInfo] = {}
        for node in typed.kind.graph.nodes:
            if node.op == "get_attr" and any(user.name in states for user in node.users):
                copies[node] = graph.node_copy(node)
            elif node.name in entries:
                copies[node] = graph.placeholder(node.name)
                set_info(copies[node], info(node))
            elif node.name in states:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            else:
                continue
            if node.op == "get_attr":
                continue
            assert copies[node].name == node.name, f"{node.name} became {copies[node].name}"
            whole = local_info(node, typed.layout, self.mesh, self.batch)
            own = (entries[node.name],) if node.name in entries else states[node.name]
            parts = zip(whole.tensors, own, strict=True)
            infos[copies[node]] = dataclasses.replace(
                whole, tensors=tuple(_part(tensor, state, num_chunks) for tensor, state in parts)
            )
        for node in graph.nodes:
            if node.name in options and node.name in states:
                shapes = [tensor.shape_at(self.batch) for tensor in infos[node].tensors]
                localize_node(graph, node, options[node.name], shapes)
        for node, facts in infos.items():
            set_info(node, facts)
        choose_kernels(graph, self.kernels)
        kind = BlockKind(name=f"{typed.kind.name}'s loss", graph=graph, roles=())
        verify_shapes(kind, self.mesh)
        return kind


def _states(graph: fx.Graph, region: LossRegion) -> dict[str, tuple[State, ...]]:
    """States of the results of the region's nodes on the axis of chunks, moves between them
    included.
    """
    found: dict[str, tuple[State, ...]] = {}
    for node in graph.nodes:
        if node in region:
            found[node.name] = region.typing[node.name].results
        elif node.target is move and operands_of(node)[0].name in found:
            found[node.name] = found[operands_of(node)[0].name]
    return found


def _entries(
    graph: fx.Graph, states: Mapping[str, tuple[State, ...]], region: LossRegion
) -> dict[str, State]:
    """What nodes of the region read from outside, in the state in which they do, in the order of
    the graph.
    """
    found: dict[str, State] = {}
    for node in graph.nodes:
        if node in region:
            pairs = zip(operands_of(node), region.typing[node.name].operands, strict=False)
            for operand, state in pairs:  # getitem has none
                if operand.name not in states:
                    assert found.setdefault(operand.name, state) == state
    return {node.name: found[node.name] for node in graph.nodes if node.name in found}


def _dim(state: State) -> int | None:
    return state.dim if state.is_sharded else None


def _part(tensor: TensorInfo, state: State, num_chunks: int) -> TensorInfo:
    """A tensor of local shape as a chunk has it."""
    shape, dim = list(tensor.shape), _dim(state)
    if dim is not None:
        size = shape[dim]
        assert isinstance(size, int)
        assert size % num_chunks == 0
        shape[dim] = size // num_chunks
    return dataclasses.replace(tensor, shape=tuple(shape))


def _as_function(graph: fx.Graph, results: list[str]) -> fx.GraphModule:
    """A module of ``graph`` that takes the groups of axes as its last arguments: it is the same on
    all ranks.
    """
    function = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    given = [node for node in graph.nodes if node.op == "placeholder"]
    handles = [node for node in graph.nodes if node.op == "get_attr"]
    for node in (*given, *handles):
        copies[node] = function.placeholder(node.name)
    for node in graph.nodes:
        if node not in copies:
            copies[node] = function.node_copy(node, copies.__getitem__)
    made = {node.name: copies[node] for node in graph.nodes}
    function.output(tuple(made[name] for name in results))
    return fx.GraphModule({}, function, class_name="LossChunk")


def _with_call(
    graph: fx.Graph,
    states: Mapping[str, tuple[State, ...]],
    entries: tuple[str, ...],
    handles: list[str],
    call: ChunkedLoss,
    sums: list[fx.Node],
    facts: tuple[TensorInfo, ...],
) -> fx.Graph:
    """``graph`` with ``call`` in place of the region's nodes."""
    changed = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            named = {str(copy.name): copy for copy in copies.values()}
            axes = [copies[node] for node in _handles(graph, handles)]
            arguments = (*(named[name] for name in entries), *axes)
            called = changed.call_function(call, arguments)
            set_info(called, dataclasses.replace(info(sums[0]), tensors=facts, is_tuple=True))
            for index, made in enumerate(sums):
                element = changed.call_function(operator.getitem, (called, index))
                set_info(element, dataclasses.replace(info(made), tensors=(facts[index],)))
                copies[_named(graph, made.name)] = element
        if node.name not in states:
            copies[node] = changed.node_copy(node, copies.__getitem__)
    return changed


def _named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def _handles(graph: fx.Graph, targets: list[str]) -> list[fx.Node]:
    found = {str(node.target): node for node in graph.nodes if node.op == "get_attr"}
    return [found[target] for target in targets]
