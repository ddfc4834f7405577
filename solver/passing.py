"""What one pass through the stages takes at the least, whatever the cuts.

Values are one number for each block, or, where stages are on nodes of different kinds, a row of
them for each stage: what a block takes depends on the cuts then.
"""

from __future__ import annotations

import functools

import numpy as np

from autopar.solver.facts import Floats
from autopar.solver.runs import Runs


class Passing:
    """Sums over the blocks before and behind runs, the least over all cuts into stages.

    Block i − 1 ends stage s − 1, and block i − 2 is on the same stage or ends the one before:
    L[s, i] = t[s − 1, i − 1] + min(L[s, i − 1], L[s − 1, i − 1]).
    """

    def __init__(self, values: Floats) -> None:
        self.values = values

    @functools.cached_property
    def total(self) -> float:
        """Of all blocks."""
        if self.values.ndim == 1:
            return float(self.values.sum())
        return float(self._before[-1, -1])

    def before(self, runs: Runs) -> Floats:
        """Of the blocks before each run, on the stages before."""
        at = runs.first if self.values.ndim == 1 else (runs.stage, runs.first)
        found: Floats = self._before[at]
        return found

    def through(self, runs: Runs, seconds: Floats, more: Floats) -> Floats:
        """Of all blocks, those of each run with what they take there: ``seconds``, which is by
        ``more`` beyond their values.
        """
        if self.values.ndim == 1:
            return self.total + more
        behind = self._behind[runs.stage + 1, runs.end]
        return self._before[runs.stage, runs.first] + seconds + behind

    @functools.cached_property
    def _before(self) -> Floats:
        """L; where stages are alike, of the blocks before each."""
        if self.values.ndim == 1:
            return np.concatenate([[0.0], np.cumsum(self.values)])
        return _least_before(self.values)

    @functools.cached_property
    def _behind(self) -> Floats:
        """``[s, i]``: of the blocks from i on, which are the stages from s on."""
        return _least_before(self.values[::-1, ::-1])[::-1, ::-1]


def _least_before(values: Floats) -> Floats:
    """L, 0 where a stage would have no block."""
    stages, num = values.shape
    found = np.full((stages + 1, num + 1), np.inf)
    found[0, 0] = 0.0
    for block in range(num):
        least = np.minimum(found[1:, block], found[:-1, block])
        found[1:, block + 1] = values[:, block] + least
    return np.where(np.isfinite(found), found, 0.0)


def least_of(values: Floats) -> Floats:
    """Of each block the least on any stage."""
    found: Floats = values if values.ndim == 1 else values.min(axis=0)
    return found


def least_prefix(values: Floats) -> Floats:
    """Its sums of all blocks before each, then of all."""
    return np.concatenate([[0.0], np.cumsum(least_of(values))])


def least_share(values: Floats, num_stages: int) -> float:
    """No cuts leave every stage with less: the whole spread evenly, or as stages are fast.

    Where they differ and a block has w to do, of which stage s does no more than v[s] = max w / t
    in a second, no cuts are faster than Σ w / Σ v: for any w.
    """
    if values.ndim == 1:
        return float(values.sum()) / num_stages
    least = least_of(values)
    columns, kinds, counts = np.unique(values, axis=1, return_inverse=True, return_counts=True)
    main = int(np.argmax(counts * columns.min(axis=0)))
    found = 0.0
    for work in (least, np.where(kinds == main, least, 0.0)):
        with np.errstate(divide="ignore", invalid="ignore"):
            speeds = np.where(work > 0, work / values, 0.0).max(axis=1)
        if speeds.sum() > 0:
            found = max(found, float(work.sum() / speeds.sum()))
    return found
