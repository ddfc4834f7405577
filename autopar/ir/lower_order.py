"""From an order to a schedule: messages, gathers, frees, reductions and the optimizer.

The same for every schedule: parameters are gathered one run of uses ahead, receives posted one
computing action ahead, results sent as soon as they are made.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.orders import Pass, segments_of
from autopar.ir.schedule import FINISHING, Action, ActionKind, Run


def lower_order(
    order: Sequence[Pass],
    stages: tuple[int, ...],
    stage: int,
    num_micro_batches: int,
    *,
    regather: bool,
    reduce_each: bool,
) -> tuple[Run | Action, ...]:
    """All that a stage does, with computing actions in runs as long as nothing separates them.

    Args:
        order: The passes of the stage.
        stages: Stage of every segment of the model.
        stage: Whose order it is.
        num_micro_batches: Micro-batches per step.
        regather: Parameters are gathered before, and freed after, each run of uses of a segment;
            otherwise gathered once. Weight parts of backwards are no uses.
        reduce_each: Gradients are reduced after every backward (its weight part, where it is
            apart); otherwise once, after the segment's last.
    """
    return _Lowering(order, stages, stage, num_micro_batches, regather, reduce_each).run()


class _Lowering:
    def __init__(
        self,
        order: Sequence[Pass],
        stages: tuple[int, ...],
        stage: int,
        num_micro_batches: int,
        regather: bool,
        reduce_each: bool,
    ) -> None:
        own = segments_of(stages, stage)
        self.order, self.stages = order, stages
        self.uses = [one for one in order if one.kind is not ActionKind.BACKWARD_WEIGHT]
        self.last = num_micro_batches - 1
        self.reduce_each = reduce_each
        self.frees_last = regather and len(own) == 1  # one segment has one run of uses
        self.regather = regather and len(own) > 1
        self.missing = set(own)  # segments that were not gathered yet
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
            reduces = kind in FINISHING and (self.reduce_each or micro_batch + num > self.last)
            if not (reduces or self.missing or self.regather):
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
        if not (self.reduce_each or micro_batch + num > self.last):
            self.lowered.append(Run(kind, segments, micro_batch, num))
            return
        for segment in segments:
            self.lowered.append(Run(kind, self.singles[segment], micro_batch, num))
            self.lowered.append(self.reductions[segment])

    def use(self, index: int, offset: int, segment: int, whole: Pass) -> None:
        """What a pass does with one of its segments; ``index`` is that of the pass among ``uses``.

        Several micro-batches through one segment are one run, unless each is received, sent or
        reduced.
        """
        kind, _, first, num = whole
        forward = kind is ActionKind.FORWARD
        if segment != self.previous:  # a run of uses starts
            if self.previous < 0:
                self.gather(segment)
            if self.regather or self.missing:
                self.gather(self.following(index, offset))
            self.previous = segment
        single, lowered = self.singles[segment], self.lowered
        receives, sends, _ = self.ends_of(forward, single)
        finishes = kind in FINISHING
        each = num > 1 and (receives or sends or (self.reduce_each and finishes))
        for micro_batch in range(first, first + num) if each else (first,):
            many = 1 if each else num
            lowered.append(Run(kind, single, micro_batch, many, receives, sends))
            if finishes and (self.reduce_each or micro_batch + many > self.last):
                lowered.append(self.reductions[segment])
        if self.regather and self.next_segment(index, offset) != segment:
            lowered.append(self.frees[segment])

    def gather(self, segment: int | None) -> None:
        if segment is not None and (self.regather or segment in self.missing):
            self.missing.discard(segment)
            self.lowered.append(self.gathers[segment])

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

    def following(self, index: int, offset: int) -> int | None:
        """The first segment after this one that is another one."""
        segment = self.uses[index].segments[offset]
        for number in range(index, len(self.uses)):
            for other in self.uses[number].segments[offset + 1 if number == index else 0 :]:
                if other != segment:
                    return other
        return None

    def next_segment(self, index: int, offset: int) -> int | None:
        """The segment that comes next."""
        segments = self.uses[index].segments
        if offset + 1 < len(segments):
            return segments[offset + 1]
        return self.uses[index + 1].segments[0] if index + 1 < len(self.uses) else None
