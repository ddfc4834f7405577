"""What tensors cannot use, fitted to which runs ran out of memory, and to what nvidia-smi showed.

A rank's bytes by the planner's account are linear in the numbers that are fitted, so that every
combination of a grid over their ranges is tried: the one that is wrong of the fewest runs, and of
those the one that is least wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.calibration.hardware import with_values
from autopar.solver.costs.memory import StageContents, rank_bytes
from autopar.solver.facts import Floats
from benchmarks.fit.numbers import MEMORY
from benchmarks.fit.runs import Run

CONTEXT, FRAGMENTATION, OVERLAP, RESERVE = (number.path for number in MEMORY)

_SHARES = 0.01
"""Steps of the grid: of shares, and of GiB."""
_GIB = 0.25

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memories:
    """Bytes of all ranks of some runs, by what they depend on; ``first`` is each run's first rank.

    A rank has ``fixed + context + fragmentation · moving + overlap_fragmentation · overlapping``
    bytes.
    """

    fixed: Floats
    moving: Floats
    overlapping: Floats
    first: np.ndarray
    usable: Floats

    def peaks(self, values: Values) -> Floats:
        """Bytes of the fullest rank of each run."""
        ranks = (
            self.fixed + values[FRAGMENTATION] * self.moving + values[OVERLAP] * self.overlapping
        )
        return np.maximum.reduceat(ranks, self.first) + values[CONTEXT]

    def shown(self, values: Values) -> Floats:
        """What tools show: with what the allocator reserves beside, as long as there is room."""
        peaks = self.peaks(values)
        held = peaks + (peaks - values[CONTEXT]) * values[RESERVE]
        return np.maximum(peaks, np.minimum(held, self.usable))


def memories(runs: Iterable[Run]) -> Memories:
    """The bytes of ``runs``."""
    fixed: list[float] = []
    moving: list[float] = []
    overlapping: list[float] = []
    first: list[int] = []
    usable: list[float] = []
    nothing = {CONTEXT: 0.0, FRAGMENTATION: 0.0, OVERLAP: 0.0}
    for run in runs:
        first.append(len(fixed))
        usable.append(float(run.cluster.usable_bytes))
        for stage in run.contents:
            none = _bytes(run, stage, nothing)
            fixed.append(none)
            moving.append(_bytes(run, stage, nothing | {FRAGMENTATION: 1.0}) - none)
            overlapping.append(_bytes(run, stage, nothing | {OVERLAP: 1.0}) - none)
    return Memories(
        fixed=np.array(fixed),
        moving=np.array(moving),
        overlapping=np.array(overlapping),
        first=np.array(first),
        usable=np.array(usable),
    )


def _bytes(run: Run, stage: StageContents, values: Values) -> float:
    causes = rank_bytes(
        stage,
        sizes=run.sizes,
        is_sharded=run.candidate.zero_stage > 0,
        num_shards=run.candidate.num_shards,
        ep=run.candidate.ep,
        layered=run.candidate.schedule == "layered",
        offload_optimizer=run.candidate.offload_optimizer,
        memory=with_values(run.cluster.hardware, values).memory,
    )
    return float(sum(causes.values()))


def fit_memory(
    outcomes: Memories, ran_out: np.ndarray, shown: Memories, used_bytes: Floats
) -> dict[str, float]:
    """The numbers that fit runs whose outcome is known, and runs whose bytes were shown."""
    found = _least_wrong(outcomes, ran_out)
    if not len(used_bytes):
        return found | {RESERVE: 0.0}
    tried = [found | {RESERVE: float(share)} for share in _grid(RESERVE)]
    errors = [np.abs(shown.shown(values) / used_bytes - 1).mean() for values in tried]
    return tried[int(np.argmin(errors))]


def _least_wrong(outcomes: Memories, ran_out: np.ndarray) -> dict[str, float]:
    best, found = (np.inf, np.inf), dict.fromkeys((CONTEXT, FRAGMENTATION, OVERLAP), 0.0)
    sign = np.where(ran_out, 1.0, -1.0)
    for share, overlap in itertools.product(_grid(FRAGMENTATION), _grid(OVERLAP)):
        peaks = outcomes.peaks({CONTEXT: 0.0, FRAGMENTATION: share, OVERLAP: overlap})
        for context in _grid(CONTEXT):
            room = sign * (outcomes.usable - peaks - context)  # positive where it is wrong
            wrong = (float((room > 0).sum()), float(np.maximum(room, 0).sum()))
            if wrong < best:
                best = wrong
                found = {CONTEXT: context, FRAGMENTATION: share, OVERLAP: overlap}
    return found


def _grid(path: str) -> Sequence[float]:
    number = next(number for number in MEMORY if number.path == path)
    step = _GIB * 2**30 if path == CONTEXT else _SHARES
    return [float(at) for at in np.arange(number.low, number.high + step / 2, step)]
