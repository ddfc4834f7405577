"""What cannot be captured is said in one message, with the model's line and a way out; torch prints
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.errors import CaptureError
from tests.capture.helpers import captured

Forward = Callable[[nn.Linear, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x).square().mean()


def branch(linear: nn.Linear, x: Tensor) -> Tensor:
    hidden: Tensor = linear(x)
    return hidden * 2 if hidden.sum() > 0 else hidden


def number(linear: nn.Linear, x: Tensor) -> Tensor:
    hidden: Tensor = linear(x)
    return hidden * hidden.mean().item()


def masked(linear: nn.Linear, x: Tensor) -> Tensor:
    hidden: Tensor = linear(x)
    return hidden[hidden > 0]


def experts(linear: nn.Linear, x: Tensor) -> Tensor:
    """As a hand-written mixture of experts visits the tokens of each."""
    hidden: Tensor = linear(x)
    out = torch.zeros_like(hidden)
    for expert in range(2):
        tokens = torch.where(hidden.argmax(-1) == expert)
        out[tokens] += hidden[tokens]
    return out


def condition(linear: nn.Linear, x: Tensor) -> Tensor:
    hidden: Tensor = linear(x)
    out: Tensor = torch.cond(hidden.sum() > 0, torch.sin, torch.cos, (hidden,))
    return out


def autocast(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out: Tensor = linear(x)
    return out


def numpy(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * torch.from_numpy(x.detach().numpy())


def own_input(linear: nn.Linear, x: Tensor) -> Tensor:
    x.mul_(2)
    out: Tensor = linear(x)
    return out


def own_weight(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        linear.weight.mul_(0.9)
    out: Tensor = linear(x)
    return out


def wrong_shape(linear: nn.Linear, x: Tensor) -> Tensor:
    out: Tensor = linear(x[..., :3])
    return out


def no_shape(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x).flatten(0, 1).to_sparse().to_dense()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.cond
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (branch, "depend on the values of tensors"),
        (number, "depend on the values of tensors"),
        (masked, "depend on the values of tensors"),
        (experts, "depend on the values of tensors"),
        (condition, r"control flow on tensors \(cond\)"),
        (autocast, "autocast region"),
        (numpy, "computes with numpy"),
        (own_input, "writes to input x"),
        (own_weight, "writes to parameter linear.weight"),
        (wrong_shape, "cannot be traced: RuntimeError: a and b must have same reduction dim"),
        (no_shape, "op aten._to_sparse.default does not say its result's shape"),
    ],
)
def test_the_message_names_line_and_way_out(
    function: Forward, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture(Model(function), (torch.ones(2, 4, 8),))
    assert caught.value.where is not None
    assert "test_failures.py" in caught.value.where
    assert function.__name__ in caught.value.where or "in forward" in caught.value.where
    assert caught.value.hint
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


class _ComplexWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).abs().mean()


def test_parameters_that_are_not_real_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"parameter weight is torch\.complex64"):
        capture(_ComplexWeight(), (torch.ones(2, 8),))


def without_autocast(linear: nn.Linear, x: Tensor) -> Tensor:
    """As Hugging Face models keep rotary tables exact."""
    with torch.autocast("cpu", enabled=False):
        out: Tensor = linear(x)
    return out


def rotated(linear: nn.Linear, x: Tensor) -> Tensor:
    """Rotary embedding by complex numbers, as Meta's Llama has it."""
    pairs = torch.view_as_complex(linear(x).unflatten(-1, (-1, 2)))
    angles = torch.arange(x.shape[1], device=x.device)[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1])
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def printed(linear: nn.Linear, x: Tensor) -> Tensor:
    """A value that is read and not used does no harm."""
    hidden: Tensor = linear(x)
    hidden.mean().item()
    return hidden


@pytest.mark.parametrize("function", [without_autocast, rotated, printed])
def test_what_looks_like_it_is_captured(function: Forward) -> None:
    model: Any = Model(function)
    x = {"x": torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))}
    loss, gradients = captured(capture(model, x), model, x)
    expected = model(x["x"])
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients["linear.weight"], model.linear.weight.grad)
