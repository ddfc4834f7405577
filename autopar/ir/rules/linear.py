"""Products of matrices: sums over a contracted factor, with or without a bias."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Rule
from autopar.ir.rules.registry import register
from autopar.ir.rules.text import parse_rule

_aten = torch.ops.aten


@register(_aten.linear.default)
def _linear(node: fx.Node) -> Rule:
    call = Call(node)
    weight = call.tensor("weight")
    assert weight is not None
    out = len(weight.shape) == 2
    return call.text_rule(
        {"input": "b.. k", "weight": "n k" if out else "k", "bias": "n" if out else ""},
        ["b.. n" if out else "b.."],
        linear=[("input", "bias"), ("weight", "bias")],
        additive=["bias"],
    )


@register(_aten.matmul.default, _aten.mm.default, _aten.bmm.default, _aten.mv.default)
@register(_aten.dot.default)
def _matmul(node: fx.Node) -> Rule:
    call = Call(node)
    left, right = call.names[:2]
    left_info, right_info = call.tensor(left), call.tensor(right)
    assert left_info is not None
    assert right_info is not None
    rows = len(left_info.shape) > 1
    columns = len(right_info.shape) > 1
    return call.text_rule(
        {left: "b.. m k" if rows else "k", right: "b.. k n" if columns else "k"},
        ["b.. " + "m " * rows + "n" * columns],
        linear=[(left,), (right,)],
    )


@register(_aten.addmm.default, _aten.addmv.default, _aten.baddbmm.default)
def _addmm(node: fx.Node) -> Rule:
    call = Call(node)
    bias, left, right = call.names[:3]
    linear = [(bias, left), (bias, right)]
    if node.target is _aten.addmv.default:
        operands = {bias: "m..", left: "m.. k", right: "k"}
        return call.text_rule(operands, ["m.."], linear=linear, additive=[bias])
    bias_info = call.tensor(bias)
    assert bias_info is not None
    batch = "b.. " if node.target is _aten.baddbmm.default else ""
    bias_text = (batch + "m n").split()[-len(bias_info.shape) :] if bias_info.shape else []
    return call.text_rule(
        {bias: " ".join(bias_text), left: batch + "m k", right: batch + "k n"},
        [batch + "m n"],
        linear=linear,
        additive=[bias],
    )


@register(_aten.outer.default)
def _outer(node: fx.Node) -> Rule:
    return Call(node).text_rule({"self": "m", "vec2": "n"}, ["m n"], linear=[("self",), ("vec2",)])


@register(_aten.einsum.default)
def _einsum(node: fx.Node) -> Rule | None:
    """Equations of plain letters with a written result."""
    call = Call(node)
    equation = str(call.argument("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        return None
    operands = ",".join(" ".join(part) for part in left.split(","))
    return parse_rule(
        f"{operands} -> {' '.join(right)}",
        call.operands,
        call.results,
        linear=[{index} for index in range(len(call.operands))],
    )
