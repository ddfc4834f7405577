"""Where to cut the blocks into stages: an exact dynamic program over the cuts that may be best.

Whatever a stage costs, a step takes no less than its work after that of the stages before it, and
its memory is no less than that of its parameters. What is within a threshold by these two is within
a window for each cut, which grows narrow as the threshold comes down to the best.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import ModelGraph
from autopar.solver.facts import Floats
from autopar.solver.runs import Ints, Runs

_SLACK = 0.03
"""How far the first threshold is above the least step; the next ones are twice as far."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """Where each cut may be: stage s begins at one of ``low[s] … high[s]``.

    Attributes:
        low, high: For each stage, then for the number of blocks.
        runs: ``[s, i, j]`` is stage s from ``low[s] + i`` to ``low[s + 1] + j``.
        possible: Which of ``runs`` there are.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    runs: Runs
    possible: NDArray[np.bool_]

    def least_largest(self, costs: Floats) -> tuple[float, tuple[int, ...]]:
        """The cuts that minimize the largest cost of a stage; (inf, ()) when there are none."""
        masked = np.where(self.possible, costs, math.inf)
        best = masked[0, 0]
        choices: list[Ints] = []
        for matrix in masked[1:]:
            worst = np.maximum(best[:, None], matrix)
            choices.append(worst.argmin(axis=0))
            best = worst.min(axis=0)
        if not math.isfinite(best[0]):
            return math.inf, ()
        chosen = [0]
        for choice in reversed(choices):
            chosen.append(int(choice[chosen[-1]]))
        cuts = [low + index for low, index in zip(self.low[1:], reversed(chosen), strict=True)]
        return float(best[0]), (0, *cuts)

    def least_sum(self, costs: Floats) -> float:
        """The least sum of the costs of stages over all cuts; inf when there are none."""
        masked = np.where(self.possible, costs, math.inf)
        best = masked[0, 0]
        for matrix in masked[1:]:
            best = (best[:, None] + matrix).min(axis=0)
        return float(best[0])


def make_windows(low: Sequence[int], high: Sequence[int]) -> Windows:
    """Windows of these borders, of which the first and the last one have one place."""
    return _make_windows(tuple(low), tuple(high))


@functools.lru_cache(maxsize=256)  # candidates that differ in little have the same ones
def _make_windows(low: tuple[int, ...], high: tuple[int, ...]) -> Windows:
    lows, highs = np.array(low)[:, None], np.array(high)[:, None]
    places = lows + np.arange(int((highs - lows).max()) + 1)
    inside, places = places <= highs, np.minimum(places, highs)
    first, end = places[:-1, :, None], places[1:, None, :]
    runs = Runs(stage=np.arange(len(low) - 1)[:, None, None], first=first, end=end)
    possible = inside[:-1, :, None] & inside[1:, None, :] & (first < end)
    return Windows(low=low, high=high, runs=runs, possible=possible)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reach:
    """What no cost of a stage is below.

    Attributes:
        seconds: Of the blocks before each, then of all, per micro-batch.
        num_micro_batches: A stage has as many, after the blocks before it.
        waiting: For each stage, seconds of the blocks before each, then of all, which come on top
            of ``all_s``.
        all_s: Seconds of one micro-batch through all stages and back.
        num_bytes: For each stage, bytes of the blocks before each, then of all.
        room: Bytes of a stage.
    """

    seconds: Floats
    num_micro_batches: int
    waiting: Floats
    all_s: float
    num_bytes: Floats
    room: float

    @property
    def num_stages(self) -> int:
        return len(self.num_bytes)

    def least_s(self) -> float:
        """No cuts are faster: work spread evenly, and each block on its stage."""
        num, before = self.num_micro_batches, self.seconds[:-1]
        each = float((before + num * np.diff(self.seconds)).max())
        waiting = self.all_s + float(np.diff(self.waiting).min(axis=0).sum()) / self.num_stages
        return max(num * float(self.seconds[-1]) / self.num_stages, each, waiting)

    def windows(self, threshold_s: float) -> Windows | None:
        """All cuts whose stages are within the threshold and the room are in these windows; None
        if there are none.
        """
        num, stages = len(self.seconds) - 1, self.num_stages
        high, low = [0], [num]
        for stage in range(stages - 1):
            most = self._farthest(stage, high[-1], threshold_s)
            high.append(min(most, num - (stages - 1 - stage)))
            if high[-1] <= high[-2]:
                return None
        if self._farthest(stages - 1, high[-1], threshold_s) < num:
            return None
        high.append(num)
        for stage in range(stages - 1, 0, -1):
            low.append(max(self._nearest(stage, low[-1], threshold_s), stage))
        low = [0, *reversed(low)]
        if any(first > last for first, last in zip(low, high, strict=True)):
            return None
        return make_windows(low, high)

    def _farthest(self, stage: int, first: int, threshold_s: float) -> int:
        """The largest end of a run from ``first`` on."""
        if math.isinf(threshold_s):
            by_time = len(self.seconds) - 1
        else:
            num, before = self.num_micro_batches, float(self.seconds[first])
            within = before + (threshold_s * _ABOVE - before) / num
            by_time = bisect.bisect_right(self.seconds, within) - 1
            own = self.waiting[stage]
            within = float(own[first]) + threshold_s * _ABOVE - self.all_s
            by_time = min(by_time, bisect.bisect_right(own, within) - 1)
        own = self.num_bytes[stage]
        by_memory = bisect.bisect_right(own, (float(own[first]) + self.room) * _ABOVE) - 1
        return min(by_time, by_memory)

    def _nearest(self, stage: int, end: int, threshold_s: float) -> int:
        """The smallest first block of a run to ``end``."""
        num, after = self.num_micro_batches, float(self.seconds[end])
        by_time = 0
        if math.isfinite(threshold_s):
            if num > 1:
                within = (num * after - threshold_s * _ABOVE) / (num - 1)
                by_time = bisect.bisect_left(self.seconds, within)
            own = self.waiting[stage]
            within = float(own[end]) - (threshold_s * _ABOVE - self.all_s)
            by_time = max(by_time, bisect.bisect_left(own, within))
        own = self.num_bytes[stage]
        by_memory = bisect.bisect_left(own, (float(own[end]) - self.room) / _ABOVE)
        return max(by_time, by_memory)


