"""By which kernels the ops of a block are computed: attention, and chains of small ops in one.

A fused chain reads what comes from outside of it, writes what is used outside, keeps what it reads
(not what it makes in between), and is launched once. Each op of the chain pays for what it alone
reads and writes, so that costs are still sums over ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.chains import chains_of, is_linear
from autopar.ir.graph import BlockKind
from autopar.ir.kernels import AttentionKernel, KernelSet
from autopar.ir.layout import operands_of

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
        for chain in chains_of(kind.graph, kernels):
            styles.update(_fuse(chain, kernels.attention))
    return styles


def _fuse(chain: list[fx.Node], attention: AttentionKernel) -> dict[fx.Node, NodeStyle]:
    members = set(chain)
    of_linear = is_linear(chain)
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
            is_linear=of_linear,
        )
        found[node] = NodeStyle(attention=attention, fused=fused, eager=False)
    return found
