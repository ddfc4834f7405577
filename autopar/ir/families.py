"""What work ops are: by the name of their overload packet or function."""

from __future__ import annotations

from enum import Enum

from torch import fx
from torch._ops import OpOverload

from autopar.ir.layout import operands_of
from autopar.ir.recompute import MATRIX_PRODUCTS, op_name


class Family(Enum):
    """What work an op is."""

    VIEW = "view"  # no kernel: the result is another look at the operand
    PRODUCT = "product"  # linear, matmul, and relatives
    ATTENTION = "attention"
    EXPERTS = "experts"  # routed: grouped products, and the way of tokens to them
    EMBEDDING = "embedding"
    LOSS = "loss"
    POINTWISE = "pointwise"  # anything else: reads operands and writes results, once


_VIEWS = frozenset(
    {
        "alias",
        "as_strided",
        "broadcast_tensors",
        "broadcast_to",
        "chunk",
        "detach",
        "diagonal",
        "expand",
        "expand_as",
        "flatten",
        "getitem",
        "movedim",
        "narrow",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "swapaxes",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "swapdims",
        "moveaxis",
        "tensor_split",
        "unsafe_split",
        "unfold",
        "adjoint",
        "mH",
        "unsqueeze",
        "view",
        "view_as",
        "_unsafe_view",
        "lift_fresh",
        "numpy_T",
        "mT",
    }
)
LINEAR = frozenset(
    {
        "add",
        "sub",
        "rsub",
        "neg",
        "to",
        "_to_copy",
        "cat",
        "stack",
        "reshape",
        "flatten",
        "view",
        "_unsafe_view",
        "clone",
        "contiguous",
        "mean",
        "sum",
        "pad",
        "constant_pad_nd",
        "repeat",
        "cumsum",
        "type_as",
    }
)
"""Ops that are linear in all operands together: their backward needs no operand."""

_PERMUTING = frozenset(
    {
        "transpose",
        "permute",
        "t",
        "expand",
        "movedim",
        "swapaxes",
        "slice",
        "broadcast_to",
        "mT",
    }
)
_FOLDING = frozenset({"reshape", "flatten", "view", "_unsafe_view", "unflatten"})


def op_text(node: fx.Node) -> str:
    """``aten.mul.Tensor``, or ``autopar.token_loss`` for a function of ours."""
    target = node.target
    return str(target) if isinstance(target, OpOverload) else f"autopar.{op_name(node)}"


def family_of(node: fx.Node) -> Family:
    """The family of a ``call_function`` node."""
    name = op_name(node)
    if name in _VIEWS:
        return Family.POINTWISE if copies(node) else Family.VIEW
    if name in MATRIX_PRODUCTS or (name == "einsum" and len(operands_of(node)) == 2):
        return Family.PRODUCT
    if name == "scaled_dot_product_attention":
        return Family.ATTENTION
    if name == "routed_experts":
        return Family.EXPERTS
    if name == "embedding":
        return Family.EMBEDDING
    if name == "token_loss":
        return Family.LOSS
    return Family.POINTWISE


def copies(node: fx.Node) -> bool:
    """True for a reshape of a permuted or expanded view: it has to be copied."""
    return op_name(node) in _FOLDING and _is_permuted(node.args[0])


def _is_permuted(value: object) -> bool:
    while isinstance(value, fx.Node) and value.op == "call_function":
        name = op_name(value)
        if name in _PERMUTING:
            return not _is_by_position(value)
        if name not in _VIEWS or copies(value):
            return False
        value = value.args[0]
    return False


def _is_by_position(node: fx.Node) -> bool:
    """Whether heads follow positions in a result of attention: its kernels write it like that."""
    source, *dims = node.args
    if not isinstance(source, fx.Node) or op_name(source) != "scaled_dot_product_attention":
        return False
    return op_name(node) in ("transpose", "swapaxes") and tuple(dims) in (
        (1, 2),
        (2, 1),
        (-3, -2),
        (-2, -3),
    )
