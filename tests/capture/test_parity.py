"""A captured graph computes what the model computes, at batch sizes that it was not captured at."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from autopar.capture import capture, run_reference
from autopar.ir.errors import CaptureError
from autopar.ir.graph import LossKind, info
from tests.capture.helpers import assert_same_training, captured, eager, targets
from tests.models import tiny_gpt2, tiny_llama, tiny_transformer


def test_llama_trains_the_same() -> None:
    model, batch = tiny_llama()
    graph = assert_same_training(model, batch)
    assert graph.loss_kind is LossKind.TOKEN_SUM
    assert "aten.view.default" not in targets(graph)


def test_gpt2_trains_the_same() -> None:
    model, batch = tiny_gpt2()
    graph = assert_same_training(model, batch)
    assert graph.loss_kind is LossKind.TOKEN_SUM
    assert targets(graph).isdisjoint({"aten.addmm.default", "aten.dropout.default"})


def test_hand_written_transformer_trains_the_same() -> None:
    model, batch, loss_fn = tiny_transformer()
    graph = assert_same_training(model, batch, loss_fn)
    assert graph.loss_kind is LossKind.TOKEN_SUM
    assert "aten.split_with_sizes.default" in targets(graph)


def test_capture_leaves_the_model_alone() -> None:
    model, batch = tiny_llama()
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    capture(model, batch, compute_dtype=torch.bfloat16)
    assert not model.training
    assert getattr(model, "config").use_cache  # noqa: B009
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.dtype is before[name].dtype


def test_threads_that_capture_at_once_wait_for_each_other() -> None:
    model, batch = tiny_llama(seq=4)
    alone = capture(model, batch).fingerprint
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(capture, model, batch) for _ in range(2)]
    assert [one.result().fingerprint for one in found] == [alone, alone]


def test_dropout_is_captured() -> None:
    model, batch = tiny_gpt2(dropout=0.1)
    assert "aten.dropout.default" in targets(capture(model, batch))


def test_bfloat16_computes_rope_in_float32() -> None:
    model, batch = tiny_llama(seq=64)
    exact = capture(model, batch)
    rounded = capture(model, batch, compute_dtype=torch.bfloat16)
    wide = [tensor for tensor in exact.constants.values() if tensor.is_floating_point()]
    narrow = [tensor for tensor in rounded.constants.values() if tensor.is_floating_point()]
    assert len(wide) == len(narrow) == 2
    for table, exact_table in zip(narrow, wide, strict=True):
        assert table.dtype is torch.bfloat16
        assert torch.equal(table, exact_table.to(torch.bfloat16))


def test_bfloat16_loss_equals_eager_bfloat16() -> None:
    model, batch = tiny_llama()
    graph = capture(model, batch, compute_dtype=torch.bfloat16)
    rotary = model.get_submodule("model.rotary_emb")
    inv_freq = rotary.get_buffer("inv_freq").clone()
    low = model.to(torch.bfloat16)
    rotary.register_buffer("inv_freq", inv_freq, persistent=False)
    loss, gradients = eager(low, batch, None)
    found, found_gradients = captured(graph, low, batch)
    torch.testing.assert_close(found, loss, rtol=1e-3, atol=1e-3)
    for name, gradient in gradients.items():  # the causal kernel rounds other than the masked one
        difference = (found_gradients[name] - gradient).float().norm()
        assert difference <= 0.01 * gradient.float().norm(), name


def test_float64_is_never_narrowed() -> None:
    model, batch = tiny_llama()
    graph = capture(model, batch, compute_dtype=torch.float64)
    total, weight = run_reference(graph, dict(model.double().named_parameters()), batch)
    assert weight is not None
    assert total.dtype is weight.dtype is torch.float64
    for kind in graph.kinds.values():
        for node in kind.graph.nodes:
            assert torch.float32 not in node.args
            assert torch.float32 not in node.kwargs.values()
    assert all(
        not tensor.is_floating_point() or tensor.dtype is torch.float64
        for tensor in graph.constants.values()
    )
    assert torch.get_default_dtype() is torch.float32


def test_tied_weights_are_one_parameter() -> None:
    model, batch = tiny_gpt2()
    graph = capture(model, batch)
    tied = graph.parameters["transformer.wte.weight"]
    assert tied.names == ("transformer.wte.weight", "lm_head.weight")
    assert "lm_head.weight" not in graph.parameters
    readers = [
        block.index
        for block in graph.blocks
        if any(value.name == tied.name for value in block.bindings)
    ]
    assert readers == [0, len(graph.blocks) - 1]


def test_the_same_tensor_given_twice_stays_two_inputs() -> None:
    model, batch = tiny_llama()
    ids = batch["input_ids"]
    graph = capture(model, {"input_ids": ids, "labels": ids})
    assert list(graph.inputs) == ["input_ids", "labels"]
    loss, _ = captured(graph, model, batch)
    torch.testing.assert_close(loss, eager(model, batch, None)[0])


def test_frozen_parameters_get_no_gradient() -> None:
    model, batch = tiny_llama()
    model.get_parameter("model.embed_tokens.weight").requires_grad_(False)
    graph = capture(model, batch)
    assert not graph.parameters["model.embed_tokens.weight"].requires_grad
    prologue = graph.kind_of(graph.blocks[0])
    assert not any(info(node).tensor.requires_grad for node in prologue.outputs)


class _Tower(nn.Module):
    """Buffers, a mask made in forward, in-place ops and a position-dependent scale."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(x.shape[0], 1, 8, device=x.device)
        mask.add_(self.scale)
        hidden = self.inner(x) * mask
        hidden += 1
        return (hidden * hidden).mean()


