"""All plans of a small instance, by enumeration and simulation: the space that
docs/concepts/problem.md states, candidate by candidate, without any bound of the search.

What is left out is never faster than what is simulated: a step is monotone in what its actions take
(``test_simulate_properties``), so that of two layouts that fit with the same cuts and recomputed
blocks the one with less of everything is enough, of two layouts the one that is nowhere slower and
takes nowhere more memory, and of two choices of what is recomputed the one with less of it: of a
block nothing, what it gathers, its ops, both, or all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.solver.candidates import Candidate
from autopar.solver.choose_again import NOTHING, Again
from autopar.solver.facts import Floats, Part
from autopar.solver.layout.problem import Solution
from autopar.solver.loss_chunks import NUMBERS
from autopar.solver.mixed import AnySetting, MixedSetting
from autopar.solver.pins import Pins
from autopar.solver.placements import placements
from autopar.solver.pricer import Pricer
from autopar.solver.settings import NOTHING_AGAIN
from autopar.solver.solved import Solved, simulate_cuts
from autopar.solver.stages import Stager
from autopar.solver.unequal_shares import UnequalSolver
from autopar.solver.virtual_cuts import virtual_cuts
from autopar.solver.zero_choice import with_stages_chosen
from tests.solver.layouts import all_layouts

Blocks = frozenset[int]
"""Those that can be recomputed."""

_ROUNDING = 1e-12

_MIXED_LAYOUTS, _MIXED_BLOCKS, _MIXED_STAGES = 3, 2, 40
"""So many layouts, and choices of what is computed again and of ZeRO stages for each, are looked at
where blocks have stages of their own.
"""


class WholePlans:
    """Enumerates plans of candidates; layouts are enumerated once for a setting."""

    def __init__(
        self, pricer: Pricer, pin: Pins | None = None, *, most_layouts: int | None = None
    ) -> None:
        self.pricer, self.pin, self.most_layouts = pricer, pin or {}, most_layouts
        self._layouts: dict[int, tuple[AnySetting, tuple[Solution, ...]]] = {}

    def plans(self, candidate: Candidate) -> Iterator[Solved]:
        """Every plan of a candidate that fits into memory and is not needless; of its placements
        those that are open, and one of those that are said to be needless.
        """
        for own in self._placed(candidate):
            yield from self._plans(own)

    def _placed(self, candidate: Candidate) -> Iterator[Candidate]:
        members = candidate.members()
        yield from members
        cluster = self.pricer.cluster.reordered(candidate.group_order)
        for placement in placements(cluster, candidate.mesh(), self.pin):
            own = dataclasses.replace(candidate.placed(placement), depths=())
            if own not in members:
                yield own
                return

    def _plans(self, candidate: Candidate) -> Iterator[Solved]:
        """Of a candidate with one placement."""
        if candidate.virtual_stages > 1:
            yield from self._virtual_plans(candidate)
            return
        if candidate.zero_open:
            yield from self._zero_plans(candidate)
            return
        if candidate.shares:
            yield from self._share_plans(candidate)
            return
        setting = self.pricer.setting(candidate)
        own = _Layouts(self.pricer, candidate, setting, self.layouts(setting))
        num = len(self.pricer.facts.model.blocks)
        for inner in itertools.combinations(range(1, num), candidate.pp - 1):
            yield from own.plans((0, *inner, num))

    def _zero_plans(self, candidate: Candidate) -> Iterator[Solved]:
        """With one ZeRO stage for all blocks; and of some layouts with stages of their own for
        each, none of which could be lower.
        """
        setting = self.pricer.setting(candidate)
        num = len(self.pricer.facts.model.blocks)
        for zero_stage in range(1, candidate.zero_stage + 1):
            own = dataclasses.replace(candidate, zero_stage=zero_stage, zero_open=False)
            yield from self._plans(own)
        highest = dataclasses.replace(candidate, zero_open=False)
        layouts = _Layouts(self.pricer, highest, setting, self.layouts(setting)[:_MIXED_LAYOUTS])
        for inner in itertools.combinations(range(1, num), candidate.pp - 1):
            cuts = (0, *inner, num)
            for number in range(len(layouts.solutions)):
                for again in itertools.islice(layouts.least_again(number, cuts), _MIXED_BLOCKS):
                    stager = layouts.recomputing(number, again, cuts)
                    for mixed in itertools.islice(_lowest_stages(stager, cuts), _MIXED_STAGES):
                        solution = layouts.solutions[number]
                        yield simulate_cuts(mixed.candidate, setting, solution, mixed, cuts)

    def least_s(self, candidate: Candidate) -> float:
        """The fastest step of a candidate; inf where nothing fits."""
        return min((plan.step_s for plan in self.plans(candidate)), default=math.inf)

    def layouts(self, setting: AnySetting) -> tuple[Solution, ...]:
        """All layouts of a setting.

        Raises:
            TooLarge: There are more than ``most_layouts``.
        """
        if id(setting) not in self._layouts:
            problems = [setting.problem]
            if isinstance(setting, MixedSetting):
                problems = [own.problem for own in dict.fromkeys(setting.settings.values())]
            found = all_layouts(*problems)
            if self.most_layouts is not None:
                found = itertools.islice(found, self.most_layouts + 1)
            solutions = tuple(found)
            if self.most_layouts is not None and len(solutions) > self.most_layouts:
                raise TooLarge(f"more than {self.most_layouts} layouts")
            self._layouts[id(setting)] = setting, solutions
        return self._layouts[id(setting)][1]

    def _share_plans(self, candidate: Candidate) -> Iterator[Solved]:
        """With every layout, and every set of blocks that is computed again and none of which could
        be left out.
        """
        pricer, solver = self.pricer, UnequalSolver(self.pricer)
        able = frozenset(np.flatnonzero(pricer.facts.repeated_blocks("full")).tolist())
        setting = pricer.setting(candidate)
        for solution in self.layouts(setting):
            found: list[Again] = []
            for again in choices(
                able if candidate.recompute == "blocks" else frozenset(),
                tuple(setting.part_solvers()),
            ):
                if any(is_less(other, again) for other in found):
                    continue
                own = again.of(candidate) if candidate.recompute == "blocks" else candidate
                if solver.fits(own, solution):
                    found.append(again)
                    yield solver.simulated(own, solution)

    def _virtual_plans(self, candidate: Candidate) -> Iterator[Solved]:
        """With virtual stages the space has one layout, a few cuts, and for each the blocks that
        have to be computed again, the chunks of the loss, and a few choices of ZeRO stages.
        """
        pricer, setting = self.pricer, self.pricer.setting(candidate)
        solution = setting.solution(candidate.recompute)
        choice = pricer.chunk_choice(candidate, setting, solution)
        for cuts in virtual_cuts(pricer.stager(candidate, setting.whole)):
            for chosen in with_stages_chosen(choice, cuts):
                yield simulate_cuts(chosen.candidate, setting, solution, chosen, cuts)


class TooLarge(Exception):
    """An instance that enumeration is not for."""


class _Layouts:
    """Layouts of a candidate, fastest first, with what each has to compute again to fit."""

    def __init__(
        self,
        pricer: Pricer,
        candidate: Candidate,
        setting: AnySetting,
        solutions: Sequence[Solution],
    ) -> None:
        self.candidate, self.setting = candidate, setting
        choices = [pricer.chunk_choice(candidate, setting, found) for found in solutions]
        numbers = (1, *NUMBERS) if candidate.chunks_open else (candidate.loss_chunks,)
        variants = [
            (choice.stager(number), solution)
            for choice, solution in zip(choices, solutions, strict=True)
            for number in numbers
        ]
        found = [(stager, solution) for stager, solution in variants if stager is not None]
        stagers, solutions = zip(*found, strict=True)
        costs = np.array([_costs(stager) for stager in stagers])
        memory = np.array([_memory(stager) for stager in stagers])
        order: list[int] = []
        for number in np.argsort(costs.sum(axis=1), kind="stable").tolist():
            no_slower = (costs[order] <= costs[number] * (1 + _ROUNDING)).all(axis=1)
            no_fuller = (memory[order] <= memory[number]).all(axis=(1, 2))
            if not (no_slower & no_fuller).any():
                order.append(number)
        self.solutions = [solutions[number] for number in order]
        self.stagers = [stagers[number] for number in order]
        # [i, j]: i is nowhere slower than j
        self.no_slower = np.array(
            [(costs[i] <= costs[order] * (1 + _ROUNDING)).all(axis=1) for i in order]
        )
        self.memory = memory[order]
        self.able = frozenset(np.flatnonzero(setting.facts.repeated_blocks("full")).tolist())
        self.known: dict[tuple[int, int, int, bytes], tuple[Again, ...]] = {}

    def plans(self, cuts: tuple[int, ...]) -> Iterator[Solved]:
        """Those with these cuts."""
        done: list[tuple[int, Again]] = []
        for number, solution in enumerate(self.solutions):
            for again in self.least_again(number, cuts):
                if any(self.no_slower[n, number] and is_less(own, again) for n, own in done):
                    continue
                done.append((number, again))
                stager = self.recomputing(number, again, cuts)
                yield simulate_cuts(stager.candidate, self.setting, solution, stager, cuts)

    def least_again(self, number: int, cuts: tuple[int, ...]) -> Iterator[Again]:
        """What has to be computed again at the least so that a layout fits."""
        if self.candidate.recompute != "blocks":
            if _fits(self.stagers[number].decided(cuts), cuts):
                yield NOTHING
        else:
            of_stages = [self.of_stage(number, stage, cuts) for stage in range(len(cuts) - 1)]
            for parts in itertools.product(*of_stages):
                again = NOTHING
                for part in parts:
                    again = again.joined(part)
                yield again

    def of_stage(self, number: int, stage: int, cuts: tuple[int, ...]) -> tuple[Again, ...]:
        """Of a stage, none of which is more than another one."""
        first, end = cuts[stage : stage + 2]
        own = self.memory[number][:, first : end + 1]  # what keeps the same fits alike
        key = (stage, first, end, own.tobytes())
        if key not in self.known:
            found: list[Again] = []
            away = self.stagers[number].decided(cuts).candidate.offloaded_blocks
            costs = self.stagers[number].costs
            parts = [  # those that give something
                part.key
                for part in costs.parts
                if (part.held_bytes < costs.held_bytes)[first:end].any()
            ]
            for again in choices(self.able & set(range(first, end)) - set(away), parts):
                if not any(is_less(other, again) for other in found):
                    stager = self.recomputing(number, again, cuts)
                    if stager.stage_bytes(stage, cuts) <= stager.sites.usable_bytes[stage]:
                        found.append(again)
            self.known[key] = tuple(found)
        return self.known[key]

    def recomputing(self, number: int, again: Again, cuts: tuple[int, ...]) -> Stager:
        """With these blocks computed again, or as the candidate is where it pins that."""
        stager = self.stagers[number].decided(cuts)
        if self.candidate.recompute != "blocks":
            return stager
        return dataclasses.replace(stager, candidate=again.of(stager.candidate))


def choices(blocks: Blocks, parts: Sequence[Part]) -> Iterator[Again]:
    """Nothing, one of ``parts`` or all of each block again, in any mixture: none before one that is
    less.
    """
    levels: list[Part | None] = [NOTHING_AGAIN, *parts, None]  # None: all

    def how_much(chosen: tuple[Part | None, ...]) -> int:
        return sum(3 if part is None else sum(part) for part in chosen)

    for chosen in sorted(itertools.product(levels, repeat=len(blocks)), key=how_much):
        pairs = list(zip(sorted(blocks), chosen, strict=True))
        yield Again(
            whole=frozenset(block for block, part in pairs if part is None),
            by_op=frozenset(block for block, part in pairs if part is not None and part[0]),
            gathers=frozenset(block for block, part in pairs if part is not None and part[1]),
        )


def is_less(one: Again, other: Again) -> bool:
    """Whether ``one`` does nothing again that ``other`` does not."""
    return (
        one.whole <= other.whole
        and one.by_op <= other.whole | other.by_op
        and one.gathers <= other.whole | other.gathers
    )


def _lowest_stages(stager: Stager, cuts: tuple[int, ...]) -> Iterator[Stager]:
    """All choices of ZeRO stages that fit, of which no block could have a lower one."""
    of_stages: list[list[tuple[int, ...]]] = []
    num = stager.costs.num_blocks
    for stage, (first, end) in enumerate(itertools.pairwise(cuts)):
        found: list[tuple[int, ...]] = []
        for own in sorted(itertools.product((1, 2, 3), repeat=end - first), key=sum):
            if any(all(a <= b for a, b in zip(lower, own, strict=True)) for lower in found):
                continue
            stages = (3,) * first + own + (3,) * (num - end)
            tried = _with_stages(stager, stages)
            if tried.stage_bytes(stage, cuts) <= stager.sites.usable_bytes[stage]:
                found.append(own)
        of_stages.append(found)
    for parts in itertools.product(*of_stages):
        mixed = _with_stages(stager, tuple(itertools.chain.from_iterable(parts)))
        if _fits(mixed, cuts) and mixed.candidate.per_block:
            yield mixed


def _with_stages(stager: Stager, stages: tuple[int, ...]) -> Stager:
    candidate = dataclasses.replace(stager.candidate, zero_stages=stages)
    return dataclasses.replace(stager, candidate=candidate)


def _costs(stager: Stager) -> Floats:
    """All of a layout that takes time: what a step is monotone in."""
    costs = stager.costs
    parts = [costs.weight_s, costs.backward_s - costs.weight_s, costs.waiting_bytes]
    seconds = [
        *(parts if stager.candidate.schedule == "zero_bubble" else []),
        *([costs.held_bytes] if stager.candidate.offload_activations else []),
        costs.forward_s,
        costs.backward_s,
        *(part.again_s for part in costs.parts),
        costs.step_s,
        costs.border_bytes,
        costs.sent_bytes,
        costs.gathered_bytes,
        costs.shared_numel,
        stager.gather_s(),
        stager.reduce_s(),
        stager.optimizer_s(),
    ]
    return np.concatenate([np.ravel(values) for values in seconds])


def _memory(stager: Stager) -> Floats:
    """All of a layout that its account of memory is made of: a column for each block."""
    costs = stager.costs
    return np.stack(
        [
            costs.held_bytes,
            costs.rebuilt_bytes,
            *(part.held_bytes for part in costs.parts),
            *(part.rebuilt_bytes for part in costs.parts),
            costs.temporary_bytes,
            costs.waiting_bytes,
            costs.input_bytes,
            costs.border_bytes,
            costs.numel,
            costs.shared_numel,
        ]
    )


def _fits(stager: Stager, cuts: tuple[int, ...]) -> bool:
    peaks = zip(stager.peak_bytes(cuts), stager.sites.usable_bytes, strict=True)
    return all(peak <= usable for peak, usable in peaks)
