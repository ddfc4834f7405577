"""What holds of every schedule, whoever made it: complete, ordered, matched, free of deadlock; and
what it keeps alive.

Sends are buffered and receives are posted without waiting: only a forward or a backward (its input
part, where it is in two) waits, for its message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set

from autopar.ir.errors import ScheduleError
from autopar.ir.schedule import (
    COMPUTING,
    COPYING,
    FINISHING,
    RETURNING,
    Action,
    ActionKind,
    Schedule,
)

Channel = tuple[int, int, bool]
"""Source stage, target stage, and whether it carries activations (else gradients). Messages keep
their order.
"""


def validate(schedule: Schedule) -> None:
    """Check ``schedule``.

    Raises:
        ScheduleError: an action is missing, repeated, on the wrong stage, out of order, unmatched,
            or never runs; the message names stage and action.
    """
    for stage in range(schedule.num_stages):
        _check_complete(schedule, stage)
        _check_order(schedule, stage)
        _check_parameters(schedule, stage)
    _check_channels(schedule)
    makespan(schedule)


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, the most (segment, micro-batch) pairs that were forwarded and whose backward,
    both parts of it, is not done.
    """
    peaks: list[int] = []
    for actions in schedule.actions:
        live = peak = 0
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                live += 1
            elif action.kind in FINISHING:
                live -= 1
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


def makespan(
    schedule: Schedule, *, forward: float = 1.0, backward: float = 1.0, weight: float = 0.0
) -> float:
    """Duration of a step in which a segment's forward and backward take these times and all else
    takes none. Of a backward in two parts ``weight`` is the weight part's.

    Raises:
        ScheduleError: the stages wait for each other for ever.
    """
    durations = {
        ActionKind.FORWARD: forward,
        ActionKind.BACKWARD: backward,
        ActionKind.BACKWARD_INPUT: backward - weight,
        ActionKind.BACKWARD_WEIGHT: weight,
    }
    clocks = [0.0] * schedule.num_stages
    positions = [0] * schedule.num_stages
    done: dict[Action, float] = {}
    advanced = True
    while advanced:
        advanced = False
        for stage, actions in enumerate(schedule.actions):
            while positions[stage] < len(actions):
                action = actions[positions[stage]]
                ready = _ready_at(schedule, action, done)
                if ready is None:
                    break
                if action.kind in COMPUTING:
                    clocks[stage] = max(clocks[stage], ready) + durations[action.kind]
                done.setdefault(action, clocks[stage])
                positions[stage] += 1
                advanced = True
    for stage, actions in enumerate(schedule.actions):
        if positions[stage] < len(actions):
            action = actions[positions[stage]]
            raise ScheduleError("the stages wait for each other", where=_where(stage, action))
    return max(clocks)


def receive_of(schedule: Schedule, action: Action) -> Action | None:
    """The receive that a forward or backward waits for, or None if its input is made on its own
    stage.
    """
    stages, segment = schedule.stage_of_segment, action.segment
    if action.kind is ActionKind.FORWARD:
        kind, neighbour = ActionKind.RECEIVE_ACTIVATIONS, segment - 1
    elif action.kind in RETURNING:
        kind, neighbour = ActionKind.RECEIVE_GRADIENTS, segment + 1
    else:
        return None
    if not 0 <= neighbour < len(stages) or stages[neighbour] == stages[segment]:
        return None
    return Action(kind, segment, action.micro_batch)


def _ready_at(schedule: Schedule, action: Action, done: dict[Action, float]) -> float | None:
    """When the inputs of ``action`` exist, or None if they do not yet."""
    if action.kind not in COMPUTING:
        return 0.0
    segment, micro_batch = action.segment, action.micro_batch
    received = receive_of(schedule, action)
    needed: list[tuple[ActionKind, ...]] = []
    neighbour = segment
    if action.kind is ActionKind.FORWARD:
        if segment > 0:
            neighbour = segment - 1
            kind = ActionKind.SEND_ACTIVATIONS if received else ActionKind.FORWARD
            needed.append((kind,))
    elif action.kind in RETURNING and segment + 1 < schedule.num_segments:
        neighbour = segment + 1
        needed.append((ActionKind.SEND_GRADIENTS,) if received else RETURNING)
    ready = [
        max((done.get(Action(kind, neighbour, micro_batch), -1.0) for kind in kinds), default=-1.0)
        for kinds in needed
    ]
    if action.kind is not ActionKind.FORWARD:
        before = ActionKind.FORWARD
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            before = ActionKind.BACKWARD_INPUT
        ready.append(done.get(Action(before, segment, micro_batch), -1.0))
    return None if min(ready, default=0.0) < 0 else max(ready, default=0.0)


