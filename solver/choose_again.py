"""Which blocks of a layout with known cuts are computed again, and how: the plan's own choice.

A stage takes the best steps of its blocks (``again_steps``) until it fits. Steps are not small, so
that the last one may make others needless: these are taken back. The same is tried with some levels
only, and the fastest is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.ir.plan import RecomputeName
from autopar.solver.again_steps import NOT_AGAIN, Step, steps_of
from autopar.solver.candidates import Candidate
from autopar.solver.facts import Floats, Part
from autopar.solver.recomputing import whole_saved_bytes
from autopar.solver.runs import on_stage, rounds_of
from autopar.solver.stages import Stager


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Blocks that are computed again whole, those whose ops are, and those that gather again."""

    whole: frozenset[int] = frozenset()
    by_op: frozenset[int] = frozenset()
    gathers: frozenset[int] = frozenset()

    def joined(self, other: Again) -> Again:
        """What either does again."""
        whole = self.whole | other.whole
        by_op, gathers = self.by_op | other.by_op, self.gathers | other.gathers
        return Again(whole=whole, by_op=by_op - whole, gathers=gathers - whole)

    def seconds(self, stager: Stager, stage: int) -> float:
        """What it takes on a stage, per micro-batch."""
        own = replace(stager, candidate=self.of(stager.candidate))
        return float(on_stage(own.again_s(), stage).sum())

    def of(self, candidate: Candidate) -> Candidate:
        """A candidate with these."""
        is_any = self.whole or self.by_op or self.gathers
        recompute: RecomputeName = "blocks" if is_any else "none"
        return replace(
            candidate,
            recompute=recompute,
            recomputed_blocks=tuple(sorted(self.whole)),
            recomputed_by_op=tuple(sorted(self.by_op)),
            gathered_again=tuple(sorted(self.gathers)),
        )


NOTHING = Again()


def choose_blocks(stager: Stager, cuts: Sequence[int]) -> Stager | None:
    """The stager of a candidate whose recomputed blocks are chosen; None where it cannot fit.

    ``cuts`` has the first block of every virtual stage, then the number of blocks.
    """
    chosen = NOTHING
    for stage, room in enumerate(_rooms(stager, cuts)):
        found = _choose(stager, stage, cuts, room)
        if found is None:
            return None
        chosen = chosen.joined(found)
    return replace(stager, candidate=chosen.of(stager.candidate))


def again_on(stager: Stager, stage: int, cuts: Sequence[int]) -> Again | None:
    """What ``choose_blocks`` would compute again on one stage; None where it cannot fit."""
    return _choose(stager, stage, cuts, _rooms(stager, cuts)[stage])


def _rooms(stager: Stager, cuts: Sequence[int]) -> list[float]:
    """Bytes that each stage may keep, with what is there again."""
    found: list[float] = stager.cut_room(rounds_of([cuts], stager.candidate.pp))[0].tolist()
    return found


