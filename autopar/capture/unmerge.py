"""Tokens keep their dims: what is computed on ``[b·s, h]`` is computed on ``[b, s, h]``.

A model that merges batch and sequence, or batch and heads, into one dim leaves ranks no way to
shard the second of them. So a merging reshape moves down behind every op that treats all positions
of the merged dim alike, until it meets the reshape that undoes it, or an op that mixes positions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from autopar.capture.clean import tidy_reshapes
from autopar.capture.flat import FlatGraph, argument, emit
from autopar.ir.graph import NodeInfo, Size, info, set_info

_aten = torch.ops.aten


def unmerge(flat: FlatGraph) -> None:
    """Move the reshapes of a cleaned ``flat`` that merge the batch with other dims behind their
    readers.
    """
    wide: dict[fx.Node, _Wide] = {}
    for node in flat.calls():
        if node.target is _aten.reshape.default:
            found = _kept(node, wide) or _merging(node, wide)
            if found is not None:
                wide[node] = found
            continue
        if node.target is operator.getitem or not any(s in wide for s in node.all_input_nodes):
            continue
        moved = _move(node, wide)
        if moved is not None:
            _replace(node, moved, wide)
    tidy_reshapes(flat)


@dataclass(frozen=True, slots=True)
class _Wide:
    """A value before its merge: dim ``dim`` of the merged value holds ``rank`` dims of ``node``."""

    node: fx.Node
    dim: int
    rank: int

    @property
    def lead(self) -> tuple[Size, ...]:
        """The sizes that were merged."""
        return info(self.node).tensor.shape[self.dim : self.dim + self.rank]


@dataclass(frozen=True, slots=True)
class _Moved:
    """A call on unmerged operands, and the place of the merged dim in each of its results, None
    where it is gone.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dims: tuple[int | None, ...]
    lead: tuple[Size, ...]


def _shape(node: fx.Node) -> tuple[Size, ...]:
    return info(node).tensor.shape


