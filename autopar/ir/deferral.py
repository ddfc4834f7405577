"""Ops whose backward leaves the gradients of their weights for later.

An op that is taken ``apart`` runs in an autograd graph of its own. Its backward asks that graph for
the gradients of activations, and notes in ``Deferred`` where those of its weights start. They are
computed by the same formulas in the same order, so that they are the same, bit by bit. Between the
two parts live what the op saved and the gradient of its result; all else of the block is let go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from autopar.ir.linear_parts import is_plain, linear_parts

_current = threading.local()


class Deferred:
    """The gradients of weights that a backward left for later."""

    def __init__(self) -> None:
        self._edges: list[GradientEdge] = []
        self._gradients: list[Tensor] = []

    def __len__(self) -> int:
        """Ops whose weights have no gradients yet."""
        return len(self._edges)

    def add(self, edge: GradientEdge, gradient: Tensor) -> None:
        """Note an op's result in its own graph, and the gradient of it."""
        self._edges.append(edge)
        self._gradients.append(gradient)

    def finish(self, parameters: Sequence[Tensor]) -> None:
        """Compute the gradients of ``parameters``, leaves, and add them to what ``grad`` has."""
        edges, gradients = self._edges, self._gradients
        self._edges, self._gradients = [], []
        if edges:
            torch.autograd.backward(edges, gradients, inputs=list(parameters))


@contextmanager
def deferring(deferred: Deferred | None) -> Iterator[None]:
    """While active, ops of this thread that are taken apart leave gradients to ``deferred``.

    What autograd computes again in backward may run in another thread: enter it there too.
    """
    before: Deferred | None = getattr(_current, "deferred", None)
    _current.deferred = deferred
    try:
        yield
    finally:
        _current.deferred = before


class Apart:
    """Calls ``op``, a product, whose tensor arguments ``weights`` (by their place among all of
    them) have their gradients later; it returns one tensor.

    All at once where nothing is ``deferring``, or only weights or only others take gradients.
    """

    def __init__(self, op: Callable[..., Any], weights: Sequence[int]) -> None:
        self.op, self.weights = op, tuple(weights)
        self.__name__ = _name_of(op)  # fx writes it into the code that it generates
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        deferred: Deferred | None = getattr(_current, "deferred", None)
        if deferred is None or not torch.is_grad_enabled():
            return self.op(*args, **kwargs)
        if self.op is torch.ops.aten.linear.default and is_plain(self.weights, *args, **kwargs):
            return linear_parts(deferred.add, *args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        weights = {places[index] for index in self.weights}
        learned = [place for place in places if leaves[place].requires_grad]
        given = [place for place in learned if place not in weights]
        if not given or len(given) == len(learned):
            return self.op(*args, **kwargs)

        def call(inputs: Sequence[Tensor]) -> Tensor:
            for place, tensor in zip(given, inputs, strict=True):
                leaves[place] = tensor
            own_args, own_kwargs = pytree.tree_unflatten(leaves, spec)
            made: Tensor = self.op(*own_args, **own_kwargs)
            return made

        return _InputPart.apply(call, deferred, *(leaves[place] for place in given))

    def __str__(self) -> str:
        return str(self.op)


class InsideApart:
    """Calls ``op``, which takes its own products apart (``apart_inside``)."""

    def __init__(self, op: Callable[..., Any]) -> None:
        self.op = op
        self.__name__ = _name_of(op)
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before: bool = getattr(_current, "inside", False)
        _current.inside = True
        try:
            return self.op(*args, **kwargs)
        finally:
            _current.inside = before

    def __str__(self) -> str:
        return str(self.op)


def apart_inside(op: Callable[..., Tensor], weights: Sequence[int]) -> Callable[..., Tensor]:
    """``op``, taken apart if the op that it is part of may be: see ``Apart``."""
    return Apart(op, weights) if getattr(_current, "inside", False) else op


class _InputPart(torch.autograd.Function):
    """An op in a graph of its own, of which this backward is the part that cannot wait."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Callable[[Sequence[Tensor]], Tensor],
        deferred: Deferred,
        *given: Tensor,
    ) -> Tensor:
        with torch.enable_grad():
            anchor = torch.empty(0, requires_grad=True)
            own = [_Start.apply(anchor, tensor.detach()) for tensor in given]
            made = call(own)
        # edges, not tensors: what the op does not save, or saves to compute it again, is let go
        ctx.starts = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in own]
        ctx.edge, ctx.deferred = torch.autograd.graph.get_gradient_edge(made), deferred
        return made.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found = torch.autograd.grad([ctx.edge], ctx.starts, [gradient], retain_graph=True)
        ctx.deferred.add(ctx.edge, gradient)
        return None, None, *found


class _Start(torch.autograd.Function):
    """Where an op's own graph starts: a leaf would hold its tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise AssertionError("backward ends before the start")


def _name_of(op: Callable[..., Any]) -> str:
    packet = getattr(op, "overloadpacket", op)
    return str(getattr(packet, "__name__", "op"))
