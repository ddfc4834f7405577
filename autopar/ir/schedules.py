"""Generators of schedules: an order of forwards and backwards for each stage, and one lowering that
adds the rest.

An *order* says what a stage computes and when. Lowering adds receives (posted one compute action
ahead), sends, gathers (one run of uses ahead), frees, reductions and the optimizer, in the same way
for every order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from autopar.ir.errors import ScheduleError
from autopar.ir.schedule import Action, ActionKind, Schedule

ComputeOrder = tuple[Action, ...]
"""The forwards and backwards of one stage, in order."""

ONE_F_ONE_B = "1f1b"
LAYERED = "layered"
FORWARD_ONLY = "forward"


def make_schedule(
    name: str, stage_of_segment: Sequence[int], num_micro_batches: int, *, zero_stage: int = 0
) -> Schedule:
    """The schedule called ``name`` (``1f1b`` or ``layered``); for the other arguments see the
    generators.
    """
    generators = {ONE_F_ONE_B: one_f_one_b, LAYERED: layered}
    if name not in generators:
        raise ScheduleError(
            f"no schedule is called {name!r}", hint=f"one of {', '.join(generators)}"
        )
    return generators[name](stage_of_segment, num_micro_batches, zero_stage=zero_stage)


def one_f_one_b(
    stage_of_segment: Sequence[int], num_micro_batches: int, *, zero_stage: int = 0
) -> Schedule:
    """1F1B (PipeDream-flush): at most p − s + 1 micro-batches are in flight on stage s (counted
    from 1).

    Args:
        stage_of_segment: Stage of each segment; stages are contiguous, in order, none empty.
        num_micro_batches: Micro-batches per step and data rank; fewer than stages are allowed.
        zero_stage: 3 gathers at each run of uses; 2 and 3 reduce after every backward.

    Raises:
        ScheduleError: the segments are not contiguous, or a number is out of range.
    """
    stages = _checked(stage_of_segment, num_micro_batches, zero_stage)
    if list(stages) != sorted(stages):
        raise ScheduleError(
            f"1F1B needs contiguous stages, not {stages}", hint="use the layered schedule"
        )

    def order(stage: int) -> Iterator[Action]:
        segments = _segments_of(stages, stage)
        warm_up = min(num_micro_batches, max(stages) + 1 - stage)
        for micro_batch in range(num_micro_batches + warm_up):
            if micro_batch < num_micro_batches:
                for segment in segments:
                    yield Action(ActionKind.FORWARD, segment, micro_batch)
            if micro_batch >= warm_up - 1 and micro_batch < num_micro_batches + warm_up - 1:
                for segment in reversed(segments):
                    yield Action(ActionKind.BACKWARD, segment, micro_batch - warm_up + 1)

    return _lower(
        ONE_F_ONE_B,
        stages,
        num_micro_batches,
        order,
        regather=zero_stage == 3,
        reduce_each=zero_stage >= 2,
    )


def layered(
    stage_of_segment: Sequence[int], num_micro_batches: int, *, zero_stage: int = 0
) -> Schedule:
    """Layered gradient accumulation: all micro-batches pass through a segment before the next one
    starts.

    The model's last segment alternates forward and backward, so that the logits of one micro-batch
    live at a time. With segment k on stage k mod p this is the modular pipeline. Concept covered by
    US patent 12585929B2.

    Args:
        stage_of_segment: Stage of each segment; any map that leaves no stage empty.
        num_micro_batches: Micro-batches per step and data rank.
        zero_stage: 3 gathers once for forward and once for backward (once for the last segment).

    Raises:
        ScheduleError: a stage has no segment, or a number is out of range.
    """
    stages = _checked(stage_of_segment, num_micro_batches, zero_stage)
    last = len(stages) - 1

    def order(stage: int) -> Iterator[Action]:
        segments = _segments_of(stages, stage)
        for segment in segments:
            for micro_batch in range(num_micro_batches):
                yield Action(ActionKind.FORWARD, segment, micro_batch)
                if segment == last:
                    yield Action(ActionKind.BACKWARD, segment, micro_batch)
        for segment in reversed(segments):
            if segment != last:
                for micro_batch in range(num_micro_batches):
                    yield Action(ActionKind.BACKWARD, segment, micro_batch)

    return _lower(
        LAYERED, stages, num_micro_batches, order, regather=zero_stage == 3, reduce_each=False
    )


def forward_only(
    stage_of_segment: Sequence[int], num_micro_batches: int, *, zero_stage: int = 0
) -> Schedule:
    """Forwards without backwards, to evaluate; the optimizer's action stands for the step's end.

    Contiguous stages pass one micro-batch after the other; otherwise all pass a segment before the
    next.

    Raises:
        ScheduleError: a stage has no segment, or a number is out of range.
    """
    stages = _checked(stage_of_segment, num_micro_batches, zero_stage)

    def order(stage: int) -> Iterator[Action]:
        segments, micro_batches = _segments_of(stages, stage), range(num_micro_batches)
        if list(stages) == sorted(stages):
            for micro_batch, segment in itertools.product(micro_batches, segments):
                yield Action(ActionKind.FORWARD, segment, micro_batch)
        else:
            for segment, micro_batch in itertools.product(segments, micro_batches):
                yield Action(ActionKind.FORWARD, segment, micro_batch)

    return _lower(
        FORWARD_ONLY,
        stages,
        num_micro_batches,
        order,
        regather=zero_stage == 3,
        reduce_each=False,
    )


def contiguous_stages(num_stages: int, segments_per_stage: int) -> tuple[int, ...]:
    """Stage of each segment when a stage holds neighbouring segments."""
    return tuple(k // segments_per_stage for k in range(num_stages * segments_per_stage))


def modular_stages(num_stages: int, segments_per_stage: int) -> tuple[int, ...]:
    """Stage of each segment when segment k sits on stage k mod p."""
    return tuple(k % num_stages for k in range(num_stages * segments_per_stage))


def _checked(
    stage_of_segment: Sequence[int], num_micro_batches: int, zero_stage: int
) -> tuple[int, ...]:
    stages = tuple(stage_of_segment)
    if not stages or sorted(set(stages)) != list(range(max(stages) + 1)):
        raise ScheduleError(f"every stage needs a segment; the stages of the segments are {stages}")
    if num_micro_batches < 1:
        raise ScheduleError(f"a step needs at least 1 micro-batch, not {num_micro_batches}")
    if zero_stage not in (0, 1, 2, 3):
        raise ScheduleError(f"ZeRO stage {zero_stage} does not exist", hint="0, 1, 2 or 3")
    return stages


def _segments_of(stages: tuple[int, ...], stage: int) -> tuple[int, ...]:
    return tuple(k for k, holder in enumerate(stages) if holder == stage)


def _lower(
    name: str,
    stages: tuple[int, ...],
    num_micro_batches: int,
    order: Callable[[int], Iterator[Action]],
    *,
    regather: bool,
    reduce_each: bool,
) -> Schedule:
    return Schedule(
        name=name,
        num_micro_batches=num_micro_batches,
        stage_of_segment=stages,
        actions=tuple(
            lower_order(
                tuple(order(stage)),
                stages,
                num_micro_batches,
                regather=regather,
                reduce_each=reduce_each,
            )
            for stage in range(max(stages) + 1)
        ),
    )


def lower_order(
    order: ComputeOrder,
    stages: tuple[int, ...],
    num_micro_batches: int,
    *,
    regather: bool,
    reduce_each: bool,
) -> tuple[Action, ...]:
    """All actions of the stage that computes ``order``.

    Args:
        order: Forwards and backwards of the stage.
        stages: Stage of every segment of the model.
        num_micro_batches: Micro-batches per step.
        regather: Parameters are gathered before, and freed after, each run of uses; otherwise
            gathered once.
        reduce_each: Gradients are reduced after every backward; otherwise once, after the segment's
            last.
    """
    starts, ends = _runs(order)
    lowered: list[Action] = []
    gathered: set[int] = set()

    def gather(segment: int) -> None:
        if regather or segment not in gathered:
            gathered.add(segment)
            lowered.append(Action(ActionKind.GATHER_PARAMETERS, segment))

    lowered.extend(_receive(order[0], stages))
    for position, action in enumerate(order):
        if position in starts:
            if position == 0:
                gather(action.segment)
            following = ends[position]
            if following < len(order):
                gather(order[following].segment)
        if position + 1 < len(order):
            lowered.extend(_receive(order[position + 1], stages))
        lowered.append(action)
        lowered.extend(_send(action, stages))
        if action.kind is ActionKind.BACKWARD and (
            reduce_each or action.micro_batch == num_micro_batches - 1
        ):
            lowered.append(Action(ActionKind.REDUCE_GRADIENTS, action.segment))
        if regather and (position + 1 in starts or position + 1 == len(order)):
            lowered.append(Action(ActionKind.FREE_PARAMETERS, action.segment))
    lowered.append(Action(ActionKind.OPTIMIZER))
    return tuple(lowered)


def _runs(order: ComputeOrder) -> tuple[frozenset[int], dict[int, int]]:
    """Where maximal runs of uses of one segment start, and (by start) where the following run
    starts.
    """
    ends: dict[int, int] = {}
    position = 0
    for _, run in itertools.groupby(order, key=lambda action: action.segment):
        start, position = position, position + len(list(run))
        ends[start] = position
    return frozenset(ends), ends


def _receive(action: Action, stages: tuple[int, ...]) -> Iterator[Action]:
    """The receive that ``action`` waits for, if it needs one."""
    segment = action.segment
    if action.kind is ActionKind.FORWARD:
        if segment > 0 and stages[segment - 1] != stages[segment]:
            yield Action(ActionKind.RECEIVE_ACTIVATIONS, segment, action.micro_batch)
    elif segment + 1 < len(stages) and stages[segment + 1] != stages[segment]:
        yield Action(ActionKind.RECEIVE_GRADIENTS, segment, action.micro_batch)


def _send(action: Action, stages: tuple[int, ...]) -> Iterator[Action]:
    """The send of what ``action`` made, if another stage needs it."""
    segment = action.segment
    if action.kind is ActionKind.FORWARD:
        if segment + 1 < len(stages) and stages[segment + 1] != stages[segment]:
            yield Action(ActionKind.SEND_ACTIVATIONS, segment, action.micro_batch)
    elif segment > 0 and stages[segment - 1] != stages[segment]:
        yield Action(ActionKind.SEND_GRADIENTS, segment, action.micro_batch)
