"""Entries that each sequence picks from itself, written so that sequences may be sharded.

``x[torch.arange(b), ids]`` indexes the batch, which keeps it whole; ``gather`` along dim 1 is the
same, sequence by sequence. Pooling the last token of each sequence is written so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.flat import FlatGraph, emit, remove_dead_code, replace
from autopar.ir.graph import BATCH, Size, info

_aten = torch.ops.aten


def pick_by_sequence(flat: FlatGraph) -> None:
    """Write ``x[arange(b), ids]`` with ``x`` ``[b, s, …]`` and ``ids`` ``[b]`` as a gather; also
    with ``ids`` ``[b, k]`` and counts ``[b, 1]``.
    """
    for node in flat.calls():
        if node.target is _aten.index.Tensor:
            _rewrite(node)
    remove_dead_code(flat)


def _rewrite(node: fx.Node) -> None:
    source, indices = node.args
    assert isinstance(source, fx.Node)
    if not isinstance(indices, list | tuple) or len(indices) != 2:
        return
    counts, ids = indices
    if not isinstance(counts, fx.Node) or not isinstance(ids, fx.Node):
        return
    shape, picked = info(source).tensor.shape, info(ids).tensor.shape
    if shape[0] != BATCH or picked[:1] != (BATCH,) or len(picked) > 2:
        return
    if not _counts_sequences(counts, len(picked)) or info(ids).tensor.dtype != torch.int64:
        return
    rest, num_picked = shape[2:], picked[1] if len(picked) == 2 else 1
    wide = (BATCH, num_picked, *rest)
    places = _emit(node, _aten.reshape.default, _not_negative(node, ids, shape[1]),
                   (BATCH, num_picked, *(1 for _ in rest)))  # fmt: skip
    if rest:
        places = _emit(node, _aten.expand.default, places, wide)
    found = emit(node.graph, node, _aten.gather.default, (source, 1, places), shape=wide)
    if len(picked) == 1:
        found = emit(
            node.graph,
            node,
            _aten.reshape.default,
            (found, _written((BATCH, *rest))),
            shape=(BATCH, *rest),
        )
    replace(node, found)


def _counts_sequences(node: fx.Node, num_dims: int) -> bool:
    """Whether ``node`` is ``arange(b)``, with a dim of size 1 more where others have two dims."""
    if info(node).tensor.shape != (BATCH, *(1 for _ in range(num_dims - 1))):
        return False
    reshaping = (_aten.reshape.default, _aten.unsqueeze.default)
    while node.target in reshaping and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if node.target not in (_aten.arange.default, _aten.arange.start):
        return False
    return node.target is _aten.arange.default or node.args[0] in (0,)


def _not_negative(node: fx.Node, ids: fx.Node, size: Size) -> fx.Node:
    """Indices count from the end where they are negative; those of ``gather`` do not."""
    facts: dict[str, Any] = {"shape": info(ids).tensor.shape, "requires_grad": False}
    from_end = emit(node.graph, node, _aten.add.Tensor, (ids, size), dtype=torch.int64, **facts)
    negative = emit(node.graph, node, _aten.lt.Scalar, (ids, 0), dtype=torch.bool, **facts)
    return emit(
        node.graph, node, _aten.where.self, (negative, from_end, ids), dtype=torch.int64, **facts
    )


def _emit(node: fx.Node, target: Any, ids: fx.Node, shape: tuple[Size, ...]) -> fx.Node:
    return emit(
        node.graph,
        node,
        target,
        (ids, _written(shape)),
        shape=shape,
        dtype=torch.int64,
        requires_grad=False,
    )


def _written(shape: tuple[Size, ...]) -> list[int]:
    """A shape as an argument, with -1 where the batch is."""
    return [size if isinstance(size, int) else -1 for size in shape]
