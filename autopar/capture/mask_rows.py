"""Masks as one run of visible keys for each query: exact, and far smaller than the mask.

Masks of transformers compare a position of the query with a position of the key. Where the keys'
side does not decrease, what a query may see is a run of keys that two binary searches find: a mask
for 131,072 tokens, of 17 billion entries, takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autopar.capture.constants import evaluate
from autopar.capture.flat import FlatGraph
from autopar.ir.graph import info

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class KeyRuns:
    """Query i sees the keys ``first[…, i] … end[…, i] − 1``; both are ``[…, queries]``, or
    ``[…, 1]`` if all queries see the same.
    """

    first: Tensor
    end: Tensor


def key_runs(flat: FlatGraph, mask: fx.Node, batch: int) -> KeyRuns | None:
    """The runs of a constant boolean mask ``[…, queries, keys]`` at one batch size; None where they
    are no runs, or the ops are none that are known here.
    """
    shape = info(mask).tensor.shape
    if info(mask).tensor.dtype is not torch.bool or not isinstance(shape[-1], int):
        return None
    return _runs(flat, mask, batch, shape[-1])


_AND = (_aten.__and__.Tensor, _aten.bitwise_and.Tensor, _aten.logical_and.default)

_COMPARISONS: dict[object, str] = {
    _aten.le.Tensor: "le",
    _aten.lt.Tensor: "lt",
    _aten.ge.Tensor: "ge",
    _aten.gt.Tensor: "gt",
    _aten.eq.Tensor: "eq",
}

_TURNED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}


def _runs(flat: FlatGraph, node: fx.Node, batch: int, num_keys: int) -> KeyRuns | None:
    sources = [source for source in node.args if isinstance(source, fx.Node)]
    if node.target in _AND and len(sources) == 2:
        parts = [_runs(flat, source, batch, num_keys) for source in sources]
        one, other = parts
        if one is None or other is None:
            return None
        return KeyRuns(torch.maximum(one.first, other.first), torch.minimum(one.end, other.end))
    if node.target is _aten.expand.default:
        return _runs(flat, sources[0], batch, num_keys)  # runs are broadcast, too
    shape = info(node).tensor.shape_at(batch)
    if len(shape) < 2 or shape[-2] == 1:
        return _same_for_all(evaluate(flat, [node], batch)[node], num_keys)
    if shape[-1] == 1 and num_keys > 1:  # all or nothing for each query
        rows = evaluate(flat, [node], batch)[node].squeeze(-1)
        return KeyRuns(torch.zeros_like(rows, dtype=torch.int64), rows * num_keys)
    if node.target in _COMPARISONS and len(sources) == 2:
        return _compared(flat, node, sources, batch, num_keys)
    return None


def _same_for_all(mask: Tensor, num_keys: int) -> KeyRuns | None:
    """Runs of a mask that does not depend on the query."""
    keys = mask.expand(*mask.shape[:-1], num_keys) if mask.dim() else mask.expand(1, num_keys)
    keys = keys.squeeze(-2) if keys.dim() > 1 else keys
    count = keys.sum(-1, keepdim=True)
    first = keys.to(torch.uint8).argmax(-1, keepdim=True)
    positions = torch.arange(num_keys)
    if not bool((((positions >= first) & (positions < first + count)) == keys).all()):
        return None
    return KeyRuns(first, first + count)


def _compared(
    flat: FlatGraph, node: fx.Node, sources: list[fx.Node], batch: int, num_keys: int
) -> KeyRuns | None:
    """Runs of ``keys ∘ queries`` or ``queries ∘ keys``."""
    comparison = _COMPARISONS[node.target]
    shapes = [info(source).tensor.shape_at(batch) for source in sources]
    if [_is_of_keys(shape) for shape in shapes] == [False, True]:
        sources, shapes, comparison = sources[::-1], shapes[::-1], _TURNED[comparison]
    if not _is_of_keys(shapes[0]) or len(shapes[1]) < 2 or shapes[1][-1] != 1:
        return None
    values = evaluate(flat, sources, batch)
    keys, queries = values[sources[0]], values[sources[1]].squeeze(-1)
    keys = keys.squeeze(-2) if keys.dim() > 1 else keys
    lead = torch.broadcast_shapes(keys.shape[:-1], queries.shape[:-1])
    keys = keys.expand(*lead, num_keys).contiguous()
    queries = queries.expand(*lead, queries.shape[-1]).contiguous()
    if not bool((keys.diff(dim=-1) >= 0).all()):
        return None
    below = torch.searchsorted(keys, queries)
    through = torch.searchsorted(keys, queries, right=True)
    none, every = torch.zeros_like(below), torch.full_like(below, num_keys)
    ends = {
        "le": (none, through),
        "lt": (none, below),
        "ge": (below, every),
        "gt": (through, every),
        "eq": (below, through),
    }
    return KeyRuns(*ends[comparison])


def _is_of_keys(shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 or (len(shape) > 1 and shape[-2] == 1 and shape[-1] > 1)
