"""The event simulator: what the runtime runs with tensors, this runs with seconds.

A rank has a compute stream and a communication stream. Computing actions wait for their message and
for the gathers of their segment; gathers and reductions queue on the communication stream from
the moment they are issued. Compute beside communication is slowed down by a share of the overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.ir.errors import ScheduleError
from autopar.ir.schedule import Action, ActionKind, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTimes:
    """Seconds of each segment's actions; ``send_s`` is the message to the next stage, either way.

    ``held_bytes`` live from a forward to its backward.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    gather_s: tuple[float, ...]
    reduce_s: tuple[float, ...]
    send_s: tuple[float, ...]
    held_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An action with the time that it took."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a step takes.

    Attributes:
        step_s: Until the last stage's optimizer is done.
        busy_s: Compute of each stage, without waiting.
        exposed_s: Waiting for gathers and reductions, by stage.
        peak_held_bytes: The most that forwarded and not yet backwarded segments hold, by stage.
        timeline: Computing and communicating actions of each stage.
    """

    step_s: float
    busy_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    peak_held_bytes: tuple[int, ...]
    timeline: tuple[tuple[Event, ...], ...]


def simulate(
    schedule: Schedule,
    times: SegmentTimes,
    *,
    optimizer_s: Sequence[float],
    slowdown: float = 0.0,
    record: bool = False,
) -> Simulation:
    """Run ``schedule``.

    Args:
        schedule: The actions of every stage.
        times: Costs of the segments.
        optimizer_s: Seconds of the optimizer on each stage.
        slowdown: Seconds by which a second of overlap lengthens compute.
        record: Whether to keep the timeline.

    Raises:
        ScheduleError: The stages wait for each other for ever.
    """
    messages: dict[tuple[ActionKind, int, int], float] = {}
    ranks = [
        _Rank(actions, times, messages, optimizer_s[stage], slowdown, record)
        for stage, actions in enumerate(schedule.actions)
    ]
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            moved = rank.advance() or moved
    stuck = [stage for stage, rank in enumerate(ranks) if rank.position < len(rank.actions)]
    if stuck:
        action = ranks[stuck[0]].actions[ranks[stuck[0]].position]
        raise ScheduleError("the stages wait for each other", where=f"stage {stuck[0]}, {action}")
    return Simulation(
        step_s=max(rank.clock for rank in ranks),
        busy_s=tuple(rank.busy_s for rank in ranks),
        exposed_s=tuple(rank.exposed_s for rank in ranks),
        peak_held_bytes=tuple(rank.peak_bytes for rank in ranks),
        timeline=tuple(tuple(rank.events) for rank in ranks),
    )


@dataclass(slots=True)
class _Rank:
    actions: tuple[Action, ...]
    times: SegmentTimes
    messages: dict[tuple[ActionKind, int, int], float]
    optimizer_s: float
    slowdown: float
    record: bool
    position: int = 0
    clock: float = 0.0
    comm_clock: float = 0.0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0
    gathered: dict[int, float] = field(default_factory=dict)
    comm: deque[tuple[float, float]] = field(default_factory=deque)
    awaits: set[tuple[ActionKind, int, int]] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)

    def advance(self) -> bool:
        """Run actions until one has to wait for a message that was not sent yet."""
        started = self.position
        while self.position < len(self.actions) and self.run(self.actions[self.position]):
            self.position += 1
        return self.position > started

    def run(self, action: Action) -> bool:
        kind, segment = action.kind, action.segment
        if kind is ActionKind.FORWARD or kind is ActionKind.BACKWARD:
            return self.compute(action)
        if kind is ActionKind.RECEIVE_ACTIVATIONS or kind is ActionKind.RECEIVE_GRADIENTS:
            self.awaits.add((kind, segment, action.micro_batch))
        elif kind is ActionKind.SEND_ACTIVATIONS:
            key = (ActionKind.RECEIVE_ACTIVATIONS, segment + 1, action.micro_batch)
            self.messages[key] = self.clock + self.times.send_s[segment]
        elif kind is ActionKind.SEND_GRADIENTS:
            key = (ActionKind.RECEIVE_GRADIENTS, segment - 1, action.micro_batch)
            self.messages[key] = self.clock + self.times.send_s[segment - 1]
        elif kind is ActionKind.GATHER_PARAMETERS:
            self.gathered[segment] = self.communicate(action, self.times.gather_s[segment])
        elif kind is ActionKind.REDUCE_GRADIENTS:
            self.communicate(action, self.times.reduce_s[segment])
        elif kind is ActionKind.OPTIMIZER:
            self.wait_for_comm(self.comm_clock)
            self.occupy(action, self.optimizer_s)
        return True

    def compute(self, action: Action) -> bool:
        forward = action.kind is ActionKind.FORWARD
        receive = ActionKind.RECEIVE_ACTIVATIONS if forward else ActionKind.RECEIVE_GRADIENTS
        key = (receive, action.segment, action.micro_batch)
        if key in self.awaits:
            if key not in self.messages:
                return False
            self.clock = max(self.clock, self.messages[key])
        self.wait_for_comm(self.gathered.get(action.segment, 0.0))
        if forward:
            self.held_bytes += self.times.held_bytes[action.segment]
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        else:
            self.held_bytes -= self.times.held_bytes[action.segment]
        seconds = self.times.forward_s if forward else self.times.backward_s
        self.occupy(action, seconds[action.segment])
        return True

    def occupy(self, action: Action, seconds: float) -> None:
        """Compute for ``seconds``, longer where communication runs beside it."""
        start = self.clock
        while self.comm and self.comm[0][1] <= start:
            self.comm.popleft()
        overlap = sum(
            max(0.0, min(end, start + seconds) - max(begin, start)) for begin, end in self.comm
        )
        seconds += self.slowdown * overlap
        self.clock = start + seconds
        self.busy_s += seconds
        self.note(action, start, self.clock)

    def communicate(self, action: Action, seconds: float) -> float:
        """Queue a collective; the time at which it is done."""
        if seconds == 0.0:
            return 0.0
        start = max(self.clock, self.comm_clock)
        self.comm_clock = start + seconds
        self.comm.append((start, self.comm_clock))
        self.note(action, start, self.comm_clock)
        return self.comm_clock

    def wait_for_comm(self, until: float) -> None:
        if until > self.clock:
            self.exposed_s += until - self.clock
            self.clock = until

    def note(self, action: Action, start: float, end: float) -> None:
        if self.record:
            self.events.append(Event(action=action, start_s=start, end_s=end))
