"""Take the products of a block apart, so that the gradients of their weights may come later."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.ir.deferral import Apart, InsideApart
from autopar.ir.graph import Role
from autopar.ir.program import copied
from autopar.ir.recompute import op_name
from autopar.ir.weight_parts import EXPERT_OPS, weight_operands


def weights_apart(module: fx.GraphModule, roles: Sequence[Role]) -> fx.GraphModule:
    """A module that computes what ``module`` does, with its products ``Apart``.

    Args:
        module: The local graph of a kind of block.
        roles: What its placeholders stand for.
    """
    made = copied(module)
    placeholders = [node for node in made.graph.nodes if node.op == "placeholder"]
    pairs = zip(placeholders, roles, strict=True)
    parameters = [node for node, role in pairs if role is Role.PARAMETER]
    for node, weights in weight_operands(made.graph, parameters).items():
        assert callable(node.target)
        inside = op_name(node) in EXPERT_OPS
        node.target = InsideApart(node.target) if inside else Apart(node.target, weights)
    made.recompile()
    return made
