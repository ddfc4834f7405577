"""Ops that make tensors from nothing: constants may be made in shards, counts are whole."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Dim, Rule
from autopar.ir.rules.registry import register
from autopar.ir.rules.text import whole_size

_aten = torch.ops.aten


@register(_aten.zeros, _aten.ones, _aten.full, _aten.empty)
@register(_aten.rand, _aten.randn, _aten.randint)
@register(_aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty)
def _constant(node: fx.Node) -> Rule:
    """``new_…`` read only dtype and device of their operand; random numbers have their place."""
    call = Call(node)
    (result,) = call.results
    sizes = {f"d{dim}": whole_size(size) for dim, size in enumerate(result.shape)}
    operands = {name: tuple(Dim() for _ in call.shape(name)) for name in call.tensor_names}
    dims = tuple(Dim((name,)) if size != 1 else Dim() for name, size in sizes.items())
    return call.rule(operands, [dims], sizes)


@register(_aten.arange, _aten.linspace, _aten.logspace, _aten.eye)
@register(_aten.tril_indices, _aten.triu_indices, _aten.scalar_tensor)
def _counting(node: fx.Node) -> Rule:
    call = Call(node)
    return call.rule({}, [tuple(Dim() for _ in call.results[0].shape)], {})