_ABOVE = 1 + 1e-9
"""Rounding takes nothing out of a window."""

_BEYOND = 1 + 1e-12
"""What is in no window of a threshold is beyond it."""


def best_cuts(
    cost: Callable[[Windows], Floats],
    reach: Reach,
    *,
    guess_s: float = 0.0,
    enough_s: float = math.inf,
) -> tuple[float, tuple[int, ...]]:
    """The cuts that minimize the largest cost of a stage.

    Args:
        cost: Costs of the runs of windows, none below what ``reach`` says; inf: does not fit.
        reach: Of the stages.
        guess_s: About what the best may cost.
        enough_s: Costs above it need not be known.

    Returns:
        The largest cost of a stage, and the first block of every stage followed by the number of
        blocks; (inf, ()) when there is no way. Without cuts: no way costs less.
    """
    widest = reach.windows(math.inf)
    if widest is None:
        return math.inf, ()
    slack, least_s = _SLACK, max(reach.least_s(), guess_s)
    threshold_s = least_s * (1 + slack)
    while True:
        threshold_s = min(threshold_s, max(enough_s, least_s))
        windows = reach.windows(threshold_s)
        if windows is not None:
            value, cuts = windows.least_largest(cost(windows))
            if value <= threshold_s or (windows.low, windows.high) == (widest.low, widest.high):
                return value, cuts
            if threshold_s >= enough_s:
                return threshold_s * _BEYOND, ()
            if math.isfinite(value):
                threshold_s = value
                continue
        elif threshold_s >= enough_s:
            return threshold_s * _BEYOND, ()
        slack *= 2
        threshold_s = least_s * (1 + slack)


def all_windows(num_blocks: int, num_stages: int) -> Windows | None:
    """Windows of all cuts; None for fewer blocks than stages."""
    if num_blocks < num_stages:
        return None
    low = [*range(num_stages), num_blocks]
    high = [0, *range(num_blocks - num_stages + 1, num_blocks + 1)]
    return make_windows(low, high)


def layer_cuts(model: ModelGraph, num_runs: int) -> tuple[int, ...]:
    """Cuts that spread layers evenly, as Megatron-LM does: blocks of the kind that repeats most.

    What comes before the first layer goes with the first run, what comes after the last with the
    last. Where the runs do not divide the layers, all blocks are spread, the first runs longer.
    """
    counts = model.multiplicity()
    kind = max(counts, key=lambda name: counts[name])
    layers = [block.index for block in model.blocks if block.kind == kind]
    num = len(model.blocks)
    if len(layers) % num_runs == 0:
        return (0, *layers[:: len(layers) // num_runs][1:], num)
    short, longer = divmod(num, num_runs)
    cuts = [0]
    for run in range(num_runs):
        cuts.append(cuts[-1] + short + (run < longer))
    return tuple(cuts)
