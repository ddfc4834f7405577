"""Local forms: what a node becomes on the ranks under the options that it has on each axis.

Most ops stay themselves, with shape arguments written anew. An option with a *helper* turns its
node into a function of ``autopar.ir.functional`` that is given the ranks of the axis (see
``program.axis_handle``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autopar.ir import functional, losses
from autopar.ir.causal import causal_attention
from autopar.ir.errors import PlacementError
from autopar.ir.experts import expert_dispatch, expert_slice
from autopar.ir.graph import info
from autopar.ir.program import axis_handle
from autopar.ir.rules.attention import CAUSAL_HELPER
from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Option
from autopar.ir.rules.random import is_random, random_call
from autopar.ir.shapes import with_shape, with_sizes

_aten = torch.ops.aten

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AxisHandle:
    """Stands for the ranks along an axis among the arguments of a local form."""

    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalForm:
    """A call that one rank makes. ``AxisHandle`` objects among the arguments stand for axes."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def localize_node(
    graph: fx.Graph,
    node: fx.Node,
    options: Mapping[str, Option],
    local_shapes: Sequence[Shape],
) -> None:
    """Turn a ``call_function`` node into what one rank computes, in place.

    Args:
        graph: The graph of ``node``.
        node: A node whose operands are already local. ``info(node)`` still has the global shapes.
        options: The node's option on each axis (axes of one rank may be left out).
        local_shapes: The shape of each result on a rank.

    Raises:
        PlacementError: If the options cannot be had together.
    """
    form = local_form(node, options, local_shapes)

    def handles(argument: Any) -> Any:
        if isinstance(argument, AxisHandle):
            return axis_handle(graph, argument.axis)
        if isinstance(argument, list | tuple):
            return type(argument)(map(handles, argument))
        return argument

    node.target = form.target
    node.args = handles(form.args)
    node.kwargs = {name: handles(value) for name, value in form.kwargs.items()}


def local_form(
    node: fx.Node, options: Mapping[str, Option], local_shapes: Sequence[Shape]
) -> LocalForm:
    """What ``node`` becomes under ``options``; see ``localize_node``."""
    require_compatible(node, options)
    if is_random(node):
        return _random(node, options, local_shapes[0])
    helped = {axis: option for axis, option in options.items() if option.helper is not None}
    names = {str(option.helper) for option in helped.values()}
    if names:
        return _HELPERS[names.pop()](node, helped)
    if node.target in _RESHAPED:
        operand = Call(node).argument("self")
        return LocalForm(
            target=_aten.reshape.default, args=(operand, list(local_shapes[0])), kwargs={}
        )
    if node.target in _SPLITS:
        call = Call(node)
        dim = call.integer("dim")
        sizes = [shape[dim] for shape in local_shapes]
        args: tuple[Any, ...] = (call.argument("self"), sizes, dim)
        return LocalForm(target=_aten.split_with_sizes.default, args=args, kwargs={})
    if node.target in (_aten.repeat.default, _aten.tile.default):
        return _repeat(node, local_shapes[0])
    if node.target in _GROUPED:
        return _grouped(node, local_shapes[0])
    target = node.target
    assert callable(target)
    kwargs = dict(node.kwargs)
    if info(node).is_tuple:
        written, kwargs = with_sizes(target, node.args, kwargs, local_shapes)
    else:
        written, kwargs = with_shape(target, node.args, kwargs, local_shapes[0])
    return LocalForm(target=target, args=written, kwargs=kwargs)


def require_compatible(node: fx.Node, options: Mapping[str, Option]) -> None:
    """Raise ``PlacementError`` if ``node`` has no local form under these options together."""
    helped = {axis: option for axis, option in options.items() if option.helper is not None}
    names = {option.helper for option in helped.values()}
    exclusive = [axis for axis, option in helped.items() if option.helper not in _SHARED]
    if len(names) > 1 or len(exclusive) > 1:
        listed = ", ".join(f"{axis}: {option} ({option.helper})" for axis, option in helped.items())
        raise PlacementError(
            f"{node.name} ({node.target}) needs helpers on several axes at once: {listed}",
            where=info(node).source or None,
            hint="replicate the op on one of these axes",
        )


_SHARED = ("mean", CAUSAL_HELPER)
"""Helpers that serve several axes together."""

_OF_ALL_AXES = ("mean", "mean_loss", "token_mean")
"""Helpers that serve several axes at once."""

# A dim of which a rank holds one index must not be squeezed away.
_RESHAPED = (
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.flatten.using_ints,
    _aten.unflatten.int,
)

_GROUPED = {
    overload: argument
    for packet, argument in {
        _aten.conv1d: "groups",
        _aten.conv2d: "groups",
        _aten.conv3d: "groups",
        _aten.convolution: "groups",
        _aten.conv_transpose1d: "groups",
        _aten.conv_transpose2d: "groups",
        _aten.conv_transpose3d: "groups",
        _aten.group_norm: "num_groups",
    }.items()
    for overload in (getattr(packet, name) for name in packet.overloads())
}
"""Ops that are told how many groups their channels have."""

_SPLITS = (
    _aten.split.Tensor,
    _aten.split.sizes,
    _aten.chunk.default,
    _aten.tensor_split.sections,
    _aten.tensor_split.indices,
    _aten.unsafe_split.Tensor,
)


def _repeat(node: fx.Node, local_shape: Shape) -> LocalForm:
    """New dims are repeated as often as the local shape says, tiles as often as they were."""
    call = Call(node)
    (operand,) = call.operands
    tiled = node.target is _aten.tile.default
    repeats = list(call.integers("dims" if tiled else "repeats"))
    repeats = [1] * (len(local_shape) - len(repeats)) + repeats
    new = len(repeats) - len(operand.shape)
    for dim in range(len(repeats)):
        if dim < new or operand.shape[dim - new] == 1:
            repeats[dim] = local_shape[dim]
    return LocalForm(target=_aten.repeat.default, args=(call.argument("self"), repeats), kwargs={})


