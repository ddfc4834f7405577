"""Constant folding: what depends on no input and no parameter becomes a tensor.

Such a value may still depend on the batch size. It is evaluated on the CPU at two of them: if it
is the same for every sequence it is kept for one sequence and expanded; otherwise the ops stay in
the graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.elementwise import ELEMENTWISE, repeats, without_repeats
from autopar.capture.flat import (
    FlatGraph,
    emit,
    is_random,
    refuse,
    remove_dead_code,
    replace,
)
from autopar.ir.graph import BATCH, NodeInfo, Role, TensorInfo, ValueId, info, set_info
from autopar.ir.shapes import call_at

_aten = torch.ops.aten

BATCHES = (2, 3)
"""The batch sizes at which constants are evaluated."""


def fold_constants(flat: FlatGraph) -> None:
    """Replace constant subgraphs by placeholders of role ``CONSTANT``; equal tensors share one.

    Raises:
        CaptureError: A constant depends on the batch size in another way than through its shape,
            or a position lies outside a table.
    """
    constant = constant_nodes(flat)
    merge_equal(flat, constant)
    frontier = [
        node
        for node in flat.calls()
        if node in constant and any(user not in constant for user in node.users)
    ]
    at_sizes = [evaluate(flat, frontier, batch) for batch in BATCHES]
    folded = _Constants(flat)
    for node in flat.graph.nodes:
        if flat.bindings.get(node, _NOTHING).role is Role.CONSTANT:
            folded.adopt(node)
    for node in frontier:
        values = tuple(values[node] for values in at_sizes)
        assert all(isinstance(value, Tensor) for value in values)
        _fold(folded, node, *values)
    remove_dead_code(flat)
    flat.constants = {
        value.name: flat.constants[value.name]
        for value in flat.bindings.values()
        if value.role is Role.CONSTANT
    }
    _check_positions(flat)


_NOTHING = ValueId(Role.INPUT, "")


def constant_nodes(flat: FlatGraph) -> set[fx.Node]:
    """Nodes whose value follows from the batch size alone."""
    found: set[fx.Node] = set()
    for node in flat.graph.nodes:
        if node.op == "placeholder":
            known = flat.bindings[node].role is Role.CONSTANT
        else:
            known = node.op == "call_function" and not is_random(node)
            known = known and all(source in found for source in node.all_input_nodes)
        if known:
            found.add(node)
    return found


def merge_equal(flat: FlatGraph, constant: set[fx.Node]) -> None:
    """Of calls that compute the same constant (each layer its own) the first is left."""
    first: dict[object, fx.Node] = {}
    for node in flat.calls():
        if node not in constant:
            continue
        facts = tuple((tensor.shape, tensor.dtype) for tensor in info(node).tensors)
        key = (node.target, repr(node.args), repr(node.kwargs), facts)
        if key in first:
            constant.discard(node)
            replace(node, first[key])
        first.setdefault(key, node)


def evaluate(flat: FlatGraph, wanted: Iterable[fx.Node], batch: int) -> dict[fx.Node, Any]:
    """The values of constant nodes at ``batch`` sequences; what is between them is freed as soon
    as possible.
    """
    kept = set(wanted)
    needed: dict[fx.Node, int] = {}
    stack = list(kept)
    for node in stack:
        needed.setdefault(node, 0)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in needed:
                needed[source] = 0
                stack.append(source)
            needed[source] += 1
    values: dict[fx.Node, Any] = {}
    for node in flat.graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            values[node] = flat.constants[flat.bindings[node].name]
            continue
        with torch.no_grad():
            values[node] = _value(node, values, batch)
        for source in node.all_input_nodes:
            needed[source] -= 1
            if not needed[source] and source not in kept:
                del values[source]
    return values


def _value(node: fx.Node, values: Mapping[fx.Node, Any], batch: int) -> Any:
    """The value of a call. What is the same for all sequences is computed once and expanded: as a
    view, which no op but elementwise ones gets to see.
    """
    if node.target in ELEMENTWISE:
        found = call_at(node, lambda source: without_repeats(values[source]), batch)
        return found.expand(info(node).tensor.shape_at(batch))

    def whole(source: fx.Node) -> Any:
        value = values[source]
        return value.contiguous() if source.target in ELEMENTWISE else value

    return call_at(node, whole, batch)


class _Constants:
    """The constants of a graph, one for each value."""

    def __init__(self, flat: FlatGraph) -> None:
        self._flat = flat
        self._by_value: dict[tuple[object, ...], fx.Node] = {}

    def adopt(self, node: fx.Node) -> None:
        """Share a placeholder that exists already."""
        tensor = self._flat.constants[self._flat.bindings[node].name]
        self._by_value.setdefault(_identity(tensor), node)

    def placeholder(self, value: Tensor, like: fx.Node) -> fx.Node:
        """The placeholder of a constant with this value, made anew if there is none."""
        key = _identity(value)
        if key not in self._by_value:
            name = f"constant_{len(self._by_value)}"
            while name in self._flat.constants:
                name += "_"
            first = next(iter(self._flat.graph.nodes))
            with self._flat.graph.inserting_before(first):
                node = self._flat.graph.placeholder(name)
            tensor = TensorInfo(shape=tuple(value.shape), dtype=value.dtype, requires_grad=False)
            set_info(node, NodeInfo(tensors=(tensor,)))
            self._flat.constants[name] = value.contiguous().clone()
            self._flat.bindings[node] = ValueId(Role.CONSTANT, name)
            self._by_value[key] = node
        return self._by_value[key]


def _identity(tensor: Tensor) -> tuple[object, ...]:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(data.data).digest()
    return (tuple(tensor.shape), tensor.dtype, digest)


def _fold(constants: _Constants, node: fx.Node, small: Tensor, large: Tensor) -> None:
    shape = info(node).tensor.shape
    varying = [dim for dim, size in enumerate(shape) if not isinstance(size, int)]
    if not varying:
        if not torch.equal(small, large):
            raise refuse(node, "a constant depends on the batch size", "use fixed numbers")
        node.replace_all_uses_with(constants.placeholder(small, node))
        return
    if len(varying) > 1 or shape[varying[0]] != BATCH:
        return
    (dim,) = varying
    one = small.narrow(dim, 0, 1)
    alike = _is_alike(small, dim) and _is_alike(large, dim)
    if not (alike and torch.equal(one, large.narrow(dim, 0, 1))):
        return
    source = constants.placeholder(one, node)
    expanded = emit(
        node.graph,
        node,
        _aten.expand.default,
        (source, [size if isinstance(size, int) else -1 for size in shape]),
    )
    for user in list(node.users):
        broadcasts = user.target in _BROADCASTING and any(
            other is not node and info(other).tensor.shape == info(user).tensor.shape
            for other in user.all_input_nodes
        )
        user.replace_input_with(node, source if broadcasts else expanded)


def _is_alike(value: Tensor, dim: int) -> bool:
    """Whether all entries along ``dim`` are equal."""
    return repeats(value, dim) or torch.equal(value.narrow(dim, 0, 1).expand_as(value), value)


_BROADCASTING = {
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.mul.Tensor,
    _aten.div.Tensor,
    _aten.where.self,
    _aten.masked_fill.Scalar,
    _aten.__and__.Tensor,
    _aten.__or__.Tensor,
    _aten.bitwise_and.Tensor,
    _aten.bitwise_or.Tensor,
    _aten.logical_and.default,
    _aten.logical_or.default,
}


def _check_positions(flat: FlatGraph) -> None:
    for node in flat.calls():
        if node.target is not _aten.embedding.default:
            continue
        table, index = node.args[:2]
        assert isinstance(table, fx.Node)
        assert isinstance(index, fx.Node)
        bound = flat.bindings.get(index)
        if bound is None or bound.role is not Role.CONSTANT:
            continue
        rows = info(table).tensor.shape[0]
        largest = int(flat.constants[bound.name].max())
        if isinstance(rows, int) and largest >= rows:
            raise refuse(
                node,
                f"position {largest} is looked up in a table of {rows}",
                "use a sequence length that the model has positions for",
            )
