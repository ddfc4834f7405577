"""Regions and in-place ops become plain calls: after ``inline`` the graph has pure ops only."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from autopar.capture.flat import refuse
from autopar.ir.graph import Role, ValueId

_aten = torch.ops.aten
_HINT_REGION = "move the choice out of forward, or compute both sides and use torch.where"


def inline(graph: fx.Graph, module: torch.nn.Module, bindings: dict[fx.Node, ValueId]) -> None:
    """Inline ``no_grad`` regions and replace in-place ops by pure ones.

    Args:
        graph: Changed in place.
        module: Holds the graphs of regions.
        bindings: What placeholders stand for: only temporary tensors may be written to.

    Raises:
        CaptureError: Autocast, control flow, a write to a buffer, parameter or input, or one
            through a view.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
            _inline_region(node, module)
    _make_pure(graph, bindings)


# --- regions -------------------------------------------------------------------------------------


def _inline_region(node: fx.Node, module: torch.nn.Module) -> None:
    name = str(node.target)
    if name == "wrap_with_set_grad_enabled":
        enabled, body, *operands = node.args
        _paste(node, module, body, operands, detach=not enabled)
    elif name == "wrap_with_autocast":
        raise refuse(
            _first_call(node, module),
            "the model opens an autocast region",
            "remove torch.autocast from forward and choose compute_dtype instead",
        )
    else:
        raise refuse(node, f"the model has control flow on tensors ({name})", _HINT_REGION)


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


# --- in-place ops --------------------------------------------------------------------------------


def _make_pure(graph: fx.Graph, bindings: dict[fx.Node, ValueId]) -> None:
    """Let a written tensor's later readers read the result of the write.

    That is right as long as no other view of its memory is read later, which is checked.
    """
    root: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        root[node] = node
        source = node.args[0] if node.args else None
        if node.op != "call_function" or not isinstance(source, fx.Node):
            continue
        if _writes(node):
            _check_write(node, source, root, bindings)
            result = _rewrite(node, source)
            for reader in list(source.users):
                if node < reader or (result is not node and reader is node):
                    reader.replace_input_with(source, result)
            root[result] = result
            if result is not node:
                node.replace_all_uses_with(result)
                graph.erase_node(node)
        elif _may_view(node):
            root[node] = root[source]


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and _schema(node.target).is_mutable


def _schema(op: OpOverload[..., Any]) -> torch.FunctionSchema:
    return op._schema  # pyright: ignore[reportPrivateUsage]


def _may_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _may_view(source)
    if node.target in _MAYBE_VIEWS:
        return True
    return isinstance(node.target, OpOverload) and any(
        result.alias_info is not None for result in _schema(node.target).returns
    )


_MAYBE_VIEWS = {
    _aten.reshape.default,
    _aten.contiguous.default,
    _aten.flatten.using_ints,
    _aten.to.dtype,
    _aten.to.dtype_layout,
    _aten.to.device,
    _aten.chunk.default,
    _aten.expand_as.default,
}


def _check_write(
    node: fx.Node,
    written: fx.Node,
    root: dict[fx.Node, fx.Node],
    bindings: dict[fx.Node, ValueId],
) -> None:
    base = root[written]
    if base in bindings:
        value = bindings[base]
        what = "buffer" if value.role is Role.CONSTANT else value.role.value
        raise refuse(
            node,
            f"forward writes to {what} {value.name}",
            "return the new value, or keep running statistics outside of forward",
        )
    read_later = any(
        node < reader
        for alias, its_root in root.items()
        if its_root is base and alias is not written
        for reader in alias.users
    )
    if read_later or base is not written:
        raise refuse(
            node,
            "forward writes to a tensor through a view of it",
            "build the result with torch.cat, torch.where or slice_scatter",
        )
    dtype = written.meta["val"].dtype
    for source in node.all_input_nodes:
        if torch.promote_types(source.meta["val"].dtype, dtype) != dtype and not _copies(node):
            raise refuse(node, "an in-place op rounds its result", "cast before the op")


def _copies(node: fx.Node) -> bool:
    return node.target is _aten.copy_.default


def _rewrite(node: fx.Node, written: fx.Node) -> fx.Node:
    """The value that an in-place op leaves, by a pure op: ``node`` itself, changed, or another
    node.
    """
    target = node.target
    assert isinstance(target, OpOverload)
    name = _schema(target).name.removeprefix("aten::")
    if target is _aten.zero_.default:
        node.target = _aten.zeros_like.default
    elif target is _aten.fill_.Scalar:
        node.target = _aten.full_like.default
    elif _copies(node):
        source = node.args[1]
        assert isinstance(source, fx.Node)
        return _copied(node, source, written.meta["val"])
    else:
        packet = getattr(_aten, name.removesuffix("_"), None)
        overload = getattr(packet, _schema(target).overload_name, None)
        if not name.endswith("_") or overload is None:
            raise refuse(node, f"the in-place op {name} is not supported", "use the pure op")
        node.target = overload
    return node


def _copied(node: fx.Node, source: fx.Node, like: torch.Tensor) -> fx.Node:
    value = source.meta["val"]
    with node.graph.inserting_before(node):
        if value.shape != like.shape:
            source = node.graph.call_function(_aten.expand.default, (source, list(like.shape)))
            source.meta.update({**node.meta, "val": value.expand(like.shape)})
        if value.dtype != like.dtype:
            source = node.graph.call_function(_aten.to.dtype, (source, like.dtype))
            source.meta.update(node.meta)
    return source
