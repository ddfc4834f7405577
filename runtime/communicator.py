"""What the runtime asks of communication. Two implementations: ``distributed`` (torch.distributed)
and ``threads`` (ranks as threads of one process).

Collectives that are *started* work in given buffers, which nobody may touch before ``Work.wait``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from autopar.ir.axis_group import AxisGroup
from autopar.ir.mesh import Mesh
from autopar.ir.schedule_checks import Channel


class CommunicationError(RuntimeError):
    """Communication broke or timed out; the cause is often another rank. The engine says which."""


class Work(Protocol):
    """Communication in flight."""

    def wait(self) -> None:
        """Return when the buffers may be used (on a GPU: by what is queued from now on)."""
        ...

    def is_done(self) -> bool:
        """True if the buffers may be released; never waits. False may mean that nobody knows."""
        ...


class Group(AxisGroup, Protocol):
    """The ranks along an axis, for local graphs and for the runtime itself."""

    def start_all_gather(self, output: Tensor, shard: Tensor) -> Work:
        """``[n]`` on each rank into ``output [size · n]``, in order of rank."""
        ...

    def start_reduce_scatter(self, output: Tensor, whole: Tensor) -> Work:
        """The sum of all ranks' own slices of ``whole [size · n]`` into ``output [n]``."""
        ...

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """The sum over the ranks, in place."""
        ...


WORLD_AXIS = "world"
"""Name of the group of all ranks of the mesh."""


class Communicator(Protocol):
    """One rank's view of all ranks of a mesh."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    def open(self, channels: Sequence[Channel], ties: Sequence[tuple[int, ...]]) -> None:
        """Make the point-to-point channels and the groups of stages that share parameters.

        Every rank calls it once with the same arguments.
        """
        ...

    def group(self, axis: str) -> Group:
        """The group of this rank along a mesh axis, ``dp``, or ``world``."""
        ...

    def tied_group(self, stages: tuple[int, ...]) -> Group:
        """The ranks of these stages with this rank's data and tensor coordinates."""
        ...

    def start_send(self, tensor: Tensor, channel: Channel) -> Work:
        """Send to the rank of the target stage that has this rank's data and tensor coordinates."""
        ...

    def start_receive(self, buffer: Tensor, channel: Channel) -> Work:
        """Receive the next message of the channel, whose shape and type are ``buffer``'s."""
        ...

    def report_failure(self, message: str) -> None:
        """Tell the other ranks that this one failed, and end all communication."""
        ...

    def failure(self) -> str | None:
        """What another rank reported, or None."""
        ...

    def final_failure(self) -> str | None:
        """Like ``failure``, asked after communication broke: waits a moment for a report."""
        ...

    def write_checkpoint(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """Write all ranks' tensors; each key comes from one rank only."""
        ...

    def close(self) -> None:
        """Meet the other ranks and end communication; a second call does nothing."""
        ...


class Done:
    """Work that was done when it was started."""

    def wait(self) -> None:
        pass

    def is_done(self) -> bool:
        return True
