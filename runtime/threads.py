"""Ranks as threads of one process: groups and channels without a backend, for tests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from autopar.ir.axis_group import Reduction
from autopar.ir.mesh import Mesh
from autopar.ir.schedule_checks import Channel
from autopar.runtime.checkpoint_files import write_alone
from autopar.runtime.communicator import WORLD_AXIS, CommunicationError, Done, Group, Work

Result = TypeVar("Result")

_TIMEOUT_S = 60.0
_POLL_S = 0.02


class Meeting:
    """Where the threads of one group exchange tensors. A failed thread breaks it, so that no other
    waits.
    """

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Tensor | None] = [None] * size

    def exchange(
        self, rank: int, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        """``combine`` of every rank's tensor, in order of rank; none changes before all have
        combined.
        """
        self.slots[rank] = tensor.detach()
        self.meet()
        combined = combine([slot for slot in self.slots if slot is not None])
        self.meet()
        return combined

    def meet(self) -> None:
        """Wait for all ranks.

        Raises:
            CommunicationError: a rank failed, or did not come.
        """
        try:
            self.barrier.wait(_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise CommunicationError("another thread rank failed, or did not come") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadGroup:
    """A ``Group`` over threads; what is started is done at once."""

    name: str
    rank: int
    size: int
    meeting: Meeting = field(repr=False)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        def combine(tensors: list[Tensor]) -> Tensor:
            stacked = torch.stack(tensors)
            return stacked.amax(0) if reduction == "max" else stacked.sum(0, dtype=tensor.dtype)

        return self.meeting.exchange(self.rank, tensor, combine)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self.meeting.exchange(self.rank, tensor, torch.cat)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        def combine(tensors: list[Tensor]) -> Tensor:
            own = [other.chunk(self.size)[self.rank] for other in tensors]
            return torch.stack(own).sum(0, dtype=tensor.dtype)

        return self.meeting.exchange(self.rank, tensor, combine)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        def combine(tensors: list[Tensor]) -> Tensor:
            return torch.cat([other.chunk(self.size)[self.rank] for other in tensors])

        return self.meeting.exchange(self.rank, tensor, combine)

    def all_to_all_uneven(
        self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        splits = torch.tensor(sent)
        everyones = self.meeting.exchange(self.rank, splits, torch.stack).tolist()

        def combine(tensors: list[Tensor]) -> Tensor:
            pairs = zip(tensors, everyones, strict=True)
            return torch.cat([other.split(counts)[self.rank] for other, counts in pairs])

        exchanged = self.meeting.exchange(self.rank, tensor, combine)
        assert exchanged.shape[0] == sum(received), "ranks disagree about the rows that they send"
        return exchanged

    def start_all_gather(self, output: Tensor, shard: Tensor) -> Work:
        output.copy_(self.all_gather(shard))
        return Done()

    def start_reduce_scatter(self, output: Tensor, whole: Tensor) -> Work:
        output.copy_(self.reduce_scatter(whole))
        return Done()

    def start_all_reduce(self, tensor: Tensor) -> Work:
        tensor.copy_(self.all_reduce(tensor))
        return Done()


class ThreadWorld:
    """What the thread ranks of a mesh share."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.failure: str | None = None
        self._lock = threading.Lock()
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._queues: dict[tuple[Channel, int], queue.SimpleQueue[Tensor]] = {}
        self._tensors: dict[str, Tensor] = {}

    def group(self, name: str, ranks: tuple[int, ...], rank: int) -> ThreadGroup:
        """The group of ``ranks`` as ``rank`` sees it."""
        with self._lock:
            meeting = self._meetings.setdefault((hash(name), *ranks), Meeting(len(ranks)))
            if self.failure is not None:
                meeting.barrier.abort()
        return ThreadGroup(name=name, rank=ranks.index(rank), size=len(ranks), meeting=meeting)

    def queue(self, channel: Channel, plane: int) -> queue.SimpleQueue[Tensor]:
        """The messages of a channel between ranks with the same data and tensor coordinates."""
        with self._lock:
            return self._queues.setdefault((channel, plane), queue.SimpleQueue())

    def fail(self, message: str) -> None:
        """Break all that waits; the first message stays."""
        with self._lock:
            self.failure = self.failure or message
            for meeting in self._meetings.values():
                meeting.barrier.abort()

    def collect(self, tensors: Mapping[str, Tensor]) -> None:
        """Add a rank's part of a checkpoint."""
        with self._lock:
            self._tensors.update(tensors)

    def take_collected(self) -> dict[str, Tensor]:
        """All ranks' parts."""
        with self._lock:
            collected, self._tensors = self._tensors, {}
        return collected

    def communicator(self, rank: int) -> ThreadCommunicator:
        """The world as ``rank`` sees it."""
        return ThreadCommunicator(self, rank)


