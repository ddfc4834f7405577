"""Tracing repeated modules once gives the graph that tracing all of them gives, or is not done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, once, run_reference
from autopar.ir.graph import ModelGraph
from tests.capture.helpers import Batch, assert_same_training, structure
from tests.models import HIDDEN, VOCAB, LossFn, tiny_gpt2, tiny_llama, tiny_transformer, token_batch

TOKENS = token_batch()
BATCH = {"tokens": TOKENS["input_ids"], "labels": TOKENS["labels"]}


def loss_of(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


class Traced:
    """Counts the modules that were traced and those that stood for others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.templates = 0
        self.copies = 0
        expand = once.Once.expand

        def counting(tracer: once.Once, *args: Any) -> None:
            self.templates += len(tracer._templates)
            self.copies += len(tracer._calls)
            expand(tracer, *args)

        monkeypatch.setattr(once.Once, "expand", counting)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    return Traced(monkeypatch)


def in_full(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, batch: Batch, loss_fn: LossFn | None
) -> ModelGraph:
    def no_candidates(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return iter(())

    with monkeypatch.context() as patch:
        patch.setattr(once, "_candidates", no_candidates)
        return capture(model, batch, loss_fn=loss_fn)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_transformer])
def test_the_graph_is_that_of_a_full_trace(
    build: Callable[..., tuple[Any, ...]], traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, *rest = build(layers=4)
    loss_fn = rest[0] if rest else None
    graph = capture(model, batch, loss_fn=loss_fn)
    assert (traced.templates, traced.copies) == (1, 3)
    full = in_full(monkeypatch, model, batch, loss_fn)
    assert structure(graph) == structure(full)
    assert graph.fingerprint == full.fingerprint
    assert [block.path for block in graph.blocks] == [block.path for block in full.blocks]
    assert [block.bindings for block in graph.blocks] == [block.bindings for block in full.blocks]


class Numbered(nn.Module):
    """A layer that knows its number and may use it."""

    def __init__(self, number: int, *, uses_number: bool) -> None:
        super().__init__()
        self.number = number
        self.uses_number = uses_number
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.number % 2 if self.uses_number else 1
        out: Tensor = x + scale * self.linear(x).tanh()
        return out


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def test_an_attribute_that_is_not_read_may_differ(traced: Traced) -> None:
    model = Stack(*(Numbered(number, uses_number=False) for number in range(4)))
    graph = assert_same_training(model, BATCH, loss_of)
    assert (traced.templates, traced.copies) == (1, 3)
    assert list(graph.multiplicity().values()) == [1, 4, 1]


def test_an_attribute_that_is_read_may_not_differ(traced: Traced) -> None:
    model = Stack(*(Numbered(number, uses_number=True) for number in range(4)))
    graph = assert_same_training(model, BATCH, loss_of)
    assert (traced.templates, traced.copies) == (4, 0)
    assert [block.kind for block in graph.blocks[1:-1]] == ["block1", "block2"] * 2


FOUND: list[Tensor] = []


class Leaking(nn.Module):
    """A layer whose inner values reach the loss by a side channel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.linear(x)
        FOUND.append(inner.square().mean())
        out: Tensor = x + inner.tanh()
        return out


class WithPenalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(*(Leaking() for _ in range(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        FOUND.clear()
        out = self.stack(tokens).square().mean()
        loss: Tensor = out + torch.stack(FOUND).sum()
        return loss


def test_a_module_that_leaks_is_traced_in_full() -> None:
    model = WithPenalty()
    tokens = {"tokens": BATCH["tokens"]}
    loss, weight = run_reference(capture(model, tokens), dict(model.named_parameters()), tokens)
    assert weight is None
    torch.testing.assert_close(loss, model(BATCH["tokens"]))


class Tupled(nn.Module):
    """A layer that passes an argument through and changes another in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, bias = state
        x = x + self.linear(x) + bias
        x += 1
        return x, bias


class TupledStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.Sequential(*(Tupled() for _ in range(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        out: Tensor = self.layers((x, x.mean(-1, keepdim=True)))[0]
        return out


def test_tuples_and_passed_through_arguments(traced: Traced) -> None:
    graph = assert_same_training(TupledStack(), BATCH, loss_of)
    assert (traced.templates, traced.copies) == (1, 2)
    assert list(graph.multiplicity().values()) == [1, 3, 1]
