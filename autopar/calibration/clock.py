"""Clocks: seconds of a call on a device that all ranks of the machine use at once.

A CPU rank that has less than a core of its own is timed by the CPU time that it takes, times the
ranks that share a core: the wall clock of a short run shows the others only now and then. An
accelerator is timed by its own events, and the host's floor by the wall clock.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from autopar.calibration.samples import Timing

Call = Callable[[], object]


class Clock(Protocol):
    """Measures how long something takes."""

    def elapsed_s(self, call: Call, repeats: int) -> float:
        """Seconds that ``repeats`` calls take, one after the other."""
        ...


@dataclass(frozen=True, slots=True)
class WallClock:
    """What the process waits for; ``synchronize`` also for what the device has queued."""

    synchronize: Call = lambda: None

    def elapsed_s(self, call: Call, repeats: int) -> float:
        self.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        self.synchronize()
        return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class CpuClock:
    """CPU time of the process, of which ``share`` seconds pass for each."""

    share: float

    def elapsed_s(self, call: Call, repeats: int) -> float:
        started = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - started) * self.share


@dataclass(frozen=True, slots=True)
class EventClock:
    """Time of an accelerator's stream between two events."""

    accelerator: str

    def elapsed_s(self, call: Call, repeats: int) -> float:
        started, ended = (torch.Event(self.accelerator, enable_timing=True) for _ in range(2))
        started.record()
        for _ in range(repeats):
            call()
        ended.record()
        ended.synchronize()
        return started.elapsed_time(ended) / 1e3


@dataclass(frozen=True, slots=True)
class MeetingClock:
    """A clock of ranks that share caches and memory: all do the same at once, meet after each
    sample, and the ``slowest`` of them counts.
    """

    clock: Clock
    slowest: Callable[[float], float]

    def elapsed_s(self, call: Call, repeats: int) -> float:
        return self.slowest(self.clock.elapsed_s(call, repeats))


def compute_clock(device: torch.device, *, ranks: int) -> Clock:
    """The clock of compute on ``device`` while ``ranks`` ranks of this machine compute."""
    if device.type != "cpu":
        return EventClock(device.type)
    cores, threads = num_cores(), torch.get_num_threads()
    if threads > 1 and ranks * threads <= cores:
        return WallClock()
    return CpuClock(max(1.0, ranks / cores) if threads == 1 else ranks / cores)


def overlap_clock(device: torch.device, *, ranks: int) -> Clock:
    """The clock of compute beside communication: where ranks leave no core idle, what communication
    takes of the CPU is missing for compute; elsewhere it is what the wall clock shows.
    """
    clock = compute_clock(device, ranks=ranks)
    is_full = ranks * torch.get_num_threads() >= num_cores()
    return clock if isinstance(clock, CpuClock) and is_full else wall_clock(device)


def wall_clock(device: torch.device) -> WallClock:
    """The clock of what ranks do together."""
    return WallClock() if device.type == "cpu" else WallClock(torch.accelerator.synchronize)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(
    clock: Clock, call: Call, *, target_s: float, samples: int, repeats: int | None = None
) -> Timing:
    """Seconds of a call: the fastest and the median of some samples of about ``target_s``.

    Args:
        repeats: Calls of a sample, where all ranks have to do the same number.
    """
    call()
    if repeats is None:
        once = max(min(clock.elapsed_s(call, 1) for _ in range(2)), 1e-7)
        repeats = max(1, round(target_s / once))
    found = [clock.elapsed_s(call, repeats) / repeats for _ in range(samples)]
    return Timing(
        best_s=max(min(found), 1e-9),
        median_s=max(statistics.median(found), 1e-9),
        is_shared=isinstance(clock, MeetingClock),
    )
