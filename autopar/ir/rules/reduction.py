"""Ops along dims: sums are contractions, means need a helper, all others keep the dims whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from autopar.ir.graph import Size
from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Dim, Rule, TensorDims
from autopar.ir.rules.registry import register
from autopar.ir.rules.text import whole_size

_aten = torch.ops.aten

_WHOLE_REDUCTIONS = """
    all amax amin any argmax argmin aminmax count_nonzero kthvalue logsumexp max median min mode
    norm prod std std_mean var var_mean linalg_vector_norm linalg_norm
"""

_ROWS = """
    softmax _softmax log_softmax _log_softmax cumprod logcumsumexp sort argsort topk flip roll
"""


def reduced_dims(call: Call) -> tuple[int, ...]:
    """The dims that a reduction reduces, not negative; all where it says none."""
    num_dims = len(call.operands[0].shape)
    named = call.argument_or("dim", call.argument_or("dims", None))
    if named is None or named == []:
        return tuple(range(num_dims))
    return wrapped((named,) if isinstance(named, int) else named, num_dims)


def wrapped(dims: Iterable[int], num_dims: int) -> tuple[int, ...]:
    """``dims`` counted from the front."""
    return tuple(dim % num_dims if num_dims else 0 for dim in dims)


def plain_dims(call: Call, whole: Iterable[int] = ()) -> tuple[TensorDims, dict[str, Size]]:
    """A factor for each dim of the first operand, none for those in ``whole``; and their sizes."""
    shape = call.operands[0].shape
    sizes = {f"d{dim}": whole_size(size) for dim, size in enumerate(shape)}
    without = {*whole, *(dim for dim, size in enumerate(shape) if size == 1)}
    dims = tuple(Dim() if dim in without else Dim((f"d{dim}",)) for dim in range(len(shape)))
    return dims, {name: sizes[name] for dim in dims for name in dim.factors}


def _reduce(
    call: Call, *, whole: bool, linear: bool = False, helper: str | None = None
) -> Rule | None:
    if len(call.operands) != 1:
        return None
    reduced = reduced_dims(call)
    dims, sizes = plain_dims(call, reduced if whole else ())
    keepdim = call.argument_or("keepdim", False)
    kept = tuple(
        Dim() if index in reduced else dim
        for index, dim in enumerate(dims)
        if keepdim or index not in reduced
    )
    contracted = [
        factor for index in reduced if index < len(dims) for factor in dims[index].factors
    ]
    name = call.tensor_names[0]
    return call.rule(
        {name: dims},
        [kept] * len(call.results),
        sizes,
        linear=[(name,)] if linear else [],
        helpers=dict.fromkeys(contracted, helper) if helper else None,
    )


@register(_aten.sum.default, _aten.sum.dim_IntList)
def _sum(node: fx.Node) -> Rule | None:
    call = Call(node)
    exact = call.operands[0].dtype != torch.bool
    return _reduce(call, whole=False, linear=exact)


@register(_aten.nansum.default)
def _nansum(node: fx.Node) -> Rule | None:
    return _reduce(Call(node), whole=False)


@register(_aten.renorm.default)
def _renorm(node: fx.Node) -> Rule:
    """Every index of ``dim`` has a norm over all other dims: they stay whole."""
    call = Call(node)
    num_dims = len(call.operands[0].shape)
    kept = wrapped([call.integer("dim")], num_dims)
    dims, sizes = plain_dims(call, set(range(num_dims)) - set(kept))
    return call.rule({"self": dims}, [dims], sizes)


@register(_aten.cosine_similarity.default)
def _cosine(node: fx.Node) -> Rule | None:
    """Along ``dim`` of operands that are broadcast; that dim stays whole."""
    call = Call(node)
    num_dims = len(call.results[0].shape) + 1
    (dim,) = wrapped([call.integer("dim")], num_dims)
    if any(len(operand.shape) != num_dims for operand in call.operands):
        return None
    names = [f"d{place}" for place in range(num_dims)]
    text = " ".join(f"!{name}" if place == dim else name for place, name in enumerate(names))
    result = " ".join(name for place, name in enumerate(names) if place != dim)
    return call.text_rule({"x1": text, "x2": text}, [result])


@register(_aten.mean.default, _aten.mean.dim)
def _mean(node: fx.Node) -> Rule | None:
    return _reduce(Call(node), whole=False, linear=True, helper="mean")


@register(*(getattr(_aten, name) for name in _WHOLE_REDUCTIONS.split()))
def _whole_reduction(node: fx.Node) -> Rule | None:
    """Maxima, products, norms and variances of shards do not add up: the dims stay whole."""
    call = Call(node)
    expected = len(call.operands[0].shape) if call.argument_or("keepdim", False) else None
    if expected is not None and any(len(result.shape) != expected for result in call.results):
        return None
    return _reduce(call, whole=True)


@register(*(getattr(_aten, name) for name in _ROWS.split()))
def _row(node: fx.Node) -> Rule | None:
    call = Call(node)
    return _along(call, linear=node.target in _LINEAR_ROWS)


@register(_aten.cumsum.default, _aten.diff.default)
def _linear_row(node: fx.Node) -> Rule | None:
    call = Call(node)
    return _along(call, linear=True) if len(call.operands) == 1 else None


_LINEAR_ROWS = (_aten.flip.default, _aten.roll.default)


def _along(call: Call, *, linear: bool) -> Rule | None:
    """An op that mixes what lies along its dims: they stay whole."""
    dims, sizes = plain_dims(call, reduced_dims(call))
    if any(len(result.shape) != len(dims) for result in call.results):
        return None
    name = call.tensor_names[0]
    return call.rule(
        {name: dims}, [dims] * len(call.results), sizes, linear=[(name,)] if linear else []
    )
