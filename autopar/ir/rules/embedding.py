"""Embeddings: split ids or features freely, and the vocabulary with a helper."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.placement import PARTIAL, REPLICATED, sharded
from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Option, Rule
from autopar.ir.rules.registry import register


@register(torch.ops.aten.embedding.default)
def _embedding(node: fx.Node) -> Rule:
    call = Call(node)
    # gradients scaled by how often an id occurs need all ids
    scaled = bool(call.argument("scale_grad_by_freq"))
    vocabulary = Option(
        operands=(sharded(0), REPLICATED), results=(PARTIAL,), helper="vocab_embedding"
    )
    ids = "!b.." if scaled else "b.."
    return call.text_rule(
        {"weight": "!v n", "indices": ids},
        [f"{ids} n"],
        linear=[("weight",)],
        extra=() if scaled else (vocabulary,),
        paddable="v",
    )
