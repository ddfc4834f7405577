"""Regions become plain calls."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from autopar.capture.flat import refuse

_aten = torch.ops.aten
_HINT_REGION = "move the choice out of forward, or compute both sides and use torch.where"


def inline(graph: fx.Graph, module: torch.nn.Module) -> None:
    """Inline the ``no_grad`` regions of ``graph``, and those without autocast, in place; ``module``
    holds their graphs.

    Raises:
        CaptureError: Autocast, control flow, or another higher-order op.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
            _inline_region(node, module)


def _inline_region(node: fx.Node, module: torch.nn.Module) -> None:
    name = str(node.target)
    if name == "wrap_with_set_grad_enabled":
        enabled, body, *operands = node.args
        _paste(node, module, body, operands, detach=not enabled)
    elif name == "wrap_with_autocast":
        _, _, enabled, _, body, *operands = node.args
        if enabled:
            raise refuse(
                _first_call(node, module),
                "the model opens an autocast region",
                "remove torch.autocast from forward and choose the precision of training instead",
            )
        _paste(node, module, body, operands, detach=False)
    elif name in _CONTROL_FLOW:
        raise refuse(node, f"the model has control flow on tensors ({name})", _HINT_REGION)
    else:
        raise refuse(
            node,
            f"the model calls the higher-order op {name}, which is not supported",
            "write what it does with plain ops; for attention choose the implementation sdpa",
        )


_CONTROL_FLOW = ("cond", "while_loop", "map_impl", "scan", "associative_scan")


def _first_call(node: fx.Node, module: torch.nn.Module) -> fx.Node:
    """A call inside a region, which knows its source line; the region itself does not."""
    for body in node.args:
        if isinstance(body, fx.Node) and body.op == "get_attr" and isinstance(body.target, str):
            inner = module.get_submodule(body.target)
            assert isinstance(inner, fx.GraphModule)
            return next((call for call in inner.graph.nodes if call.op == "call_function"), node)
    return node


def _paste(
    node: fx.Node, module: torch.nn.Module, body: Any, operands: list[Any], *, detach: bool
) -> None:
    assert isinstance(body, fx.Node)
    assert isinstance(body.target, str)
    inner = module.get_submodule(body.target)
    assert isinstance(inner, fx.GraphModule)
    copies: dict[fx.Node, Any] = {}
    remaining = iter(operands)
    results: list[Any] = []
    for call in inner.graph.nodes:
        if call.op == "placeholder":
            copies[call] = next(remaining)
        elif call.op == "output":
            (returned,) = call.args
            results = list(returned) if isinstance(returned, tuple | list) else [returned]
        else:
            with node.graph.inserting_before(node):
                copies[call] = node.graph.node_copy(call, copies.__getitem__)
            if isinstance(copies[call].target, HigherOrderOperator):
                _inline_region(copies[call], inner)
    values = [copies[result] if isinstance(result, fx.Node) else result for result in results]
    if detach:
        values = [_detached(node, value) for value in values]
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(values[user.args[1]])  # type: ignore[index]
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _detached(before: fx.Node, value: Any) -> Any:
    if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return value
    with before.graph.inserting_before(before):
        node = before.graph.call_function(_aten.detach.default, (value,))
    node.meta.update(value.meta)
    return node
