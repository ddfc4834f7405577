"""Pointwise ops: every operand is broadcast to the result, dims aligned from the right."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch._ops import OpOverload

from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Dim, Rule
from autopar.ir.rules.reduction import plain_dims, wrapped
from autopar.ir.rules.registry import register, register_tagged
from autopar.ir.rules.text import parse_rule

_aten = torch.ops.aten

Linear = tuple[tuple[str, ...], ...]
"""Sets of argument names in which an op is jointly linear."""

_NONLINEAR = """
    abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil
    celu clamp clamp_max clamp_min clip cos cosh elu eq erf erfc erfinv exp exp2 expm1 floor
    floor_divide fmod ge gelu gt hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu
    lgamma log log10 log1p log2 log_sigmoid logaddexp logical_and logical_not logical_or logical_xor
    logit lt maximum minimum mish ne pow reciprocal relu relu6 remainder round rsqrt selu sgn
    sigmoid sign silu sin sinh softplus sqrt square tan tanh threshold trunc
    __and__ __or__ __xor__ ones_like full_like empty_like
"""

_LINEAR: dict[str, Linear] = {
    "add": (("self", "other"),),
    "sub": (("self", "other"),),
    "subtract": (("self", "other"),),
    "rsub": (("self", "other"),),
    "lerp": (("self", "end"),),
    "mul": (("self",), ("other",)),
    "multiply": (("self",), ("other",)),
    "div": (("self",),),
    "divide": (("self",),),
    "true_divide": (("self",),),
    "addcmul": (("self", "tensor1"), ("self", "tensor2")),
    "addcdiv": (("self", "tensor1"),),
    "neg": (("self",),),
    "negative": (("self",),),
    "clone": (("self",),),
    "contiguous": (("self",),),
    "alias": (("self",),),
    "detach": (("self",),),
    "lift_fresh_copy": (("self",),),
    "zeros_like": (("self",),),
    "positive": (("self",),),
    "deg2rad": (("self",),),
    "rad2deg": (("self",),),
    "conj_physical": (("self",),),
    "real": (("self",),),
    "imag": (("self",),),
    "complex": (("real", "imag"),),
    "special_xlog1py": (("self",),),
    "xlogy": (("self",),),
}
"""Ops that are linear in sets of operands, provided that the constants beside them allow it."""


def pointwise_rule(node: fx.Node, linear: Linear = ()) -> Rule:
    """The rule of a broadcasting op."""
    call = Call(node)
    names = call.tensor_names
    rule = call.text_rule(dict.fromkeys(names, "d.."), ["d.."] * len(call.results), linear=linear)
    return replace(rule, paddable=frozenset(rule.sizes)) if _is_finite_at_zero(node) else rule


_FINITE = "add sub subtract rsub mul multiply neg tanh clone contiguous alias detach to _to_copy"


def _is_finite_at_zero(node: fx.Node) -> bool:
    """Whether padding, which starts as zeros, stays finite, with its gradient."""
    assert isinstance(node.target, OpOverload)
    name = node.target.overloadpacket.__name__
    by_number = name in ("div", "divide", "true_divide") and Call(node).tensor("other") is None
    return by_number or name in _FINITE.split()


@register_tagged(torch.Tag.pointwise)
@register(*(getattr(_aten, name) for name in _NONLINEAR.split()))
def _nonlinear(node: fx.Node) -> Rule:
    return pointwise_rule(node)


@register(*(getattr(_aten, name) for name in _LINEAR))
def _linear(node: fx.Node) -> Rule:
    call = Call(node)
    assert isinstance(node.target, OpOverload)
    linear = _LINEAR[node.target.overloadpacket.__name__]
    if call.argument_or("rounding_mode", None) is not None:
        linear = ()
    # x + c is affine, not linear: what is added has to be a tensor that is P as well.
    joint = [names for names in linear if len(names) > 1]
    if any(call.tensor(name) is None for names in joint for name in names):
        linear = ()
    return pointwise_rule(node, linear)


@register(_aten.to, _aten._to_copy, _aten.type_as)
def _cast(node: fx.Node) -> Rule:
    """Casts to floats are linear; ``type_as`` reads nothing but the dtype of its other operand."""
    call = Call(node)
    (result,) = call.results
    source = call.tensor("self")
    assert source is not None
    linear = result.dtype.is_floating_point or result.dtype == source.dtype
    if call.tensor("other") is not None:
        return call.text_rule({"self": "d..", "other": "_.."}, ["d.."], linear=[("self",)] * linear)
    return pointwise_rule(node, (("self",),) if linear else ())


@register(_aten.where)
def _where(node: fx.Node) -> Rule | None:
    call = Call(node)
    if call.tensor("self") is None and call.tensor("other") is None and not call.results[0].shape:
        return None
    if node.target is _aten.where.default:  # indices of what is true: a shape that depends on data
        return None
    branches = [name for name in ("self", "other") if call.tensor(name) is not None]
    constants = [call.argument_or(name, 0) for name in ("self", "other") if name not in branches]
    linear: Linear = () if any(value != 0 for value in constants) else (tuple(branches),)
    return pointwise_rule(node, linear if branches else ())


@register(_aten.masked_fill)
def _masked_fill(node: fx.Node) -> Rule:
    call = Call(node)
    if call.tensor("value") is not None:
        return pointwise_rule(node, (("self", "value"),))
    return pointwise_rule(node, (("self",),) if call.argument("value") == 0 else ())


@register(_aten.broadcast_tensors.default)
def _broadcast(node: fx.Node) -> Rule:
    call = Call(node)
    dims = ", ".join(["d.."] * len(call.operands))
    everything = range(len(call.operands))
    return parse_rule(f"{dims} -> {dims}", call.operands, call.results, linear=[everything])


@register(_aten.fill)
def _fill(node: fx.Node) -> Rule:
    """Nothing of the operand but its shape is read."""
    call = Call(node)
    if call.tensor("value") is not None:
        return pointwise_rule(node, (("self", "value"),))
    return pointwise_rule(node, (("self",),) if call.argument("value") == 0 else ())


@register(_aten.prelu.default)
def _prelu(node: fx.Node) -> Rule:
    """One slope, or one for each channel: dim 1."""
    call = Call(node)
    if call.shape("weight") in ((), (1,)) or len(call.shape("self")) < 2:
        return call.text_rule({"self": "d..", "weight": "_.."}, ["d.."])
    rest = " ".join(f"x{dim}" for dim in range(len(call.shape("self")) - 2))
    return call.text_rule({"self": f"b c {rest}", "weight": "c"}, [f"b c {rest}"])


@register(_aten.glu.default)
def _glu(node: fx.Node) -> Rule:
    """A dim of two halves, gate and value: a rank has its part of both."""
    call = Call(node)
    (dim,) = wrapped([call.integer("dim")], len(call.shape("self")))
    dims, sizes = plain_dims(call, [dim])
    half = call.results[0].shape[dim]
    joined, single = (Dim(("u",), (1, 1)), Dim(("u",))) if half != 1 else (Dim(), Dim())
    return call.rule(
        {"self": (*dims[:dim], joined, *dims[dim + 1 :])},
        [(*dims[:dim], single, *dims[dim + 1 :])],
        {**sizes, "u": half},
    )


@register(_aten.bucketize.Tensor, _aten.searchsorted.Tensor)
def _searched(node: fx.Node) -> Rule:
    """Rows of boundaries stay whole; each row of values has its own, or all have the same one."""
    call = Call(node)
    boundaries = "boundaries" if node.target is _aten.bucketize.Tensor else "sorted_sequence"
    if len(call.shape(boundaries)) == 1:
        return call.text_rule({"self": "d..", boundaries: "_"}, ["d.."])
    return call.text_rule({"self": "b.. n", boundaries: "b.. _", "sorter": "b.. _"}, ["b.. n"])


@register(_aten.one_hot.default)
def _one_hot(node: fx.Node) -> Rule:
    return Call(node).text_rule({"self": "d.."}, ["d.. _"])


@register(_aten.tril, _aten.triu)
def _triangle(node: fx.Node) -> Rule:
    return Call(node).text_rule({"self": "b.. _ _"}, ["b.. _ _"], linear=[("self",)])


@register(_aten.dropout.default, _aten.feature_dropout.default)
def _dropout(node: fx.Node) -> Rule:
    """Masks are drawn by logical position, so that they do not know of splits."""
    return pointwise_rule(node, (("input",),))


@register(
    _aten.rand_like,
    _aten.randn_like,
    _aten.randint_like,
    _aten.bernoulli,
    _aten.uniform,
    _aten.normal_functional,
    _aten.exponential,
    _aten.alpha_dropout,
    _aten.feature_alpha_dropout,
    _aten.rrelu,
)
def _sampled(node: fx.Node) -> Rule | None:
    """Random numbers by logical position, one for each element."""
    call = Call(node)
    if len(call.operands) != 1 or call.operands[0].shape != call.results[0].shape:
        return None
    return pointwise_rule(node)
