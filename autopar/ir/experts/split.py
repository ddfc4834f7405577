"""Local forms of routed experts whose experts are split over the ranks of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.axis_group import AxisGroup
from autopar.ir.experts.kernel import (
    ExpertWeights,
    as_numbers,
    by_expert,
    combine,
    compute_experts,
    grouped_experts,
    within_capacity,
)


def expert_slice(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    axis: AxisGroup,
    *,
    activation: str,
    gated: bool,
    transposed: bool,
    capacity_factor: float | None,
) -> Tensor:
    """``routed_experts`` with the experts sharded over ``axis``: the result is ``P``.

    Tokens are whole on it: every rank computes those of its own experts.
    """
    weights = ExpertWeights(
        up=up,
        down=down,
        up_bias=up_bias,
        down_bias=down_bias,
        activation=activation,
        gated=gated,
        transposed=transposed,
    )
    ids = within_capacity(expert_ids, weights.num_experts * axis.size, capacity_factor)
    own = ids - axis.rank * weights.num_experts
    return compute_experts(hidden, own, expert_weights, weights)


def expert_dispatch(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    axis: AxisGroup,
    *,
    activation: str,
    gated: bool,
    transposed: bool,
    capacity_factor: float | None,
) -> Tensor:
    """``routed_experts`` with tokens and experts sharded over ``axis``; the result as the tokens.

    Every token travels to the ranks that own its experts and its results travel back, as many as
    there are: nothing is padded or dropped. Backward makes the same two exchanges.
    """
    weights = ExpertWeights(
        up=up,
        down=down,
        up_bias=up_bias,
        down_bias=down_bias,
        activation=activation,
        gated=gated,
        transposed=transposed,
    )
    num_local, num_experts = weights.num_experts, weights.num_experts * axis.size
    order, counts = by_expert(
        within_capacity(expert_ids, num_experts, capacity_factor), num_experts
    )
    leaving = counts.view(axis.size, num_local)
    arriving = axis.all_to_all(leaving.contiguous())  # from each rank, for each expert of this one
    total = order.shape[0]
    sent = as_numbers(leaving.sum(1), total)
    received = as_numbers(arriving.sum(1), total)
    rows = hidden.flatten(0, -2)[order // expert_ids.shape[-1]]
    rows = exchange_rows(rows, axis, sent, received)
    grouped = _group_by_expert(arriving, sum(received))
    results = grouped_experts(rows[grouped], arriving.sum(0), weights)
    results = exchange_rows(results[_inverse(grouped)], axis, received, sent)
    return combine(results, order, expert_weights).view(hidden.shape)


def exchange_rows(
    rows: Tensor, axis: AxisGroup, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    """Rows to other ranks, ``sent[j]`` of them to rank j; gradients travel back."""
    exchanged: Tensor = _ExchangeRows.apply(rows, axis, tuple(sent), tuple(received))
    return exchanged


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, axis: AxisGroup, sent: tuple[int, ...], received: tuple[int, ...]
    ) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return axis.all_to_all_uneven(rows.contiguous(), sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rows = ctx.axis.all_to_all_uneven(gradient.contiguous(), ctx.received, ctx.sent)
        return rows, None, None, None


def _group_by_expert(arriving: Tensor, total: int) -> Tensor:
    """Places of the ``total`` rows, which are in order of rank and then of expert, by expert."""
    num_ranks, num_local = arriving.shape
    if arriving.is_meta:
        return torch.arange(total, device=arriving.device)
    experts = torch.arange(num_local, device=arriving.device).repeat(num_ranks)
    expert_of_row = experts.repeat_interleave(arriving.flatten(), output_size=total)
    return expert_of_row.argsort(stable=True)


def _inverse(order: Tensor) -> Tensor:
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)
