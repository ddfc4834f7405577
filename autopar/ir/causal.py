"""Causal attention of some of the queries: those that a rank holds where positions are sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from autopar.ir.axis_group import AxisGroup
from autopar.ir.eager_attention import eager_attention
from autopar.ir.moves import take_shard
from autopar.ir.placement import parse_state, sharded


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_positions: int,
    shards: Sequence[tuple[AxisGroup, str]],
    scale: float | None = None,
    enable_gqa: bool = False,
    eager: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention(…, is_causal=True)`` where a rank holds some query positions.

    Each run of positions that follow one another is a call of its own, with the keys up to its end:
    a rank computes no more scores than it needs, give or take half a run.

    Args:
        query: ``[…, heads, positions of this rank, d]``.
        key, value: ``[…, heads, num_positions, d]``: whole.
        shards: Axes that shard the positions, the outermost first, each with the state of the
            result on it, as text.
        eager: By ``eager_attention``.
    """
    attend = eager_attention if eager else functional.scaled_dot_product_attention
    parts: list[Tensor] = []
    taken = 0
    for start, length in position_runs(num_positions, shards):
        end = start + length
        parts.append(
            attend(
                query[..., taken : taken + length, :],
                key[..., :end, :],
                value[..., :end, :],
                attn_mask=_visible(length, end, query.device)
                if eager
                else causal_lower_right(length, end),
                scale=scale,
                enable_gqa=enable_gqa,
            )
        )
        taken += length
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _visible(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Which keys the last ``num_queries`` positions see, as a mask."""
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return ones.tril(num_keys - num_queries)


def position_runs(
    num_positions: int, shards: Sequence[tuple[AxisGroup, str]]
) -> list[tuple[int, int]]:
    """The positions that a rank holds, as (first, length) of runs that follow one another."""
    positions = torch.arange(num_positions, device="cpu")
    for axis, text in shards:
        state = sharded(0, parse_state(text).blocks)
        positions = take_shard(positions, state, axis.rank, axis.size)
    held = positions.tolist()
    starts = [i for i in range(len(held)) if i == 0 or held[i] != held[i - 1] + 1]
    ends = [*starts[1:], len(held)]
    return [(held[start], end - start) for start, end in zip(starts, ends, strict=True)]
