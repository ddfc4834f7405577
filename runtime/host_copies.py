"""Copies between a device and the memory of its host, in both directions beside compute.

On an accelerator they run on streams of their own, from and to pinned memory. On the CPU, and on
tensors without memory, they are plain copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy that was started. ``tensors`` are what it writes.

    What it reads and writes has to be kept until it is done: no stream but its own knows of it.
    """

    tensors: tuple[Tensor, ...]
    done: torch.Event | None = None

    def wait(self) -> None:
        """Let what is computed from now on come after it."""
        if self.done is not None:
            torch.accelerator.current_stream().wait_event(self.done)

    def finish(self) -> None:
        """Wait until it is done."""
        if self.done is not None:
            self.done.synchronize()


class HostCopies:
    """Copies of one rank, which computes on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._has_streams = device.type not in ("cpu", "meta")
        self._host = torch.device("cpu") if self._has_streams else device
        if self._has_streams:
            self._inward, self._outward = torch.Stream(device), torch.Stream(device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host, from and to which copies run beside compute."""
        return torch.empty(
            tuple(shape), dtype=dtype, device=self._host, pin_memory=self._has_streams
        )

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """``empty``, filled with zeros."""
        return self.empty(shape, dtype).zero_()

    def is_home(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is memory such as ``empty`` gives."""
        return tensor.device == self._host and (not self._has_streams or tensor.is_pinned())

    def bring(self, sources: Sequence[Tensor], *, after: Copy | None = None) -> Copy:
        """Start to copy tensors of the host to the device, once ``after`` is done."""
        if not self._has_streams:
            return Copy(tensors=tuple(source.clone() for source in sources))
        if after is not None and after.done is not None:
            self._inward.wait_event(after.done)
        with self._inward:
            tensors = tuple(
                torch.empty_like(source, device=self.device).copy_(source, non_blocking=True)
                for source in sources
            )
            return Copy(tensors=tensors, done=self._inward.record_event())

    def bring_in_order(self, sources: Sequence[Tensor], *, after: Copy) -> Copy:
        """As ``bring``, once what was computed until now is done, too: the tensors are memory that
        is free by then, and is free again for what is computed after their last use.
        """
        if not self._has_streams:
            return self.bring(sources)
        tensors = tuple(torch.empty_like(source, device=self.device) for source in sources)
        self._inward.wait_event(torch.accelerator.current_stream().record_event())
        if after.done is not None:
            self._inward.wait_event(after.done)
        with self._inward:
            for source, tensor in zip(sources, tensors, strict=True):
                tensor.copy_(source, non_blocking=True)
            return Copy(tensors=tensors, done=self._inward.record_event())

    def send(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Copy:
        """Start to copy tensors of the device, as what was computed until now makes them, to
        ``targets`` of the host.
        """
        if self._has_streams:
            self._outward.wait_event(torch.accelerator.current_stream().record_event())
            with self._outward:
                for source, target in zip(sources, targets, strict=True):
                    target.copy_(source, non_blocking=True)
                return Copy(tensors=tuple(targets), done=self._outward.record_event())
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return Copy(tensors=tuple(targets))
