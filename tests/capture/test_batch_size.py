"""Numbers that follow from the batch size are captured as what ranks can share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.graph import LossKind
from tests.capture.helpers import captured


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).mean()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.square().sum() / x.shape[0],
        lambda x: x.square().sum() / (x.shape[0] * x.shape[1]),
        lambda x: x.sum((0, 1)) * (1 / x.shape[0]) + x.shape[0],
        lambda x: x.flatten(0, 1).square().sum(0) / (x.shape[0] * x.shape[1] - 1),
        lambda x: x - x.sum(0) / (x.shape[0] * x.shape[0]),
    ],
)
def test_numbers_of_the_batch_size_are_captured(function: Callable[[Tensor], Tensor]) -> None:
    model = Model(function)
    graph = capture(model, {"x": torch.ones(2, 4, 8)})
    assert graph.loss_kind is LossKind.MICRO_BATCH_MEAN
    for size in (1, 3):
        x = {"x": torch.randn(size, 4, 8, generator=torch.Generator().manual_seed(size))}
        loss, gradients = captured(graph, model, x)
        model.zero_grad()
        expected = model(x["x"])
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(gradients["linear.weight"], model.linear.weight.grad)
