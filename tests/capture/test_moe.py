"""Experts are one op where it has what they compute; their balance loss is one of a micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, run_reference
from autopar.ir.graph import LossKind, ModelGraph
from autopar.ir.rules.registry import has_rule
from tests.capture.helpers import targets
from tests.zoo import ZOO, Batch

ROUTED = "autopar.routed_experts.default"


def assert_same(graph: ModelGraph, module: nn.Module, batch: Batch) -> None:
    """Loss and gradients of the graph are those of the module, which visits expert by expert."""
    module.zero_grad()
    output: Any = module(**batch)
    output.loss.backward()
    parameters = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in module.named_parameters()
    }
    total, weight = run_reference(graph, parameters, batch)
    loss = total if weight is None else total / weight
    loss.backward()
    torch.testing.assert_close(loss, output.loss, rtol=1e-5, atol=1e-6)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            parameters[name].grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name
        )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_balance_loss_is_of_a_micro_batch(name: str) -> None:
    module: Any = ZOO[name].build()
    module.config.output_router_logits = True
    module.router_aux_loss_coef = 0.5
    graph = capture(module, ZOO[name].inputs())
    assert graph.loss_kind is LossKind.MICRO_BATCH_MEAN
    assert ROUTED in targets(graph)
    for kind in graph.kinds.values():
        for node in kind.graph.nodes:
            assert node.op != "call_function" or "getitem" in node.name or has_rule(node), node
    assert_same(graph, module, ZOO[name].inputs(3, seed=1))


def test_capture_leaves_the_implementation_alone() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    module: Any = ZOO["mixtral"].build()
    before = module.config._experts_implementation
    known = set(ALL_EXPERTS_FUNCTIONS)
    capture(module, ZOO["mixtral"].inputs())
    assert module.config._experts_implementation == before
    assert set(ALL_EXPERTS_FUNCTIONS) == known


def test_experts_of_another_form_are_captured_by_their_products() -> None:
    """Those of gpt-oss clamp and interleave their gates."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=104,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    module: Any = GptOssForCausalLM(config)
    batch = ZOO["mixtral"].inputs()
    graph = capture(module, batch)
    assert ROUTED not in targets(graph)
    assert_same(graph, module, batch)


@torch.library.custom_op("test_capture::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scaled.register_fake
def _shape(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.factor = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient * ctx.factor, None


scaled.register_autograd(_backward, setup_context=_save)


class _Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = scaled(self.linear(x), 3.0).square().mean()
        return out


def test_an_op_with_its_own_backward_stays_whole() -> None:
    """What cannot be captured can be made one op, which is replicated."""
    model, x = _Opaque(), torch.randn(3, 4, 8)
    graph = capture(model, (x,))
    assert "test_capture.scaled.default" in targets(graph)
    weight = model.linear.weight.detach().clone().requires_grad_()
    loss, _ = run_reference(
        graph, {**dict(model.named_parameters()), "linear.weight": weight}, {"x": x}
    )
    expected = model(x)
    (found,) = torch.autograd.grad(loss, weight)
    (gradient,) = torch.autograd.grad(expected, model.linear.weight)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, gradient)
