"""All calls of ``torch.distributed`` that move tensors. Nobody else makes one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.axis_group import Reduction
from autopar.runtime.communicator import CommunicationError, Done, Work

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True, slots=True)
class DistributedWork:
    """``torch.distributed`` work; keeps its buffers until it is dropped."""

    work: dist.Work
    buffers: tuple[Tensor, ...] = field(repr=False)

    def wait(self) -> None:
        with _translated_errors("wait"):
            self.work.wait()

    def is_done(self) -> bool:
        return self.work.is_completed()


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedGroup:
    """A ``Group`` over a process group; ``handle`` is None when the axis has one rank."""

    name: str
    rank: int
    size: int
    handle: dist.ProcessGroup | None = field(repr=False)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        reduced = tensor.clone()
        if self.handle is not None:
            with _translated_errors(f"all-reduce on {self.name}"):
                dist.all_reduce(reduced, op=_REDUCTIONS[reduction], group=self.handle)
        return reduced

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        self.start_all_gather(gathered, tensor).wait()
        return gathered

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        own = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        self.start_reduce_scatter(own, tensor).wait()
        return own

    def all_to_all(self, tensor: Tensor) -> Tensor:
        exchanged = torch.empty_like(tensor)
        if self.handle is None:
            return exchanged.copy_(tensor)
        with _translated_errors(f"all-to-all on {self.name}"):
            dist.all_to_all_single(exchanged, tensor, group=self.handle)
        return exchanged

    def all_to_all_uneven(
        self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        exchanged = tensor.new_empty((sum(received), *tensor.shape[1:]))
        if self.handle is None:
            return exchanged.copy_(tensor)
        with _translated_errors(f"all-to-all on {self.name}"):
            dist.all_to_all_single(exchanged, tensor, list(received), list(sent), group=self.handle)
        return exchanged

    def start_all_gather(self, output: Tensor, shard: Tensor) -> Work:
        if self.handle is None:
            output.copy_(shard)
            return Done()
        with _translated_errors(f"all-gather on {self.name}"):
            work = dist.all_gather_single(output, shard, group=self.handle, async_op=True)
        assert work is not None
        return DistributedWork(work, (output, shard))

    def start_reduce_scatter(self, output: Tensor, whole: Tensor) -> Work:
        if self.handle is None:
            output.copy_(whole)
            return Done()
        with _translated_errors(f"reduce-scatter on {self.name}"):
            work = dist.reduce_scatter_single(output, whole, group=self.handle, async_op=True)
        assert work is not None
        return DistributedWork(work, (output, whole))

    def start_all_reduce(self, tensor: Tensor) -> Work:
        if self.handle is None:
            return Done()
        with _translated_errors(f"all-reduce on {self.name}"):
            work = dist.all_reduce(tensor, group=self.handle, async_op=True)
        assert work is not None
        return DistributedWork(work, (tensor,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One direction between two ranks: a group of its own, so that no message waits behind
    another's.
    """

    source: int
    target: int
    handle: dist.ProcessGroup = field(repr=False)

    def start_send(self, tensor: Tensor) -> Work:
        with _translated_errors("send"):
            work = dist.isend(tensor, dst=self.target, group=self.handle)
        assert work is not None
        return DistributedWork(work, (tensor,))

    def start_receive(self, buffer: Tensor) -> Work:
        with _translated_errors("receive"):
            work = dist.irecv(buffer, src=self.source, group=self.handle)
        assert work is not None
        return DistributedWork(work, (buffer,))


@contextmanager
def _translated_errors(what: str) -> Iterator[None]:
    """Backends raise plain ``RuntimeError``: name what failed, so that it is not taken for an error
    of the model.
    """
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"{what} failed: {error}") from error