def _grouped(node: fx.Node, local_shape: Shape) -> LocalForm:
    """A rank has as many groups as channels of the result, in proportion."""
    call = Call(node)
    name = _GROUPED[node.target]
    weight = call.tensor("weight")
    positions = len(weight.shape) - 2 if weight is not None and name == "groups" else None
    dim = 1 if positions is None else len(local_shape) - positions - 1
    channels = call.results[0].shape[dim]
    assert isinstance(channels, int), "channels depend on the batch"
    groups = call.integer(name)
    if groups > 1:
        groups = groups * local_shape[dim] // channels
    arguments = [groups if other == name else call.argument(other) for other in call.names]
    assert isinstance(node.target, OpOverload)
    return LocalForm(target=node.target, args=tuple(arguments), kwargs={})


def _vocab_embedding(node: fx.Node, helped: Mapping[str, Option]) -> LocalForm:
    call = Call(node)
    args = (call.argument("weight"), call.argument("indices"), AxisHandle(next(iter(helped))))
    padding = call.integer("padding_idx")
    kwargs = {"vocabulary": _static_size(call, "weight", 0)}
    if padding >= 0:
        kwargs["padding_idx"] = padding
    return LocalForm(target=functional.vocab_embedding, args=args, kwargs=kwargs)


def _vocab_token_loss(node: fx.Node, helped: Mapping[str, Option]) -> LocalForm:
    call = Call(node)
    args = (
        call.argument("logits"),
        call.argument("targets"),
        AxisHandle(next(iter(helped))),
        *map(call.argument, ("ignore_index", "label_smoothing", "weight")),
    )
    kwargs = {"vocabulary": _static_size(call, "logits", -1)}
    return LocalForm(target=functional.vocab_token_loss, args=args, kwargs=kwargs)


def _static_size(call: Call, name: str, dim: int) -> int:
    size = call.shape(name)[dim]
    assert isinstance(size, int), f"dim {dim} of {name} depends on the batch"
    return size


def _mean_loss(node: fx.Node, helped: Mapping[str, Option]) -> LocalForm:
    args = (_packet_name(node), tuple(map(AxisHandle, helped)), *node.args)
    return LocalForm(target=losses.mean_loss_of_shard, args=args, kwargs=dict(node.kwargs))


def _token_mean(node: fx.Node, helped: Mapping[str, Option]) -> LocalForm:
    call = Call(node)
    arguments = map(call.argument, ("self", "target", "weight", "ignore_index"))
    smoothing = call.argument_or("label_smoothing", 0.0)
    return LocalForm(
        target=losses.mean_token_loss_of_shard,
        args=(_packet_name(node), tuple(map(AxisHandle, helped)), *arguments),
        kwargs={"label_smoothing": smoothing} if smoothing else {},
    )


def _packet_name(node: fx.Node) -> str:
    assert isinstance(node.target, OpOverload)
    return str(node.target.overloadpacket.__name__)


def _mean(node: fx.Node, helped: Mapping[str, Option]) -> LocalForm:
    call = Call(node)
    args = (
        call.argument("self"),
        call.argument_or("dim", None),
        call.argument_or("keepdim", False),
    )
    kwargs = {"axes": tuple(map(AxisHandle, helped)), "dtype": call.argument_or("dtype", None)}
    return LocalForm(target=functional.partial_mean, args=args, kwargs=kwargs)


def _random(node: fx.Node, options: Mapping[str, Option], local_shape: Shape) -> LocalForm:
    """Random numbers by logical position: ranks take their shards of what all would draw."""
    results = {axis: option.results[0] for axis, option in options.items()}
    shards = tuple((AxisHandle(axis), str(s)) for axis, s in results.items() if s.is_sharded)
    target, args, kwargs = random_call(node, shards, local_shape)
    return LocalForm(target=target, args=args, kwargs=kwargs)


def _causal_attention(node: fx.Node, helped: Mapping[str, Option]) -> LocalForm:
    call = Call(node)
    kwargs = {
        "num_positions": _static_size(call, "query", -2),
        "shards": tuple((AxisHandle(axis), str(o.results[0])) for axis, o in helped.items()),
        "scale": call.argument("scale"),
        "enable_gqa": call.argument("enable_gqa"),
    }
    names = ("query", "key", "value")
    return LocalForm(target=causal_attention, args=tuple(map(call.argument, names)), kwargs=kwargs)


def _experts(node: fx.Node, helped: Mapping[str, Option]) -> LocalForm:
    ((axis, option),) = helped.items()
    target = {"expert_slice": expert_slice, "expert_dispatch": expert_dispatch}[str(option.helper)]
    call = Call(node)
    settings = ("activation", "gated", "transposed", "capacity_factor")
    args = tuple(map(call.argument, (name for name in call.names if name not in settings)))
    kwargs = {name: call.argument(name) for name in settings}
    return LocalForm(target=target, args=(*args, AxisHandle(axis)), kwargs=kwargs)


_HELPERS: dict[str, Callable[[fx.Node, Mapping[str, Option]], LocalForm]] = {
    "vocab_embedding": _vocab_embedding,
    "vocab_token_loss": _vocab_token_loss,
    "mean": _mean,
    "mean_loss": _mean_loss,
    "token_mean": _token_mean,
    CAUSAL_HELPER: _causal_attention,
    "expert_slice": _experts,
    "expert_dispatch": _experts,
}