def test_buffers_and_in_place_ops() -> None:
    model = _Tower()
    x = torch.randn(2, 4, 8)
    graph = capture(model, (x,))
    assert graph.loss_kind is LossKind.MICRO_BATCH_MEAN
    assert graph.weight is None
    assert list(graph.inputs) == ["x"]
    for size in (1, 3):
        batch = torch.randn(size, 4, 8)
        loss, _ = captured(graph, model, {"x": batch})
        torch.testing.assert_close(loss, model(batch).detach())


class _Routed(nn.Module):
    """An in-place op on one result of an op with several, and a literal made on the input's
    device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, _ = torch.topk(self.gate(x).softmax(-1), 2, dim=-1)
        best /= best.sum(-1, keepdim=True)
        limit = torch.tensor(0.6, device=x.device)
        with torch.no_grad():
            large = best > limit
        return torch.where(large, limit, best).mean()


def test_literals_and_in_place_ops_on_results() -> None:
    model = _Routed()
    x = torch.randn(2, 4, 8)
    graph = capture(model, (x,))
    loss, gradients = captured(graph, model, {"x": x})
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients["gate.weight"], model.gate.weight.grad)


class _PartlyDetached(nn.Module):
    """One parameter reaches the loss detached only, one without gradients, one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(8, 8)
        self.detached = nn.Parameter(torch.ones(8))
        self.without = nn.Parameter(torch.ones(8))
        self.both = nn.Parameter(torch.ones(8))
        self.unused = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.detached.detach() + self.both.detach()
        with torch.no_grad():
            x = x + self.without.exp()
        return (self.trained(x) * self.both).mean()


def test_parameters_that_no_gradient_reaches_are_not_trained() -> None:
    """Eager gives them no gradient, so that an optimizer does not decay them either."""
    model = _PartlyDetached()
    x = torch.randn(2, 4, 8)
    graph = capture(model, (x,))
    trained = {name for name, parameter in graph.parameters.items() if parameter.requires_grad}
    assert trained == {"trained.weight", "trained.bias", "both", "unused"}
    _, gradients = captured(graph, model, {"x": x})
    model(x).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in gradients), name
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad)


class _FloatInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


def test_float_inputs_are_taken_in_the_compute_type() -> None:
    model = _FloatInput()
    batch = {"x": torch.randn(2, 8), "y": torch.randn(2, 3), "mask": torch.ones(2, 3).bool()}
    for dtype in (torch.float64, torch.bfloat16):
        graph = capture(
            model,
            batch,
            loss_fn=lambda output, b: torch.nn.functional.mse_loss(output * b["mask"], b["y"]),
            compute_dtype=dtype,
        )
        assert [given.dtype for given in graph.inputs.values()] == [dtype, dtype, torch.bool]


class _Draws(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.how == "like":
            return (x * torch.bernoulli(torch.ones_like(x[:, :1]))).mean()
        if self.how == "size":
            return (x + torch.randn(8, device=x.device)).mean()
        return (x * torch.multinomial(x.detach()[:, 0].softmax(-1), 1).unsqueeze(-1)).mean()


def test_random_numbers_that_have_a_place_are_captured() -> None:
    x = torch.randn(2, 4, 8)
    assert "aten.bernoulli.default" in targets(capture(_Draws("like"), (x,)))
    assert "aten.randn.default" in targets(capture(_Draws("size"), (x,)))
    with pytest.raises(CaptureError, match="in a way that ranks cannot agree on"):
        capture(_Draws("multinomial"), (x,))


class _EmptySlice(nn.Module):
    """As Phi-3 rotates all features of a head: the rest is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return torch.cat([x[..., :8].sin(), x[..., 8:]], dim=-1).mean()


def test_nothing_is_concatenated_to_nothing() -> None:
    model = _EmptySlice()
    x = torch.randn(2, 4, 8)
    graph = capture(model, (x,))
    assert "aten.cat.default" not in targets(graph)
    torch.testing.assert_close(captured(graph, model, {"x": x})[0], model(x).detach())
