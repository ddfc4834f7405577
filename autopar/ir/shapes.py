"""Shape arguments: which arguments of an op spell out the shape of its result, and how to write
them anew.

A captured graph is valid for every batch size, and a rewritten one works on shards. So the shape of
a node is what its ``NodeInfo`` says, and the arguments are rewritten from it just before the node
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autopar.ir.graph import info
from autopar.ir.random_ops import made

_aten = torch.ops.aten

_SHAPE_POSITION: dict[Any, int] = {
    _aten.reshape.default: 1,
    _aten.view.default: 1,
    _aten._unsafe_view.default: 1,
    _aten.expand.default: 1,
    _aten.broadcast_to.default: 1,
    _aten.new_zeros.default: 1,
    _aten.new_ones.default: 1,
    _aten.new_empty.default: 1,
    _aten.new_full.default: 1,
    _aten.zeros.default: 0,
    _aten.ones.default: 0,
    _aten.empty.memory_format: 0,
    _aten.full.default: 0,
    _aten.rand.default: 0,
    _aten.randn.default: 0,
    _aten.randint.default: 1,
    _aten.randint.low: 2,
}
"""Position of the argument that is the shape of the result."""

_ARANGE = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)


def writes_shape(target: object) -> bool:
    """True if some argument of ``target`` spells out the shape of its only result."""
    return target in _SHAPE_POSITION or target in _ARANGE


def makes_from_nothing(node: fx.Node) -> bool:
    """True if ``node`` makes a tensor from no other: it has to be told on which device."""
    if node.target is made:
        return True
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    arguments = node.target._schema.arguments  # pyright: ignore[reportPrivateUsage]
    return not node.all_input_nodes and any(argument.name == "device" for argument in arguments)


def with_shape(
    target: object, args: Sequence[Any], kwargs: dict[str, Any], shape: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call of ``target`` whose result has ``shape``.

    All other arguments are left as they are; ops that spell out no shape get theirs back unchanged.
    For ``split_with_sizes`` see ``with_sizes``.
    """
    written = list(args)
    if target in _SHAPE_POSITION:
        position = _SHAPE_POSITION[target]
        if position < len(written):
            written[position] = list(shape)
            return tuple(written), kwargs
        return tuple(written), {**kwargs, "size": list(shape)}
    if target in _ARANGE:
        (length,) = shape
        if target is _aten.arange.default:
            written[0] = length
        else:
            step = written[2] if len(written) > 2 else 1
            written[1] = written[0] + step * length
    return tuple(written), kwargs


def with_sizes(
    target: object, args: Sequence[Any], kwargs: dict[str, Any], shapes: Sequence[Sequence[int]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call of ``target`` whose results, a tuple, have ``shapes``; writes
    ``split_with_sizes``.
    """
    if target is not _aten.split_with_sizes.default:
        return tuple(args), kwargs
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return (args[0], [shape[dim] for shape in shapes], *args[2:]), kwargs


def call_at(node: fx.Node, values: Callable[[fx.Node], Any], batch: int) -> Any:
    """The value of the ``call_function`` node at ``batch`` sequences.

    ``values`` gives the value of every node that it reads. Creation ops make tensors on the default
    device.
    """
    args = fx.map_arg(node.args, values)
    kwargs = fx.map_arg(node.kwargs, values)
    if writes_shape(node.target):
        args, kwargs = with_shape(node.target, args, kwargs, info(node).tensor.shape_at(batch))
    assert callable(node.target)
    return node.target(*args, **kwargs)
