"""Well-typed layouts without a solver: chosen node by node, axis by axis, for tests.

``choose_layout`` takes pinned states of the values between blocks and lets a ``choose`` function
pick an option for each op: the cheapest one in order (``cheapest``), which turns pinned parameters
into Megatron's layouts, or any one (``anything``), for random tests.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from autopar.ir.errors import PlacementError
from autopar.ir.graph import BlockKind, ModelGraph, Role, TensorInfo, ValueId, activation, info
from autopar.ir.layout import KindLayout, Layout, NodeTyping, operands_of
from autopar.ir.mesh import (
    BATCH_AXES,
    CONTEXT_AXIS,
    DATA_AXIS,
    LAYOUT_AXES,
    TENSOR_AXIS,
    Mesh,
)
from autopar.ir.moves import Collective, backward_of, collective_of
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATED, Placement, State, sharded
from autopar.ir.rules.core import Option
from autopar.ir.rules.local import require_compatible
from autopar.ir.rules.registry import rule_or_replicated
from autopar.ir.typecheck import (
    kind_options,
    outer_batch,
    placement_error,
    shared_factors_error,
)

Pin = Callable[[ValueId, TensorInfo, str], State]
"""State of a value between blocks on an axis."""

Choose = Callable[[fx.Node, Sequence[Option], Sequence[State]], Option]
"""Picks one of the options of a node whose operands are in the given states."""


def choose_layout(model: ModelGraph, mesh: Mesh, *, batch: int, pin: Pin, choose: Choose) -> Layout:
    """A layout in which every op has an option that ``choose`` picked among those that divide."""
    return {
        kind.name: _choose_kind(model, kind, mesh, batch, pin, choose)
        for kind in model.kinds.values()
    }


def _choose_kind(
    model: ModelGraph, kind: BlockKind, mesh: Mesh, batch: int, pin: Pin, choose: Choose
) -> KindLayout:
    block = next(block for block in model.blocks if block.kind == kind.name)
    nodes = [node for node in kind.graph.nodes if node.op == "call_function"]
    last = kind.graph.output_node()
    operands: dict[fx.Node, list[Placement]] = {
        node: [()] * len(operands_of(node)) for node in (*nodes, last)
    }
    results: dict[fx.Node, list[Placement]] = {
        node: [()] * len(info(node).tensors) for node in (*kind.placeholders, *nodes)
    }
    chosen: dict[fx.Node, dict[str, Option]] = {node: {} for node in nodes}
    degrees = mesh.degrees()
    for axis in LAYOUT_AXES:
        if degrees[axis] == 1:
            operands.update({node: _whole(found) for node, found in operands.items()})
            results.update({node: _whole(found) for node, found in results.items()})
            continue
        all_options = kind_options(
            kind, axis=axis, axis_size=degrees[axis], batch=outer_batch(batch, degrees, axis)
        )
        states: dict[fx.Node, tuple[State, ...]] = {}
        for node, value in zip(kind.placeholders, block.bindings, strict=True):
            states[node] = (pin(value, info(node).tensor, axis),)
        for node in nodes:
            if node.target is operator.getitem:
                source, index = node.args
                assert isinstance(source, fx.Node)
                assert isinstance(index, int)
                states[node] = (states[source][index],)
                continue

            def fits(option: Option, node: fx.Node = node, axis: str = axis) -> bool:
                tensors = (
                    *(info(operand).tensor for operand in operands_of(node)),
                    *info(node).tensors,
                )
                outer = (*operands[node], *results[node])
                inner = (*option.operands, *option.results)
                triples = zip(tensors, outer, inner, strict=True)
                return all(
                    can_place(tensor, (*placement, state), mesh, batch)
                    for tensor, placement, state in triples
                ) and _compatible(node, {**chosen[node], axis: option}, degrees, batch)

            options = [option for option in all_options[node.name] if fits(option)]
            option = choose(node, options, [states[operand][0] for operand in operands_of(node)])
            chosen[node][axis] = option
            states[node] = option.results
            operands[node] = _with(operands[node], option.operands)
        for node, found in states.items():
            results[node] = _with(results[node], found)
        demands = [
            pin(activation(block.index, index), info(node).tensor, axis)
            for index, node in enumerate(kind.outputs)
        ]
        operands[last] = _with(operands[last], demands)
    results[last] = []
    operands.update({node: [] for node in kind.placeholders})
    return {
        node.name: NodeTyping(operands=tuple(operands[node]), results=tuple(results[node]))
        for node in kind.graph.nodes
    }


def _whole(placements: Sequence[Placement]) -> list[Placement]:
    return _with(placements, [INVARIANT] * len(placements))


def _with(placements: Sequence[Placement], states: Sequence[State]) -> list[Placement]:
    return [(*outer, state) for outer, state in zip(placements, states, strict=True)]


def _compatible(
    node: fx.Node, options: Mapping[str, Option], degrees: Mapping[str, int], batch: int
) -> bool:
    """Whether a node can have these options together."""
    if shared_factors_error(rule_or_replicated(node), options, degrees=degrees, batch=batch):
        return False
    try:
        require_compatible(node, options)
    except PlacementError:
        return False
    return True


def can_place(tensor: TensorInfo, placement: Placement, mesh: Mesh, batch: int) -> bool:
    """Whether a tensor can have this placement on the first axes, and be whole on the others."""
    degrees = mesh.degrees()
    whole = (*placement, *(INVARIANT for _ in LAYOUT_AXES[len(placement) :]))
    return placement_error(whole, tensor, degrees=degrees, batch=batch) is None


def cheapest(node: fx.Node, options: Sequence[Option], given: Sequence[State]) -> Option:
    """The option with least traffic of its operands, which leaves sharded parameters where they
    are; of these, the one that computes least on each rank.
    """

    def cost(option: Option) -> float:
        total = 0.0
        for operand, source, target in zip(operands_of(node), given, option.operands, strict=True):
            tensor = info(operand).tensor
            elements = _elements(tensor)
            weight = 100 if operand.op == "placeholder" and source.is_sharded else 1
            total += weight * elements * _traffic(collective_of(source, target))
            if tensor.requires_grad:
                total += elements * _traffic(collective_of(*backward_of(source, target)))
            total += 1e-3 * elements * (source != target)
        for tensor, state in zip(info(node).tensors, option.results, strict=True):
            if state == PARTIAL and option.factor is None:
                total += 100 * _elements(tensor)  # sums are for contractions
            if not state.is_sharded and tensor.requires_grad:
                total += 0.3 * _elements(tensor)
        return total

    return min(options, key=cost)


_WEIGHT = {Collective.NONE: 0.0, Collective.ALL_REDUCE: 2.0}


def _traffic(collective: Collective) -> float:
    return _WEIGHT.get(collective, 1.0)


def _elements(tensor: TensorInfo) -> int:
    product = 1
    for size in tensor.shape_at(2):
        product *= size
    return product


def megatron(model: ModelGraph, *, sequence: bool = False) -> Pin:
    """Data parallel on ``dp`` and ``ep``, sequences on ``cp``; on ``tp`` Megatron's parameters.

    Between blocks activations are ``I`` on ``tp``, or sharded along the sequence.
    """

    def pin(value: ValueId, tensor: TensorInfo, axis: str) -> State:
        if value in (model.loss, model.weight):
            return INVARIANT if axis == TENSOR_AXIS else PARTIAL
        if axis in BATCH_AXES:
            batched = value.role in (Role.ACTIVATION, Role.INPUT)
            return sharded(0) if batched else REPLICATED
        if axis == CONTEXT_AXIS:
            return sharded(1) if value.role is Role.ACTIVATION else REPLICATED
        if value.role is Role.ACTIVATION:
            return sharded(1) if sequence else INVARIANT
        if value.role is Role.PARAMETER and len(tensor.shape) > 1:
            return _megatron_weight(value.name)
        return REPLICATED if sequence or value.role is not Role.PARAMETER else INVARIANT

    return pin


_ROWS = ("o_proj", "down_proj", "c_proj", "out", "down")
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "qkv", "up", "c_attn", "c_fc")
_VOCABULARY = ("embed_tokens", "lm_head", "tokens", "head", "wte")


def _megatron_weight(name: str) -> State:
    """How Megatron shards a matrix: by rows of its result, or by what it sums over."""
    module = name.split(".")[-2]
    conv1d = module.startswith("c_")  # stored as [in, out]
    if module in _ROWS:
        return sharded(0 if conv1d else 1)
    if module == "c_attn":
        return sharded(1, (1, 1, 1))
    if module in ("qkv", "c_attn"):
        return sharded(0, (1, 1, 1))
    if module in _COLUMNS:
        return sharded(1 if conv1d else 0)
    return sharded(0) if module in _VOCABULARY else INVARIANT


def replicated(model: ModelGraph) -> Layout:
    """Everything ``I`` everywhere."""

    def whole(count: int) -> tuple[Placement, ...]:
        return ((INVARIANT,) * len(LAYOUT_AXES),) * count

    return {
        kind.name: {
            node.name: NodeTyping(
                operands=whole(len(operands_of(node))),
                results=() if node.op == "output" else whole(len(info(node).tensors)),
            )
            for node in kind.graph.nodes
        }
        for kind in model.kinds.values()
    }


def anything(rng: random.Random) -> Choose:
    """Any option, sharded ones as likely as all others together."""

    def choose(node: fx.Node, options: Sequence[Option], given: Sequence[State]) -> Option:
        split = [option for option in options if option.factor is not None]
        return rng.choice(split if split and rng.random() < 0.5 else options)

    return choose


def random_pins(
    model: ModelGraph, mesh: Mesh, rng: random.Random, *, batch: int, trained: bool = False
) -> Pin:
    """Any placements of the values between blocks that all blocks of a kind can agree on.

    The runtime, which trains parameters (``trained``), has them whole on the data axis.
    """
    classes = _Classes()
    for block in model.blocks:
        first = next(other for other in model.blocks if other.kind == block.kind)
        for own, other in zip(block.bindings, first.bindings, strict=True):
            classes.unite(own, other)
        for index in range(len(model.kind_of(block).outputs)):
            classes.unite(activation(block.index, index), activation(first.index, index))
    placements: dict[ValueId, Placement] = {}

    def pin(value: ValueId, tensor: TensorInfo, axis: str) -> State:
        root = classes.root(value)
        if root not in placements:
            sums = value in (model.loss, model.weight)
            whole = (DATA_AXIS,) if trained and value.role is Role.PARAMETER else ()
            placements[root] = _draw(value, tensor, mesh, rng, batch, sums=sums, whole=whole)
        return placements[root][LAYOUT_AXES.index(axis)]

    return pin


def _draw(
    value: ValueId,
    tensor: TensorInfo,
    mesh: Mesh,
    rng: random.Random,
    batch: int,
    *,
    sums: bool,
    whole: Sequence[str],
) -> Placement:
    """Any placement of one value; the loss and its weight are ``I`` or ``P``."""
    placement: Placement = ()
    for axis in LAYOUT_AXES:
        if mesh.size(axis) == 1:
            placement = (*placement, INVARIANT)
            continue
        states = [INVARIANT, PARTIAL] if sums else [INVARIANT, REPLICATED]
        if not sums and axis not in whole:
            states += [PARTIAL] * (value.role is Role.ACTIVATION)
            shards = [sharded(dim) for dim in range(len(tensor.shape))]
            shards = [s for s in shards if can_place(tensor, (*placement, s), mesh, batch)]
            states += [rng.choice(shards)] * len(states) if shards else []
        placement = (*placement, rng.choice(states))
    return placement


class _Classes:
    """Values that share a placement (union-find)."""

    def __init__(self) -> None:
        self.parents: dict[ValueId, ValueId] = {}

    def root(self, value: ValueId) -> ValueId:
        while value in self.parents:
            value = self.parents[value]
        return value

    def unite(self, one: ValueId, other: ValueId) -> None:
        left, right = self.root(one), self.root(other)
        if left != right:
            self.parents[left] = right
