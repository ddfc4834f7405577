"""Chains of small ops that are one kernel: which ones a set of kernels fuses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch._ops import OpOverload

from autopar.ir.families import LINEAR, Family, family_of
from autopar.ir.graph import info
from autopar.ir.kernels import KernelSet
from autopar.ir.recompute import op_name
from autopar.ir.rules.random import is_random


def chains_of(graph: fx.Graph, kernels: KernelSet) -> list[list[fx.Node]]:
    """The chains of a block's graph, global or local: of two ops or more each, in their order."""
    if not kernels.fused:
        return []
    found = _chains(graph) if kernels.fuses_pointwise else _norms(graph)
    return [chain for chain in found if len(chain) > 1]


def is_linear(chain: Iterable[fx.Node]) -> bool:
    """Whether a chain is linear in all that it reads together: its backward reads none of it."""
    return all(op_name(node) in LINEAR or family_of(node) is Family.VIEW for node in chain)


def _can_fuse(node: fx.Node) -> bool:
    """Whether a compiler puts ``node`` into one kernel with others: PyTorch's own ops with one
    result, and neither local forms, which may communicate, nor custom ops.
    """
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    if not node.all_input_nodes:  # made from nothing
        return False
    if is_random(node) or family_of(node) is not Family.POINTWISE or info(node).is_tuple:
        return False
    return op_name(node) not in _BY_ITSELF


_BY_ITSELF = frozenset({"getitem", "cat", "index", "index_select", "gather", "scatter", "cumsum"})


def _chains(graph: fx.Graph) -> list[list[fx.Node]]:
    """Maximal connected sets of pointwise ops and normalizations between two other ops.

    A set has ops of one depth, counted in ops that cannot be fused: no path leaves it and returns.
    """
    depth: dict[fx.Node, int] = {}
    leader: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            node = leader[node]
        return node

    for node in graph.nodes:
        inputs = node.all_input_nodes
        depth[node] = max((depth[i] + (not _can_fuse(i) and _works(i)) for i in inputs), default=0)
        if not _can_fuse(node):
            continue
        leader[node] = node
        for operand in inputs:
            if operand in leader and depth[operand] == depth[node]:
                leader[find(node)] = find(operand)
    chains: dict[fx.Node, list[fx.Node]] = {}
    for node in leader:
        chains.setdefault(find(node), []).append(node)
    return list(chains.values())


def _works(node: fx.Node) -> bool:
    return node.op == "call_function" and family_of(node) is not Family.VIEW


def _norms(graph: fx.Graph) -> list[list[fx.Node]]:
    """Normalizations that are written as several ops: from the cast before the statistics to the
    product with the weights.
    """
    found: list[list[fx.Node]] = []
    for node in graph.nodes:
        if node.op == "call_function" and op_name(node) == "rsqrt":
            members = _normalization(node)
            found.append([other for other in graph.nodes if other in members])
    return found


def _normalization(rsqrt: fx.Node) -> set[fx.Node]:
    members = {rsqrt}
    statistics = [rsqrt]
    while statistics:  # up to the reduction, what it reduces, and the cast before
        node = statistics.pop()
        for operand in node.all_input_nodes:
            if (_can_fuse(operand) and op_name(operand) != "add") or _is_epsilon(operand):
                members.add(operand)
                statistics.append(operand)
    users = list(rsqrt.users)
    while users:  # down to what is scaled with weights
        node = users.pop()
        others = [operand for operand in node.all_input_nodes if operand not in members]
        is_scaled = all(other.op in ("placeholder", "get_attr") for other in others)
        if _can_fuse(node) and (is_scaled or node in rsqrt.users):
            members.add(node)
            users += list(node.users)
    return members


def _is_epsilon(node: fx.Node) -> bool:
    """``variance + eps``, unlike a residual stream that comes before a normalization."""
    return _can_fuse(node) and len(node.all_input_nodes) == 1 and node.target in _ADDS


_ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar)
