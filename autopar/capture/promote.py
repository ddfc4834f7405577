"""Integers that an op makes floats of: written as a cast, in the dtype of the capture.

``ids * 0.5`` has torch's default dtype, which is another one where the graph runs than where a
model is captured in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autopar.capture.flat import emit
from autopar.ir.graph import info

_aten = torch.ops.aten


def cast_integers(node: fx.Node) -> None:
    """Cast the operands of a pointwise op without floating operands to the dtype of its result, if
    that is not float32.
    """
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return
    operands = [source for source in node.all_input_nodes if "autopar" in source.meta]
    (result,) = info(node).tensors[:1]
    if (
        not operands
        or target is _aten.to.dtype
        or target.overloadpacket is _aten.where
        or not result.dtype.is_floating_point
        or result.dtype is torch.float32
        or any(info(source).tensor.dtype.is_floating_point for source in operands)
        or node.kwargs.get("dtype") is not None
    ):
        return

    def cast(argument: Any) -> Any:
        if argument not in operands:
            return argument
        return emit(
            node.graph,
            node,
            _aten.to.dtype,
            (argument, result.dtype),
            shape=info(argument).tensor.shape,
            dtype=result.dtype,
            requires_grad=False,
        )

    node.args = tuple(cast(a) if isinstance(a, fx.Node) else a for a in node.args)