def _choose(stager: Stager, stage: int, cuts: Sequence[int], room_bytes: float) -> Again | None:
    """Of one stage."""
    room = _room(stager, stage, cuts, room_bytes)
    if room.kept_bytes.max() <= room_bytes:
        return NOTHING
    found = [_fewest(room, steps) for steps in _orders(room.alike)]
    fitting = [taken for taken in found if taken is not None]
    for taken in fitting:
        _take_back(room, taken)
    best = min(fitting, key=lambda taken: taken.seconds(room.alike), default=None)
    return None if best is None else best.again(room.alike, [p.key for p in stager.costs.parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
    """Blocks of a stage that give the same at each level, of a micro-batch, of at most ``number``
    of them; and bytes that are there again then.
    """

    virtual_stage: int
    number: float
    freed: tuple[float, ...]
    seconds: tuple[float, ...]
    rebuilt: tuple[float, ...]
    blocks: list[int] = field(default_factory=list, compare=False)

    def steps(self, levels: Sequence[int]) -> tuple[Step, ...]:
        """Of one of them, of a micro-batch, to these levels only."""
        freed = (own if level in levels else 0.0 for level, own in enumerate(self.freed))
        return steps_of(tuple(freed), self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Room:
    """A stage with nothing computed again.

    Attributes:
        alike: Its blocks that give something.
        numbers: For each moment (row), of how many micro-batches these (columns) are kept.
        kept_bytes: At each moment.
        room_bytes: What may be kept, with what is there again.
    """

    alike: tuple[_Alike, ...]
    numbers: Floats
    kept_bytes: Floats
    room_bytes: float

    def slack(self, taken: _Taken) -> Floats:
        """At each moment, bytes that are left; negative: that are missing."""
        rebuilt, freed = 0.0, []
        for own, numbers in zip(self.alike, taken.numbers, strict=True):
            freed.append(sum(n * each for n, each in zip(numbers, own.freed, strict=True)))
            there = (each for n, each in zip(numbers, own.rebuilt, strict=True) if n)
            rebuilt = max(rebuilt, *there, 0.0)
        left: Floats = self.room_bytes - rebuilt - self.kept_bytes + self.numbers @ np.array(freed)
        return left


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """How many blocks of each that are alike are at each level."""

    numbers: list[list[int]]

    def take(self, index: int, step: Step, number: int) -> None:
        """A step of so many blocks, after those before it."""
        own = self.numbers[index]
        own[step.level] = number
        if step.before != NOT_AGAIN:
            own[step.before] = max(0, own[step.before] - number)

    def seconds(self, alike: Sequence[_Alike]) -> float:
        """What it takes."""
        return sum(
            number * seconds
            for own, numbers in zip(alike, self.numbers, strict=True)
            for number, seconds in zip(numbers, own.seconds, strict=True)
        )

    def again(self, alike: Sequence[_Alike], parts: Sequence[Part]) -> Again:
        """The blocks, whole ones first, then those that do the last of ``parts`` again."""
        whole, by_op, gathers = set[int](), set[int](), set[int]()
        for own, numbers in zip(alike, self.numbers, strict=True):
            left = iter(own.blocks)
            for number, part in zip(reversed(numbers), [None, *reversed(parts)], strict=True):
                blocks = set(itertools.islice(left, number))
                if part is None:
                    whole |= blocks
                    continue
                by_op |= blocks if part[0] else set()
                gathers |= blocks if part[1] else set()
        return Again(whole=frozenset(whole), by_op=frozenset(by_op), gathers=frozenset(gathers))


def _room(stager: Stager, stage: int, cuts: Sequence[int], room_bytes: float) -> _Room:
    nothing = replace(stager, candidate=NOTHING.of(stager.candidate))
    costs, runs = stager.costs, stager.virtual_stages(stage, cuts)
    moments = nothing.moments(stage, cuts)
    here = 1 - stager.offloaded()
    whole = whole_saved_bytes(stager)
    if not stager.candidate.per_block:  # the first block keeps its input in any case
        firsts = [first for first, _ in runs]
        whole[firsts] = (costs.held_bytes * costs.again("full"))[firsts]
    freed = np.vstack([costs.part_saved_bytes, whole]) * here
    seconds = costs.part_seconds if costs.part_seconds.ndim == 2 else costs.part_seconds[stage]
    rebuilt = np.vstack([*(part.rebuilt_bytes for part in costs.parts), costs.held_bytes])
    found: dict[_Alike, _Alike] = {}
    for number, (first, last) in enumerate(runs):
        most = float(moments.numbers[:, number].max())
        columns = [values[:, first : last + 1].T.tolist() for values in (freed, seconds, rebuilt)]
        for block, (own_freed, own_s, own_rebuilt) in enumerate(zip(*columns, strict=True), first):
            if max(own_freed) > 0:
                own = _Alike(
                    virtual_stage=number,
                    number=most,
                    freed=tuple(own_freed),
                    seconds=tuple(own_s),
                    rebuilt=tuple(own_rebuilt),
                )
                found.setdefault(own, own).blocks.append(block)
    return _Room(
        alike=tuple(found),
        numbers=moments.numbers[:, [own.virtual_stage for own in found]],
        kept_bytes=moments.kept_bytes,
        room_bytes=room_bytes,
    )


_Steps = tuple[tuple[int, Step], ...]


def _orders(alike: Sequence[_Alike]) -> Iterator[_Steps]:
    """Which of ``alike`` take which step, best first; and without the whole level, or at the first
    only, which may take more seconds for a byte: it leaves less that is there again.
    """
    levels = tuple(range(max((len(own.freed) for own in alike), default=0)))
    found: dict[_Steps, None] = {}
    for some in dict.fromkeys((levels, levels[:-1], levels[:-1][:1])):
        steps = [(index, step) for index, own in enumerate(alike) for step in own.steps(some)]
        steps.sort(key=lambda pair: (pair[1].rate / alike[pair[0]].number, pair[1].level))
        if steps:
            found[tuple(steps)] = None
    yield from found


def _fewest(room: _Room, steps: _Steps) -> _Taken | None:
    """As few of the steps, in order, as make it fit; None where all are too few."""
    nums = np.array([len(room.alike[index].blocks) for index, _ in steps])
    rebuilt = [room.alike[index].rebuilt[step.level] for index, step in steps]
    each = room.numbers[:, [index for index, _ in steps]] * [step.freed for _, step in steps]
    freed = np.cumsum(each * nums, axis=1)
    missing = room.kept_bytes[:, None] - room.room_bytes + np.maximum.accumulate(rebuilt)
    enough = np.flatnonzero((missing - freed).max(axis=0) <= _BYTE)
    if not len(enough):
        return None
    taken, last = _Taken([[0] * len(own.freed) for own in room.alike]), int(enough[0])
    for index, step in steps[:last]:
        taken.take(index, step, len(room.alike[index].blocks))
    left = (missing - freed)[:, last] + each[:, last] * nums[last]
    wanted = left[left > _BYTE] / each[left > _BYTE, last]
    number = math.ceil(wanted.max(initial=0.0) - _ROUNDING)
    taken.take(*steps[last], max(1, number))
    return taken


def _take_back(room: _Room, taken: _Taken) -> None:
    """Take back what can be, that saves most first."""
    changes = sorted(_changes(room.alike), key=lambda change: -change.saved_s)
    if not changes:
        return
    columns = [change.index for change in changes]
    each = room.numbers[:, columns] * [change.freed for change in changes]
    while True:
        able = np.array([change.able(taken) for change in changes])
        with np.errstate(divide="ignore", invalid="ignore"):
            in_slack = np.where(each > 0, room.slack(taken)[:, None] / each, np.inf).min(axis=0)
        numbers = np.minimum(able, np.floor(in_slack + _ROUNDING))
        found = np.flatnonzero(numbers > 0)
        if not len(found):
            return
        changes[int(found[0])].make(taken, int(numbers[found[0]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A block of ``alike[index]`` that is at ``level`` goes to another."""

    index: int
    freed: float
    saved_s: float
    level: int
    to: int

    def able(self, taken: _Taken) -> int:
        """How many blocks there are for it."""
        return taken.numbers[self.index][self.level]

    def make(self, taken: _Taken, number: int) -> None:
        """Of so many blocks."""
        own = taken.numbers[self.index]
        own[self.level] -= number
        if self.to != NOT_AGAIN:
            own[self.to] += number


def _changes(alike: Sequence[_Alike]) -> Iterator[_Change]:
    """All that save seconds, and leave no more that is there again."""
    for index, own in enumerate(alike):
        levels = list(zip(own.freed, own.seconds, own.rebuilt, strict=True))
        others = [*enumerate(levels), (NOT_AGAIN, (0.0, 0.0, 0.0))]
        for level, (freed, seconds, rebuilt) in enumerate(levels):
            for to, (other_freed, other_s, other_rebuilt) in others:
                gives = to == NOT_AGAIN or other_freed > 0
                if freed > 0 and gives and other_s < seconds and other_rebuilt <= rebuilt:
                    yield _Change(
                        index=index,
                        freed=freed - other_freed,
                        saved_s=seconds - other_s,
                        level=level,
                        to=to,
                    )


_BYTE = 1.0

_ROUNDING = 1e-9
"""Of numbers of blocks."""
