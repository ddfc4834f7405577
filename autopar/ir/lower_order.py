"""From an order to a schedule: messages, gathers, frees, reductions and the optimizer.

The same for every schedule: parameters are gathered one run of uses ahead, receives posted one
computing action ahead, results sent as soon as they are made. Where only some segments are freed
after their uses, the next of them is gathered while those before it are used that stay gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from autopar.ir.orders import Pass, segments_of
from autopar.ir.schedule import FINISHING, Action, ActionKind, Run


def lower_order(
    order: Sequence[Pass],
    stages: tuple[int, ...],
    stage: int,
    num_micro_batches: int,
    *,
    regathered: Collection[int],
    reduced_each: Collection[int],
) -> tuple[Run | Action, ...]:
    """All that a stage does, with computing actions in runs as long as nothing separates them.

    Args:
        order: The passes of the stage.
        stages: Stage of every segment of the model.
        stage: Whose order it is.
        num_micro_batches: Micro-batches per step.
        regathered: Segments whose parameters are gathered before, and freed after, each run of
            their uses, two of them at a time; others are gathered once. Weight parts of backwards
            are no uses.
        reduced_each: Segments whose gradients are reduced after every backward (its weight part,
            where it is apart); those of others once, after the segment's last.
    """
    return _Lowering(order, stages, stage, num_micro_batches, regathered, reduced_each).run()


_HELD = 2
"""Segments that are freed after their uses are gathered so many at a time."""


class _Lowering:
    def __init__(
        self,
        order: Sequence[Pass],
        stages: tuple[int, ...],
        stage: int,
        num_micro_batches: int,
        regathered: Collection[int],
        reduced_each: Collection[int],
    ) -> None:
        own = segments_of(stages, stage)
        self.order, self.stages, self.stage = order, stages, stage
        self.uses = [one for one in order if one.kind is not ActionKind.BACKWARD_WEIGHT]
        self.last = num_micro_batches - 1
        self.reduced_each = frozenset(reduced_each).intersection(own)
        self.regathered = frozenset(regathered).intersection(own)
        self.frees_last = len(own) == 1 and bool(self.regathered)  # it has one run of uses
        if self.frees_last:
            self.regathered = frozenset()
        self.coming = self.gathered_in_order()
        self.next_gather = next(self.coming, None)  # None: there are no more
        self.held: set[int] = set()  # of what is freed again, gathered
        self.num_runs = 0  # of uses that began
        self.previous = -1  # segment of the action before
        self.lowered: list[Run | Action] = []
        self.gathers = {k: Action(ActionKind.GATHER_PARAMETERS, k) for k in own}
        self.frees = {k: Action(ActionKind.FREE_PARAMETERS, k) for k in own}
        self.reductions = {k: Action(ActionKind.REDUCE_GRADIENTS, k) for k in own}
        self.singles = {k: (k,) for k in own}
        self.ends: dict[bool, dict[tuple[int, ...], tuple[bool, bool, bool]]] = {
            True: {},
            False: {},
        }

    def run(self) -> tuple[Run | Action, ...]:
        index = 0
        for whole in self.order:
            kind, segments, micro_batch, num = whole
            if kind is ActionKind.BACKWARD_WEIGHT:
                self.finish(whole)
                continue
            reduces = kind in FINISHING and self.reduces_any(segments, micro_batch + num)
            if not (reduces or self.next_gather or self.regathered):
                receives, sends, passes_on = self.ends_of(kind is ActionKind.FORWARD, segments)
                if passes_on and (num == 1 or not (receives or sends)):
                    run = Run(kind, segments, micro_batch, num, receives, sends)
                    self.lowered.append(run)
                    self.previous = segments[-1]
                    index += 1
                    continue
            for offset, segment in enumerate(segments):
                self.use(index, offset, segment, whole)
            index += 1
        if self.frees_last:
            self.lowered.append(self.frees[self.previous])
        self.lowered.append(Action(ActionKind.OPTIMIZER))
        return tuple(self.lowered)

    def finish(self, whole: Pass) -> None:
        """A weight part: it waits for nothing and reads no parameters."""
        kind, segments, micro_batch, num = whole
        end = micro_batch + num
        if not self.reduces_any(segments, end):
            self.lowered.append(Run(kind, segments, micro_batch, num))
            return
        for segment in segments:
            self.lowered.append(Run(kind, self.singles[segment], micro_batch, num))
            if self.reduces(segment, end):
                self.lowered.append(self.reductions[segment])

    def use(self, index: int, offset: int, segment: int, whole: Pass) -> None:
        """What a pass does with one of its segments; ``index`` is that of the pass among ``uses``.

        Several micro-batches through one segment are one run, unless each is received, sent or
        reduced.
        """
        kind, _, first, num = whole
        forward = kind is ActionKind.FORWARD
        if segment != self.previous:  # a run of uses starts
            self.gather()
            self.previous = segment
        single, lowered = self.singles[segment], self.lowered
        receives, sends, _ = self.ends_of(forward, single)
        finishes = kind in FINISHING
        reduces_each = finishes and segment in self.reduced_each
        each = num > 1 and (receives or sends or reduces_each)
        for micro_batch in range(first, first + num) if each else (first,):
            many = 1 if each else num
            lowered.append(Run(kind, single, micro_batch, many, receives, sends))
            if finishes and self.reduces(segment, micro_batch + many):
                lowered.append(self.reductions[segment])
        if segment in self.regathered and self.next_segment(index, offset) != segment:
            lowered.append(self.frees[segment])
            self.held.discard(segment)

    def reduces(self, segment: int, end: int) -> bool:
        """Whether a segment's gradients are reduced when those of the micro-batches before ``end``
        are there.
        """
        return end > self.last or segment in self.reduced_each

    def reduces_any(self, segments: tuple[int, ...], end: int) -> bool:
        return end > self.last or not self.reduced_each.isdisjoint(segments)

    def gather(self) -> None:
        """At the start of a run of uses, what it needs that is not there yet, and what comes next
        if there is room for it.
        """
        while self.next_gather is not None and self.next_gather[0] <= self.num_runs:
            self.start_gather(self.next_gather[1])
        self.num_runs += 1
        if self.next_gather is not None:
            number, segment = self.next_gather
            has_room = len(self.held) < _HELD and segment not in self.held
            if has_room if segment in self.regathered else number == self.num_runs:
                self.start_gather(segment)

    def start_gather(self, segment: int) -> None:
        self.lowered.append(self.gathers[segment])
        if segment in self.regathered:
            self.held.add(segment)
        self.next_gather = next(self.coming, None)

    def gathered_in_order(self) -> Iterator[tuple[int, int]]:
        """Every gather: the number of the run of uses that needs it, and the segment."""
        missing = set(segments_of(self.stages, self.stage))
        number, previous = -1, -1
        for whole in self.uses:
            for segment in whole.segments:
                if segment == previous:
                    continue
                number, previous = number + 1, segment
                if segment in missing or segment in self.regathered:
                    missing.discard(segment)
                    yield number, segment
                if not (missing or self.regathered):
                    return

    def ends_of(self, forward: bool, segments: tuple[int, ...]) -> tuple[bool, bool, bool]:
        """Whether the first receives, the last sends, and those between hand on to each other."""
        known = self.ends[forward]
        if segments not in known:
            step = 1 if forward else -1
            first, last = segments[0], segments[-1]
            known[segments] = (
                self.crosses(first - step, first),
                self.crosses(last, last + step),
                segments == tuple(range(first, last + step, step)),
            )
        return known[segments]

    def crosses(self, one: int, other: int) -> bool:
        inside = min(one, other) >= 0 and max(one, other) < len(self.stages)
        return inside and self.stages[one] != self.stages[other]

    def next_segment(self, index: int, offset: int) -> int | None:
        """The segment that comes next."""
        segments = self.uses[index].segments
        if offset + 1 < len(segments):
            return segments[offset + 1]
        return self.uses[index + 1].segments[0] if index + 1 < len(self.uses) else None
