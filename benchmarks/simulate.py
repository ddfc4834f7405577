"""Seconds of making and simulating large schedules: `python benchmarks/simulate.py`.

Each block is a segment, as in candidates that gather or reduce. *plain* makes and simulates each
action by itself, *compact* runs of actions; the ratio is that of one run on one machine, and the
steps have to agree. Target: 12 stages × 70 blocks × 512 micro-batches of 1F1B under ZeRO 1 in less
than 0.15 s. Times of segments are random (seed 0), 10 ms forward on average.
"""

from __future__ import annotations

import functools
import os
import platform
import random
import time
from collections.abc import Callable
from typing import TypeVar

from autopar.ir.schedules import compact_schedule, make_schedule
from autopar.solver.simulate import SegmentTimes, simulate

CASES = (  # schedule, stages, virtual stages, blocks, micro-batches, ZeRO stage
    ("1f1b", 12, 1, 70, 512, 1),
    ("1f1b", 12, 1, 70, 512, 2),
    ("1f1b", 12, 1, 70, 512, 3),
    ("interleaved", 12, 2, 72, 512, 1),
    ("layered", 12, 3, 36, 512, 3),
    ("1f1b", 1, 1, 70, 512, 1),
    ("1f1b", 64, 1, 128, 512, 1),
    ("1f1b", 64, 1, 128, 512, 3),
)
REPEATS = 3

Result = TypeVar("Result")


def main() -> None:
    """Print a line for each schedule."""
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}; best of {REPEATS}, seconds"
    )
    print(f"{'schedule':44}{'plain':>8}{'make':>8}{'simulate':>10}{'compact':>9}{'ratio':>8}")
    for name, stages, virtual, blocks, micro_batches, zero_stage in CASES:
        num = stages * virtual
        holders = tuple(block * num // blocks % stages for block in range(blocks))
        run = functools.partial(
            simulate,
            times=segment_times(blocks),
            optimizer_s=(0.1,) * stages,
            slowdown=0.1,
        )
        case = name, holders, micro_batches
        expand_s, schedule = best(functools.partial(make_schedule, *case, zero_stage=zero_stage))
        make_s, compact = best(functools.partial(compact_schedule, *case, zero_stage=zero_stage))
        each_s, plain = best(functools.partial(run, schedule))
        simulate_s, merged = best(functools.partial(run, compact))
        assert abs(merged.step_s / plain.step_s - 1) < 1e-10
        plain_s = expand_s + each_s
        compact_s = make_s + simulate_s
        title = (
            f"{name} {stages} × {blocks} blocks"
            + (f" (v {virtual})" if virtual > 1 else "")
            + f" × {micro_batches}, ZeRO {zero_stage}"
        )
        print(
            f"{title:44}{plain_s:8.3f}{make_s:8.3f}{simulate_s:10.3f}{compact_s:9.3f}"
            f"{plain_s / compact_s:8.1f}"
        )


def segment_times(num: int) -> SegmentTimes:
    """Random times around those of a layer."""
    chance = random.Random(0)

    def around(seconds: float) -> tuple[float, ...]:
        return tuple(seconds * chance.uniform(0.5, 1.5) for _ in range(num))

    return SegmentTimes(
        forward_s=around(0.010),
        backward_s=around(0.020),
        gather_s=around(0.002),
        reduce_s=around(0.003),
        send_s=around(0.0005),
        held_bytes=(1,) * num,
    )


def best(run: Callable[[], Result]) -> tuple[float, Result]:
    """The least seconds of some runs, and a result."""
    least, result = once(run)
    for _ in range(REPEATS - 1):
        least = min(least, once(run)[0])
    return least, result


def once(run: Callable[[], Result]) -> tuple[float, Result]:
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    main()
