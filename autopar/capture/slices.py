"""Slices that divide a dim among them become one split, whose parts can be sharded alike.

Fused projections are cut apart by slices as well as by splits (Phi-3: ``qkv[..., :q]`` and so on).
A slice by itself keeps its dim whole; the parts of a split are blocks of it.
"""

from __future__ import annotations

import operator
from dataclasses import replace as with_fields

import torch
from torch import fx

from autopar.capture.flat import FlatGraph, replace
from autopar.ir.graph import Role, info, set_info

_aten = torch.ops.aten


def join_slices(flat: FlatGraph) -> None:
    """Write slices of one value that cover one of its dims without overlap as a split.

    Needs slices in the form that ``clean`` gives them. Slices of constants stay.
    """
    constants = {node for node, value in flat.bindings.items() if value.role is Role.CONSTANT}
    for node in list(flat.graph.nodes):
        if node.op not in ("call_function", "placeholder") or node in constants:
            continue
        by_dim: dict[int, list[fx.Node]] = {}
        for user in node.users:
            if user.target is _aten.slice.Tensor and user.args[0] is node:
                _, dim, _, _, step = user.args
                if step == 1 and isinstance(dim, int):
                    by_dim.setdefault(dim, []).append(user)
        for dim, slices in by_dim.items():
            ordered = _in_a_row(slices, info(node).tensor.shape[dim])
            if ordered:
                _split(node, dim, ordered)


def _in_a_row(slices: list[fx.Node], size: object) -> list[list[fx.Node]]:
    """Slices by place, equal ones together, if they are two places or more that cover the dim."""
    if not isinstance(size, int):
        return []
    places: dict[tuple[int, int], list[fx.Node]] = {}
    for node in slices:
        start, end = node.args[2:4]
        if not isinstance(start, int) or not isinstance(end, int):
            return []
        places.setdefault((start, end), []).append(node)
    covered = 0
    ordered: list[list[fx.Node]] = []
    for start, end in sorted(places):
        if start != covered:
            return []
        covered = end
        ordered.append(places[start, end])
    return ordered if covered == size and len(ordered) > 1 else []


def _split(node: fx.Node, dim: int, parts: list[list[fx.Node]]) -> None:
    graph = node.graph
    positions = {other: position for position, other in enumerate(graph.nodes)}
    first = min((part for same in parts for part in same), key=positions.__getitem__)
    facts = info(first)
    tensors = tuple(info(same[0]).tensor for same in parts)
    with graph.inserting_before(first):
        sizes = [int(tensor.shape[dim]) for tensor in tensors]
        split = graph.call_function(_aten.split_with_sizes.default, (node, sizes, dim))
        set_info(split, with_fields(facts, tensors=tensors, is_tuple=True))
        made = [
            graph.call_function(operator.getitem, (split, index)) for index in range(len(parts))
        ]
    for part, same in zip(made, parts, strict=True):
        set_info(part, info(same[0]))
        for old in same:
            replace(old, part)
