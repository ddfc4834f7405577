"""In-place ops become pure ones: a write gives a new tensor, and what is read later reads that.

A write through a view is put back into the tensor that the view is of, and every view of that
tensor that is read later is taken anew. Only tensors that the graph made itself may be written to.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from autopar.capture.flat import argument, refuse
from autopar.ir.errors import CaptureError
from autopar.ir.graph import Role, ValueId

_aten = torch.ops.aten


def make_pure(graph: fx.Graph, bindings: Mapping[fx.Node, ValueId]) -> None:
    """Replace the in-place ops of an exported ``graph``, whose nodes have their ``val``.

    Args:
        graph: Changed in place.
        bindings: What placeholders stand for: they may not be written to.

    Raises:
        CaptureError: A write to a buffer, parameter or input, or one that has no pure form.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if not any(map(_is_mutable, calls)):
        return
    views = _Views()
    for node in calls:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        if _is_mutable(node):
            _write(node, source, views, bindings)
        elif _is_view(node):
            views.add(node)


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and _schema(node.target).is_mutable


def _schema(op: OpOverload[..., Any]) -> torch.FunctionSchema:
    return op._schema  # pyright: ignore[reportPrivateUsage]


def _is_view(node: fx.Node) -> bool:
    """True if the result shares its memory with the first argument."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target is operator.getitem:
        return _is_view(source)
    if node.target in _MAYBE_VIEWS:
        before = source.meta["val"]
        if before.is_contiguous():
            return bool(before.dtype == node.meta["val"].dtype)
        found = _run(node.target, node.args, node.kwargs)
        return bool(found.untyped_storage()._cdata == before.untyped_storage()._cdata)
    return isinstance(node.target, OpOverload) and any(
        result.alias_info is not None for result in _schema(node.target).returns
    )


_MAYBE_VIEWS = {
    _aten.reshape.default,
    _aten.reshape_as.default,
    _aten.contiguous.default,
    _aten.flatten.using_ints,
    _aten.to.dtype,
    _aten.to.dtype_layout,
    _aten.to.device,
    _aten.to.other,
    _aten.type_as.default,
}


class _Views:
    """The views of each tensor, and for each the calls that lead from that tensor to it."""

    def __init__(self) -> None:
        self._paths: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._of: dict[fx.Node, list[fx.Node]] = {}

    def add(self, view: fx.Node) -> None:
        self._paths[view] = (*self.path(_source(view)), view)
        self._of.setdefault(self.base(view), []).append(view)

    def path(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return self._paths.get(node, ())

    def base(self, node: fx.Node) -> fx.Node:
        """The tensor that ``node`` is a view of: itself, if it is none."""
        path = self.path(node)
        return _source(path[0]) if path else node

    def of(self, base: fx.Node) -> list[fx.Node]:
        return list(self._of.get(base, ()))


def _source(view: fx.Node) -> fx.Node:
    source = view.args[0]
    assert isinstance(source, fx.Node)
    return source


def _write(
    node: fx.Node, written: fx.Node, views: _Views, bindings: Mapping[fx.Node, ValueId]
) -> None:
    base = views.base(written)
    _check(node, base, bindings)
    if torch.Tag.inplace_view in getattr(node.target, "tags", ()):  # as unsqueeze_
        node.target = _pure_form(node)
        views.add(node)
        _redirect(node, written, node)
        return
    value = _written_value(node, written)
    path = list(views.path(written))
    while path:
        value = _put_back(node, path, value)
    anew = {base: value}
    for view in (base, *views.of(base)):
        if view is not written and not any(node < reader for reader in view.users):
            continue
        for step in views.path(view):
            if step not in anew:
                with node.graph.inserting_before(node):
                    anew[step] = node.graph.node_copy(step, lambda old: anew.get(old, old))
                views.add(anew[step])
        _redirect(node, view, anew[view])
    node.replace_all_uses_with(anew[written])
    node.graph.erase_node(node)


def _redirect(write: fx.Node, old: fx.Node, new: fx.Node) -> None:
    """What comes after ``write`` reads ``new`` in place of ``old``."""
    for reader in list(old.users):
        if write < reader:
            reader.replace_input_with(old, new)


def _check(node: fx.Node, base: fx.Node, bindings: Mapping[fx.Node, ValueId]) -> None:
    if base in bindings:
        value = bindings[base]
        what = "buffer" if value.role is Role.CONSTANT else value.role.value
        raise refuse(
            node,
            f"forward writes to {what} {value.name}",
            "write to a copy (x.clone()), return the new value, or keep running statistics "
            "outside of forward",
        )


# --- the value that a write leaves ---------------------------------------------------------------


def _written_value(node: fx.Node, written: fx.Node) -> fx.Node:
    """The value of ``written`` after the in-place op ``node``, which stays."""
    like = written.meta["val"]
    if node.target is _aten.copy_.default:
        source = node.args[1]
        assert isinstance(source, fx.Node)
        if source.meta["val"].shape != like.shape:
            source = _emit_shaped(node, _aten.expand.default, source, like.shape)
        if source.meta["val"].dtype != like.dtype:
            source = _emit(node, _aten.to.dtype, (source, like.dtype))
        return _emit(node, _aten.clone.default, (source,))
    for source in node.all_input_nodes:
        other = source.meta["val"].dtype
        if torch.promote_types(other, like.dtype) != like.dtype:
            raise refuse(node, "an in-place op rounds its result", "cast before the op")
    return _emit(node, _pure_form(node), node.args, node.kwargs)


def _pure_form(node: fx.Node) -> Any:
    target = node.target
    assert isinstance(target, OpOverload)
    if target in _OTHER_NAMES:
        return _OTHER_NAMES[target]
    name = _schema(target).name.removeprefix("aten::")
    packet = getattr(_aten, name.removesuffix("_"), None)
    overload = getattr(packet, _schema(target).overload_name or "default", None)
    if not name.endswith("_") or overload is None:
        raise refuse(node, f"the in-place op {name} is not supported", "use the pure op")
    return overload


_OTHER_NAMES: dict[Any, Any] = {
    _aten.zero_.default: _aten.zeros_like.default,
    _aten.fill_.Scalar: _aten.full_like.default,
}


# --- views ---------------------------------------------------------------------------------------


def _put_back(node: fx.Node, path: list[fx.Node], value: fx.Node) -> fx.Node:
    """The tensor that the last view of ``path`` is of, after that view got ``value``.

    Takes from ``path`` what it has put back.
    """
    view = path.pop()
    part = 0
    if view.target is operator.getitem:
        index = view.args[1]
        assert isinstance(index, int)
        part, view = index, path.pop()
    source = _source(view)
    shape = source.meta["val"].shape
    if view.target in _RESHAPING:
        return _emit_shaped(node, _aten.reshape.default, value, shape)
    if view.target in _SAME:
        return value
    if view.target in _SWAPPING:
        dims = view.args[1:] or (0, 1)
        return _emit(node, _aten.transpose.int, (value, *dims))
    if view.target is _aten.permute.default:
        order = [dim % len(shape) for dim in argument(view, 1, "dims", ())]
        inverse = [order.index(dim) for dim in range(len(order))]
        return _emit(node, _aten.permute.default, (value, inverse))
    if view.target not in _DIM_POSITION:
        raise _beyond(node)
    dim = argument(view, _DIM_POSITION[view.target], "dim", 0) % len(shape)
    size = shape[dim]
    if isinstance(size, int):
        if view.target in (_aten.select.int, _aten.unbind.int):
            start = argument(view, 2, "index", 0) if view.target is _aten.select.int else part
            value = _emit(node, _aten.unsqueeze.default, (value, dim))
            return _replaced(node, source, value, dim, range(start % size, start % size + 1))
        if view.target is _aten.slice.Tensor:
            bounds = argument(view, 2, "start", None), argument(view, 3, "end", None)
            taken = slice(*bounds, argument(view, 4, "step", 1)).indices(size)
            return _replaced(node, source, value, dim, range(*taken))
        sizes = [item.shape[dim] for item in view.meta["val"]]
        start = sum(sizes[:part])
        return _replaced(node, source, value, dim, range(start, start + sizes[part]))
    raise _beyond(node)


def _beyond(node: fx.Node) -> CaptureError:
    return refuse(
        node,
        "forward writes to a tensor through a view of it",
        "build the result with torch.cat or torch.where",
    )


_RESHAPING = {
    _aten.view.default,
    _aten.reshape.default,
    _aten.reshape_as.default,
    _aten.view_as.default,
    _aten.flatten.using_ints,
    _aten.unflatten.int,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
}
_SAME = {_aten.alias.default, *_MAYBE_VIEWS}
_SWAPPING = {
    _aten.t.default,
    _aten.numpy_T.default,
    _aten.transpose.int,
    _aten.swapaxes.default,
    _aten.swapdims.default,
}
_DIM_POSITION: dict[Any, int] = {
    _aten.slice.Tensor: 1,
    _aten.select.int: 1,
    _aten.unbind.int: 1,
    _aten.split.Tensor: 2,
    _aten.split.sizes: 2,
    _aten.split_with_sizes.default: 2,
    _aten.chunk.default: 2,
}


def _replaced(node: fx.Node, source: fx.Node, value: fx.Node, dim: int, taken: range) -> fx.Node:
    """``source`` with ``value`` at the positions ``taken`` of ``dim``."""
    size = source.meta["val"].shape[dim]
    if taken.step != 1:
        args = (source, value, dim, taken.start, taken.stop, taken.step)
        return _emit(node, _aten.slice_scatter.default, args)
    parts = [value]
    if taken.start > 0:
        parts.insert(0, _emit(node, _aten.slice.Tensor, (source, dim, 0, taken.start)))
    if taken.stop < size:
        parts.append(_emit(node, _aten.slice.Tensor, (source, dim, taken.stop, size)))
    return _emit(node, _aten.cat.default, (parts, dim)) if len(parts) > 1 else value


# --- nodes ---------------------------------------------------------------------------------------


def _emit(
    before: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> fx.Node:
    """A call before ``before``, which comes from where that comes from."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, dict(kwargs or {}))
    node.meta.update({**before.meta, "val": _run(target, args, kwargs or {})})
    return node


def _emit_shaped(before: fx.Node, target: Any, source: fx.Node, shape: Sequence[Any]) -> fx.Node:
    """A reshape or an expansion to ``shape``, which ``val`` says; the arguments may not."""
    written = [size if isinstance(size, int) else -1 for size in shape]
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, (source, written))
    node.meta.update({**before.meta, "val": _run(target, (source, list(shape)), {})})
    return node


def _run(target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The result on the meta device, without values."""

    def value(item: Any) -> Any:
        return item.meta["val"] if isinstance(item, fx.Node) else item

    args, kwargs = pytree.tree_map(value, (args, kwargs))
    with torch.no_grad():
        found: Tensor = target(*args, **kwargs)
    return found
