"""Communication over ``torch.distributed``: where process groups are made and ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.mesh import DATA_AXIS, LAYOUT_AXES, MESH_AXES, Mesh
from autopar.ir.schedule_checks import Channel
from autopar.runtime.checkpoint_files import write_together
from autopar.runtime.communicator import WORLD_AXIS, Group, Work
from autopar.runtime.distributed_group import DistributedGroup, Pair
from autopar.runtime.failures import FailureWatch

_LOG = logging.getLogger(__name__)

AXES = tuple(dict.fromkeys((*MESH_AXES, *LAYOUT_AXES)))
"""Axes that have groups, in the order in which every rank makes them."""


class DistributedCommunicator:
    """A ``Communicator`` over the default process group, which has to span exactly the mesh.

    Args:
        mesh: The mesh; this process is the rank that the default group says.
        device: Where this rank's tensors are.
        timeout_s: For every wait.
        store: The rendezvous store, to report and watch failures; None for a group that has no real
            peers.
        owns_processes: End the default group with ``close``.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        *,
        timeout_s: float,
        store: dist.Store | None,
        owns_processes: bool,
    ) -> None:
        self.mesh = mesh
        self.rank = dist.get_rank()
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._owns_processes = owns_processes
        self._open = True
        self._coordinates = mesh.coordinates(self.rank)
        self._groups: dict[str, DistributedGroup] = {
            axis: self._make_axis_group(axis) for axis in AXES
        }
        self._groups[WORLD_AXIS] = DistributedGroup(
            name=WORLD_AXIS,
            rank=self.rank,
            size=mesh.num_ranks,
            handle=dist.group.WORLD if mesh.num_ranks > 1 else None,
        )
        self._ties: dict[tuple[int, ...], DistributedGroup] = {}
        self._pairs: dict[Channel, Pair] = {}
        self._watch = (
            None if store is None else FailureWatch(store, self._abort, holds_store=self.rank == 0)
        )

    def open(self, channels: Sequence[Channel], ties: Sequence[tuple[int, ...]]) -> None:
        stage = self._coordinates["pp"]
        for channel in channels:
            if channel not in self._pairs and stage in channel[:2]:
                source, target = self._peer(channel[0]), self._peer(channel[1])
                handle = self._make_group(tuple(sorted((source, target))))
                self._pairs[channel] = Pair(source=source, target=target, handle=handle)
        for stages in ties:
            if stages not in self._ties and stage in stages:
                handle = self._make_group(tuple(map(self._peer, stages)))
                self._ties[stages] = DistributedGroup(
                    name="tied", rank=stages.index(stage), size=len(stages), handle=handle
                )

    def group(self, axis: str) -> Group:
        return self._groups[axis]

    def tied_group(self, stages: tuple[int, ...]) -> Group:
        return self._ties[stages]

    def start_send(self, tensor: Tensor, channel: Channel) -> Work:
        return self._pairs[channel].start_send(tensor)

    def start_receive(self, buffer: Tensor, channel: Channel) -> Work:
        return self._pairs[channel].start_receive(buffer)

    def report_failure(self, message: str) -> None:
        if self._watch is not None and self._open:
            self._watch.report(message)
            self._destroy()  # closes the connections, which wakes the ranks that wait for this one
            self._watch.linger()

    def failure(self) -> str | None:
        return None if self._watch is None else self._watch.message

    def final_failure(self) -> str | None:
        return None if self._watch is None else self._watch.await_message()

    def write_checkpoint(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        write_together(tensors, path)

    def close(self) -> None:
        if not self._open:
            return
        if self._watch is not None:
            failed = self._watch.message is not None
            self._watch.stop()
            if not failed:
                dist.barrier()
        self._destroy()

    def _destroy(self) -> None:
        """End the groups of this communicator; the default group only if it is ours or
        communication failed.
        """
        self._open = False
        handles = [group.handle for name, group in self._groups.items() if name != WORLD_AXIS]
        handles += [group.handle for group in self._ties.values()]
        handles += [pair.handle for pair in self._pairs.values()]
        self._groups, self._ties, self._pairs = {}, {}, {}
        failed = self._watch is not None and self._watch.failed
        if self._owns_processes or failed:
            dist.destroy_process_group()
            return
        for handle in handles:
            if handle is not None:
                dist.destroy_process_group(handle)

    def _abort(self) -> None:
        """Called by the watch: end this rank's own waits, where the backend can (its kernels on a
        GPU).
        """
        for group in self._groups.values():
            if group.handle is not None:
                try:
                    group.handle.abort()
                except RuntimeError as error:
                    _LOG.debug("process group %s: no abort: %s", group.name, error)
        for pair in self._pairs.values():
            try:
                pair.handle.abort()
            except RuntimeError as error:
                _LOG.debug("pair %s: no abort: %s", pair, error)

    def _peer(self, stage: int) -> int:
        at = self._coordinates
        return self.mesh.rank_at(pp=stage, dp=at[DATA_AXIS], tp=at["tp"])

    def _make_axis_group(self, axis: str) -> DistributedGroup:
        ranks = next(ranks for ranks in self.mesh.groups(axis) if self.rank in ranks)
        return DistributedGroup(
            name=axis,
            rank=ranks.index(self.rank),
            size=len(ranks),
            handle=self._make_group(ranks) if len(ranks) > 1 else None,
        )

    def _make_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A group that only its members make: all of them do so in the same order."""
        handle = dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=True)
        assert isinstance(handle, dist.ProcessGroup)
        return handle
