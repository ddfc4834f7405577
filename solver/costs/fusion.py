"""By which kernels the ops of a block are computed: attention, and chains of small ops in one.

A fused chain reads what comes from outside of it, writes what is used outside, keeps what it reads
(not what it makes in between), and is launched once. Each op of the chain pays for what it alone
reads and writes, so that costs are still sums over ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.graph import BlockKind
from autopar.ir.kernels import AttentionKernel, KernelSet
from autopar.ir.layout import operands_of
from autopar.ir.rules.random import is_random
from autopar.solver.costs.families import LINEAR, Family, family_of, op_name

SCORES_WRITTEN: tuple[AttentionKernel, ...] = (
    "eager",
    "fused_softmax",
    "fused_causal_softmax",
)
"""Attention kernels that write scores to memory."""

SCORE_PASSES: Mapping[str, tuple[int, int]] = {
    "eager": (15, 15),  # scale, mask, cast, softmax in fp32, cast
    "fused_softmax": (4, 5),  # one kernel that reads scores and mask; its backward reads two
    "fused_causal_softmax": (3, 3),  # of half of the scores; dropout and its mask of all
    "random": (16, 14),  # autopar.ir.functional.attention_with_dropout
}
"""How often a score is read or written beside products, forward and backward, in units of the
dtype of compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOp:
    """An op as part of a fused chain.

    Attributes:
        reads: Operands that come from outside the chain.
        writes: Whether the result is used outside.
        is_first: True for one op of each chain.
        is_linear: Whether the whole chain is linear: then its backward reads no operand.
    """

    reads: tuple[int, ...]
    writes: bool
    is_first: bool
    is_linear: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStyle:
    """How a node is computed.

    Attributes:
        fused: Its part in a fused chain; None for an op by itself.
        eager: Whether small ops run as PyTorch's own kernels, one by one.
    """

    attention: AttentionKernel = "flash_attention2"
    fused: FusedOp | None = None
    eager: bool = True


PLAIN = NodeStyle()


def node_styles(kinds: Iterable[BlockKind], kernels: KernelSet) -> Mapping[fx.Node, NodeStyle]:
    """The style of every op of all kinds under ``kernels``."""
    styles: dict[fx.Node, NodeStyle] = {}
    alone = NodeStyle(attention=kernels.attention, eager=not kernels.fuses_pointwise)
    for kind in kinds:
        styles.update(dict.fromkeys(kind.graph.nodes, alone))
        if not kernels.fused:
            continue
        chains = _chains(kind.graph) if kernels.fuses_pointwise else _norms(kind.graph)
        for chain in chains:
            if len(chain) > 1:
                styles.update(_fuse(chain, kernels.attention))
    return styles


def _fuse(chain: list[fx.Node], attention: AttentionKernel) -> dict[fx.Node, NodeStyle]:
    members = set(chain)
    is_linear = all(op_name(node) in LINEAR for node in chain)
    found: dict[fx.Node, NodeStyle] = {}
    seen: set[fx.Node] = set()
    for node in chain:
        operands = operands_of(node)
        reads = [
            index
            for index, operand in enumerate(operands)
            if operand not in members and operand not in seen
        ]
        seen.update(operands)
        fused = FusedOp(
            reads=tuple(reads),
            writes=any(user not in members for user in node.users),
            is_first=node is chain[0],
            is_linear=is_linear,
        )
        found[node] = NodeStyle(attention=attention, fused=fused, eager=False)
    return found


def _can_fuse(node: fx.Node) -> bool:
    if node.op != "call_function" or is_random(node) or family_of(node) is not Family.POINTWISE:
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
