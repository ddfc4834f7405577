"""What the capture tests share: eager runs, comparisons and renamed models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.capture import capture, run_reference
from autopar.ir.graph import BATCH, ModelGraph, info
from tests.models import LossFn

Batch = dict[str, Tensor]


def eager(model: nn.Module, batch: Batch, loss_fn: LossFn | None) -> tuple[Tensor, Batch]:
    """Loss and gradients of the model itself."""
    model.zero_grad()
    if loss_fn is None:
        loss = model(**batch).loss
    else:
        loss = loss_fn(model(next(iter(batch.values()))), batch)
    loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return loss.detach(), gradients


def captured(graph: ModelGraph, model: nn.Module, batch: Batch) -> tuple[Tensor, Batch]:
    """Loss and gradients of the captured graph with the model's parameters."""
    parameters = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    total, weight = run_reference(graph, parameters, batch)
    loss = total if weight is None else total / weight
    loss.backward()
    gradients = {
        name: tensor.grad for name, tensor in parameters.items() if tensor.grad is not None
    }
    return loss.detach(), gradients


def assert_same_training(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None = None, *, tolerance: float = 1e-6
) -> ModelGraph:
    """Capture once; loss and all gradients equal eager at batch sizes 1, 3 and 5."""
    graph = capture(model, batch, loss_fn=loss_fn)
    for size in (1, 3, 5):
        resized = {name: resize(tensor, size) for name, tensor in batch.items()}
        loss, gradients = eager(model, resized, loss_fn)
        found, found_gradients = captured(graph, model, resized)
        torch.testing.assert_close(found, loss, rtol=tolerance, atol=tolerance)
        assert found_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                found_gradients[name], gradient, rtol=tolerance, atol=tolerance, msg=name
            )
    return graph


def resize(tensor: Tensor, batch: int) -> Tensor:
    """``tensor`` with ``batch`` sequences, which all differ."""
    rows = [tensor[row % len(tensor)].roll(row) for row in range(batch)]
    return torch.stack(rows)


def targets(graph: ModelGraph) -> set[str]:
    """The distinct ops of a captured model."""
    return {
        str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.name
        for kind in graph.kinds.values()
        for node in kind.graph.nodes
        if node.op == "call_function"
    }


def structure(graph: ModelGraph) -> list[tuple[str, list[str]]]:
    """Kinds block by block, with the roles of what each reads."""
    return [(block.kind, [value.role.value for value in block.bindings]) for block in graph.blocks]


def merged_sizes(graph: ModelGraph) -> set[object]:
    """Sizes that are neither the batch nor a number."""
    return {
        size
        for kind in graph.kinds.values()
        for node in kind.graph.nodes
        if node.op == "call_function"
        for tensor in info(node).tensors
        for size in tensor.shape
        if not isinstance(size, int) and size != BATCH
    }
