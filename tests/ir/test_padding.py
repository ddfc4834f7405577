"""Dims that the ranks do not divide are padded: proved as all options, and by what they hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir import functional
from autopar.ir.errors import InputError
from autopar.ir.moves import assemble, move, take_shard
from autopar.ir.placement import padded, parse_state
from autopar.ir.rules import core
from autopar.ir.rules.registry import rule_or_replicated
from autopar.runtime.threads import run_ranks, thread_groups
from autopar.testing.prove import node_options, prove, sample_node
from tests.ir.samples import SAMPLES, Source


def test_texts_are_read_back():
    assert parse_state(str(padded(0, 50257))) == padded(0, 50257)
    assert str(padded(2, 9)) == "S(2, 9 padded)"
    for wrong in ("S(0, padded)", "S(0, 1:1 padded)", "S(0, 0 padded)"):
        with pytest.raises(InputError):
            parse_state(wrong)


@pytest.mark.parametrize(("size", "num_ranks"), [(7, 2), (7, 3), (9, 4), (3, 4), (5, 4)])
def test_shards_have_one_size_and_put_together_are_the_tensor(size: int, num_ranks: int):
    tensor = torch.arange(1.0, size + 1)
    state = padded(0, size)
    shards = [take_shard(tensor, state, rank, num_ranks) for rank in range(num_ranks)]
    assert {shard.shape for shard in shards} == {(-(-size // num_ranks),)}
    assert torch.equal(torch.cat(shards)[size:], torch.zeros(sum(map(len, shards)) - size))
    assert torch.equal(assemble(shards, state), tensor)


@pytest.mark.parametrize("target", ["I", "R", "P", "S(1)"])
def test_moves_drop_padding_and_fill_its_gradient_with_zeros(target: str):
    size, source = 5, "S(0, 5 padded)"
    whole = torch.randn(size, 4, dtype=torch.float64)
    groups = thread_groups("tp", 2)

    def rank(index: int) -> Tensor:
        held = take_shard(whole, parse_state(source), index, 2)
        held = held.where(held != 0, 99.0).clone().requires_grad_()  # padding holds anything
        moved = move(held, groups[index], source, target)
        assert not (moved == 99).any()
        moved.square().sum().backward()
        assert held.grad is not None
        return held.grad

    last = run_ranks(2, rank, meetings=[groups[0].meeting])[1]
    assert last[:2].all()
    assert torch.equal(last[2:], torch.zeros(1, 4, dtype=torch.float64))


PADDED = ["linear", "matmul", "embedding", "add.Tensor", "tanh", "transpose.int", "token_loss"]


@pytest.mark.parametrize("name", PADDED)
def test_padded_options_are_proved_like_others(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(core, "PADDED_FROM", 0)
    seen: list[str] = []

    @settings(max_examples=10)
    @given(st.integers(2, 3), st.data())
    def every_option(axis_size: int, data: st.DataObject) -> None:
        sample = SAMPLES[name](Source(data.draw, axis_size + 1))  # sizes divide by another number
        node = sample_node(sample).node
        options = node_options(node, rule_or_replicated(node), axis_size)
        seen.extend(str(option) for option in options if "padded" in str(option))
        prove(sample, axis_size)

    every_option()
    assert seen


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padded_classes_have_no_share_of_the_loss(smoothing: float):
    size, vocabulary, num_ranks = 3, 7, 3
    logits = torch.randn(5, vocabulary, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, -100, 2])
    loss, count = functional.token_loss(logits, targets, label_smoothing=smoothing)
    (expected,) = torch.autograd.grad(loss, logits)
    groups = thread_groups("tp", num_ranks)
    state = padded(1, vocabulary)

    def rank(index: int) -> Tensor:
        held = take_shard(logits.detach(), state, index, num_ranks).clone()
        real = min(size, vocabulary - index * size)
        held[:, real:] = 50.0  # padding that would win
        held.requires_grad_()
        found, total = functional.vocab_token_loss(
            held, targets, groups[index], label_smoothing=smoothing, vocabulary=vocabulary
        )
        torch.testing.assert_close(found, loss.detach())
        assert total == count
        found.backward()
        assert held.grad is not None
        assert not held.grad[:, real:].any()
        return held.grad

    shards = run_ranks(num_ranks, rank, meetings=[groups[0].meeting])
    torch.testing.assert_close(assemble(shards, state), expected)
