"""Windows: where each cut of the blocks into stages may be, and the best cuts in them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solver.facts import Floats
from autopar.solver.runs import Ints, Runs


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


def num_runs(low: Sequence[int], high: Sequence[int]) -> int:
    """Size of the arrays of windows with these borders."""
    widest = max(last - first for first, last in zip(low, high, strict=True)) + 1
    return (len(low) - 1) * widest**2


@functools.lru_cache(maxsize=256)  # candidates that differ in little have the same ones
def make_windows(low: tuple[int, ...], high: tuple[int, ...]) -> Windows:
    """Windows of these borders, of which the first and the last one have one place."""
    lows, highs = np.array(low)[:, None], np.array(high)[:, None]
    places = lows + np.arange(int((highs - lows).max()) + 1)
    inside, places = places <= highs, np.minimum(places, highs)
    first, end = places[:-1, :, None], places[1:, None, :]
    runs = Runs(stage=np.arange(len(low) - 1)[:, None, None], first=first, end=end)
    possible = inside[:-1, :, None] & inside[1:, None, :] & (first < end)
    return Windows(low=low, high=high, runs=runs, possible=possible)


def all_windows(num_blocks: int, num_stages: int) -> Windows | None:
    """Windows of all cuts; None for fewer blocks than stages."""
    if num_blocks < num_stages:
        return None
    low = (*range(num_stages), num_blocks)
    high = (0, *range(num_blocks - num_stages + 1, num_blocks + 1))
    return make_windows(low, high)
