"""Functions that graphs call beside ATen ops: the loss, and forms of ops that a split changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.ir.axis_group import AxisGroup


def token_loss(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over valid tokens, and their number.

    Both are scalars of ``sum_dtype`` of the logits' dtype.

    Args:
        logits: ``[…, vocabulary]``.
        targets: ``[…]``, integers; tokens equal to ``ignore_index`` are not valid.
    """
    dtype = sum_dtype(logits.dtype)
    losses = functional.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        ignore_index=ignore_index,
        reduction="sum" if logits.dtype == dtype else "none",
    )
    return losses.sum(dtype=dtype), (targets != ignore_index).sum().to(dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what sums over tokens are kept: float32 or wider, as bfloat16 counts up to 256 only."""
    return torch.promote_types(dtype, torch.float32)


def vocab_embedding(weight: Tensor, ids: Tensor, axis: AxisGroup, padding_idx: int = -1) -> Tensor:
    """Embedding with the rows of ``weight`` sharded over ``axis``: the result is ``P``.

    One rank knows each row. The row ``padding_idx``, if it is not negative, gets no gradient.
    """
    rows = weight.shape[0]
    _require_below(ids, rows * axis.size)
    local = ids - axis.rank * rows
    foreign = (local < 0) | (local >= rows)
    padding = padding_idx - axis.rank * rows
    found = functional.embedding(
        local.masked_fill(foreign, 0),
        weight,
        padding_idx=padding if padding_idx >= 0 and 0 <= padding < rows else None,
    )
    return found.masked_fill(foreign.unsqueeze(-1), 0)


def vocab_token_loss(
    logits: Tensor, targets: Tensor, axis: AxisGroup, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """``token_loss`` with the vocabulary of ``logits`` sharded over ``axis``.

    No logits are gathered. The results are ``I`` on the axis.
    """
    valid = targets.masked_fill(targets == ignore_index, 0)
    _require_below(valid, logits.shape[-1] * axis.size)
    loss: Tensor = _VocabTokenLoss.apply(logits, targets, axis, ignore_index)
    return loss, (targets != ignore_index).sum().to(sum_dtype(logits.dtype))


class _VocabTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, axis: AxisGroup, ignore_index: int
    ) -> Tensor:
        size = logits.shape[-1]
        valid = targets != ignore_index
        local = targets - axis.rank * size
        mine = valid & (local >= 0) & (local < size)
        local = local.masked_fill(~mine, 0)
        peak = axis.all_reduce(logits.amax(-1).contiguous(), "max")
        shifted = logits - peak.unsqueeze(-1)
        target_logit = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        softmax = shifted.exp_()
        total, target_logit = axis.all_reduce(torch.stack([softmax.sum(-1), target_logit])).unbind()
        softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, mine, valid)
        losses = (total.log() - target_logit).masked_fill(~valid, 0)
        return losses.sum(dtype=sum_dtype(losses.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, mine, valid = ctx.saved_tensors
        hit = mine.unsqueeze(-1).to(softmax.dtype)
        logits_gradient = softmax.scatter_add(-1, local.unsqueeze(-1), -hit)
        logits_gradient.mul_(valid.unsqueeze(-1)).mul_(gradient)
        return logits_gradient, None, None, None


def _require_below(ids: Tensor, size: int) -> None:
    """Fail as an unsplit table does, on the device where it can: otherwise no rank would know the
    id, and its row would be zeros.
    """
    message = f"an id is negative or not below {size}"
    torch._assert_async(((ids >= 0) & (ids < size)).all(), message)  # pyright: ignore[reportPrivateUsage]


def partial_mean(
    tensor: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    axes: Sequence[AxisGroup],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's term of the mean of a tensor whose reduced dims are sharded over ``axes``."""
    mean = tensor.mean(None if dim is None else tuple(dim), keepdim, dtype=dtype)
    return mean / math.prod(axis.size for axis in axes)