def _check_complete(schedule: Schedule, stage: int) -> None:
    """Each forward, backward (whole or in two parts), send and receive once and on its stage, and
    each copy there and back of offloaded activations; the optimizer once, last.
    """
    actions = schedule.actions[stage]
    split = {
        (action.segment, action.micro_batch)
        for action in actions
        if action.kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    }
    offloaded = _offloaded(schedule, stage)
    expected = {*_expected(schedule, stage, split), *_copies(schedule, stage, offloaded)}
    counts = Counter(
        action
        for action in actions
        if action.micro_batch >= 0 or action.kind is ActionKind.OPTIMIZER
    )
    for action, count in counts.items():
        if action not in expected:
            raise ScheduleError("the action does not belong here", where=_where(stage, action))
        if count > 1:
            raise ScheduleError(f"the action occurs {count} times", where=_where(stage, action))
    for action in expected:
        if action not in counts:
            raise ScheduleError("the action is missing", where=_where(stage, action))
    if actions[-1].kind is not ActionKind.OPTIMIZER:
        raise ScheduleError("the optimizer must come last", where=_where(stage, actions[-1]))


def _expected(schedule: Schedule, stage: int, split: Set[tuple[int, int]]) -> Iterator[Action]:
    yield Action(ActionKind.OPTIMIZER)
    stages = schedule.stage_of_segment
    for segment in schedule.segments_of(stage):
        after = segment > 0 and stages[segment - 1] != stage
        before = segment + 1 < len(stages) and stages[segment + 1] != stage
        for micro_batch in range(schedule.num_micro_batches):
            yield Action(ActionKind.FORWARD, segment, micro_batch)
            if (segment, micro_batch) in split:
                yield Action(ActionKind.BACKWARD_INPUT, segment, micro_batch)
                yield Action(ActionKind.BACKWARD_WEIGHT, segment, micro_batch)
            else:
                yield Action(ActionKind.BACKWARD, segment, micro_batch)
            if after:
                yield Action(ActionKind.RECEIVE_ACTIVATIONS, segment, micro_batch)
                yield Action(ActionKind.SEND_GRADIENTS, segment, micro_batch)
            if before:
                yield Action(ActionKind.SEND_ACTIVATIONS, segment, micro_batch)
                yield Action(ActionKind.RECEIVE_GRADIENTS, segment, micro_batch)


def _offloaded(schedule: Schedule, stage: int) -> frozenset[tuple[int, int]]:
    """Segments and micro-batches of which something is copied to the host or back."""
    return frozenset(
        (action.segment, action.micro_batch)
        for action in schedule.actions[stage]
        if action.kind in COPYING
    )


def _copies(schedule: Schedule, stage: int, offloaded: Set[tuple[int, int]]) -> Iterator[Action]:
    own = schedule.segments_of(stage)
    for segment, micro_batch in offloaded:
        if segment in own and micro_batch < schedule.num_micro_batches:
            for kind in COPYING:
                yield Action(kind, segment, micro_batch)


def _check_order(schedule: Schedule, stage: int) -> None:
    """What is used was made before: receives before uses, forwards before backwards, results before
    sends, and what was offloaded came back before its backward.
    """
    seen: set[Action] = set()
    offloaded = _offloaded(schedule, stage)
    for action in schedule.actions[stage]:
        kind, segment, micro_batch = action.kind, action.segment, action.micro_batch
        needed: list[tuple[Action, ...]] = []
        received = receive_of(schedule, action)
        if received is not None:
            needed.append((received,))
        if kind in RETURNING and (segment, micro_batch) in offloaded:
            needed.append((Action(ActionKind.FETCH_ACTIVATIONS, segment, micro_batch),))
        if kind is ActionKind.FETCH_ACTIVATIONS:
            needed.append((Action(ActionKind.OFFLOAD_ACTIVATIONS, segment, micro_batch),))
        makes = ActionKind.SEND_ACTIVATIONS, ActionKind.OFFLOAD_ACTIVATIONS
        if kind in (*RETURNING, *makes):
            needed.append((Action(ActionKind.FORWARD, segment, micro_batch),))
        if kind is ActionKind.SEND_GRADIENTS:
            needed.append(tuple(Action(made, segment, micro_batch) for made in RETURNING))
        if kind is ActionKind.BACKWARD_WEIGHT:
            needed.append((Action(ActionKind.BACKWARD_INPUT, segment, micro_batch),))
        for before in needed:
            if seen.isdisjoint(before):
                raise ScheduleError(f"{before[0]} must come before", where=_where(stage, action))
        seen.add(action)


