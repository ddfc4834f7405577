"""Slices that divide a dim become one split, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.graph import ModelGraph
from tests.capture.helpers import assert_same_training

_aten = torch.ops.aten


class _Fused(nn.Module):
    """A fused projection of 12 features, cut as ``cuts`` says."""

    def __init__(self, cuts: tuple[slice, ...]) -> None:
        super().__init__()
        self.cuts = cuts
        self.fused = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.fused(x)
        parts = [fused[..., cut].square().mean() * (3 + 2 * i) for i, cut in enumerate(self.cuts)]
        return torch.stack(parts).sum()


def targets(graph: ModelGraph) -> list[object]:
    return [node.target for kind in graph.kinds.values() for node in kind.graph.nodes]


@pytest.mark.parametrize(
    ("cuts", "joined"),
    [
        ((slice(0, 6), slice(6, 9), slice(9, None)), True),
        ((slice(9, None), slice(0, 9)), True),
        ((slice(0, 6), slice(6, None), slice(0, 6)), True),  # one of them twice
        ((slice(0, 6), slice(5, None)), False),  # overlapping
        ((slice(0, 6), slice(7, None)), False),  # a feature is left out
        ((slice(0, None, 2), slice(1, None, 2)), False),  # every other
        ((slice(0, 6),), False),
    ],
)
def test_slices_that_divide_a_dim_are_a_split(cuts: tuple[slice, ...], joined: bool) -> None:
    model, batch = _Fused(cuts), {"x": torch.randn(4, 5, 6)}
    graph = assert_same_training(model, batch, lambda loss, _: loss, tolerance=1e-5)
    assert (_aten.split_with_sizes.default in targets(graph)) is joined
    assert (_aten.slice.Tensor in targets(graph)) is not joined


def test_slices_of_tables_stay() -> None:
    """They are constants: nothing is gained by a split of them."""

    class Table(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("table", torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.table[:3], self.table[3:]
            return (self.linear(x)[..., :3] * first + second).mean()

    graph = capture(Table(), {"x": torch.randn(4, 5, 6)})
    assert _aten.split_with_sizes.default not in targets(graph)
