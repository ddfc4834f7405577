"""A linear layer whose backward leaves the gradients of its weights for later, without an autograd
graph of its own: by far the most common product, and the host's time for it counts.

Its formulas are those of autograd, in the same order of the same products, so that gradients are
the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

Leave = Callable[[GradientEdge, Tensor], None]


def is_plain(weights: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether ``linear_parts`` computes this layer as autograd does: rows of a matrix, by a matrix
    whose gradient waits, as does the bias's.

    Args:
        weights: Which of the tensors have their gradients later.
    """
    operands = (x, weight) if bias is None else (x, weight, bias)
    learned = [index for index, tensor in enumerate(operands) if tensor.requires_grad]
    return (
        tuple(weights) == tuple(range(1, len(operands)))
        and learned[:1] == [0]
        and len(learned) > 1
        and x.dim() in (2, 3)
        and min(x.shape) > 1
        and x.is_contiguous()
        and weight.dim() == 2
        and min(weight.shape) > 1
        and weight.is_contiguous()
    )


def linear_parts(leave: Leave, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        leave: Takes in backward where the gradients of ``weight`` and ``bias`` start, and the
            gradient of the result.
        x: Of shape ``[…, in]``; ``weight`` of ``[out, in]``, ``bias`` of ``[out]``.
    """
    made: Tensor = _LinearWeightPart.apply(x.detach(), weight, bias)
    edge = torch.autograd.graph.get_gradient_edge(made)
    result: Tensor = _LinearInputPart.apply(x, weight.detach(), made.detach(), edge, leave)
    return result


class _LinearWeightPart(torch.autograd.Function):
    """The layer, as far as its weights' gradients are concerned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        _, for_weight, for_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            None,
            rows.t().mm(x.reshape(-1, x.shape[-1])) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


class _LinearInputPart(torch.autograd.Function):
    """The layer, as far as the gradient of ``x`` is concerned; it passes on what is made of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, made: Tensor, edge: GradientEdge, leave: Leave
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.edge, ctx.leave = edge, leave
        return made.view_as(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        ctx.leave(ctx.edge, gradient)
        rows = gradient.reshape(-1, gradient.shape[-1])
        found = rows.mm(weight).view(*gradient.shape[:-1], weight.shape[1])
        return found, None, None, None, None
