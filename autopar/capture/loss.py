"""Loss normalization: a mean cross-entropy becomes a sum over tokens and their number.

Only then do all layouts agree on the loss: the mean of a micro-batch is not the mean of the batch
when the numbers of valid tokens differ. The final loss may be the mean times or divided by
constants.
"""

from __future__ import annotations

import operator
from dataclasses import replace as with_fields
from typing import Any

import torch
from torch import fx

from autopar.capture.flat import FlatGraph, argument, emit, remove_dead_code
from autopar.ir.functional import sum_dtype, token_loss
from autopar.ir.graph import LossKind, NodeInfo, Size, TensorInfo, info, set_info

_aten = torch.ops.aten
_MEAN = 1


def normalize_loss(flat: FlatGraph) -> LossKind:
    """Let the graph return (Σ loss, number of valid tokens) if its loss is a mean cross-entropy.

    Class weights count as numbers of tokens. Any other scalar, cross-entropy with
    ``reduction="sum"`` included, is left as it is: the loss of a micro-batch.
    """
    (loss,) = flat.results
    factors, core = _linear_part(loss)
    found = _token_loss(core)
    if found is None:
        return LossKind.MICRO_BATCH_MEAN
    total, count = found
    for factor in reversed(factors):
        dtype = info(total).tensor.dtype
        if factor.target is _aten.to.dtype:
            cast = info(factor).tensor.dtype
            if dtype == cast or torch.promote_types(dtype, cast) != cast:
                continue  # sums stay as wide as they are
            dtype = cast
        total = emit(flat.graph, loss, factor.target, (total, *factor.args[1:]), dtype=dtype)
    flat.graph.output_node().args = ((total, count),)
    remove_dead_code(flat)
    return LossKind.TOKEN_SUM


_SCALING = {_aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar, _aten.div.Scalar}


def _linear_part(loss: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The scalings between the loss and what it is a multiple of, outermost first, and the
    latter.
    """
    scalings: list[fx.Node] = []
    while True:
        if loss.target in (_aten.neg.default, _aten.to.dtype) or (
            loss.target in _SCALING and isinstance(loss.args[1], int | float)
        ):
            source = loss.args[0]
        elif loss.target is _aten.reshape.default:
            source = loss.args[0]
            assert isinstance(source, fx.Node)
            if info(source).tensor.shape:
                return scalings, loss
        else:
            return scalings, loss
        assert isinstance(source, fx.Node)
        scalings.append(loss)
        loss = source


def _token_loss(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Sum and count in place of a mean cross-entropy."""
    if node.target not in (_aten.cross_entropy_loss.default, _aten.nll_loss_nd.default):
        return None
    if argument(node, 3, "reduction", _MEAN) != _MEAN:
        return None
    weight = argument(node, 2, "weight", None)
    if weight is not None and info(weight).tensor.requires_grad:
        return None
    logits, targets = node.args[:2]
    assert isinstance(logits, fx.Node)
    assert isinstance(targets, fx.Node)
    if info(targets).tensor.dtype.is_floating_point:
        return None
    smoothing = 0.0
    if node.target is _aten.nll_loss_nd.default:
        source = _before_log_softmax(logits)
        if source is None:
            return None
        logits = source
    else:
        smoothing = argument(node, 5, "label_smoothing", 0.0)
        if len(info(logits).tensor.shape) != 2:
            logits = _classes_last(node, logits)
    logits, targets = _unflatten(logits), _unflatten(targets)
    lead = info(logits).tensor.shape[:-1]
    if info(targets).tensor.shape != lead:
        sentinels = [size if isinstance(size, int) else -1 for size in lead]
        like = info(targets).tensor
        targets = emit(
            node.graph,
            node,
            _aten.reshape.default,
            (targets, sentinels),
            shape=lead,
            dtype=like.dtype,
        )
    ignore_index = argument(node, 4, "ignore_index", -100)
    arguments: tuple[Any, ...] = (logits, targets, ignore_index)
    if smoothing or weight is not None:
        arguments = (*arguments, smoothing, weight)
    return _emit_token_loss(node, logits, arguments)


def _before_log_softmax(node: fx.Node) -> fx.Node | None:
    """The logits, classes last, of which ``[tokens, classes]`` are the logarithms of a softmax."""
    if len(info(node).tensor.shape) != 2:
        return None
    softmax = _unflatten(node)
    if softmax.target is not _aten.log_softmax.int:
        return None
    source, dim = softmax.args[0], argument(softmax, 1, "dim", None)
    assert isinstance(source, fx.Node)
    is_last = dim in (-1, len(info(source).tensor.shape) - 1)
    return source if is_last and argument(softmax, 2, "dtype", None) is None else None


def _emit_token_loss(
    node: fx.Node, logits: fx.Node, arguments: tuple[Any, ...]
) -> tuple[fx.Node, fx.Node]:
    dtype = sum_dtype(info(logits).tensor.dtype)
    scalar = TensorInfo(shape=(), dtype=dtype, requires_grad=info(node).tensor.requires_grad)
    facts = (scalar, with_fields(scalar, requires_grad=False))
    both = emit(node.graph, node, token_loss, arguments)
    set_info(both, with_fields(info(node), tensors=facts, is_tuple=True))
    parts: list[fx.Node] = []
    for index, fact in enumerate(facts):
        part = emit(node.graph, node, operator.getitem, (both, index))
        set_info(part, _single(info(node), fact))
        parts.append(part)
    return parts[0], parts[1]


def _single(like: NodeInfo, tensor: TensorInfo) -> NodeInfo:
    return NodeInfo(tensors=(tensor,), module=like.module, source=like.source)


def _classes_last(node: fx.Node, logits: fx.Node) -> fx.Node:
    """Logits ``[batch, classes, …]`` with their classes as the last dim."""
    shape: tuple[Size, ...] = info(logits).tensor.shape
    if len(shape) == 1:
        return logits
    last = len(shape) - 1
    if len(shape) == 3 and logits.target is _aten.transpose.int and logits.args[1:] == (1, 2):
        source = logits.args[0]
        assert isinstance(source, fx.Node)
        return source
    order = [0, *range(2, last + 1), 1]
    target, args = (
        (_aten.transpose.int, (logits, 1, 2))
        if len(shape) == 3
        else (_aten.permute.default, (logits, order))
    )
    return emit(
        node.graph,
        node,
        target,
        args,
        shape=[shape[dim] for dim in order],
        dtype=info(logits).tensor.dtype,
    )


def _unflatten(node: fx.Node) -> fx.Node:
    """What was flattened to give ``node``, if its last dim (of logits) was kept."""
    if node.target is not _aten.reshape.default:
        return node
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = info(source).tensor.shape, info(node).tensor.shape
    kept = len(after) == 1 or before[-1:] == after[-1:]
    return source if kept and len(before) > len(after) else node
