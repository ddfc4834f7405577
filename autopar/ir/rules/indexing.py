"""Ops that pick entries by index tensors: what is indexed stays whole, the indices may be split."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Dim, Rule
from autopar.ir.rules.reduction import plain_dims, wrapped
from autopar.ir.rules.registry import register
from autopar.ir.rules.text import SizeTable, match_dims, parse_dims

_aten = torch.ops.aten


@register(_aten.index.Tensor)
def _index(node: fx.Node) -> Rule | None:
    """``x[i, j]``: the indices are broadcast together and take the place of the dims they index."""
    call = Call(node)
    given = list(call.argument("indices"))
    indexed = [dim for dim, index in enumerate(given) if index is not None]
    indices = [call.operands[position] for position in call.indices("indices")]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return None  # a shape that depends on data
    dims, sizes = plain_dims(call, indexed)
    terms = parse_dims("i..")
    table = SizeTable.of((terms, index.shape) for index in indices)
    longest = max((index.shape for index in indices), key=len)
    index_dims = tuple(
        Dim((f"i..{place}",)) if table.sizes[f"i..{place}"] != 1 else Dim()
        for place in reversed(range(len(longest)))
    )
    kept = [dim for place, dim in enumerate(dims) if place not in indexed]
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    before = indexed[0] if adjacent else 0
    result = (*kept[:before], *index_dims, *kept[before:])
    return Rule(
        operands=(dims, *(match_dims(terms, index.shape, table) for index in indices)),
        results=(result,),
        sizes={**sizes, **table.sizes},
        linear=(frozenset({0}),),
    )


@register(_aten.index_select.default)
def _index_select(node: fx.Node) -> Rule:
    call = Call(node)
    (dim,) = wrapped([call.integer("dim")], len(call.operands[0].shape))
    dims, sizes = plain_dims(call, [dim])
    (length,) = call.shape("index")
    chosen = Dim(("i",)) if length != 1 else Dim()
    return call.rule(
        {"self": dims, "index": (chosen,)},
        [(*dims[:dim], chosen, *dims[dim + 1 :])],
        {**sizes, "i": length},
        linear=[("self",)],
    )


@register(_aten.gather.default)
def _gather(node: fx.Node) -> Rule:
    """Dims in which the index is as long as the tensor go together; others stay whole."""
    call = Call(node)
    shape = call.shape("self")
    index_shape = call.shape("index")
    (dim,) = wrapped([call.integer("dim")], len(shape))
    unequal = [place for place in range(len(shape)) if shape[place] != index_shape[place]]
    dims, sizes = plain_dims(call, [dim, *unequal])
    chosen = Dim(("i",)) if index_shape[dim] != 1 else Dim()
    index_dims = (*dims[:dim], chosen, *dims[dim + 1 :])
    return call.rule(
        {"self": dims, "index": index_dims},
        [index_dims],
        {**sizes, "i": index_shape[dim]},
        linear=[("self",)],
    )
