"""Which blocks of a layout with known cuts are computed again, and how: the plan's own choice.

A stage takes the best steps of its blocks (``again_steps``) until it fits. Steps are not small, so
that the last one may make others needless: these are taken back. The same is tried with blocks
whole only, and by their ops only, and the fastest is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.ir.plan import RecomputeName
from autopar.solver.again_steps import Step, steps_of
from autopar.solver.candidates import Candidate
from autopar.solver.facts import Floats
from autopar.solver.recomputing import op_saved_bytes, whole_saved_bytes
from autopar.solver.runs import on_stage, rounds_of
from autopar.solver.stages import Stager


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Blocks that are computed again: whole, and by their ops."""

    whole: frozenset[int] = frozenset()
    by_op: frozenset[int] = frozenset()

    def joined(self, other: Again) -> Again:
        """What either computes again."""
        whole = self.whole | other.whole
        return Again(whole=whole, by_op=(self.by_op | other.by_op) - whole)

    def seconds(self, stager: Stager, stage: int) -> float:
        """What it takes on a stage, per micro-batch."""
        whole, by_op = sorted(self.whole), sorted(self.by_op)
        forward = on_stage(stager.costs.forward_s, stage)[whole].sum()
        return float(forward + on_stage(stager.costs.op_again_s, stage)[by_op].sum())

    def of(self, candidate: Candidate) -> Candidate:
        """A candidate with these."""
        recompute: RecomputeName = "blocks" if self.whole or self.by_op else "none"
        return replace(
            candidate,
            recompute=recompute,
            recomputed_blocks=tuple(sorted(self.whole)),
            recomputed_by_op=tuple(sorted(self.by_op)),
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
    return None if best is None else best.again(room.alike)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
    """Blocks of a stage that give the same, by their ops and whole, of a micro-batch, of at most
    ``number`` of them; and bytes that are there again then.
    """

    virtual_stage: int
    number: float
    op_freed: float
    op_s: float
    op_rebuilt: float
    whole_freed: float
    whole_s: float
    whole_rebuilt: float
    blocks: list[int] = field(default_factory=list, compare=False)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Of one of them, of a micro-batch."""
        return steps_of(self.op_freed, self.op_s, self.whole_freed, self.whole_s)

    def rebuilt(self, *, whole: bool) -> float:
        """Bytes that are there again."""
        return self.whole_rebuilt if whole else self.op_rebuilt


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
        for own, by_op, whole in zip(self.alike, taken.by_op, taken.whole, strict=True):
            freed.append(by_op * own.op_freed + whole * own.whole_freed)
            if whole:
                rebuilt = max(rebuilt, own.whole_rebuilt)
            if by_op:
                rebuilt = max(rebuilt, own.op_rebuilt)
        left: Floats = self.room_bytes - rebuilt - self.kept_bytes + self.numbers @ np.array(freed)
        return left


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """How many blocks of each that are alike are computed again, by their ops and whole."""

    by_op: list[int]
    whole: list[int]

    def take(self, index: int, step: Step, number: int) -> None:
        """A step of so many blocks, after those before it."""
        if step.whole:
            self.whole[index], self.by_op[index] = number, max(0, self.by_op[index] - number)
        else:
            self.by_op[index] = number

    def seconds(self, alike: Sequence[_Alike]) -> float:
        """What it takes."""
        return sum(
            by_op * own.op_s + whole * own.whole_s
            for own, by_op, whole in zip(alike, self.by_op, self.whole, strict=True)
        )

    def again(self, alike: Sequence[_Alike]) -> Again:
        """The blocks, whole ones first."""
        whole, by_op = set[int](), set[int]()
        for own, num_ops, num_whole in zip(alike, self.by_op, self.whole, strict=True):
            whole.update(own.blocks[:num_whole])
            by_op.update(own.blocks[num_whole : num_whole + num_ops])
        return Again(whole=frozenset(whole), by_op=frozenset(by_op))


def _room(stager: Stager, stage: int, cuts: Sequence[int], room_bytes: float) -> _Room:
    nothing = replace(stager, candidate=NOTHING.of(stager.candidate))
    costs, runs = stager.costs, stager.virtual_stages(stage, cuts)
    moments = nothing.moments(stage, cuts)
    here = 1 - stager.offloaded()
    whole, by_op = whole_saved_bytes(stager) * here, op_saved_bytes(costs) * here
    if not stager.candidate.per_block:  # the first block keeps its input in any case
        firsts = [first for first, _ in runs]
        whole[firsts] = (costs.held_bytes * costs.again("full") * here)[firsts]
    found: dict[_Alike, _Alike] = {}
    columns = (
        by_op,
        on_stage(costs.op_again_s, stage),
        costs.op_rebuilt_bytes,
        whole,
        on_stage(costs.forward_s, stage),
        costs.held_bytes,
    )
    for number, (first, last) in enumerate(runs):
        rows = zip(*(values[first : last + 1].tolist() for values in columns), strict=True)
        most = float(moments.numbers[:, number].max())
        for block, (op_freed, op_s, op_rebuilt, freed, seconds, rebuilt) in enumerate(rows, first):
            if op_freed > 0 or freed > 0:
                own = _Alike(
                    virtual_stage=number,
                    number=most,
                    op_freed=op_freed,
                    op_s=op_s,
                    op_rebuilt=op_rebuilt,
                    whole_freed=freed,
                    whole_s=seconds,
                    whole_rebuilt=rebuilt,
                )
                found.setdefault(own, own).blocks.append(block)
    return _Room(
        alike=tuple(found),
        numbers=moments.numbers[:, [own.virtual_stage for own in found]],
        kept_bytes=moments.kept_bytes,
        room_bytes=room_bytes,
    )


_Steps = Sequence[tuple[int, Step]]


def _orders(alike: Sequence[_Alike]) -> Iterator[_Steps]:
    """Which of ``alike`` take which step, best first; and by their ops only, where that takes more
    seconds for a byte: it leaves less that is there again.
    """
    steps = [(index, step) for index, own in enumerate(alike) for step in own.steps]
    yield sorted(steps, key=lambda pair: (pair[1].rate / alike[pair[0]].number, pair[1].whole))
    by_op = [
        (index, Step(freed=own.op_freed, seconds=own.op_s, whole=False))
        for index, own in enumerate(alike)
        if own.op_freed > 0
    ]
    if any(own.op_freed > 0 and own.steps[0].whole for own in alike):
        yield sorted(by_op, key=lambda pair: pair[1].rate / alike[pair[0]].number)


def _fewest(room: _Room, steps: _Steps) -> _Taken | None:
    """As few of the steps, in order, as make it fit; None where all are too few."""
    nums = np.array([len(room.alike[index].blocks) for index, _ in steps])
    rebuilt = [room.alike[index].rebuilt(whole=step.whole) for index, step in steps]
    each = room.numbers[:, [index for index, _ in steps]] * [step.freed for _, step in steps]
    freed = np.cumsum(each * nums, axis=1)
    missing = room.kept_bytes[:, None] - room.room_bytes + np.maximum.accumulate(rebuilt)
    enough = np.flatnonzero((missing - freed).max(axis=0) <= _BYTE)
    if not len(enough):
        return None
    taken, last = _Taken([0] * len(room.alike), [0] * len(room.alike)), int(enough[0])
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
    """A block of ``alike[index]`` that is not computed again, or by its ops and not whole."""

    index: int
    freed: float
    saved_s: float
    was_whole: bool
    is_by_op: bool

    def able(self, taken: _Taken) -> int:
        """How many blocks there are for it."""
        return (taken.whole if self.was_whole else taken.by_op)[self.index]

    def make(self, taken: _Taken, number: int) -> None:
        """Of so many blocks."""
        (taken.whole if self.was_whole else taken.by_op)[self.index] -= number
        taken.by_op[self.index] += number * self.is_by_op


def _changes(alike: Sequence[_Alike]) -> Iterator[_Change]:
    for index, own in enumerate(alike):
        kinds = (
            (own.whole_freed, own.whole_s, True, False),
            (own.op_freed, own.op_s, False, False),
            (own.whole_freed - own.op_freed, own.whole_s - own.op_s, True, True),
        )
        for freed, saved_s, was_whole, is_by_op in kinds:
            less_is_there = not is_by_op or 0 < own.op_rebuilt <= own.whole_rebuilt
            if saved_s > 0 and less_is_there:
                yield _Change(
                    index=index,
                    freed=freed,
                    saved_s=saved_s,
                    was_whole=was_whole,
                    is_by_op=is_by_op,
                )


_BYTE = 1.0

_ROUNDING = 1e-9
"""Of numbers of blocks."""
