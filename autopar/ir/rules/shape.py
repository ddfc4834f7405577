"""Ops that move entries without computing: transposes, expansions, slices, concatenations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from autopar.ir.graph import Size, TensorInfo
from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Dim, Rule, TensorDims
from autopar.ir.rules.reduction import plain_dims, wrapped
from autopar.ir.rules.registry import register
from autopar.ir.rules.reshape import common_factors
from autopar.ir.rules.text import whole_size

_aten = torch.ops.aten


@register(
    _aten.reshape,
    _aten.view.default,
    _aten._unsafe_view,
    _aten.unsqueeze,
    _aten.squeeze,
    _aten.flatten.using_ints,
    _aten.unflatten.int,
)
def _reshape(node: fx.Node) -> Rule:
    call = Call(node)
    name = call.tensor_names[0]
    factors = common_factors(call.operands[0].shape, call.results[0].shape)
    return call.rule(
        {name: factors.source},
        [factors.target],
        factors.sizes,
        unsplittable=factors.private,
        linear=[(name,)],
    )


@register(_aten.transpose.int, _aten.swapaxes.default, _aten.permute.default, _aten.t.default)
@register(_aten.movedim, _aten.moveaxis, _aten.swapdims.default)
@register(_aten.mT.default, _aten.mH.default, _aten.adjoint.default, _aten.numpy_T.default)
def _permute(node: fx.Node) -> Rule:
    call = Call(node)
    num_dims = len(call.operands[0].shape)
    dims, sizes = plain_dims(call)
    result = tuple(dims[place] for place in _permutation(call, num_dims))
    return call.rule({"self": dims}, [result], sizes, linear=[("self",)], paddable=sizes)


def _permutation(call: Call, num_dims: int) -> Sequence[int]:
    """The operand's dim at each place of the result."""
    target = call.node.target
    order = list(range(num_dims))
    if target is _aten.permute.default:
        return wrapped(call.integers("dims"), num_dims)
    if target in (_aten.t.default, _aten.numpy_T.default):
        return order[::-1]
    if "destination" in call.names:
        moved = wrapped(call.integers("source"), num_dims)
        places = wrapped(call.integers("destination"), num_dims)
        rest = iter(dim for dim in order if dim not in moved)
        given = dict(zip(places, moved, strict=True))
        return [given[place] if place in given else next(rest) for place in order]
    names = {
        _aten.transpose.int: ("dim0", "dim1"),
        _aten.swapaxes.default: ("axis0", "axis1"),
        _aten.swapdims.default: ("dim0", "dim1"),
    }.get(target)  # type: ignore[call-overload]
    pair = (call.integer(names[0]), call.integer(names[1])) if names else (-2, -1)
    first, second = wrapped(pair, num_dims)
    order[first], order[second] = order[second], order[first]
    return order


