"""The program of one rank: its groups are bound, and what it makes is on its device."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from autopar.ir.program import Program, bind_axes

_aten = torch.ops.aten


def program() -> Program:
    """``x + arange(3) + full([3], 2)``, and zeros like ``x``."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    counted = graph.call_function(_aten.arange.default, (3,), {"dtype": torch.float32})
    full = graph.call_function(_aten.full.default, ([3], 2.0), {"dtype": torch.float32})
    total = graph.call_function(_aten.add.Tensor, (x, counted))
    total = graph.call_function(_aten.add.Tensor, (total, full))
    zeros = graph.call_function(_aten.new_zeros.default, (x, [2]))
    graph.output((total, zeros))
    return Program(kinds={"only": fx.GraphModule({}, graph)}, segments=(), values={}, parameters={})


def run(bound: Program, x: Tensor) -> tuple[Tensor, Tensor]:
    total, zeros = bound.kinds["only"](x)
    return total, zeros


def test_tensors_made_from_nothing_are_on_the_ranks_device() -> None:
    """The meta device stands for a GPU: it takes part in no sum with a tensor of the CPU."""
    whole, device = program(), torch.device("meta")
    total, zeros = run(bind_axes(whole, {}, device), torch.ones(3, device=device))
    assert total.device == zeros.device == device
    total, _ = run(bind_axes(whole, {}, torch.device("cpu")), torch.ones(3))
    assert total.tolist() == [3, 4, 5]


def test_binding_leaves_the_program_as_it_was() -> None:
    whole = program()
    before = str(whole.kinds["only"].graph)
    bind_axes(whole, {}, torch.device("meta"))
    assert str(whole.kinds["only"].graph) == before
    total, _ = run(whole, torch.ones(3))
    assert total.tolist() == [3, 4, 5]
