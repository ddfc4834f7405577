"""Cost expressions of one capture, at any size, are what the user's own model does at that size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.capture import capture
from autopar.ir.graph import ModelGraph, evaluate
from autopar.solver.costs.work import computing_nodes, op_flops
from tests.models import LossFn, tiny_gpt2, tiny_llama, tiny_transformer

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm)
MODELS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "transformer": tiny_transformer,
}


def product_flops(model: ModelGraph, batch: int) -> list[int]:
    """FLOPs of matrix products with weights by their expressions: forward, and both passes."""
    forward = total = 0
    for block in model.blocks:
        for node in computing_nodes(model.kind_of(block)):
            if node.target in (aten.linear.default, aten.addmm.default, aten.mm.default):
                flops = [evaluate(size, batch) for size in op_flops(node)]
                forward += flops[0]
                total += sum(flops)
    return [forward, total]


def run_flops(
    module: nn.Module, inputs: dict[str, Tensor], loss_fn: LossFn | None, batch: int
) -> list[int]:
    """FLOPs that torch counts when the module itself runs on ``batch`` sequences."""
    batched = {
        name: torch.zeros((batch, *value.shape[1:]), dtype=value.dtype, device="meta")
        for name, value in inputs.items()
    }
    counts = []
    with FlopCounterMode(display=False) as counter:
        if loss_fn is None:
            loss = module(**batched).loss
        else:
            loss = loss_fn(module(batched["tokens"]), batched)
        counts.append(counted(counter))
        loss.backward()
    return [*counts, counted(counter)]


def counted(counter: FlopCounterMode) -> int:
    return sum(counter.get_flop_counts()["Global"].get(op, 0) for op in PRODUCTS)


@pytest.mark.parametrize("name", MODELS)
def test_flops_at_any_size_are_those_of_the_model_run_at_that_size(name: str):
    """20 random batches, at two lengths of sequence (which are captured anew)."""
    sizes = random.Random(name)
    for seq in (8, 24):
        module, inputs, *rest = MODELS[name](1, seq=seq)
        loss_fn = rest[0] if rest else None
        model = capture(module, inputs, loss_fn=loss_fn)
        module = module.to("meta")
        for batch in sizes.sample(range(1, 400), 10):
            expected = run_flops(module, inputs, loss_fn, batch)
            assert 0 < expected[0] < expected[1]
            assert product_flops(model, batch) == expected
