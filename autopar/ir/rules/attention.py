"""Scaled dot-product attention with masks, grouped heads and causality."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Rule
from autopar.ir.rules.registry import register

_aten = torch.ops.aten

CAUSAL_HELPER = "causal_attention"
"""Helper of options that split the positions of causal attention."""


@register(_aten.scaled_dot_product_attention.default)
def _attention(node: fx.Node) -> Rule | None:
    """Batch, heads and query positions may be split; causal positions need a helper.

    Groups: query head ``(m g)`` reads key head ``m``. A split of ``g`` leaves keys and values
    whole: it serves more ranks than key heads. Keys are a softmax row; a split of value features
    would repeat all the work on the scores.
    """
    call = Call(node)
    query, key = call.tensor("query"), call.tensor("key")
    assert query is not None
    assert key is not None
    if len(query.shape) < 3:
        return None
    grouped = call.argument("enable_gqa") and query.shape[-3] != key.shape[-3]
    heads, key_heads = ("(m g)", "m") if grouped else ("h", "h")
    is_causal = bool(call.argument("is_causal"))
    rows = "!s" if is_causal and query.shape[-2] != key.shape[-2] else "s"
    mask = call.tensor("attn_mask")
    mask_text = ["b..", heads, rows, "!t"]
    if mask is not None and len(mask.shape) < 4:
        mask_text = mask_text[-len(mask.shape) :]
    return call.text_rule(
        {
            "query": f"b.. {heads} {rows} !d",
            "key": f"b.. {key_heads} !t !d",
            "value": f"b.. {key_heads} !t !e",
            "attn_mask": " ".join(mask_text),
        },
        [f"b.. {heads} {rows} !e"],
        linear=[("value",)],
        helpers={"s": CAUSAL_HELPER} if is_causal else None,
    )
