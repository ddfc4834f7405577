"""Autograd functions of a model: their forward is traced if its gradients are their backward.

A graph has no place for a backward of its own. Many functions have one that only saves memory; the
ops of their forward give the same gradients, and are captured in their place. Whether they do is
tried on random numbers, after the trace, when tensors have values again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.capture.host import HOST

_TOLERANCE = 1e-5
_SCALES = (1e-2, 1.0, 1e2)
"""Sizes of the gradients that are tried: a backward that clips is told from one that does not."""
_LARGEST_DIM = 6
_MOST_ENTRIES = 2**22


@dataclass(slots=True, eq=False)
class Functions:
    """The functions that were traced, by class and arguments, with the line that called each."""

    calls: dict[object, _Call] = field(default_factory=dict)

    def trace(self, cls: type[torch.autograd.Function], args: tuple[Any, ...], where: str) -> Any:
        """What the forward of ``cls`` returns, by the ops in it."""
        call = _Call(cls=cls, arguments=tuple(map(_describe, args)), where=where)
        self.calls.setdefault((cls, repr(call.arguments)), call)
        return _run_forward(cls, args)

    def first_inexact(self) -> tuple[str, str] | None:
        """Name and source line of a function whose backward is another."""
        for call in self.calls.values():
            if not _is_exact(call):
                return call.cls.__name__, call.where
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    cls: type[torch.autograd.Function]
    arguments: tuple[Any, ...]
    where: str


@dataclass(frozen=True, slots=True)
class _Like:
    """A tensor argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _describe(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape = tuple(s if isinstance(s, int) else int(s.node.hint) for s in value.shape)
    return _Like(shape, value.dtype)


class _Context:
    """What a forward does with ``ctx`` when nothing is to be saved."""

    needs_input_grad: tuple[bool, ...]

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in ("save_for_backward", "save_for_forward", "set_materialize_grads"):
            return lambda *_: None
        raise AttributeError(name)


def _run_forward(cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    if cls.setup_context is not torch.autograd.Function.setup_context:
        return cls.forward(*args)
    return cls.forward(_Context(len(args)), *args)


def _is_exact(call: _Call) -> bool:
    generator = torch.Generator().manual_seed(0)
    try:
        for scale in _SCALES:
            args = _random(call.arguments, generator)
            own = _gradients(call.cls.apply, args, scale)
            ops = _gradients(lambda *given: _run_forward(call.cls, given), args, scale)
            if not all(_close(one, other) for one, other in zip(own, ops, strict=True)):
                return False
    except Exception:  # its forward saves what only its backward knows, marks results, …
        return False
    return True


def _random(arguments: Sequence[Any], generator: torch.Generator) -> list[Any]:
    sizes = [argument.shape for argument in arguments if isinstance(argument, _Like)]
    entries = sum(torch.Size(shape).numel() for shape in sizes)
    cut = _LARGEST_DIM if entries > _MOST_ENTRIES else None
    found: list[Any] = []
    for argument in arguments:
        if isinstance(argument, _Like):
            shape = [size if cut is None else min(size, cut) for size in argument.shape]
            if argument.dtype.is_floating_point:
                number = torch.randn(shape, generator=generator, dtype=torch.float64, device=HOST)
                argument = number.requires_grad_()
            else:
                bits = torch.randint(0, 2, shape, generator=generator, device=HOST)
                argument = bits.to(argument.dtype)
        found.append(argument)
    return found


def _gradients(function: Callable[..., Any], args: Sequence[Any], scale: float) -> list[Tensor]:
    """Results and the gradients of the float arguments, for fixed random gradients of results."""
    output = function(*args)
    outputs: tuple[Any, ...] = output if isinstance(output, tuple) else (output,)
    trained = [item for item in outputs if isinstance(item, Tensor) and item.requires_grad]
    wanted = [item for item in args if isinstance(item, Tensor) and item.requires_grad]
    generator = torch.Generator().manual_seed(1)
    seeds = [
        scale * torch.randn(item.shape, generator=generator, dtype=item.dtype) for item in trained
    ]
    found = torch.autograd.grad(trained, wanted, seeds, materialize_grads=True)
    return [item.detach() for item in outputs if isinstance(item, Tensor)] + list(found)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    difference = float((one - other).double().norm())
    return difference <= _TOLERANCE * float(other.double().norm())
