"""A chain of small ops that a step runs as one kernel forward and one backward.

What autograd keeps is what the chain reads, nothing that it makes in between: its backward computes
that again, in the same kernel. The kernels are ``torch.compile``'s, made when the chain first runs.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

COMPILER = "AUTOPAR_CHAIN_COMPILER"
"""Environment variable: a backend of ``torch.compile``; ``none`` runs the ops one by one."""

Kernel = Callable[..., Sequence[Tensor]]


class FusedChain:
    """Callable: what the chain reads, to the tuple of what others read of it.

    Args:
        module: The chain as a function: its placeholders are what it reads, and it returns a tuple.
            Shapes are those of one rank and micro-batch.
        is_linear: Whether its backward needs nothing of what it reads but shapes.
        learned: Through which of its results gradients flow.
    """

    __name__ = "fused_chain"

    def __init__(self, module: fx.GraphModule, *, is_linear: bool, learned: Sequence[bool]) -> None:
        self.module, self.is_linear, self.learned = module, is_linear, tuple(learned)
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = _Chain.apply(self, *arguments)
        return found

    def forward(self, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if arguments[0].device.type == "meta":  # only shapes are wanted
            return tuple(self.module(*arguments))
        given = tuple(own.detach() for own in arguments)
        key = (None, *map(_form, given))
        if key not in self._kernels:
            kernel: Kernel = self.module
            if not _one_by_one():  # code of its own: PyTorch limits how often one is compiled
                kernel = _compiled(fx.GraphModule({}, self.module.graph, class_name="Chain"))
            self._kernels[key] = kernel
        return tuple(self._kernels[key](*given))

    def backward(
        self, arguments: Sequence[Tensor], wanted: tuple[bool, ...], gradients: Sequence[Tensor]
    ) -> list[Tensor]:
        """Gradients of the ``wanted`` arguments, from those of the ``learned`` results."""
        given = (*arguments, *gradients)
        key = (wanted, *map(_form, given))
        if key not in self._kernels:
            kernel = self._backward_of(wanted)
            if not _one_by_one():
                kernel = _compiled(_traced(kernel, given))
            self._kernels[key] = kernel
        return list(self._kernels[key](*given))

    def _backward_of(self, wanted: tuple[bool, ...]) -> Callable[..., Sequence[Tensor]]:
        def run(*given: Tensor) -> Sequence[Tensor]:
            arguments, gradients = given[: len(wanted)], given[len(wanted) :]

            def chain(*moving: Tensor) -> tuple[Tensor, ...]:
                rest = iter(moving)
                pairs = zip(arguments, wanted, strict=True)
                made = self.module(*(next(rest) if moves else own for own, moves in pairs))
                return tuple(itertools.compress(made, self.learned))

            moving = [own for own, moves in zip(arguments, wanted, strict=True) if moves]
            found: Sequence[Tensor] = torch.func.vjp(chain, *moving)[1](tuple(gradients))
            return found

        return run


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: FusedChain, *arguments: Tensor) -> tuple[Tensor, ...]:
        ctx.chain = chain
        if chain.is_linear:
            ctx.forms = [(own.shape, own.dtype, own.device) for own in arguments]
        else:
            ctx.save_for_backward(*arguments)
        made = chain.forward(arguments)
        passed = zip(made, chain.learned, strict=True)
        ctx.mark_non_differentiable(*(own for own, is_learned in passed if not is_learned))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.chain.is_linear:
            arguments = [
                torch.zeros((), dtype=dtype, device=device).expand(shape)
                for shape, dtype, device in ctx.forms
            ]
        else:
            arguments = [own.detach() for own in ctx.saved_tensors]
        wanted = tuple(ctx.needs_input_grad[1:])
        given = list(itertools.compress(gradients, ctx.chain.learned))
        found = iter(ctx.chain.backward(arguments, wanted, given))
        return None, *(next(found) if moves else None for moves in wanted)


def _form(tensor: Tensor) -> tuple[object, ...]:
    """What a kernel is made for: what was traced once holds for no other strides."""
    return tensor.shape, tensor.stride(), tensor.dtype


def _one_by_one() -> bool:
    return os.environ.get(COMPILER) == "none"


def _traced(kernel: Kernel, arguments: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of what ``kernel`` does, without what only results need."""
    with _tracing:
        traced: fx.GraphModule = make_fx(kernel, tracing_mode="fake")(*arguments)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


_tracing = threading.RLock()  # while one thread traces, others cannot even run what is compiled


def _compiled(module: fx.GraphModule) -> Kernel:
    backend = os.environ.get(COMPILER, "inductor")
    compiled: Kernel = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)

    def run(*given: Tensor) -> Sequence[Tensor]:
        with _tracing:
            return compiled(*given)

    return run
