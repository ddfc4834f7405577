"""Clean-ups: one spelling for each operation, and none that does nothing.

After ``clean``: no aliases, same-type casts or inactive dropout; shapes change by ``reshape`` and
``expand`` only, whose arguments hold -1 where the batch is; matrices multiply in ``linear`` with
their leading dims kept; results are split by ``split_with_sizes``; no size is read from a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace as with_fields
from typing import Any

import sympy
import torch
from torch import fx

from autopar.capture.batch_size import count_sequences
from autopar.capture.failures import data_dependent
from autopar.capture.flat import (
    FlatGraph,
    argument,
    emit,
    refuse,
    remove_dead_code,
    replace,
)
from autopar.capture.promote import cast_integers
from autopar.ir.graph import NodeInfo, Role, Size, TensorInfo, info, set_info
from autopar.ir.rules.random import has_logical_form, is_random
from autopar.ir.shapes import with_shape, writes_shape

_aten = torch.ops.aten


def clean(flat: FlatGraph) -> None:
    """Bring the exported graph into the form above, and mark what gradients flow through.

    Raises:
        CaptureError: The model computes with its batch size, or draws random numbers for all
            sequences together.
    """
    for node in flat.calls():
        if node.target in _CHECKS:
            flat.graph.erase_node(node)
            continue
        if not _has_info(node):
            continue
        _mark_gradient(node)
        _drop_device(node)
        cast_integers(node)
        if is_random(node) and not has_logical_form(node):
            raise refuse(
                node,
                "the model draws random numbers in a way that ranks cannot agree on",
                "draw them like a tensor of the batch: torch.rand_like(x), or use nn.Dropout",
            )
        if node.target in _REWRITES:
            _REWRITES[node.target](node)
        elif writes_shape(node.target):
            _write_shape(node)
    count_sequences(flat)
    tidy_reshapes(flat)
    for node in flat.calls():
        if not _has_info(node):
            if node.target in (_aten.item.default, _aten._local_scalar_dense.default):
                raise data_dependent(refuse(node, "", "").where)
            reader = node
            while not _has_info(reader) and reader.users:
                reader = next(iter(reader.users))
            raise refuse(
                reader,
                "the model computes with its batch size in a way that ranks cannot",
                "take means with .mean(), or divide by the size itself or by a fixed number",
            )


def tidy_reshapes(flat: FlatGraph) -> None:
    """Of reshapes one after another one is left, or none; then dead code is removed."""
    for node in flat.calls():
        if node.target is _aten.reshape.default and _has_info(node):
            _to_reshape(node)
    for node in flat.calls():
        if node.target is _aten.reshape.default:
            _merge_reshapes(node)
    remove_dead_code(flat)


def _has_info(node: fx.Node) -> bool:
    return "autopar" in node.meta


# --- facts ---------------------------------------------------------------------------------------

_NO_GRADIENT = {
    _aten.detach.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
}


def freeze_unreached(flat: FlatGraph) -> None:
    """Parameters that no gradient of the loss reaches (what follows them is detached) are not
    trained: an optimizer leaves them as they are, without weight decay.
    """
    reached: set[fx.Node] = set()
    pending = [flat.results[0]]
    while pending:
        node = pending.pop()
        if node in reached or not any(tensor.requires_grad for tensor in info(node).tensors):
            continue
        reached.add(node)
        if node.target not in _NO_GRADIENT:
            pending += node.all_input_nodes
    frozen = {
        value.name: node
        for node, value in flat.bindings.items()
        if value.role is Role.PARAMETER and node not in reached
    }
    flat.parameters = {
        name: with_fields(parameter, requires_grad=False) if name in frozen else parameter
        for name, parameter in flat.parameters.items()
    }
    for node in frozen.values():
        set_info(node, NodeInfo(tensors=(with_fields(_tensor(node), requires_grad=False),)))
    for node in flat.calls():
        _mark_gradient(node)


def _mark_gradient(node: fx.Node) -> None:
    """A result requires a gradient if it is no integer and computed from something that does."""
    flows = node.target not in _NO_GRADIENT and any(
        tensor.requires_grad
        for source in node.all_input_nodes
        if _has_info(source)
        for tensor in info(source).tensors
    )
    facts = info(node)
    if flows or any(tensor.requires_grad for tensor in facts.tensors):
        tensors = tuple(
            with_fields(tensor, requires_grad=flows and _differentiable(tensor.dtype))
            for tensor in facts.tensors
        )
        set_info(node, with_fields(facts, tensors=tensors))


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _tensor(node: fx.Node) -> TensorInfo:
    return info(node).tensor


def _shape(node: fx.Node) -> tuple[Size, ...]:
    return info(node).tensor.shape


def _arg(node: fx.Node, position: int, name: str) -> fx.Node:
    found = argument(node, position, name, None)
    assert isinstance(found, fx.Node)
    return found


def _same(node: fx.Node, other: fx.Node) -> bool:
    return _shape(node) == _shape(other) and _tensor(node).dtype == _tensor(other).dtype


# --- what does nothing ---------------------------------------------------------------------------

_CHECKS = {
    _aten._assert_tensor_metadata.default,
    _aten._assert_scalar.default,
    _aten._assert_async.msg,
    _aten.sym_constrain_range.default,
    _aten.sym_constrain_range_for_size.default,
}


def _drop(node: fx.Node) -> None:
    replace(node, _arg(node, 0, "self"))


def _drop_detach(node: fx.Node) -> None:
    if not _tensor(_arg(node, 0, "self")).requires_grad:
        _drop(node)


def _drop_dropout(node: fx.Node) -> None:
    if argument(node, 1, "p", 0.5) == 0 or not argument(node, 2, "train", True):
        _drop(node)


def _from_nothing(node: fx.Node) -> None:
    """``x.new_zeros(size)`` takes nothing from ``x`` but its dtype, which the call then names."""
    shape, dtype = _shape(node), _tensor(node).dtype
    fill = _NEW[node.target] if node.target in _NEW else argument(node, 2, "fill_value", 0)
    node.target = _aten.full.default
    node.args, node.kwargs = (_sentinels(shape), fill), {"dtype": dtype}


_NEW: dict[Any, int] = {_aten.new_zeros.default: 0, _aten.new_ones.default: 1}


def _drop_empty(node: fx.Node) -> None:
    """A ``cat`` of what has entries; of a single one, nothing to do."""
    node.target = _aten.cat.default
    given = node.args[0]
    assert isinstance(given, list | tuple)
    tensors = [tensor for tensor in given if isinstance(tensor, fx.Node)]
    kept = [tensor for tensor in tensors if 0 not in _shape(tensor)]
    if len(kept) == 1 and _same(node, kept[0]):
        replace(node, kept[0])
    elif 0 < len(kept) < len(tensors):
        node.args = (kept, *node.args[1:])


def _normalize_slice(node: fx.Node) -> None:
    """A slice has dim, start, end and step, with 0 ≤ dim and 0 ≤ start ≤ end ≤ size; a whole one
    is dropped.
    """
    source = _arg(node, 0, "self")
    step = argument(node, 4, "step", 1)
    if _same(node, source) and step == 1:
        _drop(node)
        return
    dim = argument(node, 1, "dim", 0) % len(_shape(source))
    size = _shape(source)[dim]
    bounds = argument(node, 2, "start", None), argument(node, 3, "end", None)
    if isinstance(size, int) and all(bound is None or isinstance(bound, int) for bound in bounds):
        start, end, _ = slice(*bounds).indices(size)
        node.args, node.kwargs = (source, dim, start, end, step), {}


def _drop_device(node: fx.Node) -> None:
    """No op names a device: tensors are made on the default one."""
    dropped = {"device", "pin_memory", "layout", "memory_format", "non_blocking", "copy"}
    kwargs = {key: value for key, value in node.kwargs.items() if key not in dropped}
    creates = not any(_has_info(source) for source in node.all_input_nodes)
    if creates and node.target is not operator.getitem:
        kwargs["dtype"] = _tensor(node).dtype
    if kwargs != node.kwargs:
        node.kwargs = kwargs


def _count_bins(node: fx.Node) -> None:
    """``histc`` of integers, a bin for each, counts which are equal to what: by dims that can be
    sharded, and on devices whose ``histc`` takes no integers.
    """
    source = _arg(node, 0, "self")
    values = _arg(source, 0, "self") if source.target is _aten.to.dtype else source
    bins = argument(node, 1, "bins", 100)
    low, high = argument(node, 2, "min", 0), argument(node, 3, "max", 0)
    if _tensor(values).dtype.is_floating_point or low != 0 or high not in (bins - 1, bins):
        return
    dtype, shape = torch.int64, (*_shape(values), 1)
    facts = _tensor(values)
    apart = emit(
        node.graph, node, _aten.unsqueeze.default, (values, -1), shape=shape, dtype=facts.dtype
    )
    every = emit(
        node.graph,
        node,
        _aten.arange.default,
        (bins,),
        {"dtype": dtype},
        shape=(bins,),
        dtype=dtype,
    )
    shape = (*_shape(values), bins)
    equal = emit(node.graph, node, _aten.eq.Tensor, (apart, every), shape=shape, dtype=torch.bool)
    node.target = _aten.sum.dim_IntList
    node.args = (equal, list(range(len(shape) - 1)))
    node.kwargs = {"dtype": _tensor(node).dtype}


def _normalize_cast(node: fx.Node) -> None:
    source = _arg(node, 0, "self")
    dtype = _tensor(node).dtype
    if _tensor(source).dtype == dtype:
        _drop(node)
        return
    node.target = _aten.to.dtype
    node.args, node.kwargs = (source, dtype), {}


# --- shapes --------------------------------------------------------------------------------------


def _sentinels(shape: tuple[Size, ...]) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in shape]


def _write_shape(node: fx.Node) -> None:
    node.args, node.kwargs = with_shape(
        node.target, node.args, dict(node.kwargs), _sentinels(_shape(node))
    )


def _to_reshape(node: fx.Node) -> None:
    """A reshape; none if it comes back to a shape that the tensor had before."""
    source = before = _arg(node, 0, "self")
    while _shape(before) != _shape(node):
        if before.target is not _aten.reshape.default:
            node.target = _aten.reshape.default
            node.args, node.kwargs = (source, _sentinels(_shape(node))), {}
            return
        before = _arg(before, 0, "self")
    replace(node, before)


def _merge_reshapes(node: fx.Node) -> None:
    source = _arg(node, 0, "self")
    while source.target is _aten.reshape.default:
        source = _arg(source, 0, "self")
    node.replace_input_with(_arg(node, 0, "self"), source)


def _to_expand(node: fx.Node) -> None:
    source = _arg(node, 0, "self")
    if _shape(source) == _shape(node):
        _drop(node)
        return
    node.target = _aten.expand.default
    node.args, node.kwargs = (source, _sentinels(_shape(node))), {}


def _repeat_to_expand(node: fx.Node) -> None:
    """``repeat`` is an ``expand``, of new dims where it repeats whole dims one after another."""
    source = _arg(node, 0, "self")
    shape = _shape(node)
    padded = (1,) * (len(shape) - len(_shape(source))) + _shape(source)
    if all(old in (1, new) for old, new in zip(padded, shape, strict=True)):
        _to_expand(node)
        return
    spread: list[Size] = []
    copied: list[Size] = []
    for old, new in zip(padded, shape, strict=True):
        if old not in (1, new):
            spread.append(1)
            copied.append(new // old if isinstance(new, int) else sympy.sympify(new / old))
        spread.append(old)
        copied.append(new if old == 1 else old)
    facts = _tensor(node)
    args = (source, _sentinels(tuple(spread)))
    apart = emit(node.graph, node, _aten.reshape.default, args, shape=spread, dtype=facts.dtype)
    args = (apart, _sentinels(tuple(copied)))
    stretched = emit(node.graph, node, _aten.expand.default, args, shape=copied)
    node.target = _aten.reshape.default
    node.args, node.kwargs = (stretched, _sentinels(shape)), {}


def _to_transpose(node: fx.Node) -> None:
    """Transposes with dims ≥ 0, the smaller first; two that undo each other are dropped."""
    source = _arg(node, 0, "self")
    rank = len(_shape(source))
    if node.target in (_aten.t.default, _aten.numpy_T.default) and rank != 2:
        if rank < 2:
            _drop(node)
        return
    default = (rank - 2, rank - 1)
    dims = [argument(node, index + 1, f"dim{index}", default[index]) for index in range(2)]
    first, second = sorted(dim % rank for dim in dims)
    if first == second:
        _drop(node)
    elif source.target is _aten.transpose.int and source.args[1:] == (first, second):
        replace(node, _arg(source, 0, "self"))
    else:
        node.target = _aten.transpose.int
        node.args, node.kwargs = (source, first, second), {}


def _to_split_with_sizes(node: fx.Node) -> None:
    source = _arg(node, 0, "self")
    dim = argument(node, 2, "dim", 0) % len(_shape(source))
    sizes = [tensor.shape[dim] for tensor in info(node).tensors]
    if not all(isinstance(size, int) for size in sizes):
        raise refuse(node, "the model splits the batch", "process the batch as a whole")
    node.target = _aten.split_with_sizes.default
    node.args, node.kwargs = (source, sizes, dim), {}


# --- linear --------------------------------------------------------------------------------------


def _addmm_to_linear(node: fx.Node) -> None:
    bias, source, matrix = node.args[:3]
    scaled = any(node.kwargs.get(key, 1) != 1 for key in ("alpha", "beta"))
    assert isinstance(bias, fx.Node)
    assert isinstance(source, fx.Node)
    assert isinstance(matrix, fx.Node)
    if not scaled and _shape(bias) == _shape(matrix)[1:]:
        _multiply(node, source, _transposed(node, matrix), bias)


def _matmul_to_linear(node: fx.Node) -> None:
    source, matrix = _arg(node, 0, "self"), node.args[1]
    assert isinstance(matrix, fx.Node)
    if len(_shape(matrix)) == 2 and len(_shape(source)) >= 2:
        _multiply(node, source, _transposed(node, matrix), None)


def _baddbmm_to_bmm(node: fx.Node) -> None:
    """``beta · a + alpha · b @ c`` as two products and a sum."""
    added, left, right = node.args[:3]
    product: Any = emit(node.graph, node, _aten.bmm.default, (left, right))
    terms: list[Any] = []
    for term, factor in ((added, "beta"), (product, "alpha")):
        scale = node.kwargs.get(factor, 1)
        assert isinstance(term, fx.Node)
        if scale != 1:
            facts = _tensor(term)
            term = emit(
                node.graph,
                node,
                _aten.mul.Tensor,
                (term, scale),
                shape=facts.shape,
                dtype=facts.dtype,
                requires_grad=facts.requires_grad,
            )
        terms.append(term)
    node.target = _aten.add.Tensor
    node.args, node.kwargs = tuple(terms), {}


def _unflatten_linear(node: fx.Node) -> None:
    source, weight = node.args[:2]
    assert isinstance(source, fx.Node)
    assert isinstance(weight, fx.Node)
    if source.target is _aten.reshape.default:
        _multiply(node, source, weight, argument(node, 2, "bias", None))


def _transposed(node: fx.Node, matrix: fx.Node) -> fx.Node:
    if matrix.target is _aten.transpose.int:
        return _arg(matrix, 0, "self")
    rows, columns = _shape(matrix)
    facts = _tensor(matrix)
    return emit(
        node.graph,
        node,
        _aten.transpose.int,
        (matrix, 0, 1),
        shape=(columns, rows),
        dtype=facts.dtype,
        requires_grad=facts.requires_grad,
    )


def _multiply(node: fx.Node, source: fx.Node, weight: fx.Node, bias: fx.Node | None) -> None:
    """``node`` becomes a linear, on the tensor before its leading dims were flattened."""
    operands = (weight,) if bias is None else (weight, bias)
    features = _shape(node)[-1]
    while source.target is _aten.reshape.default:
        before = _arg(source, 0, "self")
        if not _shape(before) or _shape(before)[-1] != _shape(source)[-1]:
            break
        source = before
    shape = (*_shape(source)[:-1], features)
    if shape == _shape(node):
        node.target = _aten.linear.default
        node.args, node.kwargs = (source, *operands), {}
        return
    product = emit(node.graph, node, _aten.linear.default, (source, *operands), shape=shape)
    node.target = _aten.reshape.default
    node.args, node.kwargs = (product, _sentinels(_shape(node))), {}


_REWRITES: dict[Any, Callable[[fx.Node], None]] = {
    _aten.alias.default: _drop,
    _aten.contiguous.default: _drop,
    _aten.clone.default: _drop,
    _aten.lift_fresh_copy.default: _drop,
    _aten.detach.default: _drop_detach,
    _aten.detach_.default: _drop_detach,
    _aten.dropout.default: _drop_dropout,
    _aten.feature_dropout.default: _drop_dropout,
    _aten.cat.default: _drop_empty,
    _aten.concat.default: _drop_empty,
    _aten.concatenate.default: _drop_empty,
    _aten.new_zeros.default: _from_nothing,
    _aten.new_ones.default: _from_nothing,
    _aten.new_full.default: _from_nothing,
    _aten.slice.Tensor: _normalize_slice,
    _aten.histc.default: _count_bins,
    _aten.to.dtype: _normalize_cast,
    _aten.to.dtype_layout: _normalize_cast,
    _aten.to.device: _normalize_cast,
    _aten.to.other: _normalize_cast,
    _aten.type_as.default: _normalize_cast,
    _aten._to_copy.default: _normalize_cast,
    _aten.reshape.default: _to_reshape,
    _aten.view.default: _to_reshape,
    _aten._unsafe_view.default: _to_reshape,
    _aten.flatten.using_ints: _to_reshape,
    _aten.unflatten.int: _to_reshape,
    _aten.view_as.default: _to_reshape,
    _aten.reshape_as.default: _to_reshape,
    _aten.expand.default: _to_expand,
    _aten.expand_as.default: _to_expand,
    _aten.broadcast_to.default: _to_expand,
    _aten.repeat.default: _repeat_to_expand,
    _aten.t.default: _to_transpose,
    _aten.numpy_T.default: _to_transpose,
    _aten.mT.default: _to_transpose,
    _aten.transpose.int: _to_transpose,
    _aten.swapaxes.default: _to_transpose,
    _aten.swapdims.default: _to_transpose,
    _aten.chunk.default: _to_split_with_sizes,
    _aten.split.Tensor: _to_split_with_sizes,
    _aten.split.sizes: _to_split_with_sizes,
    _aten.split_with_sizes.default: _to_split_with_sizes,
    _aten.addmm.default: _addmm_to_linear,
    _aten.baddbmm.default: _baddbmm_to_bmm,
    _aten.mm.default: _matmul_to_linear,
    _aten.matmul.default: _matmul_to_linear,
    _aten.linear.default: _unflatten_linear,
}
