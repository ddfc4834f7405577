"""The end of a model that can run chunk by chunk: from the head's input to the summed loss.

Chunks are ranks of one more axis, innermost, that come one after the other: an op may run in chunks
where it has an option on such an axis, by its own rule. What it reads sharded is sliced, what it
reads whole (``R``: weights) is read by every chunk, so that its gradient is a sum over chunks, and
the loss has to come out ``P``: its terms are added. Nothing can be sent from chunk to chunk: there
are no moves along the axis, and no helpers. Moves along other axes stay as they are where they do
not touch the dim that chunks slice; otherwise they are made before, of the whole value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import BlockKind, ModelGraph, TensorInfo, info
from autopar.ir.layout import KindLayout, NodeTyping, operands_of
from autopar.ir.mesh import LAYOUT_AXES
from autopar.ir.move_path import move_path
from autopar.ir.placement import INVARIANT, PARTIAL, Placement, State, local_shape
from autopar.ir.rules.core import Option, normal_state, options_of
from autopar.ir.rules.random import is_random
from autopar.ir.typecheck import KindRules


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRegion:
    """Nodes that run in chunks: name → states of operands and results on the axis of chunks, in the
    order of the graph. What is no node of it and read by one is sliced as that one demands.
    """

    typing: Mapping[str, Option]

    def __contains__(self, node: fx.Node) -> bool:
        return node.name in self.typing


@dataclass(frozen=True, slots=True, kw_only=True)
class NoLossRegion:
    """Why nothing can run in chunks, and at which source line of the model."""

    reason: str
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossKind:
    """The kind of block that makes the loss.

    Attributes:
        sums: Which of its results are the loss and its weight.
        loss: The node that is the loss.
    """

    kind: BlockKind
    sums: frozenset[int]
    loss: fx.Node


def loss_kind(model: ModelGraph) -> LossKind | NoLossRegion:
    """The kind that makes the loss of ``model``, if it is of one block."""
    block, result = model.producer(model.loss)
    kind = model.kind_of(model.blocks[block])
    if model.multiplicity()[kind.name] > 1:
        return NoLossRegion(reason="the loss is made by a block that is repeated")
    sums = {result}
    if model.weight is not None and model.producer(model.weight)[0] == block:
        sums.add(model.producer(model.weight)[1])
    return LossKind(kind=kind, sums=frozenset(sums), loss=kind.outputs[result])


def loss_region(
    own: LossKind,
    layout: KindLayout,
    rules: KindRules,
    *,
    degrees: Mapping[str, int],
    batch: int,
    num_chunks: int,
) -> LossRegion | NoLossRegion:
    """The nodes of the kind that run in ``num_chunks`` chunks: as many as can.

    Args:
        own: The kind.
        layout: Typing of its nodes, before moves are inserted.
        rules: ``kind_rules`` of it.
        degrees: Ranks of each of ``LAYOUT_AXES``.
        batch: Sequences of the micro-batch over all data ranks.
        num_chunks: At least 2; each slice is as large.
    """
    grower = _Grower(own, layout, rules, degrees, batch, num_chunks)
    found = grower.regions()
    return max(found, key=lambda region: len(region.typing)) if found else grower.failure()


def most_in_chunks(
    own: LossKind, rules: KindRules, num_chunks: int
) -> frozenset[str] | NoLossRegion:
    """Nodes that are in a region of ``num_chunks`` chunks, or of a multiple of so many, under some
    layout.
    """
    whole = (INVARIANT,) * len(LAYOUT_AXES)
    layout = {
        node.name: NodeTyping(
            operands=(whole,) * len(operands_of(node)),
            results=() if node.op == "output" else (whole,) * len(info(node).tensors),
        )
        for node in own.kind.graph.nodes
    }
    degrees = {str(axis): 1 for axis in LAYOUT_AXES}
    grower = _Grower(own, layout, rules, degrees, num_chunks, num_chunks)
    found = frozenset(name for region in grower.regions() for name in region.typing)
    return found or grower.failure()


class _Grower:
    """Grows a region from the loss upward. Where a sum can be cut in several ways (by sequences, by
    positions) each gives a region.
    """

    def __init__(
        self,
        own: LossKind,
        layout: KindLayout,
        rules: KindRules,
        degrees: Mapping[str, int],
        batch: int,
        num_chunks: int,
    ) -> None:
        self.own, self.layout, self.rules = own, layout, rules
        self.sizes = tuple(degrees[axis] for axis in LAYOUT_AXES)
        self.batch, self.num_chunks = batch, num_chunks
        self.num_ways = 0
        self.blocked: fx.Node | None = None

    def regions(self) -> list[LossRegion]:
        """Those of all ways that there are."""
        found: list[LossRegion] = []
        number = 0
        while number < max(1, self.num_ways):
            region = self.grow(number)
            found += [] if region is None else [region]
            number += 1
        return found

    def grow(self, way: int) -> LossRegion | None:
        """The region that cuts sums in way number ``way``; None where it lacks the loss."""
        banned: set[fx.Node] = set()
        while True:
            typing = self._grown(way, banned)
            unmet = self._unmet(typing)
            if not unmet:
                break
            banned |= unmet
        if self.own.loss.name not in typing:
            return None
        order = {node.name: number for number, node in enumerate(self.own.kind.graph.nodes)}
        return LossRegion(typing={name: typing[name] for name in sorted(typing, key=order.get)})  # type: ignore[arg-type]

    def failure(self) -> NoLossRegion:
        """Why no region has the loss."""
        node = self.blocked or self.own.loss
        while node.target is operator.getitem:
            node = node.all_input_nodes[0]
        return NoLossRegion(
            reason=f"the loss is no sum over {self.num_chunks} equal shares of tokens: "
            f"{node.name} ({node.target}) does not come in parts",
            where=info(node).source,
        )

    def _grown(self, way: int, banned: set[fx.Node]) -> dict[str, Option]:
        """All nodes that are read by nodes of the region only, in the states that these demand.

        Of each element of each value: the states that its readers demand, None where it is whole.
        """
        demands: dict[tuple[fx.Node, int], set[State | None]] = {}
        typing: dict[str, Option] = {}
        self.blocked = None
        for node in reversed(self.own.kind.graph.nodes):
            if node.op == "output":
                for index, value in enumerate(self.own.kind.outputs):
                    state = PARTIAL if index in self.own.sums else None
                    demands.setdefault((value, 0), set()).add(state)
            elif node.op == "call_function":
                num = len(info(node).tensors)
                wanted = [demands.get((node, element), set()) for element in range(num)]
                if not any(wanted):
                    continue  # nobody reads it
                self._visit(node, wanted, way, banned, demands, typing)
        return typing

    def _visit(
        self,
        node: fx.Node,
        wanted: list[set[State | None]],
        way: int,
        banned: set[fx.Node],
        demands: dict[tuple[fx.Node, int], set[State | None]],
        typing: dict[str, Option],
    ) -> None:
        is_alike = all(len(states) <= 1 and None not in states for states in wanted)
        results = [next(iter(states), None) for states in wanted]
        if node.target is operator.getitem:
            source, element = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(element, int)
            state = results[0] if is_alike and node not in banned else None
            if state is not None:
                typing[node.name] = Option(operands=(), results=(state,))
            demands.setdefault((source, element), set()).add(state)
            return
        option = None
        if is_alike and node not in banned:
            option = self._option(node, results, way)
            if option is None and self.blocked is None and PARTIAL in results:
                self.blocked = node
        operands = operands_of(node)
        if option is None:
            for operand in operands:
                demands.setdefault((operand, 0), set()).add(None)
            return
        typing[node.name] = option
        demanded = self.layout[node.name].operands
        for operand, state, placement in zip(operands, option.operands, demanded, strict=True):
            inside = (state.is_sharded or state == PARTIAL) and self._is_free(
                operand, state, placement
            )
            demands.setdefault((operand, 0), set()).add(state if inside else None)

    def _unmet(self, typing: Mapping[str, Option]) -> set[fx.Node]:
        """Nodes that read terms of a sum from outside, where there are none, or an element of what
        is outside; and what is read from outside in two ways.
        """
        found: set[fx.Node] = set()
        read: dict[str, State] = {}
        for node in self.own.kind.graph.nodes:
            if node.name not in typing:
                continue
            if node.target is operator.getitem and node.all_input_nodes[0].name not in typing:
                found.add(node)
            states = typing[node.name].operands
            for operand, state in zip(operands_of(node), states, strict=False):  # getitem: none
                if operand.name in typing:
                    continue
                if state == PARTIAL or read.setdefault(operand.name, state) != state:
                    found.add(node)
        return found

    def _option(self, node: fx.Node, results: list[State | None], way: int) -> Option | None:
        """An option that gives ``results`` on the axis of chunks (None: any); None where there is
        none.
        """
        operands = operands_of(node)
        if not operands or is_random(node):
            return None  # made from nothing, or by position among all tokens
        typing: NodeTyping = self.layout[node.name]
        pairs = zip(operands, typing.operands, strict=True)
        found = [
            option
            for option in options_of(
                self.rules.rules[node.name],
                [self._local(info(operand).tensor, placement) for operand, placement in pairs],
                [
                    self._local(tensor, placement)
                    for tensor, placement in zip(info(node).tensors, typing.results, strict=True)
                ],
                axis_size=self.num_chunks,
                batch=self.batch,
                patterns={},
            )
            if self._gives(option, results)
        ]
        if PARTIAL in results:
            self.num_ways = max(self.num_ways, len(found))
        elif len(found) > 1:
            found = found[:1]
        return found[min(way, len(found) - 1)] if found else None

    def _gives(self, option: Option, results: list[State | None]) -> bool:
        if option.helper is not None:
            return False
        states = (*option.operands, *option.results)
        if any(
            state.is_sharded and (len(state.blocks) > 1 or state.padded_size) for state in states
        ):
            return False
        return all(
            wanted is None or given == wanted
            for given, wanted in zip(option.results, results, strict=True)
        ) and any(state.is_sharded or state == PARTIAL for state in option.operands)

    def _local(self, tensor: TensorInfo, placement: Placement) -> TensorInfo:
        shape = local_shape(tensor.shape_at(self.batch), placement, self.sizes)
        return TensorInfo(shape=shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)

    def _is_free(self, operand: fx.Node, state: State, demanded: Placement) -> bool:
        """Whether all moves of a value, from where it is made to where it is read, leave alone the
        dim that chunks slice, so that they can be made of each slice.
        """
        tensor = info(operand).tensor
        given = self._normal(self.layout[operand.name].results[0], tensor)
        target = self._normal(demanded, tensor)
        steps = move_path(given, target, self.sizes, requires_grad=tensor.requires_grad)
        touched = {end.dim for step in steps for end in (step.source, step.target)}
        return not state.is_sharded or state.dim not in touched

    def _normal(self, placement: Placement, tensor: TensorInfo) -> Placement:
        """On an axis of one rank all states are the same."""
        return tuple(
            INVARIANT if size == 1 else normal_state(state, tensor)
            for state, size in zip(placement, self.sizes, strict=True)
        )