def _merging(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Wide | None:
    """What ``node`` merges into one dim that holds the batch; the dims before it stay."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    source = wide[source].node if source in wide else source
    before, after = _shape(source), _shape(node)
    kept = 0
    while kept < min(len(before), len(after)) and before[kept] == after[kept]:
        kept += 1
    if kept == min(len(before), len(after)) or isinstance(after[kept], int):
        return None
    lead = _merged(before[kept:], after[kept])
    if len(lead) < 2:
        return None
    shape = (*after[:kept], *lead, *after[kept + 1 :])
    return _Wide(source if shape == before else _reshape(node, source, shape), kept, len(lead))


def _merged(sizes: Sequence[Size], product: Size) -> tuple[Size, ...]:
    """The first of ``sizes``, or of them and a divisor of the next, that multiply to ``product``;
    nothing if there are none.
    """
    found: Any = 1
    for count, size in enumerate(sizes):
        rest = sympy.sympify(product / found)
        if rest.is_Integer and isinstance(size, int) and size % int(rest) == 0 and count:
            return (*sizes[:count], int(rest))
        found = sympy.sympify(found * size)
        if found == product:
            return tuple(sizes[: count + 1])
    return ()


def _kept(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Wide | None:
    """``node`` unmerged, if it reshapes a merged value on one side of the merged dim only."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source not in wide:
        return None
    found, before, after = wide[source], _shape(source), _shape(node)
    for dim in (found.dim, len(after) - len(before) + found.dim):
        left = before[: found.dim + 1] == after[: dim + 1]
        right = before[found.dim :] == after[max(dim, 0) :]
        if dim >= 0 and (left or right):
            shape = (*after[:dim], *found.lead, *after[dim + 1 :])
            return _Wide(_reshape(node, found.node, shape), dim, found.rank)
    return None


def _reshape(before: fx.Node, source: fx.Node, shape: Sequence[Size]) -> fx.Node:
    facts = info(source).tensor
    return emit(
        before.graph,
        before,
        _aten.reshape.default,
        (source, [size if isinstance(size, int) else -1 for size in shape]),
        shape=shape,
        dtype=facts.dtype,
        requires_grad=facts.requires_grad,
    )


def _replace(node: fx.Node, moved: _Moved, wide: dict[fx.Node, _Wide]) -> None:
    """Compute ``moved`` and merge its results where ``node`` was."""
    facts = info(node)
    call = emit(node.graph, node, moved.target, moved.args, moved.kwargs)
    shapes = [
        tensor.shape
        if dim is None
        else (*tensor.shape[:dim], *moved.lead, *tensor.shape[dim + 1 :])
        for tensor, dim in zip(facts.tensors, moved.dims, strict=True)
    ]
    tensors = tuple(
        with_fields(tensor, shape=shape)
        for tensor, shape in zip(facts.tensors, shapes, strict=True)
    )
    set_info(call, with_fields(facts, tensors=tensors))
    readers: list[tuple[fx.Node, fx.Node, int]] = [(node, call, 0)]
    if facts.is_tuple:
        readers = []
        for user in list(node.users):
            at = user.args[1]
            assert isinstance(at, int)
            part = emit(node.graph, user, operator.getitem, (call, at))
            set_info(
                part, NodeInfo(tensors=(tensors[at],), module=facts.module, source=facts.source)
            )
            readers.append((user, part, at))
    for old, new, at in readers:
        dim = moved.dims[at]
        if dim is None:
            old.replace_all_uses_with(new)
            continue
        old.target = _aten.reshape.default
        sentinels = [size if isinstance(size, int) else -1 for size in _shape(old)]
        old.args, old.kwargs = (new, sentinels), {}
        wide[old] = _Wide(new, dim, len(moved.lead))


# --- calls on unmerged operands ------------------------------------------------------------------


def _move(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    """The call that does what ``node`` does before its operands are merged; None if there is
    none.
    """
    if node.target in _MOVES:
        return _MOVES[node.target](node, wide)
    if isinstance(node.target, OpOverload) and (
        torch.Tag.pointwise in node.target.tags or node.target in _ALSO_POINTWISE
    ):
        return _pointwise(node, wide)
    return None


_ALSO_POINTWISE = {
    _aten.to.dtype,
    _aten.dropout.default,
    _aten.detach.default,
    _aten.where.self,
    _aten.where.ScalarSelf,
    _aten.where.ScalarOther,
    _aten.masked_fill.Scalar,
    _aten.masked_fill.Tensor,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.bernoulli.default,
    _aten.floor_divide.default,
    _aten.__and__.Tensor,
    _aten.__or__.Tensor,
}


def _pointwise(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    """Operands are aligned at their last dims."""
    if info(node).is_tuple:
        return None
    merged = [wide[source] for source in node.all_input_nodes if source in wide]
    places = {_from_end(source, wide) for source in node.all_input_nodes if source in wide}
    if len(places) != 1 or any(other.lead != merged[0].lead for other in merged):
        return None
    (place,) = places
    widened: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        if source in wide:
            widened[source] = wide[source].node
            continue
        shape = _shape(source)
        dim = len(shape) - place
        if dim < 0:
            widened[source] = source
        elif shape[dim] == 1:
            ones = (1,) * merged[0].rank
            widened[source] = _reshape(node, source, (*shape[:dim], *ones, *shape[dim + 1 :]))
        else:
            return None
    args = fx.map_arg(node.args, widened.__getitem__)
    kwargs = fx.map_arg(node.kwargs, widened.__getitem__)
    return _Moved(node.target, args, kwargs, (len(_shape(node)) - place,), merged[0].lead)


def _from_end(node: fx.Node, wide: dict[fx.Node, _Wide]) -> int:
    return len(_shape(node)) - wide[node].dim


def _first(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Wide | None:
    """The first operand, if it is merged and the only one that is."""
    source = node.args[0]
    alone = sum(operand in wide for operand in node.all_input_nodes) == 1
    return wide[source] if isinstance(source, fx.Node) and source in wide and alone else None


def _last_dims(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    """Works on last dims, which the other operands have: norms, linear."""
    found = _first(node, wide)
    if found is None or info(node).is_tuple or found.dim >= len(_shape(node)):
        return None
    normalized = node.args[1]
    count = len(normalized) if isinstance(normalized, list | tuple) else 1
    rank = len(_shape(node.args[0]))  # type: ignore[arg-type]
    if found.dim >= rank - count:
        return None
    return _Moved(
        node.target, (found.node, *node.args[1:]), dict(node.kwargs), (found.dim,), found.lead
    )


def _shifted(found: _Wide, dim: int, rank: int) -> int | None:
    """Where dim ``dim`` of the merged value (of ``rank`` dims) is in the unmerged one; None for the
    merged dim.
    """
    dim %= rank
    if dim == found.dim:
        return None
    return dim if dim < found.dim else dim + found.rank - 1


def _along(position: int, default: int | None = None) -> Callable[..., _Moved | None]:
    """Works along one dim that is not the merged one, and keeps the number of dims."""

    def move(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
        found = _first(node, wide)
        given = argument(node, position, "dim", default)
        if found is None or not isinstance(given, int):
            return None
        dim = _shifted(found, given, len(_shape(node.args[0])))  # type: ignore[arg-type]
        if dim is None:
            return None
        args, kwargs = _with_argument(node, position, "dim", dim)
        places = (found.dim,) * len(info(node).tensors)
        return _Moved(node.target, (found.node, *args[1:]), kwargs, places, found.lead)

    return move


def _removing(position: int, default: int | None = None) -> Callable[..., _Moved | None]:
    """Works along one dim that is not the merged one, and takes that dim away."""

    def move(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
        source = node.args[0]
        moved = _along(position, default)(node, wide)
        if moved is None:
            return None
        assert isinstance(source, fx.Node)
        rank = len(_shape(source))
        kept = len(info(node).tensors[0].shape) == rank
        dim = argument(node, position, "dim", default) % rank
        place = moved.dims[0]
        assert place is not None
        if not kept and dim < place:
            place -= 1
        return with_fields(moved, dims=(place,) * len(moved.dims))

    return move


def _with_argument(
    node: fx.Node, position: int, name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = list(node.args), dict(node.kwargs)
    if position < len(args):
        args[position] = value
    else:
        kwargs[name] = value
    return tuple(args), kwargs


def _reduction(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    """Sums and means over any dims, the merged one included."""
    found = _first(node, wide)
    if found is None or info(node).is_tuple:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target in (_aten.sum.default, _aten.mean.default):
        args = (found.node, *node.args[1:])
        return _Moved(node.target, args, dict(node.kwargs), (None,), found.lead)
    given = argument(node, 1, "dim", None)
    rank = len(_shape(source))
    given = [given] if isinstance(given, int) else given
    dims = sorted(dim % rank for dim in given) if given else list(range(rank))
    keeps = len(_shape(node)) == rank
    whole = found.dim in dims
    if whole and keeps:
        return None
    shifted: list[int] = []
    for dim in dims:
        place = _shifted(found, dim, rank)
        shifted += range(found.dim, found.dim + found.rank) if place is None else [place]
    args, kwargs = _with_argument(node, 1, "dim", shifted)
    place = found.dim if keeps else found.dim - sum(dim < found.dim for dim in dims)
    return _Moved(
        node.target, (found.node, *args[1:]), kwargs, (None if whole else place,), found.lead
    )


def _unsqueeze(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    found = _first(node, wide)
    if found is None:
        return None
    dim = argument(node, 1, "dim", 0) % len(_shape(node))
    place = found.dim + (dim <= found.dim)
    at = dim if dim <= found.dim else dim + found.rank - 1
    return _Moved(_aten.unsqueeze.default, (found.node, at), {}, (place,), found.lead)


def _transpose(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    found = _first(node, wide)
    if found is None:
        return None
    rank = len(_shape(node))
    order = list(range(rank))
    if node.target is _aten.permute.default:
        order = [dim % rank for dim in argument(node, 1, "dims", ())]
    else:
        first, second = (int(dim) % rank for dim in node.args[1:3])  # type: ignore[arg-type]
        order[first], order[second] = order[second], order[first]
    permuted: list[int] = []
    for dim in order:
        place = _shifted(found, dim, rank)
        permuted += range(found.dim, found.dim + found.rank) if place is None else [place]
    place = order.index(found.dim)
    return _Moved(_aten.permute.default, (found.node, permuted), {}, (place,), found.lead)


def _expand(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    found = _first(node, wide)
    if found is None:
        return None
    shape = _shape(node)
    place = len(shape) - _from_end(node.args[0], wide)  # type: ignore[arg-type]
    sizes = (*shape[:place], *found.lead, *shape[place + 1 :])
    sentinels = [size if isinstance(size, int) else -1 for size in sizes]
    return _Moved(node.target, (found.node, sentinels), {}, (place,), found.lead)


def _bmm(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    """Matrix products for each position of the merged dim, in both operands the first."""
    operands = [wide.get(source) for source in node.args[:2]]  # type: ignore[arg-type]
    left, right = operands
    if left is None or right is None or left.dim or right.dim or left.lead != right.lead:
        return None
    if any(len(_shape(source)) != 3 for source in node.args[:2]):  # type: ignore[arg-type]
        return None
    return _Moved(_aten.matmul.default, (left.node, right.node), {}, (0,), left.lead)


def _embedding(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    ids = node.args[1]
    found = wide.get(ids) if isinstance(ids, fx.Node) else None
    if found is None or node.args[0] in wide:
        return None
    args = (node.args[0], found.node, *node.args[2:])
    return _Moved(node.target, args, dict(node.kwargs), (found.dim,), found.lead)


def _gather(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    """Takes or puts along a dim that is not the merged one, which all tensors have."""
    sources = node.all_input_nodes
    found = [wide.get(source) for source in sources]
    first = found[0]
    dim = argument(node, 1, "dim", None)
    if first is None or not isinstance(dim, int):
        return None
    same = all(f is not None and (f.dim, f.lead) == (first.dim, first.lead) for f in found)
    at = _shifted(first, dim, len(_shape(sources[0])))
    if not same or at is None:
        return None
    args, kwargs = _with_argument(node, 1, "dim", at)
    args = fx.map_arg(args, lambda source: wide[source].node)
    kwargs = fx.map_arg(kwargs, lambda source: wide[source].node)
    return _Moved(node.target, args, kwargs, (first.dim,), first.lead)


def _concatenation(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    """Tensors that are all merged alike, next to one another along another dim."""
    sources = node.args[0]
    assert isinstance(sources, list | tuple)
    found = [wide.get(source) for source in sources]  # type: ignore[arg-type]
    first = found[0]
    if first is None:
        return None
    same = all(f is not None and (f.dim, f.lead) == (first.dim, first.lead) for f in found)
    at = _shifted(first, argument(node, 1, "dim", 0), len(_shape(node)))
    if not same or at is None:
        return None
    return _Moved(node.target, ([f.node for f in found if f], at), {}, (first.dim,), first.lead)


def _experts(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    tokens = [wide.get(source) for source in node.args[:3]]  # type: ignore[arg-type]
    first = tokens[0]
    if first is None or any(t is None or t.dim or t.lead != first.lead for t in tokens):
        return None
    args = (*(t.node for t in tokens if t is not None), *node.args[3:])
    return _Moved(node.target, args, dict(node.kwargs), (0,), first.lead)


def _one_hot(node: fx.Node, wide: dict[fx.Node, _Wide]) -> _Moved | None:
    found = _first(node, wide)
    if found is None:
        return None
    args = (found.node, *node.args[1:])
    return _Moved(node.target, args, dict(node.kwargs), (found.dim,), found.lead)


_MOVES: dict[Any, Callable[[fx.Node, dict[fx.Node, _Wide]], _Moved | None]] = {
    _aten.linear.default: _last_dims,
    _aten.layer_norm.default: _last_dims,
    _aten.rms_norm.default: _last_dims,
    _aten.softmax.int: _along(1),
    _aten._softmax.default: _along(1),
    _aten.log_softmax.int: _along(1),
    _aten._log_softmax.default: _along(1),
    _aten.cumsum.default: _along(1),
    _aten.topk.default: _along(2, -1),
    _aten.sort.default: _along(1, -1),
    _aten.argsort.default: _along(1, -1),
    _aten.slice.Tensor: _along(1, 0),
    _aten.split_with_sizes.default: _along(2, 0),
    _aten.index_select.default: _along(1),
    _aten.select.int: _removing(1),
    _aten.squeeze.dim: _removing(1),
    _aten.argmax.default: _removing(1),
    _aten.argmin.default: _removing(1),
    _aten.max.dim: _removing(1),
    _aten.min.dim: _removing(1),
    _aten.any.dim: _removing(1),
    _aten.all.dim: _removing(1),
    _aten.unbind.int: _removing(1, 0),
    _aten.sum.default: _reduction,
    _aten.sum.dim_IntList: _reduction,
    _aten.mean.default: _reduction,
    _aten.mean.dim: _reduction,
    _aten.amax.default: _reduction,
    _aten.amin.default: _reduction,
    _aten.logsumexp.default: _reduction,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.transpose.int: _transpose,
    _aten.permute.default: _transpose,
    _aten.expand.default: _expand,
    _aten.bmm.default: _bmm,
    _aten.embedding.default: _embedding,
    _aten.gather.default: _gather,
    _aten.scatter.value: _gather,
    _aten.scatter.src: _gather,
    _aten.scatter_add.default: _gather,
    _aten.cat.default: _concatenation,
    _aten.one_hot.default: _one_hot,
    torch.ops.autopar.routed_experts.default: _experts,
}
