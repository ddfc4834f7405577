"""Which stages may be within a threshold: what they cost and hold at least, as sums of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autopar.solver.facts import Floats

Borders = tuple[tuple[int, ...], tuple[int, ...]]
"""The first and the last block that each stage may begin with, then twice the number of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Floor:
    """What runs cost at the least, where that is a sum over blocks: stage s from block i to block
    j − 1 costs ``end[s, j] − first[s, i]``. Rows of both never decrease.
    """

    first: Floats
    end: Floats

    def least(self) -> float:
        """The largest of any cuts is not below it: as blocks spread evenly, or as the largest."""
        num, stages = self.end.shape[1] - 1, len(self.end)
        each = np.diff(self.end).min(axis=0).sum()
        gaps = self.end - self.first  # of a stage that begins there: stage s not before block s
        starts = [gap[s : num - stages + s + 1].min() for s, gap in enumerate(gaps)]
        single = (self.end[:, 1:] - self.first[:, :-1]).min(axis=0).max()
        return max(float(each + sum(starts)) / stages, float(single))

    def farthest(self, stage: int, first: int, limit: float) -> int:
        """The largest end of a run from ``first`` on within the limit."""
        within = self.first[stage, first] + limit
        return int(self.end[stage].searchsorted(within, side="right")) - 1

    def nearest(self, stage: int, end: int, limit: float) -> int:
        """The smallest first block of a run to ``end`` within the limit."""
        return int(self.first[stage].searchsorted(self.end[stage, end] - limit))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reach:
    """What no stage is below.

    Attributes:
        seconds: No cost of a stage is below any of them.
        priced: The same, of stages that fit into their memory.
        memory: What is above 0 does not fit.
    """

    seconds: tuple[Floor, ...]
    priced: tuple[Floor, ...]
    memory: tuple[Floor, ...]

    def anywhere(self) -> Reach:
        """The same, were there memory enough."""
        return Reach(seconds=self.seconds, priced=(), memory=())

    def least_s(self) -> float:
        """No cuts are faster."""
        return max(floor.least() for floor in (*self.seconds, *self.priced))

    def borders(self, threshold_s: float) -> Borders | None:
        """The first and the last place of each cut such that its stages may be within the threshold
        and fit; None if there are none.
        """
        stages, num = self.seconds[0].end.shape[0], self.seconds[0].end.shape[1] - 1
        limits = [(floor, 0.0) for floor in self.memory]
        if math.isfinite(threshold_s):
            limits += [(floor, threshold_s * _ABOVE) for floor in (*self.seconds, *self.priced)]

        def farthest(stage: int, first: int) -> int:
            return min([num, *(floor.farthest(stage, first, most) for floor, most in limits)])

        def nearest(stage: int, end: int) -> int:
            return max([0, *(floor.nearest(stage, end, most) for floor, most in limits)])

        high, low = [0], [num]
        for stage in range(stages - 1):
            high.append(min(farthest(stage, high[-1]), num - (stages - 1 - stage)))
            if high[-1] <= high[-2]:
                return None
        if farthest(stages - 1, high[-1]) < num:
            return None
        high.append(num)
        for stage in range(stages - 1, 0, -1):
            low.append(max(nearest(stage, low[-1]), stage))
        low = [0, *reversed(low)]
        if any(first > last for first, last in zip(low, high, strict=True)):
            return None
        return tuple(low), tuple(high)


_ABOVE = 1 + 1e-9
"""Rounding takes nothing out of a window."""
