"""A candidate with its layout and cuts: its segments, its schedule and its simulated step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.schedule import CompactSchedule
from autopar.ir.schedules import compact_schedule
from autopar.solver.candidates import Candidate
from autopar.solver.layout.problem import Solution
from autopar.solver.mixed import AnySetting
from autopar.solver.runs import on_stage
from autopar.solver.simulate import SegmentTimes, Simulation, Work, simulate_together
from autopar.solver.stages import Stager


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """A candidate with its layout, cuts and simulated step.

    Where data ranks have unequal shares of the batch, ``beside`` are those of each group of nodes,
    and all else is that of the one that does not wait for others.
    """

    candidate: Candidate
    solution: Solution
    setting: AnySetting
    stager: Stager
    cuts: tuple[int, ...]  # first block of each virtual stage, then the number of blocks
    segments: tuple[tuple[int, int, int], ...]  # stage, first block, last block
    schedule: CompactSchedule
    times: SegmentTimes
    simulation: Simulation
    beside: tuple[Solved, ...] = ()

    @property
    def step_s(self) -> float:
        return self.simulation.step_s


def simulate_cuts(
    candidate: Candidate,
    setting: AnySetting,
    solution: Solution,
    stager: Stager,
    cuts: tuple[int, ...],
) -> Solved:
    """Segments, schedule and simulated step of a candidate whose layout and cuts are known."""
    work = work_of(stager, cuts)
    (simulation,) = simulate_together([work])
    return _solved(candidate, setting, solution, stager, cuts, work, simulation)


def solved_together(
    candidate: Candidate, setting: AnySetting, solution: Solution, stagers: Sequence[Stager]
) -> Solved:
    """A candidate of one stage with unequal shares of the batch; ``stagers`` are those of each
    group of nodes, which begin gathers and reductions together.
    """
    cuts = (0, stagers[0].costs.num_blocks)
    works = [work_of(stager, cuts) for stager in stagers]
    both = [
        tuple(map(max, zip(*(getattr(work.times, name) for work in works), strict=True)))
        for name in ("gather_s", "reduce_s")
    ]
    works = [
        replace(work, times=replace(work.times, gather_s=both[0], reduce_s=both[1]))
        for work in works
    ]
    simulations = simulate_together(works)
    beside = tuple(
        _solved(stager.candidate, setting, solution, stager, cuts, work, simulation)
        for stager, work, simulation in zip(stagers, works, simulations, strict=True)
    )
    last = max(beside, key=lambda solved: solved.simulation.busy_s)
    return replace(last, candidate=candidate, beside=beside)


def work_of(stager: Stager, cuts: tuple[int, ...]) -> Work:
    """What the ranks of a candidate do with these cuts."""
    candidate, segments = stager.candidate, segments_of(stager.candidate, cuts)
    return Work(
        schedule=compact_schedule(
            candidate.schedule,
            [stage for stage, _, _ in segments],
            candidate.num_micro_batches,
            zero_stage=_zero_stages(stager, segments),
            extra_in_flight=candidate.extra_in_flight,
            offloaded=_offloaded(stager, segments),
        ),
        times=segment_times(stager, segments),
        optimizer_s=optimizer_s(stager, segments),
        slowdown=stager.sites.slowdown.tolist(),
    )


def _zero_stages(stager: Stager, segments: Sequence[tuple[int, int, int]]) -> list[int]:
    return [int(stager.zero_stages[first]) for _, first, _ in segments]


def _offloaded(stager: Stager, segments: Sequence[tuple[int, int, int]]) -> list[int]:
    listed = frozenset(stager.candidate.offloaded_blocks)
    return [index for index, (_, first, _) in enumerate(segments) if first in listed]


def segments_of(candidate: Candidate, cuts: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Stage, first and last block of each segment."""
    return tuple(
        segment
        for number, (first, end) in enumerate(itertools.pairwise(cuts))
        for segment in (
            [(number % candidate.pp, block, block) for block in range(first, end)]
            if candidate.per_block
            else [(number % candidate.pp, first, end - 1)]
        )
    )


def _solved(
    candidate: Candidate,
    setting: AnySetting,
    solution: Solution,
    stager: Stager,
    cuts: tuple[int, ...],
    work: Work,
    simulation: Simulation,
) -> Solved:
    assert isinstance(work.schedule, CompactSchedule)
    return Solved(
        candidate=candidate,
        solution=solution,
        setting=setting,
        stager=stager,
        cuts=cuts,
        segments=segments_of(candidate, cuts),
        schedule=work.schedule,
        times=work.times,
        simulation=simulation,
    )


def optimizer_s(stager: Stager, segments: Sequence[tuple[int, int, int]]) -> tuple[float, ...]:
    """Seconds of the optimizer and of what else comes once a step, by stage."""
    seconds, once = stager.once_s(), stager.sites.step_s.tolist()
    return tuple(
        once[stage]
        + float(
            sum(
                on_stage(seconds, stage)[i : j + 1].sum()
                for holder, i, j in segments
                if holder == stage
            )
        )
        for stage in range(stager.candidate.pp)
    )


def segment_times(stager: Stager, segments: Sequence[tuple[int, int, int]]) -> SegmentTimes:
    """Costs of the actions of each segment."""
    costs, num = stager.costs, len(segments)

    def sums(values: np.ndarray) -> tuple[float, ...]:
        return tuple(
            float(on_stage(values, stage)[first : last + 1].sum())
            for stage, first, last in segments
        )

    sends = []
    for index, (stage, _, last) in enumerate(segments):
        crosses = index + 1 < num and segments[index + 1][0] != stage
        sends.append(stager.border_s(last + 1, stage) if crosses else 0.0)
    splits = stager.candidate.schedule == "zero_bubble"
    kept = stager.held_bytes() + costs.input_bytes * stager.again()
    kept = np.where(stager.offloaded() > 0, costs.input_bytes, kept)
    return SegmentTimes(
        forward_s=sums(costs.forward_s),
        backward_s=sums(stager.backward_s()),
        gather_s=sums(stager.gather_s()),
        reduce_s=sums(stager.reduce_s()),
        send_s=tuple(sends),
        held_bytes=tuple(int(held) for held in sums(kept)),
        weight_s=sums(stager.weight_s()) if splits else (),
        weight_bytes=tuple(map(int, sums(costs.waiting_bytes))) if splits else (),
        copy_s=sums(stager.copy_s()) if stager.candidate.offloaded_blocks else (),
    )
