"""Compute a block again in backward, where the gradients of its weights come later.

``torch.utils.checkpoint`` computes a block again for each autograd graph that asks for what it
saved. Ops that are taken apart (``autopar.ir.deferral``) have graphs of their own, so that the
block is computed again as a whole here, once, and backward then runs through what that recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., tuple[Tensor, ...]]


def compute_again(
    run: Run, arguments: Sequence[Tensor], *, given: Sequence[int], learned: Sequence[bool]
) -> tuple[Tensor, ...]:
    """What ``run`` returns for ``arguments``, which are all that is kept for backward.

    Args:
        run: Computes the same whenever it is called; its results are tensors.
        arguments: Parameters among them take gradients as leaves.
        given: Places of the arguments whose gradients go on to what made them; one at least.
        learned: For each result, whether it takes a gradient.
    """
    made: tuple[Tensor, ...] = _Again.apply(
        run, tuple(arguments), tuple(given), tuple(learned), *(arguments[i] for i in given)
    )
    return made


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        arguments: tuple[Tensor, ...],
        given: tuple[int, ...],
        learned: tuple[bool, ...],
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.arguments, ctx.given = run, arguments, given
        ctx.set_materialize_grads(False)
        made = tuple(run(*arguments))
        pairs = zip(made, learned, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, learns in pairs if not learns))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        arguments = list(ctx.arguments)
        del ctx.arguments
        own = [arguments[index].detach().requires_grad_() for index in ctx.given]
        for index, tensor in zip(ctx.given, own, strict=True):
            arguments[index] = tensor
        with torch.enable_grad():
            made = ctx.run(*arguments)
        roots = [
            (tensor, gradient)
            for tensor, gradient in zip(made, gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        torch.autograd.backward([tensor for tensor, _ in roots], [g for _, g in roots])
        return None, None, None, None, *(tensor.grad for tensor in own)
