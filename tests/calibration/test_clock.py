"""Clocks, of a CPU that ranks share and of a device that is not here."""

from __future__ import annotations

import time

import torch

from autopar.calibration import clock
from autopar.calibration.clock import (
    CpuClock,
    EventClock,
    MeetingClock,
    WallClock,
    compute_clock,
    measure,
    overlap_clock,
)


class Ticking:
    """A clock by which calls take given seconds, in order."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.repeats: list[int] = []

    def elapsed_s(self, call, repeats: int) -> float:
        self.repeats.append(repeats)
        return self.seconds.pop(0) * repeats


class FakeEvent:
    """A device event: the time is what was queued before."""

    queued_ms = 0.0

    def __init__(self, device: str, *, enable_timing: bool) -> None:
        assert (device, enable_timing) == ("cuda", True)
        self.at: float | None = None
        self.is_awaited = False

    def record(self) -> None:
        self.at = FakeEvent.queued_ms

    def synchronize(self) -> None:
        self.is_awaited = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.is_awaited
        assert self.at is not None
        assert end.at is not None
        return end.at - self.at


def test_a_measurement_is_the_fastest_and_the_median():
    ticking = Ticking(0.5, 0.1, 0.4, 0.2, 0.3)
    timing = measure(ticking, lambda: None, target_s=0.4, samples=3)
    assert (timing.best_s, timing.median_s) == (0.2, 0.3)
    assert ticking.repeats == [1, 1, 4, 4, 4]


def test_all_ranks_can_do_the_same_number_of_calls():
    calls: list[int] = []
    measure(WallClock(), lambda: calls.append(1), target_s=9.0, samples=2, repeats=5)
    assert len(calls) == 11  # the first warms up


def test_a_device_is_timed_by_its_events(monkeypatch):
    def run() -> None:
        FakeEvent.queued_ms += 3.0

    monkeypatch.setattr(torch, "Event", FakeEvent)
    assert EventClock("cuda").elapsed_s(run, 4) == 0.012


def test_ranks_that_share_cores_are_timed_by_their_share(monkeypatch):
    monkeypatch.setattr(clock, "num_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    cpu = torch.device("cpu")
    assert compute_clock(cpu, ranks=4) == CpuClock(2.0)
    assert compute_clock(cpu, ranks=1) == CpuClock(1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert compute_clock(cpu, ranks=1) == WallClock()
    assert compute_clock(cpu, ranks=4) == CpuClock(2.0)
    assert compute_clock(torch.device("cuda", 1), ranks=8) == EventClock("cuda")


def test_overlap_is_timed_by_what_it_takes_of_cores_that_are_all_busy(monkeypatch):
    monkeypatch.setattr(clock, "num_cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    cpu = torch.device("cpu")
    assert overlap_clock(cpu, ranks=8) == CpuClock(2.0)
    assert overlap_clock(cpu, ranks=4) == CpuClock(1.0)
    assert overlap_clock(cpu, ranks=3) == WallClock()  # a core is left for communication
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert overlap_clock(cpu, ranks=2) == WallClock()


def test_ranks_that_meet_count_as_the_slowest_and_at_their_median():
    ticking = Ticking(0.5, 0.1, 0.4, 0.2, 0.3)
    others = iter((0.6, 0.2, 0.9, 0.1, 5.0))
    meeting = MeetingClock(ticking, lambda seconds: max(seconds, next(others)))
    timing = measure(meeting, lambda: None, target_s=0.2, samples=3)
    assert (timing.best_s, timing.median_s) == (0.2, 0.9)
    assert timing.compute_s == 0.9
    assert measure(Ticking(1.0, 1.0, 3.0), lambda: None, target_s=1.0, samples=1).compute_s == 3.0


def test_cpu_time_passes_only_while_the_process_computes(monkeypatch):
    now = iter((1.0, 3.0))
    monkeypatch.setattr(time, "process_time", lambda: next(now))
    assert CpuClock(2.5).elapsed_s(lambda: None, 3) == 5.0
