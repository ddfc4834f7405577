"""What the collectives of axes that are typed already cost, by the choices on the axis that is not.

A value moves on a typed axis in the state in which it is made on the other: a shard of it sends so
much less. The tokens of routed experts are sent as the option of their op shards them.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.graph import BlockKind, ModelGraph, TensorInfo
from autopar.ir.layout import operands_of
from autopar.ir.placement import State
from autopar.ir.rules.core import Option
from autopar.ir.typecheck import is_op
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.outer import AxisTyping, NodeView, OuterAxes, OuterAxis, shard
from autopar.solver.layout.problem import MoveCost


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterMove:
    """A move on typed axis ``axis`` of a tensor as the ranks of all other typed axes hold it."""

    axis: str
    tensor: TensorInfo
    source: State
    target: State


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterHelper:
    """A helper on typed axis ``axis`` of an op as the ranks of all other typed axes see it."""

    axis: str
    view: NodeView
    option: Option


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OuterTraffic:
    """What typed axes send in each kind of block.

    Attributes:
        moves: By kind, node and result.
        helpers: By kind and node.
    """

    moves: Mapping[tuple[str, str, int], tuple[OuterMove, ...]]
    helpers: Mapping[tuple[str, str], tuple[OuterHelper, ...]]

    def of_op(self, kind: str, node: str, num_results: int) -> Hashable:
        """Equal for ops of whose results and tokens the same is sent."""
        moves = tuple(self.moves.get((kind, node, result), ()) for result in range(num_results))
        return moves, self.helpers.get((kind, node), ())

    def sends(self, kind: str, node: str, num_results: int) -> bool:
        """Whether anything is sent of an op's results or tokens."""
        moved = any((kind, node, result) in self.moves for result in range(num_results))
        return moved or (kind, node) in self.helpers


def outer_traffic(model: ModelGraph, axes: Mapping[str, OuterAxis]) -> OuterTraffic:
    """Of all typed axes of a model."""
    moves: dict[tuple[str, str, int], dict[OuterMove, None]] = {}
    helpers: dict[tuple[str, str], tuple[OuterHelper, ...]] = {}
    for name, axis in axes.items():
        others = OuterAxes(tuple(other for key, other in axes.items() if key != name))
        for kind in model.kinds.values():
            for node, result, move in _moves(kind, name, axis.typing, others):
                moves.setdefault((kind.name, node, result), {})[move] = None
            for node, helper in _helpers(kind, name, axis.typing, others):
                key = (kind.name, node)
                helpers[key] = (*helpers.get(key, ()), helper)
    return OuterTraffic(moves={key: tuple(found) for key, found in moves.items()}, helpers=helpers)


def _moves(
    kind: BlockKind, axis: str, typing: AxisTyping, others: OuterAxes
) -> Iterator[tuple[str, int, OuterMove]]:
    """Values that somebody takes in another state than they are made in."""
    states = typing[kind.name]
    for node in kind.graph.nodes:
        if node.op != "output" and not is_op(node):
            continue
        for operand, target in zip(operands_of(node), states[node.name][0], strict=True):
            source = states[operand.name][1][0]
            if source != target:
                tensor = others.view(kind, operand).results[0]
                move = OuterMove(axis=axis, tensor=tensor, source=source, target=target)
                yield (*_value(operand), move)


def _value(node: fx.Node) -> tuple[str, int]:
    """A value is a result of a node, or the element of one that ``getitem`` reads."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        return source.name, index
    return node.name, 0


def _helpers(
    kind: BlockKind, axis: str, typing: AxisTyping, others: OuterAxes
) -> Iterator[tuple[str, OuterHelper]]:
    """Routed experts whose tokens are sent to other ranks."""
    for node in kind.graph.nodes:
        if node.target is not torch.ops.autopar.routed_experts.default:
            continue
        operands, results = typing[kind.name][node.name]
        if operands[0].is_sharded and results[0].is_sharded and operands[3].is_sharded:
            option = Option(operands=operands, results=results, helper="expert_dispatch")
            view = others.view(kind, node)
            yield node.name, OuterHelper(axis=axis, view=view, option=option)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OuterComm:
    """Seconds of ``traffic``, per block and micro-batch.

    Attributes:
        costers: For the ranks of each typed axis, at the sequences of all of them together.
        size: Ranks of the axis that is not typed yet.
    """

    traffic: OuterTraffic
    costers: Mapping[str, Coster]
    size: int
    _known: dict[tuple[OuterMove, State], MoveCost] = field(default_factory=dict, repr=False)

    def made(self, kind: str, node: str, result: int, state: State) -> MoveCost:
        """Of the moves of a value that is made in ``state``."""
        forward = backward = 0.0
        for move in self.traffic.moves.get((kind, node, result), ()):
            cost = self._move(move, state)
            forward, backward = forward + cost.forward_s, backward + cost.backward_s
        return MoveCost(forward, backward)

    def _move(self, move: OuterMove, state: State) -> MoveCost:
        if (move, state) not in self._known:
            tensor = shard(move.tensor, state, self.size)
            cost = self.costers[move.axis].move(tensor, move.source, move.target)
            self._known[move, state] = cost
        return self._known[move, state]

    def helped(self, kind: str, node: str, option: Option) -> MoveCost:
        """Of the helpers of an op under ``option``."""
        forward = backward = 0.0
        for helper in self.traffic.helpers.get((kind, node), ()):
            operands = tuple(
                shard(tensor, state, self.size)
                for tensor, state in zip(helper.view.operands, option.operands, strict=True)
            )
            seconds = self.costers[helper.axis].helper_seconds(helper.option, operands)
            forward, backward = forward + seconds[0], backward + seconds[1]
        return MoveCost(forward, backward)


NO_COMM = OuterComm(traffic=OuterTraffic(moves={}, helpers={}), costers={}, size=1)
"""Of no typed axes."""
