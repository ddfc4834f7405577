"""What a model computes on tokens in one dim is captured on batch and sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture, run_reference
from autopar.ir.graph import BATCH
from tests.capture.helpers import merged_sizes
from tests.zoo import SEQ, VOCAB

WIDTH, HEADS = 12, 3
Flat = Callable[["Merging", Tensor], Tensor]
"""What is computed from ``hidden`` [b·s, 12]; the result has the tokens in its first dim."""


class Merging(nn.Module):
    def __init__(self, function: Flat) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.function = function

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        out = self.function(self, hidden.view(-1, WIDTH))
        return out.reshape(*tokens.shape, -1)


def gated(model: Merging, x: Tensor) -> Tensor:
    gate, up = F.linear(x, model.weight, model.bias).chunk(2, dim=-1)
    return F.silu(gate) * up + x[:, :6].mean(-1, keepdim=True)


def conv1d(model: Merging, x: Tensor) -> Tensor:
    return torch.addmm(model.bias, x, model.weight).tanh()


def routed(model: Merging, x: Tensor) -> Tensor:
    """Top-k routing whose result is scattered back over the experts."""
    scores = F.linear(x, model.weight).float().softmax(dim=-1)
    best, where = torch.topk(scores, 3, dim=-1)
    best = best / best.sum(dim=-1, keepdim=True)
    kept = torch.zeros_like(scores).scatter(1, where, best)
    chosen = F.one_hot(where, WIDTH).sum(1).to(x.dtype)
    return kept.type_as(x) * x + chosen + scores.gather(1, where).sum(-1, keepdim=True)


def normalized(model: Merging, x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), model.bias) * torch.where(x > 0, x, model.bias)


def stacked(model: Merging, x: Tensor) -> Tensor:
    twice = torch.cat([x, x * model.bias], dim=1).view(-1, 2, WIDTH).transpose(1, 2)
    return twice.cumsum(1).permute(2, 0, 1)[1].unsqueeze(1).expand(-1, 2, -1).amax(1)


def attended(model: Merging, x: Tensor) -> Tensor:
    """Heads are merged with the batch, as in Bloom, and biased by a tensor repeated over it."""
    batch = x.shape[0] // SEQ
    heads = x.view(batch, SEQ, HEADS, -1).transpose(1, 2).reshape(batch * HEADS, SEQ, -1)
    slopes = torch.linspace(0.1, 0.3, HEADS, device=x.device).view(-1, 1, 1)
    alibi = (slopes * torch.arange(SEQ, device=x.device)).repeat(batch, 1, 1)
    scores = torch.baddbmm(alibi, heads, heads.transpose(1, 2), beta=0.5, alpha=0.25)
    out = torch.bmm(scores.softmax(-1), heads).view(batch, HEADS, SEQ, -1)
    return F.linear(out.transpose(1, 2).reshape(-1, WIDTH), model.weight)


def balanced(model: Merging, x: Tensor) -> Tensor:
    """Tokens meet in a mean over all of them."""
    scores = F.linear(x, model.weight).softmax(-1)
    return x * (scores.mean(0) * scores.sum(dim=(0, 1))).sum()


def squared(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize(
    "function", [gated, conv1d, routed, normalized, stacked, attended, balanced]
)
def test_tokens_keep_their_dims(function: Flat) -> None:
    model = Merging(function)
    tokens = torch.randint(0, VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(0))
    graph = capture(model, (tokens,), loss_fn=squared)
    assert merged_sizes(graph) == set()
    parameters = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    loss, _ = run_reference(graph, parameters, {"tokens": tokens})
    expected = squared(model(tokens), None)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameters[name].grad, parameter.grad, msg=name)


def sorted_tokens(model: Merging, x: Tensor) -> Tensor:
    order = x.sum(-1).argsort()
    return F.linear(x[order], model.weight)[order.argsort()]


def test_what_mixes_tokens_stays_merged() -> None:
    model = Merging(sorted_tokens)
    tokens = torch.randint(0, VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(0))
    graph = capture(model, (tokens,), loss_fn=squared)
    assert merged_sizes(graph) == {SEQ * BATCH}
    loss, _ = run_reference(graph, dict(model.named_parameters()), {"tokens": tokens})
    torch.testing.assert_close(loss, squared(model(tokens), None))
