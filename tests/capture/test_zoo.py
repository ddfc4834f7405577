"""Every model of the zoo is captured as what it computes."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture, run_reference
from autopar.ir.graph import LossKind, ModelGraph
from tests.capture.helpers import merged_sizes
from tests.zoo import ZOO, ZooModel

CASES = [(model, attention) for model in ZOO.values() for attention in model.attentions]
IDS = [f"{model.name}-{attention}" for model, attention in CASES]


@pytest.mark.parametrize(("model", "attention"), CASES, ids=IDS)
def test_loss_and_gradients_equal_eager(model: ZooModel, attention: str) -> None:
    """At batch sizes that the model was not captured at; no op has tokens merged into one dim."""
    module = model.build(attention)
    graph = capture(module, model.inputs(), loss_fn=model.loss_fn)
    assert graph.loss_kind is LossKind.TOKEN_SUM
    assert merged_sizes(graph) == set()
    for size in (1, 3):
        batch = model.inputs(size, seed=size)
        module.zero_grad()
        expected = model.loss(module, batch)
        expected.backward()
        parameters = {
            name: parameter.detach().clone().requires_grad_()
            for name, parameter in module.named_parameters()
        }
        total, weight = run_reference(graph, parameters, batch)
        assert weight is not None
        (total / weight).backward()
        torch.testing.assert_close(total / weight, expected, rtol=1e-6, atol=1e-6)
        largest = max(float(p.grad.norm()) for p in module.parameters() if p.grad is not None)
        for name, parameter in module.named_parameters():
            found = parameters[name].grad
            assert (found is None) == (parameter.grad is None), name
            if found is not None and parameter.grad is not None:
                error = float((found - parameter.grad).norm())
                assert error <= 1e-5 * max(float(parameter.grad.norm()), 1e-3 * largest), name


def kinds_in_order(graph: ModelGraph) -> str:
    return " ".join(block.kind.removeprefix("block") for block in graph.blocks)


@pytest.mark.parametrize(
    ("name", "layers", "kinds"),
    [
        ("llama", 3, "0 1 1 1 2"),
        ("gemma2", 4, "0 1 2 1 2 3"),  # windows alternate
        ("gemma3", 4, "0 1 2 1 2 3"),
        ("t5", 3, "0 1 2 2 3 4 5 5 6"),  # first layers compute the bias, the others read it
        ("t5", 2, "0 1 2 3 4 5 6"),
        ("qwen3_moe", 3, "0 1 1 1 2"),
        ("vit", 3, "0 1 1 1 2"),
        ("torch_encoder", 3, "0 1 1 1 2"),
    ],
)
def test_layers_that_are_alike_are_of_one_kind(name: str, layers: int, kinds: str) -> None:
    model = ZOO[name]
    module = model.build(layers=layers)
    graph = capture(module, model.inputs(), loss_fn=model.loss_fn)
    assert kinds_in_order(graph) == kinds