class _Receive:
    def __init__(self, world: ThreadWorld, buffer: Tensor, messages: queue.SimpleQueue[Tensor]):
        self._world, self._buffer, self._messages = world, buffer, messages

    def wait(self) -> None:
        waited_s = 0.0
        while True:
            try:
                self._buffer.copy_(self._messages.get(timeout=_POLL_S))
                return
            except queue.Empty:
                waited_s += _POLL_S
            if self._world.failure is not None or waited_s > _TIMEOUT_S:
                raise CommunicationError(f"no message came in {waited_s:.0f} s")

    def is_done(self) -> bool:
        return False


class ThreadCommunicator:
    """A ``Communicator`` of a thread rank."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.mesh = world.mesh
        self.rank = rank
        self.device = torch.empty(0).device
        self._world = world
        self._groups = {
            axis: world.group(axis, ranks, rank)
            for axis in self.mesh.group_axes()
            for ranks in self.mesh.groups(axis)
            if rank in ranks
        }
        everyone = tuple(range(self.mesh.num_ranks))
        self._groups[WORLD_AXIS] = world.group(WORLD_AXIS, everyone, rank)

    def open(self, channels: Sequence[Channel], ties: Sequence[tuple[int, ...]]) -> None:
        pass

    def group(self, axis: str) -> Group:
        return self._groups[axis]

    def tied_group(self, stages: tuple[int, ...]) -> Group:
        ranks = tuple(self.mesh.on_stage(self.rank, stage) for stage in stages)
        return self._world.group("tied", ranks, self.rank)

    def start_send(self, tensor: Tensor, channel: Channel) -> Work:
        self._queue(channel).put(tensor.clone())
        return Done()

    def start_receive(self, buffer: Tensor, channel: Channel) -> Work:
        return _Receive(self._world, buffer, self._queue(channel))

    def report_failure(self, message: str) -> None:
        self._world.fail(message)

    def failure(self) -> str | None:
        return self._world.failure

    def final_failure(self) -> str | None:
        return self._world.failure

    def write_checkpoint(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        self._world.collect(tensors)
        everyone = self._groups[WORLD_AXIS].meeting
        everyone.meet()
        if self.rank == 0:
            write_alone(self._world.take_collected(), path)
        everyone.meet()

    def close(self) -> None:
        pass

    def _queue(self, channel: Channel) -> queue.SimpleQueue[Tensor]:
        return self._world.queue(channel, self.mesh.on_stage(self.rank, 0))


def thread_groups(name: str, size: int) -> tuple[ThreadGroup, ...]:
    """One group of ``size`` ranks, seen from each of them."""
    meeting = Meeting(size)
    return tuple(
        ThreadGroup(name=name, rank=rank, size=size, meeting=meeting) for rank in range(size)
    )


def run_mesh(mesh: Mesh, function: Callable[[ThreadCommunicator], Result]) -> list[Result]:
    """``function`` on every rank of ``mesh``, one thread each; the results in order of rank.

    The first exception of any rank is raised here.
    """
    world = ThreadWorld(mesh)

    def run(rank: int) -> Result:
        try:
            return function(world.communicator(rank))
        except BaseException as error:
            world.fail(f"rank {rank}: {error}")
            raise

    return run_ranks(mesh.num_ranks, run)


def run_ranks(
    num_ranks: int, function: Callable[[int], Result], *, meetings: Sequence[Meeting] = ()
) -> list[Result]:
    """``function(rank)`` on one thread for each rank; the results in order of rank.

    The first exception of any rank is raised here, after ``meetings`` were broken so that no rank
    waits for it.
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
        causes = [error for _, error in errors if not isinstance(error, CommunicationError)]
        raise causes[0] if causes else errors[0][1]
    return [results[rank] for rank in range(num_ranks)]
