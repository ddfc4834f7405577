"""Attention that writes all scores to memory, whatever fused kernels there are."""

from __future__ import annotations

import torch
from torch import Tensor


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` by its ``MATH`` backend.

    The backend is called itself: ``sdpa_kernel`` chooses it for all threads of a process.
    """
    assert dropout_p == 0.0, "dropout is drawn by position: attention_with_dropout"
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the backend adds what it is given
        seen = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = seen.where(attn_mask, -torch.inf)
    attended: Tensor = torch.ops.aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return attended
