"""Numbers that a model computes from its batch size become tensors.

A rank holds a part of the batch, so a size that is written into its graph would be wrong. Instead
ones for all sequences are summed: a sum that ranks of the batch share as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from autopar.capture.flat import FlatGraph, emit
from autopar.ir.graph import BATCH, Role, info

_aten = torch.ops.aten

_TAKING = {_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor}
"""Ops whose second operand may be a number or a tensor without dims."""

_NUMBER = torch.float32


def count_sequences(flat: FlatGraph) -> None:
    """Put tensors in place of numbers that are sums, products and quotients of the batch size."""
    batch = next(node for node, value in flat.bindings.items() if value.role is Role.INPUT)
    found: dict[fx.Node, fx.Node] = {}
    for node in flat.calls():
        operand = node.args[1] if node.target in _TAKING and len(node.args) > 1 else None
        if not isinstance(operand, fx.Node) or "autopar" in operand.meta:
            continue
        value = operand.meta.get("val")
        if not isinstance(value, torch.SymInt | torch.SymFloat) or value.node.expr is None:
            continue
        if operand not in found:
            emitted = _emitted(node, value.node.expr, batch)
            if emitted is None:
                continue
            found[operand] = emitted
        tensor = found[operand]
        facts = info(node).tensor
        if not facts.shape and facts.dtype != _NUMBER:  # else it would decide the result's type
            tensor = _scalar(node, _aten.to.dtype, (tensor, facts.dtype), facts.dtype)
        node.update_arg(1, tensor)


def _emitted(node: fx.Node, expression: Any, batch: fx.Node) -> fx.Node | None:
    """A tensor with the value of ``expression`` before ``node``; None if that is beyond sums,
    products and quotients of the size of ``batch``, an input.
    """
    symbols: set[Any] = set(expression.free_symbols)
    if len(symbols) != 1:
        return None
    symbol = symbols.pop()
    if not str(symbol).startswith("s"):  # u…: from values
        return None

    def emitted(part: Any) -> fx.Node | float | None:
        if part == symbol:
            ones = _ones(node, batch)
            return _scalar(node, _aten.sum.default, (ones,), _NUMBER)
        if part.is_number:
            return float(part)
        operation = _operation(part)
        if operation is None:
            return None
        target, operands = operation
        total: fx.Node | float | None = None
        for operand in operands:
            value = emitted(operand)
            if value is None:
                return None
            total = value if total is None else _combined(node, target, total, value)
        return total

    found = emitted(expression)
    return found if isinstance(found, fx.Node) else None


def _ones(node: fx.Node, batch: fx.Node) -> fx.Node:
    """A one for each sequence, made from the first entries of ``batch``: sharded as that is."""
    first, facts = batch, info(batch).tensor
    for rank in range(len(facts.shape) - 1, 0, -1):
        first = emit(
            node.graph,
            node,
            _aten.select.int,
            (first, 1, 0),
            shape=(facts.shape[0], *facts.shape[len(facts.shape) - rank + 1 :]),
            dtype=facts.dtype,
            requires_grad=False,
        )
    return emit(
        node.graph,
        node,
        _aten.ones_like.default,
        (first,),
        {"dtype": _NUMBER},
        shape=(BATCH,),
        dtype=_NUMBER,
        requires_grad=False,
    )


def _operation(part: Any) -> tuple[Any, tuple[Any, ...]] | None:
    name = type(part).__name__
    if name == "ToFloat":
        return _aten.add.Tensor, part.args
    if name in ("FloatTrueDiv", "IntTrueDiv"):
        return _aten.div.Tensor, part.args
    if isinstance(part, sympy.Add):
        return _aten.add.Tensor, part.args
    if isinstance(part, sympy.Mul):
        return _aten.mul.Tensor, part.args
    if isinstance(part, sympy.Pow) and part.exp.is_Integer:
        factors = (part.base,) * abs(int(part.exp))
        inverse = (sympy.Integer(1), *factors)
        return (_aten.mul.Tensor, factors) if part.exp > 0 else (_aten.div.Tensor, inverse)
    return None


_NUMBERS: dict[Any, Callable[[float, float], float]] = {
    _aten.add.Tensor: lambda one, other: one + other,
    _aten.mul.Tensor: lambda one, other: one * other,
    _aten.div.Tensor: lambda one, other: one / other,
}


def _combined(
    node: fx.Node, target: Any, one: fx.Node | float, other: fx.Node | float
) -> fx.Node | float:
    if isinstance(one, float) and isinstance(other, float):
        return _NUMBERS[target](one, other)
    if isinstance(one, float) and target is _aten.div.Tensor:
        inverse = _scalar(node, _aten.reciprocal.default, (other,), _NUMBER)
        return _scalar(node, _aten.mul.Tensor, (inverse, one), _NUMBER)
    pair = (other, one) if isinstance(one, float) else (one, other)
    return _scalar(node, target, pair, _NUMBER)


def _scalar(node: fx.Node, target: Any, args: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
    return emit(node.graph, node, target, args, shape=(), dtype=dtype, requires_grad=False)
