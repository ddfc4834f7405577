"""Losses that graphs call, and their forms on ranks that hold a share of tokens or vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.ir.axis_group import AxisGroup


def token_loss(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over valid tokens, and what its mean divides by.

    That is the number of valid tokens, or the sum of their classes' weights. Both are scalars of
    ``sum_dtype`` of the logits' dtype.

    Args:
        logits: ``[…, vocabulary]``.
        targets: ``[…]``, integers; tokens equal to ``ignore_index`` are not valid.
        label_smoothing: Share of each target that is spread over all classes.
        weight: ``[vocabulary]``, of each class.
    """
    dtype = sum_dtype(logits.dtype)
    losses = functional.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        weight=weight,
        ignore_index=ignore_index,
        reduction="sum" if logits.dtype == dtype else "none",
        label_smoothing=label_smoothing,
    )
    return losses.sum(dtype=dtype), _total_weight(targets, ignore_index, weight, dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what sums over tokens are kept: float32 or wider, as bfloat16 counts up to 256 only."""
    return torch.promote_types(dtype, torch.float32)


def _total_weight(
    targets: Tensor, ignore_index: int, weight: Tensor | None, dtype: torch.dtype
) -> Tensor:
    valid = targets != ignore_index
    if weight is None:
        return valid.sum().to(dtype)
    weights = weight.detach()[targets.masked_fill(~valid, 0)]
    return weights.masked_fill(~valid, 0).sum(dtype=dtype)


def vocab_token_loss(
    logits: Tensor,
    targets: Tensor,
    axis: AxisGroup,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    *,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """``token_loss`` with the ``vocabulary`` of ``logits`` and ``weight`` sharded over ``axis``.

    No logits are gathered: ranks exchange a few numbers of each token. Shards may be padded: what
    lies beyond the vocabulary is no class. The results are ``I`` on the axis.
    """
    valid = targets.masked_fill(targets == ignore_index, 0)
    require_below(valid, vocabulary)
    if vocabulary < logits.shape[-1] * axis.size:
        logits = logits.masked_fill(_padding(logits, axis, vocabulary), -torch.inf)
    loss, total = _VocabTokenLoss.apply(
        logits, targets, axis, ignore_index, label_smoothing, weight, vocabulary
    )
    return loss, total


class _VocabTokenLoss(torch.autograd.Function):
    """With ``p`` the softmax, ``y`` a token's target and ``w`` the weights of the C classes:

    loss = (1 - s) · w_y · (log Z - x_y) + s / C · (Σ w · log Z - Σ_c w_c x_c), and its gradient
    (1 - s) · w_y · (p - δ_y) + s / C · (Σ w · p - w).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        axis: AxisGroup,
        ignore_index: int,
        smoothing: float,
        weight: Tensor | None,
        vocabulary: int,
    ) -> tuple[Tensor, Tensor]:
        size = logits.shape[-1]
        dtype = sum_dtype(logits.dtype)
        valid = targets != ignore_index
        local = targets - axis.rank * size
        mine = valid & (local >= 0) & (local < size)
        local = local.masked_fill(~mine, 0)
        peak = axis.all_reduce(logits.amax(-1).contiguous(), "max")
        shifted = logits - peak.unsqueeze(-1)
        found = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        exchanged = [found.to(dtype)]  # wide: fp16 has no sum of 65505 exponentials
        if weight is not None:
            exchanged.append(weight[local].to(dtype).masked_fill(~mine, 0))
        if smoothing:
            weighted = shifted.masked_fill(_padding(logits, axis, vocabulary), 0)
            weighted = weighted if weight is None else weighted * weight
            exchanged.append(weighted.sum(-1, dtype=dtype))
        softmax = shifted.exp_()
        exchanged.append(softmax.sum(-1, dtype=dtype))
        target_logit, *others, total = axis.all_reduce(torch.stack(exchanged)).unbind()
        softmax.div_(total.unsqueeze(-1))
        target_weight = valid.to(dtype) if weight is None else others.pop(0)
        log_total = total.log()
        losses = (1 - smoothing) * target_weight * (log_total - target_logit)
        ctx.weight_sum = None
        if smoothing:
            ctx.weight_sum = _weight_sum(weight, vocabulary, axis)
            spread = ctx.weight_sum * log_total - others.pop()
            losses = losses + smoothing / vocabulary * spread
        ctx.save_for_backward(softmax, local, mine, valid, target_weight, weight)
        ctx.spread = smoothing / vocabulary
        ctx.smoothing = smoothing
        count = target_weight.masked_fill(~valid, 0).sum(dtype=dtype)
        ctx.mark_non_differentiable(count)
        return losses.masked_fill(~valid, 0).sum(dtype=dtype), count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        softmax, local, mine, valid, target_weight, weight = ctx.saved_tensors
        scale = (1 - ctx.smoothing) * target_weight
        hit = scale.masked_fill(~mine, 0).unsqueeze(-1).to(softmax.dtype)
        if ctx.smoothing:
            scale = scale + ctx.spread * ctx.weight_sum
        logits_gradient = softmax * scale.unsqueeze(-1).to(softmax.dtype)
        if ctx.smoothing:
            logits_gradient -= ctx.spread * (1.0 if weight is None else weight)
        logits_gradient.scatter_add_(-1, local.unsqueeze(-1), -hit)
        logits_gradient.mul_(valid.unsqueeze(-1)).mul_(gradient)
        return logits_gradient, None, None, None, None, None, None


def _padding(logits: Tensor, axis: AxisGroup, vocabulary: int) -> Tensor:
    """``[shard]``: True beyond the end of the vocabulary."""
    size = logits.shape[-1]
    return torch.arange(size, device=logits.device) + axis.rank * size >= vocabulary


def _weight_sum(weight: Tensor | None, vocabulary: int, axis: AxisGroup) -> float | Tensor:
    """The sum of the weights of all classes."""
    if weight is None:
        return float(vocabulary)
    return axis.all_reduce(weight.sum().reshape(1)).squeeze(0)


def require_below(ids: Tensor, size: int) -> None:
    """Fail as an unsplit table does, on the device where it can: otherwise no rank would know the
    id, and its row would be zeros.
    """
    message = f"an id is negative or not below {size}"
    torch._assert_async(((ids >= 0) & (ids < size)).all(), message)  # pyright: ignore[reportPrivateUsage]


def mean_loss_of_shard(op: str, axes: Sequence[AxisGroup], *args: Any, **kwargs: Any) -> Tensor:
    """This rank's term of a loss that is a mean over elements which are sharded over ``axes``.

    Args:
        op: Name of the ATen op, whose other arguments follow.
    """
    loss: Tensor = getattr(torch.ops.aten, op).default(*args, **kwargs)
    return loss / math.prod(axis.size for axis in axes)


def mean_token_loss_of_shard(
    op: str,
    axes: Sequence[AxisGroup],
    scores: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    **kwargs: Any,
) -> Tensor:
    """This rank's term of a mean over valid tokens, which are sharded over ``axes``.

    Args:
        op: ``cross_entropy_loss``, ``nll_loss`` or ``nll_loss_nd``.
    """
    reduction = 2  # sum
    function = getattr(torch.ops.aten, op).default
    loss: Tensor = function(scores, targets, weight, reduction, ignore_index, **kwargs)
    total = _total_weight(targets, ignore_index, weight, loss.dtype).reshape(1)
    for axis in axes:
        total = axis.all_reduce(total)
    return loss / total.squeeze(0)
