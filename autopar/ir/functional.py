"""Functions that graphs call beside ATen ops: the loss, and forms of ops that a split changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.ir.axis_group import AxisGroup
from autopar.ir.moves import take_shard
from autopar.ir.placement import parse_state


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


def dropout(tensor: Tensor, p: float) -> Tensor:
    """Dropout that draws the same mask as ``sharded_dropout`` from the same random state."""
    return _drop(tensor, torch.rand(tensor.shape, device=tensor.device) >= p, p)


def sharded_dropout(tensor: Tensor, p: float, axis: AxisGroup, state: str) -> Tensor:
    """Dropout of a sharded tensor, with the mask of the whole tensor.

    Every rank of ``axis`` draws that mask and takes its shard: all need the same state of the
    random generator.
    """
    placed = parse_state(state)
    shape = list(tensor.shape)
    shape[placed.dim] *= axis.size
    keep = torch.rand(shape, device=tensor.device) >= p
    return _drop(tensor, take_shard(keep, placed, axis.rank, axis.size), p)


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    axis: AxisGroup | None = None,
    state: str = "I",
) -> Tensor:
    """``scaled_dot_product_attention`` with the dropout of ``dropout`` or ``sharded_dropout``.

    ``state`` is the result's state on ``axis``: batch, heads or query positions may be sharded.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    blind = (scores == -torch.inf).all(-1, keepdim=True)  # gets zeros, as fused kernels have it
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    if axis is None or not parse_state(state).is_sharded:
        return dropout(weights, dropout_p) @ value
    return sharded_dropout(weights, dropout_p, axis, state) @ value


def _drop(tensor: Tensor, keep: Tensor, p: float) -> Tensor:
    return tensor * keep / (1 - p) if p < 1 else torch.zeros_like(tensor)
