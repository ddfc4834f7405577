"""Products of matrices: sums over a contracted factor, with or without a bias."""

from __future__ import annotations

import re

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
        paddable="n",
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
        paddable="n",
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
def _einsum(node: fx.Node) -> Rule:
    """Any equation; what ``...`` stands for is broadcast."""
    call = Call(node)
    equation = str(call.argument("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow:  # letters that occur once, in order of the alphabet
        letters = left.replace(".", "").replace(",", "")
        once = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
        right = ("..." if "..." in left else "") + once
    sides = [",".join(map(_spelled, side.split(","))) for side in (left, right)]
    return parse_rule(
        " -> ".join(sides),
        call.operands,
        call.results,
        linear=[{index} for index in range(len(call.operands))],
    )


def _spelled(term: str) -> str:
    """``b...k`` as ``b rest.. k``."""
    return " ".join(" rest.. " if part == "..." else part for part in _PARTS.findall(term))


_PARTS = re.compile(r"\.\.\.|[A-Za-z]")


@register(_aten.tensordot.default)
def _tensordot(node: fx.Node) -> Rule:
    call = Call(node)
    pairs = list(zip(call.integers("dims_self"), call.integers("dims_other"), strict=True))
    left = [f"m{dim}" for dim in range(len(call.shape("self")))]
    right = [f"n{dim}" for dim in range(len(call.shape("other")))]
    for number, (one, other) in enumerate(pairs):
        left[one] = right[other] = f"k{number}"
    result = [name for name in (*left, *right) if not name.startswith("k")]
    return call.text_rule(
        {"self": " ".join(left), "other": " ".join(right)},
        [" ".join(result)],
        linear=[("self",), ("other",)],
    )


@register(_aten._grouped_mm.default, "transformers::grouped_mm_fallback")
def _grouped_mm(node: fx.Node) -> Rule | None:
    """Rows of one matrix multiply that of their group: groups and their rows stay whole."""
    call = Call(node)
    left, right, offsets = call.names[:3]
    shapes = (len(call.shape(left)), len(call.shape(right)))
    if call.tensor(offsets) is None:
        texts = {left: "g m k", right: "g k n"}, "g m n"
    elif shapes == (2, 3):
        texts = {left: "!t k", right: "!g k n"}, "!t n"
    elif shapes == (2, 2):
        texts = {left: "m !t", right: "!t n"}, "_ m n"
    elif shapes == (3, 2):
        texts = {left: "!g m k", right: "k !t"}, "m !t"
    else:
        return None
    operands, result = texts
    return call.text_rule({**operands, offsets: "_"}, [result], linear=[(left,), (right,)])


@register(_aten.cdist.default)
def _distances(node: fx.Node) -> Rule:
    return Call(node).text_rule({"x1": "b.. m !d", "x2": "b.. n !d"}, ["b.. m n"])