@register(_aten.expand.default, _aten.broadcast_to.default)
@register(_aten.repeat.default, _aten.tile.default)
def _expand(node: fx.Node) -> Rule:
    """A new or stretched dim is a factor that the operand lacks; tiles come one after another."""
    call = Call(node)
    shape, wide = call.operands[0].shape, call.results[0].shape
    dims, sizes = plain_dims(call)
    new = len(wide) - len(shape)
    result: list[Dim] = []
    for place, size in enumerate(wide):
        old = shape[place - new] if place >= new else 1
        if old == 1 and size != 1:
            sizes[f"e{place}"] = whole_size(size)
            result.append(Dim((f"e{place}",)))
        elif old == size or old == 1:
            result.append(dims[place - new] if place >= new else Dim())
        else:
            (factor,) = dims[place - new].factors
            sizes[f"r{place}"] = whole_size(size // old if isinstance(size, int) else size / old)
            result.append(Dim((f"r{place}", factor)))
    repeats = [name for name in sizes if name.startswith("r")]
    return call.rule(
        {"self": dims}, [tuple(result)], sizes, unsplittable=repeats, linear=[("self",)]
    )


@register(_aten.repeat_interleave.self_int)
def _repeat_interleave(node: fx.Node) -> Rule | None:
    call = Call(node)
    if call.argument("dim") is None:
        return None
    dims, sizes = plain_dims(call)
    (dim,) = wrapped([call.integer("dim")], len(dims))
    sizes["r"] = call.integer("repeats")
    repeated = Dim((*dims[dim].factors, "r"))
    return call.rule(
        {"self": dims},
        [(*dims[:dim], repeated, *dims[dim + 1 :])],
        sizes,
        unsplittable=["r"],
        linear=[("self",)],
    )


@register(
    _aten.slice.Tensor, _aten.narrow.default, _aten.constant_pad_nd.default, _aten.pad.default
)
def _resized(node: fx.Node) -> Rule | None:
    """Dims whose size changes stay whole. Padding with anything but zeros is not linear."""
    call = Call(node)
    shape, changed = call.operands[0].shape, call.results[0].shape
    whole = {
        place
        for place, sizes in enumerate(zip(shape, changed, strict=True))
        if sizes[0] != sizes[1]
    }
    if node.target is _aten.narrow.default:  # its length is an argument even where nothing changes
        whole.add(wrapped([call.integer("dim")], len(shape))[0])
    pads = list(call.argument_or("pad", ()))
    whole |= {len(shape) - 1 - place // 2 for place, pad in enumerate(pads) if pad != 0}
    dims, sizes = plain_dims(call, whole)
    constant = call.argument_or("mode", "constant") == "constant"
    linear = not constant or not call.argument_or("value", None)
    return call.rule({"self": dims}, [dims], sizes, linear=[("self",)] if linear else [])


@register(_aten.select.int, _aten.unbind.int)
def _select(node: fx.Node) -> Rule:
    call = Call(node)
    (dim,) = wrapped([call.integer("dim")], len(call.operands[0].shape))
    dims, sizes = plain_dims(call, [dim])
    result = (*dims[:dim], *dims[dim + 1 :])
    return call.rule({"self": dims}, [result] * len(call.results), sizes, linear=[("self",)])


@register(_aten.diagonal.default)
def _diagonal(node: fx.Node) -> Rule:
    """The two dims become one, the last; both stay whole."""
    call = Call(node)
    num_dims = len(call.shape("self"))
    pair = wrapped((call.integer("dim1"), call.integer("dim2")), num_dims)
    dims, sizes = plain_dims(call, pair)
    kept = tuple(dim for place, dim in enumerate(dims) if place not in pair)
    return call.rule({"self": dims}, [(*kept, Dim())], sizes, linear=[("self",)])


@register(_aten.split_with_sizes.default, _aten.split, _aten.chunk.default)
@register(_aten.tensor_split.sections, _aten.tensor_split.indices, _aten.unsafe_split.Tensor)
def _split(node: fx.Node) -> Rule:
    """A dim of several blocks: each rank may hold its part of every block (fused QKV, gate-up)."""
    call = Call(node)
    (dim,) = wrapped([call.integer("dim")], len(call.operands[0].shape))
    parts = _Blocks.of(call.results, dim)
    dims, sizes = plain_dims(call, [dim])
    operand = (*dims[:dim], parts.joined, *dims[dim + 1 :])
    results = [(*dims[:dim], part, *dims[dim + 1 :]) for part in parts.parts]
    return call.rule(
        {call.tensor_names[0]: operand},
        results,
        {**sizes, **parts.sizes},
        linear=[(call.tensor_names[0],)],
    )


@register(_aten.cat.default, _aten.concat.default)
def _cat(node: fx.Node) -> Rule:
    call = Call(node)
    num_dims = len(call.results[0].shape)
    (dim,) = wrapped([call.integer("dim")], num_dims)
    parts = _Blocks.of(call.operands, dim)
    dims, sizes = plain_dims(call, [dim])
    operands: list[TensorDims] = [(*dims[:dim], part, *dims[dim + 1 :]) for part in parts.parts]
    return Rule(
        operands=tuple(operands),
        results=((*dims[:dim], parts.joined, *dims[dim + 1 :]),),
        sizes={**sizes, **parts.sizes},
        linear=(frozenset(range(len(operands))),),
    )


class _Blocks:
    """The dims of a concatenation: the blocks have a common unit, the factor ``u``."""

    def __init__(self, lengths: Sequence[Size]) -> None:
        numbers = [length for length in lengths if isinstance(length, int)]
        self.sizes: dict[str, Size] = {}
        self.joined = Dim()
        self.parts: tuple[Dim, ...] = (Dim(),) * len(lengths)
        if len(numbers) == len(lengths) and math.gcd(*numbers) > 1:
            unit = math.gcd(*numbers)
            self.sizes = {"u": unit}
            self.joined = Dim(("u",), tuple(number // unit for number in numbers))
            self.parts = tuple(Dim(("u",), (number // unit,)) for number in numbers)

    @classmethod
    def of(cls, tensors: Sequence[TensorInfo], dim: int) -> _Blocks:
        return cls([whole_size(tensor.shape[dim]) for tensor in tensors])


@register(_aten.stack.default)
def _stack(node: fx.Node) -> Rule:
    call = Call(node)
    dims, sizes = plain_dims(call)
    (dim,) = wrapped([call.integer("dim")], len(dims) + 1)
    return call.rule(
        {"tensors": dims},
        [(*dims[:dim], Dim(), *dims[dim:])],
        sizes,
        linear=[("tensors",)],
    )


@register(_aten.view_as_complex.default)
def _view_as_complex(node: fx.Node) -> Rule:
    return Call(node).text_rule({"self": "b.. _"}, ["b.."], linear=[("self",)])


@register(_aten.view_as_real.default)
def _view_as_real(node: fx.Node) -> Rule:
    return Call(node).text_rule({"self": "b.."}, ["b.. _"], linear=[("self",)])
