"""Runs of blocks as stages, many at once: sums and maxima over each, without a matrix of all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solver.facts import Floats

Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Runs of blocks ``first … end − 1`` as ``stage``: arrays that broadcast to one shape.

    Runs whose ``end`` is not behind their ``first`` are empty; what is said of them means nothing.
    """

    stage: Ints
    first: Ints
    end: Ints

    def sums(self, values: Floats) -> Floats:
        """The sum of a block's values over each run; ``values`` of one stage, or rows of each."""
        if values.ndim == 2:
            rows = prefixes(values)
            return rows[self.stage, self.end] - rows[self.stage, self.first]
        prefix = np.concatenate([[0.0], np.cumsum(values)])
        found: Floats = prefix[self.end] - prefix[self.first]
        return found

    def at_first(self, values: Floats) -> Floats:
        """The value of the first block of each run; ``values`` of one stage, or rows of each."""
        found: Floats = values[self.first] if values.ndim == 1 else values[self.stage, self.first]
        return found

    def at_ends(self, values: Floats) -> Floats:
        """The sum of the values before the first and after the last block of each run."""
        found: Floats = values[self.first] + values[self.end]
        return found

    def maxima(self, values: Floats) -> Floats:
        """The largest of a block's values in each run; ``values`` of one stage, or rows of each."""
        if values.ndim == 2:
            rows, of_stage = distinct_rows(values)
            return np.choose(of_stage[self.stage], [self.maxima(row) for row in rows])
        table = _maxima(values.tobytes())
        level = _levels(len(values))[np.maximum(self.length, 1)]
        start = np.minimum(self.first, len(values) - 1)
        last = np.maximum(self.end - (1 << level), 0)
        return np.maximum(table[level, start], table[level, last])

    @property
    def length(self) -> Ints:
        """Blocks of each run, at least 0."""
        return np.maximum(self.end - self.first, 0)


def on_stage(values: Floats, stage: int) -> Floats:
    """Values of blocks on a stage: of ``values`` of one stage, or rows of each."""
    found: Floats = values if values.ndim == 1 else values[stage]
    return found


def distinct_rows(values: Floats) -> tuple[Floats, Ints]:
    """Values of blocks that some stage has, and for each stage which: of ``values`` of one stage,
    or rows of each.
    """
    if values.ndim == 1:
        return values[None], np.zeros(1, dtype=np.intp)
    rows, of_stage = np.unique(values, axis=0, return_inverse=True)
    return rows, of_stage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """The virtual stages of one choice of cuts: what is said is said of all that a stage has.

    Attributes:
        each: The virtual stages: a row for each round, a column for each stage; of several choices
            of cuts one after the other.
    """

    each: Runs

    @property
    def stage(self) -> Ints:
        return self.each.stage

    def sums(self, values: Floats) -> Floats:
        """The sum of a block's values over each stage."""
        return self.each.sums(values).sum(axis=-2)

    def largest_sums(self, values: Floats) -> Floats:
        """The same of the virtual stage that has most."""
        return self.each.sums(values).max(axis=-2)

    def at_ends(self, values: Floats) -> Floats:
        """The largest sum of the values before the first and after the last block of a round."""
        return self.each.at_ends(values).max(axis=-2)

    def maxima(self, values: Floats) -> Floats:
        """The largest of a block's values in each stage."""
        return self.each.maxima(values).max(axis=-2)

    @property
    def length(self) -> Ints:
        """Blocks of each stage."""
        return self.each.length.sum(axis=-2)


def rounds_of(cuts: Sequence[Sequence[int]], num_stages: int) -> Rounds:
    """The virtual stages of choices of cuts, all as many: the first block of each, then the number
    of blocks; virtual stage c is on stage c mod p.
    """
    all_cuts = np.array(cuts)
    first = all_cuts[:, :-1].reshape(len(cuts), -1, num_stages)
    end = all_cuts[:, 1:].reshape(len(cuts), -1, num_stages)
    return Rounds(each=Runs(stage=np.arange(num_stages), first=first, end=end))


def all_runs(num_blocks: int, stage: int) -> Runs:
    """All runs as one stage: ``[i, j]`` is that of the blocks ``i … j − 1``."""
    return Runs(
        stage=np.array(stage),
        first=np.arange(num_blocks)[:, None],
        end=np.arange(num_blocks + 1)[None, :],
    )


def prefixes(values: Floats) -> Floats:
    """The sums of all before each, then of all; of several rows each by itself."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)


@functools.lru_cache(maxsize=64)  # candidates that differ in their schedule ask for the same
def _maxima(data: bytes) -> Floats:
    """``[k, i]``: the largest of the 2ᵏ values from ``i`` on."""
    values = np.frombuffer(data)
    table = np.tile(values, (len(values).bit_length(), 1))
    for level in range(1, len(table)):
        half = 1 << (level - 1)
        table[level] = table[level - 1]
        table[level, :-half] = np.maximum(table[level - 1, :-half], table[level - 1, half:])
    return table


@functools.lru_cache(maxsize=16)
def _levels(num: int) -> Ints:
    """For each length, the largest k with 2ᵏ not above it."""
    return np.array([max(0, length.bit_length() - 1) for length in range(num + 1)])
