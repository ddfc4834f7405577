"""Ops that write entries by index: what is written into stays whole along the indexed dims.

Where entries are added, the written ones are a sum: they may be split, and the rest is ``P`` then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.ir.graph import Size
from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Dim, Rule, TensorDims
from autopar.ir.rules.reduction import plain_dims, wrapped
from autopar.ir.rules.registry import register
from autopar.ir.rules.text import SizeTable, match_dims, parse_dims

_aten = torch.ops.aten


@register(
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.scatter.reduce,
    _aten.scatter.value_reduce,
    _aten.scatter_add.default,
    _aten.scatter_reduce.two,
)
def _scatter(node: fx.Node) -> Rule:
    """Dims in which index and source are as long as the tensor go together; others stay whole."""
    call = Call(node)
    shape, index_shape = call.shape("self"), call.shape("index")
    (dim,) = wrapped([call.integer("dim")], len(shape)) if shape else (0,)
    shapes = [shape, index_shape, *([call.shape("src")] if call.tensor("src") else [])]
    unequal = [place for place in range(len(shape)) if len({s[place] for s in shapes}) > 1]
    dims, sizes = plain_dims(call, [dim, *unequal])
    adds = _adds(call)
    written = Dim()
    if adds and shape and shapes[-1][dim] == index_shape[dim] != 1:
        written = Dim(("i",))
        sizes["i"] = index_shape[dim]
    index = (*dims[:dim], written, *dims[dim + 1 :])
    value = call.argument_or("value", None)
    replaces = call.argument_or("reduce", None) is None
    return call.rule(
        {"self": dims, "index": index, "src": index},
        [dims],
        sizes,
        linear=[("self", "src")] if adds or (replaces and not value) else [],
        additive=["self"] if adds else [],
    )


def _adds(call: Call) -> bool:
    if call.node.target is _aten.scatter_add.default:
        return True
    summed = call.argument_or("reduce", None) in ("sum", "add")
    return summed and call.tensor("src") is not None and call.argument_or("include_self", True)


@register(_aten.index_add.default, _aten.index_copy.default)
def _index_add(node: fx.Node) -> Rule:
    call = Call(node)
    shape = call.shape("self")
    (dim,) = wrapped([call.integer("dim")], len(shape))
    dims, sizes = plain_dims(call, [dim])
    (length,) = call.shape("index") or (1,)
    adds = node.target is _aten.index_add.default
    sizes["i"] = length
    written = Dim(("i",)) if length != 1 else Dim()
    return call.rule(
        {
            "self": dims,
            "index": (written,) * len(call.shape("index")),
            "source": (*dims[:dim], written, *dims[dim + 1 :]),
        },
        [dims],
        sizes,
        unsplittable=[] if adds else ["i"],  # the last of several writers wins
        linear=[("self", "source")],
        additive=["self"],
    )


@register(_aten.index_fill)
def _index_fill(node: fx.Node) -> Rule:
    call = Call(node)
    (dim,) = wrapped([call.integer("dim")], len(call.shape("self")))
    dims, sizes = plain_dims(call, [dim])
    zero = call.tensor("value") is not None or call.argument("value") == 0
    operands: dict[str, TensorDims] = {"self": dims, "index": (Dim(),) * len(call.shape("index"))}
    return call.rule(
        {**operands, "value": ()}, [dims], sizes, linear=[("self", "value")] if zero else []
    )


@register(_aten.index_put.default)
def _index_put(node: fx.Node) -> Rule | None:
    """``x[i, j] = v``: a mask of all leading dims is pointwise, other masks depend on data."""
    call = Call(node)
    given = list(call.argument("indices"))
    indexed = [dim for dim, index in enumerate(given) if index is not None]
    indices = [call.operands[position] for position in call.indices("indices")]
    values = call.shape("values")
    dims, sizes = plain_dims(call)
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        if len(indices) > 1 or indexed != [0] or values not in ((), (1,)):
            return None
        mask = dims[: len(indices[0].shape)]
        value = (Dim(),) * len(values)
        return call.rule(
            {"self": dims, "indices": mask, "values": value},
            [dims],
            sizes,
            linear=[] if call.argument_or("accumulate", False) else [("self", "values")],
        )
    return _put_at(call, indexed, [tuple(index.shape) for index in indices])


def _put_at(call: Call, indexed: Sequence[int], shapes: Sequence[tuple[Size, ...]]) -> Rule:
    dims, sizes = plain_dims(call, indexed)
    terms = parse_dims("i..")
    table = SizeTable.of((terms, shape) for shape in shapes)
    longest = max(map(len, shapes))
    index_dims = [
        Dim((f"i..{place}",)) if table.sizes[f"i..{place}"] != 1 else Dim()
        for place in reversed(range(longest))
    ]
    kept = [dim for place, dim in enumerate(dims) if place not in indexed]
    adjacent = list(indexed) == list(range(indexed[0], indexed[-1] + 1))
    before = indexed[0] if adjacent else 0
    written = [*kept[:before], *index_dims, *kept[before:]]
    all_sizes = {**sizes, **table.sizes}
    values = call.shape("values")
    # values are broadcast to what is written
    value_dims = tuple(
        Dim() if size == 1 else dim
        for size, dim in zip(values, written[len(written) - len(values) :], strict=True)
    )
    adds = bool(call.argument_or("accumulate", False))
    operands: list[TensorDims] = [()] * len(call.operands)
    for position, shape in zip(call.indices("indices"), shapes, strict=True):
        operands[position] = match_dims(terms, shape, table)
    (own,), (value,) = call.indices("self"), call.indices("values")
    operands[own], operands[value] = dims, value_dims
    return Rule(
        operands=tuple(operands),
        results=(dims,),
        sizes=all_sizes,
        unsplittable=frozenset() if adds else frozenset(table.sizes),
        linear=(frozenset({own, value}),),
        additive=frozenset({own}),
    )


@register(_aten.slice_scatter.default, _aten.select_scatter.default)
def _write_slice(node: fx.Node) -> Rule:
    call = Call(node)
    (dim,) = wrapped([call.integer("dim")], len(call.shape("self")))
    dims, sizes = plain_dims(call, [dim])
    source = dims if node.target is _aten.slice_scatter.default else (*dims[:dim], *dims[dim + 1 :])
    return call.rule({"self": dims, "src": source}, [dims], sizes, linear=[("self", "src")])


@register(_aten.histc.default, _aten.bincount.default)
def _count(node: fx.Node) -> Rule | None:
    """Counts of shards add up, if all ranks count in the same bins."""
    call = Call(node)
    if node.target is _aten.histc.default and not call.argument("min") < call.argument("max"):
        return None
    dims, sizes = plain_dims(call)
    return call.rule({"self": dims, "weights": dims}, [(Dim(),)], sizes, linear=[("weights",)])
