"""The loss in chunks: forward and backward of each slice of the tokens, one after the other.

In training nothing is computed forward. The backward of the loss, whose gradient is known by then,
runs each chunk forward and at once backward, so that logits are there for one chunk at a time and
nothing is computed twice; the loss gets its value meanwhile. Gradients of parameters go chunk by
chunk to where those of micro-batches are added up, in the width that these are added in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.losses import sum_dtype


class ChunkedLoss:
    """Calls ``module`` on each of ``num_chunks`` slices of its arguments, and sums up its results.

    Args:
        module: Of one chunk. Its results are terms of sums, in a tuple.
        dims: For each argument the dim of which a chunk has its slice; None: it has all of it.
        shapes, dtypes: Of the results.
        learned: Which results have a gradient.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        *,
        num_chunks: int,
        dims: Sequence[int | None],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        learned: Sequence[bool],
    ) -> None:
        self.module, self.num_chunks, self.dims = module, num_chunks, tuple(dims)
        self.shapes, self.dtypes, self.learned = tuple(shapes), tuple(dtypes), tuple(learned)
        self.__name__ = "chunked_loss"  # fx writes it into the code that it generates
        self.__module__ = __name__

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The sums, in training without their values until their backward."""
        learns = any(isinstance(found, Tensor) and found.requires_grad for found in arguments)
        if not learns or not torch.is_grad_enabled():
            sums = self.zeros(_device(arguments))
            for chunk in self._chunks(arguments):
                _add(sums, self.module(*chunk))
            return sums
        anchor = torch.empty(0, requires_grad=True)
        apart = tuple(found if _takes_its_own(found) else None for found in arguments)
        others = (
            found if own is None else None for found, own in zip(arguments, apart, strict=True)
        )
        made = _InBackward.apply(self, anchor, apart, *others)
        return tuple(made)

    def zeros(self, device: torch.device) -> tuple[Tensor, ...]:
        """Sums of nothing."""
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def _chunks(self, arguments: Sequence[Any]) -> Iterator[list[Any]]:
        for number in range(self.num_chunks):
            yield [
                self.slice(argument, dim, number)
                for argument, dim in zip(arguments, self.dims, strict=True)
            ]

    def slice(self, argument: Any, dim: int | None, number: int) -> Any:
        """What chunk ``number`` has of an argument."""
        if dim is None:
            return argument
        size = argument.shape[dim] // self.num_chunks
        return argument.narrow(dim, number * size, size)


def _takes_its_own(argument: Any) -> bool:
    """Whether somebody takes gradients of a parameter as they come: autograd hands it those of
    every chunk.
    """
    if not isinstance(argument, Tensor) or not argument.requires_grad or not argument.is_leaf:
        return False
    return bool(getattr(argument, "_post_accumulate_grad_hooks", None))


class _InBackward(torch.autograd.Function):
    """Keeps its arguments; backward computes the results and the gradients of the arguments.

    ``apart`` has arguments whose gradients this does not return, in the places in which ``others``
    has None; ``anchor`` requires a gradient in any case.
    """

    @staticmethod
    def forward(
        ctx: Any, call: ChunkedLoss, anchor: Tensor, apart: tuple[Any, ...], *others: Any
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.apart = call, apart
        ctx.save_for_backward(*(found for found in others if isinstance(found, Tensor)))
        ctx.handles = [None if isinstance(found, Tensor) else found for found in others]
        ctx.is_saved = [isinstance(found, Tensor) for found in others]
        results = call.zeros(_device((*apart, *others)))
        ctx.filled = [result.detach() for result in results]
        fixed = [r for r, learned in zip(results, call.learned, strict=True) if not learned]
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call: ChunkedLoss = ctx.call
        saved = iter(ctx.saved_tensors)
        found = [
            next(saved) if is_saved else handle
            for is_saved, handle in zip(ctx.is_saved, ctx.handles, strict=True)
        ]
        given = [
            _Argument(value if own is None else own, dim, learns=own is None)
            for value, own, dim in zip(found, ctx.apart, call.dims, strict=True)
        ]
        sums = call.zeros(_device([argument.value for argument in given]))
        for number in range(call.num_chunks):
            with torch.enable_grad():
                made = call.module(*(argument.of_chunk(call, number) for argument in given))
            learned = [
                (result, gradient)
                for result, gradient in zip(made, gradients, strict=True)
                if result.requires_grad
            ]
            _add(sums, [result.detach() for result in made])
            torch.autograd.backward([r for r, _ in learned], [g for _, g in learned])
            del made, learned
            for argument in given:
                argument.end_chunk(number)
        for result, value in zip(ctx.filled, sums, strict=True):
            result.copy_(value)
        return None, None, None, *(argument.whole_gradient() for argument in given)


class _Argument:
    """An argument, what the running chunk has of it, and its gradient so far if it ``learns``."""

    def __init__(self, value: Any, dim: int | None, *, learns: bool) -> None:
        self.value, self.dim = value, dim
        self.gradient: Tensor | None = None
        self._part: Tensor | None = None
        self._learns = learns and isinstance(value, Tensor) and value.requires_grad

    def of_chunk(self, call: ChunkedLoss, number: int) -> Any:
        """What chunk ``number`` is called with."""
        part = call.slice(self.value, self.dim, number)
        if not self._learns:
            return part
        self._part = part.detach().requires_grad_()
        return self._part

    def end_chunk(self, number: int) -> None:
        """Take the gradient that autograd left."""
        if self._part is None:
            return
        part, self._part = self._part, None
        if part.grad is None:
            return
        if self.dim is not None:
            if self.gradient is None:
                self.gradient = torch.zeros_like(self.value)
            size = part.shape[self.dim]
            self.gradient.narrow(self.dim, number * size, size).copy_(part.grad)
        elif self.gradient is None:
            self.gradient = part.grad.to(sum_dtype(part.dtype))
        else:
            self.gradient += part.grad

    def whole_gradient(self) -> Tensor | None:
        """The gradient of all chunks, in the type of the argument."""
        return None if self.gradient is None else self.gradient.to(self.value.dtype)


def _add(sums: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    for total, term in zip(sums, terms, strict=True):
        total += term


def _device(arguments: Sequence[Any]) -> torch.device:
    return next(found.device for found in arguments if isinstance(found, Tensor))
