"""Folding: the flat graph cut into blocks, and one graph for all blocks that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autopar.capture.flat import FlatGraph
from autopar.capture.partition import Partition, partition
from autopar.ir.errors import CaptureError
from autopar.ir.graph import Block, BlockKind, Role, ValueId, activation, info, set_info


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Blocks in order, their kinds by name, and where the results of the model come from."""

    blocks: tuple[Block, ...]
    kinds: dict[str, BlockKind]
    signatures: dict[str, tuple[Any, ...]]
    results: tuple[ValueId, ...]


def fold(flat: FlatGraph) -> Folded:
    """Cut ``flat`` into blocks. Two are of one kind if they have the same ops, arguments, shapes,
    dtypes, wiring, outputs and constants; names do not matter. Kinds are named ``block0``,
    ``block1``, … in order.

    Raises:
        CaptureError: Nothing depends on a parameter.
    """
    drafts = _draft(flat, partition(flat))
    if not drafts:
        raise CaptureError(
            "the loss is computed from no parameter",
            hint="return a loss that depends on what is to be trained",
        )
    produced: dict[fx.Node, ValueId] = {}
    kinds: dict[str, BlockKind] = {}
    signatures: dict[str, tuple[Any, ...]] = {}
    names: dict[tuple[Any, ...], str] = {}
    blocks: list[Block] = []
    for index, draft in enumerate(drafts):
        produced |= {node: activation(index, at) for at, node in enumerate(draft.outputs)}
        bindings = tuple(flat.bindings.get(node) or produced[node] for node in draft.operands)
        signature = _signature(draft, bindings)
        if signature not in names:
            name = names[signature] = f"block{len(names)}"
            kinds[name] = _build(name, draft, bindings)
            signatures[name] = signature
        blocks.append(Block(index=index, kind=names[signature], path=draft.path, bindings=bindings))
    return Folded(
        blocks=tuple(blocks),
        kinds=kinds,
        signatures=signatures,
        results=tuple(produced[node] for node in flat.results),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Draft:
    """A block before its graph is built: calls in order, what they read from outside, what others
    read.
    """

    path: str
    calls: list[fx.Node] = field(default_factory=list)
    operands: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


def _draft(flat: FlatGraph, parts: Partition) -> list[_Draft]:
    placed: dict[int, list[fx.Node]] = {}
    for node in flat.calls():
        if node in parts.slots:
            placed.setdefault(parts.slots[node], []).append(node)
    results = set(flat.results)
    drafts: list[_Draft] = []
    slots = sorted(placed)
    for slot in slots:
        nodes = placed[slot]
        draft = _Draft(path=parts.paths.get(slot) or _common_path(nodes))
        known: set[fx.Node] = set()
        loose = [node for node in flat.results if node in parts.floating and slot == slots[-1]]
        for node in (*nodes, *loose):
            _include(node, draft, known, parts, slot)
        draft.outputs = [
            node
            for node in draft.calls
            if (node in results and (node in parts.slots or slot == slots[-1]))
            or (node in parts.slots and any(parts.slots.get(u, slot) != slot for u in node.users))
        ]
        drafts.append(draft)
    return drafts


def _include(
    node: fx.Node, draft: _Draft, known: set[fx.Node], parts: Partition, slot: int
) -> None:
    """Add ``node`` after what it reads: operands from outside and floating calls, which are
    copied.
    """
    for source in node.all_input_nodes:
        if source in known:
            continue
        if source in parts.floating:
            _include(source, draft, known, parts, slot)
        elif parts.slots.get(source) != slot:
            known.add(source)
            draft.operands.append(source)
    known.add(node)
    draft.calls.append(node)


def _common_path(nodes: Sequence[fx.Node]) -> str:
    paths = [info(node).module.split(".") for node in nodes]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _signature(draft: _Draft, bindings: Sequence[ValueId]) -> tuple[Any, ...]:
    """What makes two blocks alike, as nested tuples of plain values."""
    number = {node: index for index, node in enumerate((*draft.operands, *draft.calls))}
    operands = tuple(
        (value.role.value, value.name if value.role is Role.CONSTANT else "", _facts(node))
        for node, value in zip(draft.operands, bindings, strict=True)
    )
    calls = tuple(
        (
            target_name(node.target),
            _plain(node.args, number),
            _plain(node.kwargs, number),
            _facts(node),
        )
        for node in draft.calls
    )
    return operands, calls, tuple(number[node] for node in draft.outputs)


def target_name(target: object) -> str:
    """The name of an op or function: ``aten.add.Tensor``, ``autopar.ir.functional.token_loss``."""
    if isinstance(target, OpOverload):
        return str(target)
    return f"{target.__module__}.{getattr(target, '__qualname__', target)}"


def _facts(node: fx.Node) -> tuple[Any, ...]:
    return tuple(
        (tuple(map(str, tensor.shape)), str(tensor.dtype), tensor.requires_grad)
        for tensor in info(node).tensors
    )


def _plain(value: Any, number: dict[fx.Node, int]) -> Any:
    match value:
        case fx.Node():
            return ("node", number[value])
        case tuple() | list():
            return tuple(_plain(item, number) for item in value)
        case dict():
            return tuple((key, _plain(item, number)) for key, item in sorted(value.items()))
        case torch.dtype():
            return str(value)
        case bool() | int() | float() | str() | None:
            return repr(value)
        case _:
            return str(value)


def _build(name: str, draft: _Draft, bindings: Sequence[ValueId]) -> BlockKind:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    counts: dict[Role, int] = {}
    for node, value in zip(draft.operands, bindings, strict=True):
        count = counts[value.role] = counts.get(value.role, -1) + 1
        copies[node] = graph.placeholder(f"{value.role.value}_{count}")
        set_info(copies[node], info(node))
    for node in draft.calls:
        copies[node] = graph.call_function(
            node.target,  # type: ignore[arg-type]
            fx.map_arg(node.args, copies.__getitem__),
            fx.map_arg(node.kwargs, copies.__getitem__),
        )
        set_info(copies[node], info(node))
    graph.output(tuple(copies[node] for node in draft.outputs))
    return BlockKind(name=name, graph=graph, roles=tuple(value.role for value in bindings))
