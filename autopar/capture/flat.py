"""The graph between export and folding: one flat graph whose placeholders are bound to values of
the model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autopar.ir.errors import CaptureError
from autopar.ir.graph import NodeInfo, Parameter, Size, TensorInfo, ValueId, info, set_info


@dataclass(slots=True, kw_only=True, eq=False)
class FlatGraph:
    """A captured forward pass. Every node has its ``NodeInfo``; every placeholder its entry in
    ``bindings``.
    """

    graph: fx.Graph
    bindings: dict[fx.Node, ValueId]
    parameters: Mapping[str, Parameter]
    inputs: Mapping[str, TensorInfo]
    constants: dict[str, Tensor] = field(default_factory=dict)

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """What the graph returns: the loss and, for a loss summed over tokens, its weight."""
        (returned,) = self.graph.output_node().args
        assert isinstance(returned, tuple)
        return tuple(node for node in returned if isinstance(node, fx.Node))

    def calls(self) -> Iterator[fx.Node]:
        """The nodes that compute, in order. The graph may change while this runs."""
        return (node for node in list(self.graph.nodes) if node.op == "call_function")


def emit(
    graph: fx.Graph,
    like: fx.Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    shape: Iterable[Size] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool | None = None,
) -> fx.Node:
    """Insert a call before ``like`` that comes from where ``like`` comes from and, by default,
    yields the same.
    """
    facts = info(like)
    node = graph.call_function(target, args, kwargs)
    like.prepend(node)
    tensor = facts.tensors[0]
    result = TensorInfo(
        shape=tensor.shape if shape is None else tuple(shape),
        dtype=tensor.dtype if dtype is None else dtype,
        requires_grad=tensor.requires_grad if requires_grad is None else requires_grad,
    )
    set_info(node, NodeInfo(tensors=(result,), module=facts.module, source=facts.source))
    return node


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let ``new`` stand for ``old`` everywhere, and remove ``old``."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def remove_dead_code(flat: FlatGraph) -> None:
    """Remove calls and placeholders that nothing reads."""
    for node in reversed(list(flat.graph.nodes)):
        if node.users or node.op == "output":
            continue
        flat.bindings.pop(node, None)
        flat.graph.erase_node(node)


def argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    """An argument of a call, given by position or by name."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def is_random(node: fx.Node) -> bool:
    """True for a call whose value is drawn anew each time."""
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


_PACKAGE = str(Path(__file__).parent)

_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(_PACKAGE).parent}{os.sep}")
"""Folders whose lines do not tell a user where in the model something happens."""

_FRAME = re.compile(r'File "([^"]*)", line (\d+), in (\S+)')


def source_of(stack_trace: str | None) -> str:
    """The model's innermost line of a stack trace, as ``modeling_llama.py:123, in forward``."""
    frames: list[tuple[str, str, str]] = _FRAME.findall(stack_trace or "")
    if not frames:
        return ""
    own = [frame for frame in frames if not frame[0].startswith((*_LIBRARIES, "<"))]
    if not own and frames[-1][0].startswith(_PACKAGE):  # a loss_fn leaves no frame of its own
        return "in loss_fn"
    file, line, function = (own or frames)[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}, in {function}"


def refuse(node: fx.Node, what: str, hint: str) -> CaptureError:
    """The error for a ``node`` that cannot be captured."""
    found = node.meta.get("autopar")
    source = (
        found.source if isinstance(found, NodeInfo) else source_of(node.meta.get("stack_trace"))
    )
    where = f"{node.target}" + (f", {source}" if source else "")
    return CaptureError(what, where=where, hint=hint)
