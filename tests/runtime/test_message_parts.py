"""Of what all tensor ranks have alike, each sends its part; the next stage has the same bits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from autopar.ir.mesh import LAYOUT_AXES, TENSOR_AXIS, Mesh
from autopar.ir.placement import INVARIANT, REPLICATED, State, sharded
from autopar.ir.program import LocalTensor
from autopar.ir.schedule_checks import Channel
from autopar.runtime.communicator import Communicator, Work
from autopar.runtime.message_parts import part_of
from autopar.runtime.threads import ThreadCommunicator, run_mesh
from tests.runtime.cases import Setup
from tests.runtime.harness import lowered, train_on_threads


def value(shape: tuple[int, ...], state: State) -> LocalTensor:
    placement = tuple(state if axis == TENSOR_AXIS else INVARIANT for axis in LAYOUT_AXES)
    return LocalTensor(shape=shape, dtype=torch.float32, requires_grad=True, placement=placement)


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_are_gathered_to_what_was_sent(ranks: int) -> None:
    whole = torch.randn(3, 4, 8).transpose(0, 1)

    def rank(communicator: Communicator) -> tuple[Tensor, Tensor]:
        part = part_of(value((4, 3, 8), INVARIANT), communicator.group(TENSOR_AXIS))
        assert part is not None
        sent = part.of(whole)
        return sent, part.gather(sent)

    found = run_mesh(Mesh(tp=ranks), rank)
    assert torch.equal(torch.cat([sent for sent, _ in found]), whole.reshape(-1))
    assert all(torch.equal(gathered, whole) for _, gathered in found)


def test_other_values_are_sent_as_they_are() -> None:
    """Replicated ones have partial gradients; shards differ; and sizes that do not divide."""
    cases = [value((4, 8), REPLICATED), value((4, 8), sharded(0)), value((3, 5), INVARIANT)]

    def rank(communicator: Communicator) -> list[bool]:
        group = communicator.group(TENSOR_AXIS)
        return [part_of(case, group) is None for case in cases]

    assert run_mesh(Mesh(tp=2), rank) == [[True] * 3] * 2
    assert run_mesh(Mesh(tp=1), rank) == [[True] * 3]


@pytest.mark.parametrize("sequence", [False, True])
def test_a_rank_sends_a_tensor_ranks_share(sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether positions are sharded or all tensor ranks have all, what they send together is one
    copy of the activations and one of their gradients.
    """
    sent: list[int] = []
    start = ThreadCommunicator.start_send

    def counted(self: ThreadCommunicator, tensor: Tensor, channel: Channel) -> Work:
        if tensor.is_floating_point():
            sent.append(tensor.numel())
        return start(self, tensor, channel)

    monkeypatch.setattr(ThreadCommunicator, "start_send", counted)
    whole = Setup(mesh=Mesh(pp=2), sequence=sequence)
    train_on_threads(whole, num_steps=1)
    alone, sent[:] = sum(sent), []
    split = dataclasses.replace(whole, mesh=Mesh(pp=2, tp=2))
    train_on_threads(split, num_steps=1)
    assert sum(sent) == alone
    program, _, plan = lowered(whole)
    stream = math.prod(program.values[program.segments[1].received[0]].shape)
    assert alone >= 2 * stream * plan.batch.num_micro_batches
