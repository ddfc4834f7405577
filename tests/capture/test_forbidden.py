"""What no graph can hold is refused: an own backward, hooks on gradients, state that changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.ir.errors import CaptureError
from tests.capture.helpers import captured

X = {"x": torch.ones(2, 4, 8)}


class _Model(nn.Module):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = 0
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean()


class _Tripled(torch.autograd.Function):
    """Its backward is not the gradient of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class _OwnBackward(_Model):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = _Tripled.apply(self.linear(x))
        return doubled.mean()


class _TensorHook(_Model):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        hidden.register_hook(lambda gradient: 5 * gradient)
        return hidden.mean()


class _Assigns(_Model):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean((0, 1))
        return (hidden - self.average).square().mean()


class _Counts(_Model):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x).mean() / self.count


class _Nested(_Model):
    """Modules of a list are traced once, and watched all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Counts() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.mean()


def _with_parameter_hook() -> nn.Module:
    model = _Model()
    model.linear.weight.register_hook(lambda gradient: 2 * gradient)
    return model


def _with_module_hook() -> nn.Module:
    model = _Model()
    model.linear.register_full_backward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_OwnBackward(), "autograd function _Tripled.*test_forbidden.py:.*in forward"),
        (_TensorHook(), "a tensor has a hook on its gradient"),
        (_Assigns(), "assigns to buffer average.*test_forbidden.py:.*in forward"),
        (_Counts(), "attribute count at every call.*test_forbidden.py:.*in forward"),
        (_Nested(), "attribute layers.0.count at every call"),
        (_with_parameter_hook(), "parameter linear.weight has a hook"),
        (_with_module_hook(), "module linear has a hook"),
    ],
)
def test_what_no_graph_holds_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        capture(model, X)
    assert "apply" in vars(torch.autograd.Function)
    assert _Tripled.apply(torch.ones(1)).item() == 2  # all is as it was


class _Remembers(_Model):
    def forward(self, x: Tensor) -> Tensor:
        self.count = max(self.count, x.shape[1])
        return self.linear(x).mean() / self.count


def test_what_is_kept_from_the_first_call_is_no_change() -> None:
    model = _Remembers()
    loss, _ = captured(capture(model, X), model, X)
    torch.testing.assert_close(loss, model(X["x"]).detach())
    assert model.count == 4


class _Recomputed(_Model):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Any = checkpoint(self.linear, self.linear(x), use_reentrant=self.reentrant)
        mean: Tensor = out.mean()
        return mean


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_captured_as_what_they_compute(reentrant: bool) -> None:
    model = _Recomputed(reentrant=reentrant)
    loss, gradients = captured(capture(model, X), model, X)
    expected = model(X["x"])
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients["linear.weight"], model.linear.weight.grad)


class _Doubled(torch.autograd.Function):
    """Saves nothing, as its backward needs nothing; its gradients are those of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x.square() * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * x * ctx.factor * gradient, None


class _Clipped(torch.autograd.Function):
    """Its backward is that of its forward as long as gradients are small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-10, 10)


class _Calls(_Model):
    def __init__(self, function: Any, *arguments: Any) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function.apply(self.linear(x), *self.arguments)
        return out.mean()


def test_functions_whose_backward_is_that_of_their_forward_are_captured() -> None:
    model = _Calls(_Doubled, 3.0)
    loss, gradients = captured(capture(model, X), model, X)
    expected = model(X["x"])
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients["linear.weight"], model.linear.weight.grad)


def test_a_backward_that_differs_for_large_gradients_only_is_refused() -> None:
    with pytest.raises(CaptureError, match="autograd function _Clipped"):
        capture(_Calls(_Clipped), X)
