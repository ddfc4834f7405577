"""Integers in arithmetic: in every compute dtype a program computes what eager PyTorch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.mesh import Mesh
from autopar.ir.plan import SegmentPlan
from autopar.passes import lower
from tests.passes.harness import run_program
from tests.passes.layouts import cheapest, choose_layout, megatron


class _Positions(nn.Module):
    """Integers times, over and to the power of Python floats; counts of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        scale = (ids * 0.3 + ids / 7).sin() + (ids + 1) ** 0.5 + (ids > 2) * 0.7
        row = torch.arange(x.shape[0], device=x.device).view(-1, 1) * 2 + 1
        column = torch.arange(x.shape[1], device=x.device) * 0.1
        result = self.linear(x) * (scale * column / row).unsqueeze(-1)
        return result.square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp_shard=2, tp=2)], ids=["alone", "dp2-tp2"])
def test_integers_become_floats_as_in_eager_pytorch(dtype: torch.dtype, mesh: Mesh) -> None:
    model = _Positions().to(dtype)
    inputs = {"ids": torch.randint(0, 5, (4, 6)), "x": torch.randn(4, 6, 8, dtype=dtype)}
    graph = capture(model, inputs, compute_dtype=dtype)
    layout = choose_layout(graph, mesh, batch=4, pin=megatron(graph), choose=cheapest)
    program = lower(
        graph,
        layout,
        mesh=mesh,
        micro_batch_size=4 // mesh.batch_ranks,
        segments=[SegmentPlan(stage=0, first_block=0, last_block=len(graph.blocks) - 1)],
    )
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = run_program(program, graph, mesh, parameters, inputs)
    torch.set_default_dtype(dtype)  # as if all were computed in it
    try:
        loss = model(**inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    tolerance = 1e-9 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(found.loss, loss.detach(), rtol=tolerance, atol=tolerance)
    for name, parameter in model.named_parameters():
        gradient = found.gradients[name]
        torch.testing.assert_close(gradient, parameter.grad, rtol=tolerance, atol=tolerance)
