"""What a forward pass may do that no graph can hold: a backward of its own, hooks on gradients, and
state that changes from call to call. It is noticed while the model is traced, and refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from autopar.capture.functions import Functions
from autopar.ir.errors import CaptureError

_PLAIN = (bool, int, float, str)
_OF_OPS = ("torch._library.", "torch._higher_order_ops.", "autopar.ir.")
"""Where custom ops have their autograd functions, which stay with them."""
_HOOKS = ("_backward_hooks", "_backward_pre_hooks")

GRADIENT_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
"""Functions that change gradients behind the graph's back."""


@dataclass(slots=True, eq=False)
class Changes:
    """What is judged after the trace: plain attributes that a forward pass gave another value
    (where, by name), and the autograd functions that it called.
    """

    found: dict[str, str] = field(default_factory=dict)
    functions: Functions = field(default_factory=Functions)


@contextmanager
def watched(model: nn.Module, changes: Changes) -> Iterator[None]:
    """While active, refuse assignments to buffers, trace the forward of autograd functions, and
    note both in ``changes``.

    Raises:
        CaptureError: The forward pass does what a graph cannot hold.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    plain_set: Any = nn.Module.__setattr__
    plain_apply = vars(torch.autograd.Function)["apply"]

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if id(module) in paths:
            path = f"{paths[id(module)]}.{name}".removeprefix(".")
            if isinstance(value, Tensor) and name in module._buffers:  # pyright: ignore[reportPrivateUsage]
                raise CaptureError(
                    f"forward assigns to buffer {path}",
                    where=_caller(),
                    hint="keep running statistics outside of forward",
                )
            old = vars(module).get(name)
            if isinstance(old, _PLAIN) and isinstance(value, _PLAIN) and old != value:
                changes.found[path] = _caller()
        plain_set(module, name, value)

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(_OF_OPS):
            return plain_apply.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:  # what is recomputed says the plan
            function, _, *operands = args
            return function(*operands)
        return changes.functions.trace(cls, args, _caller())

    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = plain_set  # type: ignore[method-assign]
        torch.autograd.Function.apply = plain_apply  # type: ignore[method-assign]


def own_backward(name: str, where: str) -> CaptureError:
    """The error for a backward that is not that of the ops of its forward."""
    return CaptureError(
        f"forward uses the autograd function {name}, whose backward cannot be captured",
        where=where,
        hint="write it with differentiable ops, for example (y - x).detach() + x",
    )


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise ``CaptureError`` if gradients of ``model`` are changed by hooks."""
    for path, module in model.named_modules():
        if any(getattr(module, hooks) for hooks in _HOOKS):
            raise hooked(f"module {path or type(module).__name__}")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):  # pyright: ignore[reportPrivateUsage]
            raise hooked(f"parameter {name}")


def hooked(what: str, where: str | None = None) -> CaptureError:
    """The error for hooks on gradients."""
    return CaptureError(
        f"{what} has a hook on its gradient, which cannot be captured",
        where=where,
        hint="remove it: hooks would see the gradients of shards and micro-batches",
    )


def _caller() -> str:
    """The innermost line outside of torch and autopar that is running."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in ("torch", "autopar", "contextlib"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
