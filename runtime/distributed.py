"""Communication over ``torch.distributed``: where process groups are made and ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.schedule_checks import Channel
from autopar.runtime.checkpoint_files import write_together
from autopar.runtime.communicator import WORLD_AXIS, Group, Work
from autopar.runtime.distributed_group import DistributedGroup, Pair
from autopar.runtime.failures import FailureWatch

_LOG = logging.getLogger(__name__)


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
            axis: self._make_axis_group(axis) for axis in mesh.group_axes()
        }
        self._groups[WORLD_AXIS] = DistributedGroup(
            name=WORLD_AXIS,
            rank=self.rank,
            size=mesh.num_ranks,
            handle=dist.group.WORLD if mesh.num_ranks > 1 else None,
        )
        self._ties: dict[tuple[int, ...], DistributedGroup] = {}
        self._pairs: dict[Channel, Pair] = {}
        self._opened: set[Channel] = set()
        self._tied: set[tuple[int, ...]] = set()
        self._watch = (
            None if store is None else FailureWatch(store, self._abort, holds_store=self.rank == 0)
        )

    def open(self, channels: Sequence[Channel], ties: Sequence[tuple[int, ...]]) -> None:
        stage = self._coordinates["pp"]
        for channel in channels:
            if channel in self._opened:
                continue
            self._opened.add(channel)
            source, target, _ = channel
            handle = self._make_groups(tuple(sorted((source, target))))
            if handle is not None:
                self._pairs[channel] = Pair(
                    source=self._peer(source), target=self._peer(target), handle=handle
                )
        for stages in ties:
            if stages in self._tied:
                continue
            self._tied.add(stages)
            handle = self._make_groups(stages)
            if handle is not None:
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
                has_index = str(self.device) != self.device.type
                dist.barrier(device_ids=[self.device.index] if has_index else None)
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
        return self.mesh.on_stage(self.rank, stage)

    def _make_axis_group(self, axis: str) -> DistributedGroup:
        groups = self.mesh.groups(axis)
        ranks = next(ranks for ranks in groups if self.rank in ranks)
        return DistributedGroup(
            name=axis,
            rank=ranks.index(self.rank),
            size=len(ranks),
            handle=self._make_group_of_each(groups) if len(ranks) > 1 else None,
        )

    def _make_groups(self, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
        """For every pipeline, a group of its ranks on ``stages``; returns this rank's."""
        pipelines = self.mesh.groups("pp")
        return self._make_group_of_each([tuple(line[s] for s in stages) for line in pipelines])

    def _make_group_of_each(self, groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """Make all ``groups``; returns the one that this rank is in.

        Every rank makes all groups, also those that it is not in: their names are numbers that must
        agree. (``use_local_synchronization`` would spare it that, but then a name depends on how
        many groups its maker has made before, and stages make different numbers of them.)
        """
        own: dist.ProcessGroup | None = None
        for ranks in groups:
            is_sorted = list(ranks) == sorted(ranks)  # by coordinate, whatever ranks' numbers are
            handle = dist.new_group(list(ranks), timeout=self._timeout, sort_ranks=is_sorted)
            if self.rank in ranks:
                assert isinstance(handle, dist.ProcessGroup)
                own = handle
        return own
