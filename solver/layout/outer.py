"""What the axes that are typed already leave of every tensor to a rank.

Axes are typed one after the other: the data axis, then the context and the expert axis, then the
tensor axis. A problem sees its tensors as the ranks of all other axes hold them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch import fx

from autopar.ir.graph import BATCH, BlockKind, TensorInfo, info
from autopar.ir.layout import operands_of
from autopar.ir.placement import State
from autopar.ir.rules.call import Call
from autopar.solver.layout.state import grows

KindStates = Mapping[str, tuple[tuple[State, ...], tuple[State, ...]]]
"""Node → states of its operands and of its results, on one axis."""

AxisTyping = Mapping[str, KindStates]
"""The same of each kind."""

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterAxis:
    """A typed axis.

    Attributes:
        size: Its ranks.
        divides_batch: Whether the batch that a problem is solved at is that of one of its ranks.
    """

    size: int
    divides_batch: bool
    typing: AxisTyping


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node as the ranks of typed axes see it.

    Attributes:
        operands, results: Tensors with the shapes of a rank.
        states: For each of them (operands first) its states on the typed axes.
        imbalance: How much more than the average the busiest rank computes.
        dispatch: Ranks of typed axes that send each other the tokens of their experts.
    """

    operands: tuple[TensorInfo, ...]
    results: tuple[TensorInfo, ...]
    states: tuple[tuple[State, ...], ...]
    imbalance: float = 1.0
    dispatch: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class OuterAxes:
    """All typed axes of more than one rank."""

    axes: tuple[OuterAxis, ...] = ()
    _views: dict[fx.Node, NodeView] = field(default_factory=dict)
    _tensors: dict[tuple[int, tuple[State, ...]], tuple[TensorInfo, TensorInfo]] = field(
        default_factory=dict
    )

    def view(self, kind: BlockKind, node: fx.Node) -> NodeView:
        """How a rank sees ``node``; of ``getitem``, which has no operands, its element."""
        if node not in self._views:
            self._views[node] = self._make_view(kind, node)
        return self._views[node]

    def _make_view(self, kind: BlockKind, node: fx.Node) -> NodeView:
        operands = tuple(info(operand).tensor for operand in operands_of(node))
        results = () if node.op == "output" else info(node).tensors
        typings = [axis.typing[kind.name][node.name] for axis in self.axes]
        states = tuple(
            tuple(typing[side][index] for typing in typings)
            for side, tensors in enumerate((operands, results))
            for index in range(len(tensors))
        )
        split = len(operands)
        calls = node.op == "call_function" and node.target is not operator.getitem
        return NodeView(
            operands=tuple(map(self.local, operands, states[:split])),
            results=tuple(map(self.local, results, states[split:])),
            states=states,
            imbalance=self._imbalance(node, states[split]) if calls and results else 1.0,
            dispatch=self._dispatch(node, states) if calls else 1,
        )

    def local(self, tensor: TensorInfo, states: Sequence[State]) -> TensorInfo:
        """``tensor`` with the shape of a rank; the same object for the same question."""
        key = (id(tensor), tuple(states))
        if key not in self._tensors:
            self._tensors[key] = (tensor, self._local(tensor, states))
        return self._tensors[key][1]

    def _local(self, tensor: TensorInfo, states: Sequence[State]) -> TensorInfo:
        shape = list(tensor.shape)
        for axis, state in zip(self.axes, states, strict=True):
            if state.is_sharded and not grows(shape[state.dim]):
                shape = list(shard_shape(shape, state, axis.size))
            elif axis.divides_batch and not state.is_sharded:
                shape = [
                    size if isinstance(size, int) else size.subs(BATCH, axis.size * BATCH)
                    for size in shape
                ]
        if shape == list(tensor.shape):
            return tensor
        return TensorInfo(
            shape=tuple(shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad
        )

    def _imbalance(self, node: fx.Node, states: Sequence[State]) -> float:
        factor = 1.0
        for axis, state in zip(self.axes, states, strict=True):
            factor *= causal_imbalance(node, state, axis.size)
        return factor

    def _dispatch(self, node: fx.Node, states: Sequence[Sequence[State]]) -> int:
        if node.target is not torch.ops.autopar.routed_experts.default:
            return 1
        up = Call(node).indices("up")[0]
        pairs = zip(self.axes, states[0], states[up], strict=True)
        total = 1
        for axis, tokens, experts in pairs:
            if tokens.is_sharded and experts.is_sharded and experts.dim == 0:
                total *= axis.size
        return total


def shard(tensor: TensorInfo, state: State, size: int) -> TensorInfo:
    """``tensor`` as one of ``size`` ranks has it that do not share the batch."""
    if size == 1 or not state.is_sharded or grows(tensor.shape[state.dim]):
        return tensor
    return replace(tensor, shape=shard_shape(tensor.shape, state, size))


def shard_shape(
    shape: Sequence[int | sympy.Expr], state: State, size: int
) -> tuple[int | sympy.Expr, ...]:
    """The shape of a shard in ``state``."""
    dim = state.dim
    return (*shape[:dim], -(-shape[dim] // size), *shape[dim + 1 :])


def causal_imbalance(node: fx.Node, state: State, num_ranks: int) -> float:
    """How much more than its share the last rank computes of causal attention.

    ``state`` is the result's. With n ranks and B blocks the runs of the last rank lie later by
    (n − 1) / 2 runs of s / (n·B) positions than those of the average rank, of s / 2.
    """
    if node.target is not _ATTENTION or not Call(node).argument("is_causal"):
        return 1.0
    if not state.is_sharded or state.dim != len(info(node).tensor.shape) - 2:
        return 1.0
    return 1 + (num_ranks - 1) / (num_ranks * len(state.blocks))
