"""Ranks as threads of one process: the collectives of ``AxisGroup`` without a backend, for tests and debugging."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from autopar.ir.axis_group import Reduction

Result = TypeVar("Result")

_TIMEOUT_S = 60.0


class Meeting:
    """Where the threads of one group exchange tensors. A failed thread breaks it, so that no other waits."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in order of rank."""
        self.slots[rank] = tensor.detach()
        self.barrier.wait(_TIMEOUT_S)
        tensors = [slot for slot in self.slots if slot is not None]
        self.barrier.wait(_TIMEOUT_S)
        return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadGroup:
    """An ``AxisGroup`` over threads."""

    name: str
    rank: int
    size: int
    meeting: Meeting = field(repr=False)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        stacked = torch.stack(self.meeting.exchange(self.rank, tensor))
        return stacked.amax(0) if reduction == "max" else stacked.sum(0, dtype=tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, tensor))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        tensors = self.meeting.exchange(self.rank, tensor)
        own = [other.chunk(self.size)[self.rank] for other in tensors]
        return torch.stack(own).sum(0, dtype=tensor.dtype)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        tensors = self.meeting.exchange(self.rank, tensor)
        return torch.cat([other.chunk(self.size)[self.rank] for other in tensors])


def thread_groups(name: str, size: int) -> tuple[ThreadGroup, ...]:
    """One group of ``size`` ranks, seen from each of them."""
    meeting = Meeting(size)
    return tuple(ThreadGroup(name=name, rank=rank, size=size, meeting=meeting) for rank in range(size))


def run_ranks(
    num_ranks: int, function: Callable[[int], Result], *, meetings: Sequence[Meeting] = ()
) -> list[Result]:
    """``function(rank)`` on one thread for each rank; the results in order of rank.

    The first exception of any rank is raised here, after ``meetings`` were broken so that no rank waits for it.
    """
    results: dict[int, Result] = {}
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:  # the caller raises it: a rank must not die silently
            errors.append((rank, error))
            for meeting in meetings:
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        causes = [error for _, error in errors if not isinstance(error, threading.BrokenBarrierError)]
        raise causes[0] if causes else errors[0][1]
    return [results[rank] for rank in range(num_ranks)]
