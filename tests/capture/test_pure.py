"""In-place ops on tensors that the forward pass made are captured as what they leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.capture import capture, run_reference
from tests.capture.helpers import targets

SEQ, WIDTH = 6, 8
Step = Callable[[Tensor, Tensor], Tensor]
"""What is done to ``y``, given ``x`` of the same shape [b, 6, 8]; returns what the loss reads."""


class Writes(nn.Module):
    def __init__(self, *steps: Step) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        for step in self.steps:
            y = step(y, x)
        return y.square().mean() + self.weight.mean()


def assert_captured(model: nn.Module) -> set[str]:
    """Loss and gradient equal eager; returns the ops, none of which writes."""
    graph = capture(model, {"x": torch.ones(2, SEQ, WIDTH)})
    x = torch.randn(3, SEQ, WIDTH, generator=torch.Generator().manual_seed(0))
    weight = model.get_parameter("weight")
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected, weight)
    copy = weight.detach().clone().requires_grad_()
    loss, _ = run_reference(graph, {"weight": copy}, {"x": x})
    (found,) = torch.autograd.grad(loss, copy)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, gradient)
    ops = targets(graph)
    assert not any(name.split(".")[1].endswith("_") for name in ops if name.startswith("aten."))
    return ops


def shift_right(y: Tensor, x: Tensor) -> Tensor:
    """As T5 makes the inputs of its decoder."""
    shifted = y.new_zeros(y.shape)
    shifted[..., 1:] = y[..., :-1].clone()
    shifted[..., 0] = 2
    shifted.masked_fill_(shifted < -1, 0.5)
    return shifted


def views_are_read_later(y: Tensor, x: Tensor) -> Tensor:
    turned = y.transpose(1, 2)
    first, second = y[..., :4], y[..., 4:]
    y[:, 2:4] += 1
    turned[:, 1].mul_(3)
    return torch.cat([second, first], dim=-1) * y + turned.transpose(1, 2)


def a_copy_is_no_alias(y: Tensor, x: Tensor) -> Tensor:
    other = x * 2
    target = torch.empty_like(y)
    target.copy_(other)
    target.add_(1)
    return target * other * y


def through_reshapes(y: Tensor, x: Tensor) -> Tensor:
    pairs = y.view(y.shape[0], SEQ, WIDTH // 2, 2)
    even, odd = pairs.select(-1, 0), pairs[..., 1]
    even.mul_(2)
    odd.unsqueeze(-1)[..., 0].sub_(even)
    apart = y.transpose(1, 2).reshape(y.shape[0], -1)  # this one is a copy
    y.zero_()
    return pairs.flatten(2) + apart.view(y.shape[0], WIDTH, SEQ).transpose(1, 2)


def through_parts(y: Tensor, x: Tensor) -> Tensor:
    """Torch lets parts be written to where there is no gradient."""
    mask = torch.zeros_like(x)
    first, second = mask.chunk(2, dim=-1)
    rows = mask.unbind(1)
    first += 1
    rows[2].fill_(0.5)
    second.split([1, 3], dim=-1)[1].mul_(3)
    return y * mask + first.sum() + rows[0].sum()


def every_other(y: Tensor, x: Tensor) -> Tensor:
    y[:, ::2] = x[:, :1]
    y.permute(2, 0, 1)[3] = 0.25
    return y


def seen_otherwise(y: Tensor, x: Tensor) -> Tensor:
    y = y.clone()
    y.unsqueeze_(1)
    y += 1
    y.squeeze_(1)
    return y


@pytest.mark.parametrize(
    "step",
    [
        shift_right,
        views_are_read_later,
        a_copy_is_no_alias,
        through_reshapes,
        through_parts,
        every_other,
        seen_otherwise,
    ],
)
def test_writes_are_captured(step: Step) -> None:
    assert_captured(Writes(step))


def test_a_shift_is_a_concatenation() -> None:
    """Slices and concatenations are what rules know."""
    assert "aten.cat.default" in assert_captured(Writes(shift_right))


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[str, int, int], ...]:
    """Views and writes: each names an op, which of the views so far it takes, and a number."""
    ops = st.sampled_from(["slice", "select", "turn", "add", "mul", "copy", "fill"])
    step = st.tuples(ops, st.integers(0, 5), st.integers(0, 3))
    return tuple(draw(st.lists(step, min_size=2, max_size=8)))


def run_program(program: tuple[tuple[str, int, int], ...]) -> Step:
    def step(y: Tensor, x: Tensor) -> Tensor:
        views = [y]
        for name, which, number in program:
            view = views[which % len(views)]
            match name:
                case "slice":
                    views.append(view[:, number % 2 :])
                case "select" if view.dim() > 2:
                    views.append(view.select(-1, number % view.shape[-1]))
                case "turn" if view.dim() > 2:
                    views.append(view.transpose(1, 2))
                case "add":
                    view += number
                case "mul":
                    view.mul_(x.mean((1, 2)).view(-1, *(1,) * (view.dim() - 1)))
                case "copy":
                    view.copy_(x.flatten(1)[:, :1].view(-1, *(1,) * (view.dim() - 1)))
                case "fill":
                    view.fill_(number)
                case _:
                    pass
        total = y.sum((1, 2))
        for number, view in enumerate(views):
            total = total + (number + 1) * view.square().flatten(1).sum(1)
        return total

    return step


@settings(max_examples=settings.default.max_examples // 3)  # type: ignore[union-attr]
@given(programs())
@example((("turn", 0, 0), ("slice", 1, 1), ("add", 2, 1), ("mul", 0, 0), ("copy", 3, 0)))
def test_random_writes_are_captured(program: tuple[tuple[str, int, int], ...]) -> None:
    assert_captured(Writes(run_program(program)))
