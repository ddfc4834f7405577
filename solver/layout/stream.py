"""The residual stream: what blocks hand on, and what is made of it before the next product."""

from __future__ import annotations

from torch import fx

from autopar.ir.families import Family, family_of
from autopar.ir.graph import BlockKind, Role

_ENDS = (Family.PRODUCT, Family.ATTENTION, Family.EXPERTS, Family.LOSS)


def residual_stream(kind: BlockKind) -> frozenset[fx.Node]:
    """The ops of a block that normalize, add to, or otherwise pass on its activations.

    Without sequence parallelism Megatron-LM's tensor ranks all compute them whole.
    """
    reached = {
        node
        for node, role in zip(kind.placeholders, kind.roles, strict=True)
        if role is Role.ACTIVATION
    }
    for node in kind.graph.nodes:
        continues = node.op == "call_function" and family_of(node) not in _ENDS
        if continues and any(operand in reached for operand in node.all_input_nodes):
            reached.add(node)
    return frozenset(reached)