def _check_parameters(schedule: Schedule, stage: int) -> None:
    """Parameters are gathered when used; every gradient is reduced after it was made, before the
    optimizer.
    """
    own = set(schedule.segments_of(stage))
    gathered: set[int] = set()
    unreduced: set[int] = set()
    for action in schedule.actions[stage]:
        segment, where = action.segment, _where(stage, action)
        match action.kind:
            case ActionKind.GATHER_PARAMETERS:
                if segment not in own or segment in gathered:
                    raise ScheduleError("gathers what is gathered, or not held here", where=where)
                gathered.add(segment)
            case ActionKind.FREE_PARAMETERS:
                if segment not in gathered:
                    raise ScheduleError("frees parameters that are not gathered", where=where)
                gathered.remove(segment)
            case ActionKind.BACKWARD_WEIGHT:
                unreduced.add(segment)
            case ActionKind.FORWARD | ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                if segment not in gathered:
                    raise ScheduleError("the parameters are not gathered", where=where)
                if action.kind is ActionKind.BACKWARD:
                    unreduced.add(segment)
            case ActionKind.REDUCE_GRADIENTS:
                if segment not in unreduced:
                    raise ScheduleError("there is no gradient to reduce", where=where)
                unreduced.remove(segment)
            case ActionKind.OPTIMIZER:
                if unreduced:
                    raise ScheduleError(
                        f"gradients of segments {sorted(unreduced)} are not reduced", where=where
                    )
            case _:
                pass


def _check_channels(schedule: Schedule) -> None:
    """On every channel the receives are posted in the order of the sends."""
    sends: dict[Channel, list[tuple[int, int]]] = {}
    receives: dict[Channel, list[tuple[int, int]]] = {}
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            channel = channel_of(schedule, action)
            if channel is None:
                continue
            sending = stage == channel[0]
            boundary = action.segment
            if action.kind in (ActionKind.RECEIVE_ACTIVATIONS, ActionKind.SEND_GRADIENTS):
                boundary -= 1
            side = sends if sending else receives
            side.setdefault(channel, []).append((boundary, action.micro_batch))
    for channel in sends.keys() | receives.keys():
        sent, received = sends.get(channel, []), receives.get(channel, [])
        for position, (left, right) in enumerate(zip(sent, received, strict=False)):
            if left != right:
                raise ScheduleError(
                    f"message {position} from stage {channel[0]} is {left} (segment, micro-batch), "
                    f"but stage {channel[1]} receives {right}",
                    where=f"stage {channel[1]}",
                )
        if len(sent) != len(received):
            raise ScheduleError(
                f"{len(sent)} sends from stage {channel[0]}, {len(received)} receives",
                where=f"stage {channel[1]}",
            )


def channel_of(schedule: Schedule, action: Action) -> Channel | None:
    """The channel that a send or receive uses; None for other actions."""
    stages, segment = schedule.stage_of_segment, action.segment
    match action.kind:
        case ActionKind.SEND_ACTIVATIONS:
            return stages[segment], stages[segment + 1], True
        case ActionKind.RECEIVE_ACTIVATIONS:
            return stages[segment - 1], stages[segment], True
        case ActionKind.SEND_GRADIENTS:
            return stages[segment], stages[segment - 1], False
        case ActionKind.RECEIVE_GRADIENTS:
            return stages[segment + 1], stages[segment], False
        case _:
            return None


def _where(stage: int, action: Action) -> str:
    return f"stage {stage}, action {action}"
