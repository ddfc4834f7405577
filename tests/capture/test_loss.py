"""A mean cross-entropy becomes a sum over tokens and their number; any other loss stays what it
is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture import capture, run_reference
from autopar.ir.graph import LossKind, info
from tests.capture.helpers import assert_same_training
from tests.models import VOCAB, tiny_transformer

Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def shifted(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    kept = logits[:, :-1].reshape(-1, VOCAB)
    return F.cross_entropy(kept, batch["targets"][:, 1:].reshape(-1))


def classes_second(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), batch["targets"])


def scaled(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    loss = F.cross_entropy(logits.view(-1, VOCAB), batch["targets"].view(-1), ignore_index=3)
    return 0.5 * loss / 4


def in_float(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten()).double()


def smoothed(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), label_smoothing=0.1)


def class_weighted(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    weight = torch.linspace(0.5, 2, VOCAB, dtype=logits.dtype, device=logits.device)
    targets = batch["targets"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, weight=weight, label_smoothing=0.2)


def of_logarithms(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), batch["targets"].flatten())


def of_logarithms_flat(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.nll_loss(F.log_softmax(logits.flatten(0, 1), 1), batch["targets"].flatten())


TOKEN_SUMS = [
    shifted,
    classes_second,
    scaled,
    in_float,
    smoothed,
    class_weighted,
    of_logarithms,
    of_logarithms_flat,
]


@pytest.mark.parametrize("loss_fn", TOKEN_SUMS)
def test_mean_cross_entropies_are_sums_over_tokens(loss_fn: Loss) -> None:
    model, batch, _ = tiny_transformer(layers=1)
    if loss_fn is scaled:
        batch["targets"] = batch["targets"].clamp_min(0)
    graph = assert_same_training(model, batch, loss_fn)
    assert graph.loss_kind is LossKind.TOKEN_SUM
    assert graph.weight is not None


def summed(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


def weighted(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    targets = batch["targets"]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(-1).sum()


def weighted_nll(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    targets = batch["targets"]
    logarithms = F.log_softmax(logits, -1).flatten(0, 1)
    losses = F.nll_loss(logarithms, targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(-1).sum()


def with_penalty(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    mean = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    return mean + 0.01 * logits.square().mean()


@pytest.mark.parametrize("loss_fn", [summed, weighted, weighted_nll, with_penalty])
def test_other_losses_belong_to_the_micro_batch(loss_fn: Loss) -> None:
    model, batch, _ = tiny_transformer(layers=1)
    graph = assert_same_training(model, batch, loss_fn, tolerance=1e-5)
    assert graph.loss_kind is LossKind.MICRO_BATCH_MEAN
    assert graph.weight is None


def test_logits_are_not_flattened() -> None:
    model, batch, loss_fn = tiny_transformer()
    graph = capture(model, batch, loss_fn=loss_fn)
    epilogue = graph.kind_of(graph.blocks[-1])
    calls = [str(node.target) for node in epilogue.graph.nodes if node.op == "call_function"]
    assert "aten.reshape.default" not in calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_over_tokens_are_as_wide_as_their_facts_say(dtype: torch.dtype) -> None:
    model, batch, _ = tiny_transformer(layers=1)
    batch["targets"] = batch["targets"].clamp_min(0)
    graph = capture(model, batch, loss_fn=scaled, compute_dtype=dtype)
    block, output = graph.producer(graph.loss)
    facts = info(graph.kind_of(graph.blocks[block]).outputs[output]).tensor
    total, _ = run_reference(graph, dict(model.named_parameters()), batch)
    assert total.dtype is facts.dtype is torch.promote_types(dtype, torch.float32)
