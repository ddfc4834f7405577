"""The event simulator: what the runtime runs with tensors, this runs with seconds.

A rank has a compute stream and a communication stream. Computing actions wait for their message and
for the gathers of their segment; gathers and reductions queue on the communication stream from
the moment they are issued. Compute beside communication is slowed down by a share of the overlap.
Copies of offloaded activations have a stream to the host and one back, beside all else: a copy out
waits for the one before it, a copy back for the copy out, and a backward for its copy back.

A compact schedule is simulated run by run: while the communication stream is idle, a run takes the
sum of its actions, which is exact because nothing happens between them. Otherwise, and where the
timeline is recorded, its actions are simulated one by one.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.ir.errors import ScheduleError
from autopar.ir.schedule import (
    COMPUTING,
    RETURNING,
    Action,
    ActionKind,
    CompactSchedule,
    Run,
    Schedule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTimes:
    """Seconds of each segment's actions; ``send_s`` is the message to the next stage, either way.

    ``held_bytes`` live from a forward to its backward. Of a backward in two parts, ``weight_s`` of
    ``backward_s`` is the weight part, and ``weight_bytes`` live between the parts; none by default.
    ``copy_s`` is what copying offloaded activations takes, either way.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    gather_s: tuple[float, ...]
    reduce_s: tuple[float, ...]
    send_s: tuple[float, ...]
    held_bytes: tuple[int, ...]
    weight_s: tuple[float, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    copy_s: tuple[float, ...] = ()

    def seconds(self, kind: ActionKind, segment: int) -> float:
        """Of a computing action."""
        if kind is ActionKind.FORWARD:
            return self.forward_s[segment]
        weight_s = self.weight_s[segment] if self.weight_s else 0.0
        if kind is ActionKind.BACKWARD_WEIGHT:
            return weight_s
        backward_s = self.backward_s[segment]
        return backward_s if kind is ActionKind.BACKWARD else backward_s - weight_s

    def more_bytes(self, kind: ActionKind, segment: int) -> int:
        """How much more is held after a computing action than before it."""
        held, waiting = self.held_bytes[segment], 0
        if self.weight_bytes:
            waiting = self.weight_bytes[segment]
        return {
            ActionKind.FORWARD: held,
            ActionKind.BACKWARD: -held,
            ActionKind.BACKWARD_INPUT: waiting - held,
            ActionKind.BACKWARD_WEIGHT: -waiting,
        }[kind]


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
        copying_s: Waiting for copies of offloaded activations, by stage.
        peak_held_bytes: The most that forwarded and not yet backwarded segments hold, by stage; of
            backwards in two parts also what lives between them.
        timeline: Computing and communicating actions of each stage, where it is recorded.
        messages: Sends of each stage until they arrive, where the timeline is recorded.
    """

    step_s: float
    busy_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    copying_s: tuple[float, ...]
    peak_held_bytes: tuple[int, ...]
    timeline: tuple[tuple[Event, ...], ...]
    messages: tuple[tuple[Event, ...], ...]

    @property
    def waiting_s(self) -> tuple[float, ...]:
        """Waiting for other stages, by stage: all other time."""
        known = zip(self.busy_s, self.exposed_s, self.copying_s, strict=True)
        return tuple(max(0.0, self.step_s - sum(seconds)) for seconds in known)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Waiting for other stages over compute, by stage; 0 for a stage that computes nothing."""
        pairs = zip(self.waiting_s, self.busy_s, strict=True)
        return tuple(waiting / busy if busy else 0.0 for waiting, busy in pairs)


def simulate(
    schedule: Schedule | CompactSchedule,
    times: SegmentTimes,
    *,
    optimizer_s: Sequence[float],
    slowdown: float | Sequence[float] = 0.0,
    record: bool = False,
) -> Simulation:
    """Run ``schedule``.

    Args:
        schedule: The actions of every stage.
        times: Costs of the segments.
        optimizer_s: Seconds of the optimizer on each stage.
        slowdown: Seconds by which a second of overlap lengthens compute, at most 1; or those of
            each stage.
        record: Whether to keep the timeline.

    Raises:
        ScheduleError: The stages wait for each other for ever.
    """
    work = Work(schedule=schedule, times=times, optimizer_s=optimizer_s, slowdown=slowdown)
    return simulate_together([work], record=record)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the ranks of one pipeline do; see ``simulate``."""

    schedule: Schedule | CompactSchedule
    times: SegmentTimes
    optimizer_s: Sequence[float]
    slowdown: float | Sequence[float] = 0.0


def simulate_together(works: Sequence[Work], *, record: bool = False) -> tuple[Simulation, ...]:
    """Pipelines that do different work side by side, as data ranks with unequal shares of a batch:
    a gather or reduction begins when all have come to it, and a step ends with the last of them.

    All of them have the same gathers and reductions in the same order.
    """
    meetings: list[_Meeting] = []
    teams: list[list[_Rank]] = []
    for number, work in enumerate(works):
        schedule, times, slowdown = work.schedule, work.times, work.slowdown
        items = schedule.items if isinstance(schedule, CompactSchedule) else _one_by_one(schedule)
        messages: dict[int, float] = {}
        slower = slowdown if isinstance(slowdown, Sequence) else [slowdown] * len(items)
        meetings = meetings or [_Meeting(size=len(works)) for _ in items]
        teams.append(
            [
                _Rank(
                    items=of_stage,
                    num_micro_batches=schedule.num_micro_batches,
                    times=times,
                    messages=messages,
                    optimizer_s=work.optimizer_s[stage],
                    slowdown=slower[stage],
                    record=record,
                    meeting=meetings[stage],
                    number=number,
                )
                for stage, of_stage in enumerate(items)
            ]
        )
    _run([rank for team in teams for rank in team])
    step_s = max(rank.clock for team in teams for rank in team)
    return tuple(_simulation(team, step_s) for team in teams)


@dataclass(slots=True, kw_only=True)
class _Meeting:
    """When each of the ranks that communicate with each other comes to a collective."""

    size: int
    arrivals: dict[int, dict[int, float]] = field(default_factory=dict)

    def begins(self, collective: int, number: int, at: float) -> float | None:
        """When the collective begins; None while others are not known to come."""
        if self.size == 1:
            return at
        arrived = self.arrivals.setdefault(collective, {})
        arrived[number] = at
        return max(arrived.values()) if len(arrived) == self.size else None


def _run(ranks: Sequence[_Rank]) -> None:
    """Let all ranks do all that they do.

    Raises:
        ScheduleError: They wait for each other for ever.
    """
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            moved = rank.advance() or moved
    for stage, rank in enumerate(ranks):
        if rank.position < len(rank.items):
            item = rank.items[rank.position]
            action = next(item.actions()) if isinstance(item, Run) else item
            raise ScheduleError("the stages wait for each other", where=f"stage {stage}, {action}")


def _simulation(ranks: Sequence[_Rank], step_s: float) -> Simulation:
    return Simulation(
        step_s=step_s,
        busy_s=tuple(rank.busy_s for rank in ranks),
        exposed_s=tuple(rank.exposed_s for rank in ranks),
        copying_s=tuple(rank.copying_s for rank in ranks),
        peak_held_bytes=tuple(rank.peak_bytes for rank in ranks),
        timeline=tuple(tuple(rank.events) for rank in ranks),
        messages=tuple(tuple(rank.sent) for rank in ranks),
    )


def _one_by_one(schedule: Schedule) -> tuple[tuple[Run | Action, ...], ...]:
    """Each computing action as a run of its own; it waits if its receive was posted before."""
    stages: list[tuple[Run | Action, ...]] = []
    for actions in schedule.actions:
        posted: set[Action] = set()
        items: list[Run | Action] = []
        for action in actions:
            if action.kind in (ActionKind.RECEIVE_ACTIVATIONS, ActionKind.RECEIVE_GRADIENTS):
                posted.add(action)
            elif action.kind in COMPUTING:
                run = Run(action.kind, (action.segment,), action.micro_batch)
                waits = action.kind is not ActionKind.BACKWARD_WEIGHT and run.receive in posted
                items.append(run._replace(receives=waits))
            else:
                items.append(action)
        stages.append(tuple(items))
    return tuple(stages)


_Totals = tuple[float, int, int, float, int]
"""Of one micro-batch through some segments: see ``_Rank.totals``."""


@dataclass(slots=True, kw_only=True)
class _Rank:
    items: tuple[Run | Action, ...]
    num_micro_batches: int
    times: SegmentTimes
    messages: dict[int, float]
    optimizer_s: float
    slowdown: float
    record: bool
    meeting: _Meeting
    number: int
    position: int = 0
    num_collectives: int = 0
    clock: float = 0.0
    comm_clock: float = 0.0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    out_clock: float = 0.0
    back_clock: float = 0.0
    copying_s: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0
    gathered: dict[int, float] = field(default_factory=dict)
    offloaded: dict[tuple[int, int], float] = field(default_factory=dict)  # when it is on the host
    fetched: dict[tuple[int, int], float] = field(default_factory=dict)  # when it is back
    comm: deque[tuple[float, float]] = field(default_factory=deque)
    forward: dict[tuple[int, ...], _Totals] = field(default_factory=dict)
    backward: dict[tuple[int, ...], _Totals] = field(default_factory=dict)
    input_part: dict[tuple[int, ...], _Totals] = field(default_factory=dict)
    weight_part: dict[tuple[int, ...], _Totals] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    sent: list[Event] = field(default_factory=list)

    def advance(self) -> bool:
        """Go on until an action has to wait for a message that was not sent yet.

        The loop keeps the rank's numbers in local names: large schedules have 10⁵ runs.
        """
        items, messages, record = self.items, self.messages, self.record
        started, end, num_all = self.position, len(self.items), 2 * self.num_micro_batches
        position, clock, busy_s = started, self.clock, self.busy_s
        held_bytes, peak_bytes, comm_clock = self.held_bytes, self.peak_bytes, self.comm_clock
        while position < end:
            item = items[position]
            if isinstance(item, Action):
                self.clock, self.busy_s = clock, busy_s
                if not self.run_action(item):
                    break
                clock, busy_s, comm_clock = self.clock, self.busy_s, self.comm_clock
                position += 1
                continue
            kind, segments, micro_batch, num, receives, sends = item
            # activations have odd keys, gradients even ones
            known, key = self.backward, 2 * micro_batch
            if kind is ActionKind.FORWARD:
                known, key = self.forward, key + 1
            elif kind is ActionKind.BACKWARD_INPUT:
                known = self.input_part
            elif kind is ActionKind.BACKWARD_WEIGHT:
                known = self.weight_part
            if receives:
                arrival = messages.get(segments[0] * num_all + key)
                if arrival is None:
                    break
                if arrival > clock:
                    clock = arrival
            if self.fetched and kind in RETURNING:
                back = self.fetched.pop((segments[0], micro_batch), 0.0)
                if back > clock:
                    self.copying_s += back - clock
                    clock = back
            found = known.get(segments)
            if found is None:
                found = known[segments] = self.totals(kind, segments)
            seconds, more_bytes, most_bytes, send_s, target = found
            if record or comm_clock > clock:
                self.clock, self.busy_s = clock, busy_s
                self.compute_each(item, num * seconds)
                clock, busy_s = self.clock, self.busy_s
            else:
                clock += num * seconds
                busy_s += num * seconds
            if most_bytes > more_bytes and held_bytes + most_bytes > peak_bytes:
                peak_bytes = held_bytes + most_bytes
            held_bytes += num * more_bytes
            if held_bytes > peak_bytes:
                peak_bytes = held_bytes
            if sends:
                messages[target * num_all + key] = clock + send_s
                if record:
                    self.sent.append(Event(action=item.send, start_s=clock, end_s=clock + send_s))
            position += 1
        self.position, self.clock, self.busy_s = position, clock, busy_s
        self.held_bytes, self.peak_bytes = held_bytes, peak_bytes
        return position > started

    def totals(self, kind: ActionKind, segments: tuple[int, ...]) -> _Totals:
        """Of one micro-batch through ``segments``: seconds, bytes that are held more afterwards,
        and after any of them at the most, seconds of the message that may follow, and the segment
        that it goes to.
        """
        target = segments[-1] + (1 if kind is ActionKind.FORWARD else -1)
        more_bytes = [self.times.more_bytes(kind, segment) for segment in segments]
        return (
            math.fsum(self.times.seconds(kind, segment) for segment in segments),
            sum(more_bytes),
            max(itertools.accumulate(more_bytes)),
            self.times.send_s[min(segments[-1], target)],
            target,
        )

    def compute_each(self, run: Run, seconds: float) -> None:
        """The actions of a run one by one, as long as communication runs beside them."""
        left = seconds
        for action in run.actions():
            if self.comm_clock <= self.clock and not self.record:
                left = max(0.0, left)
                self.clock += left
                self.busy_s += left
                return
            if run.kind is not ActionKind.BACKWARD_WEIGHT:  # which reads no parameters
                self.wait_for_comm(self.gathered.get(action.segment, 0.0))
            taken = self.times.seconds(run.kind, action.segment)
            self.occupy(action, taken)
            left -= taken

    def run_action(self, action: Action) -> bool:
        """False while a collective waits for ranks that are not known to come to it."""
        kind, segment = action.kind, action.segment
        if kind is ActionKind.SEND_ACTIVATIONS or kind is ActionKind.SEND_GRADIENTS:
            self.send(action)
        elif kind is ActionKind.GATHER_PARAMETERS:
            done = self.communicate(action, self.times.gather_s[segment])
            if done is None:
                return False
            self.gathered[segment] = done
        elif kind is ActionKind.REDUCE_GRADIENTS:
            return self.communicate(action, self.times.reduce_s[segment]) is not None
        elif kind is ActionKind.OFFLOAD_ACTIVATIONS:
            self.offload(action)
        elif kind is ActionKind.FETCH_ACTIVATIONS:
            self.fetch(action)
        elif kind is ActionKind.OPTIMIZER:
            self.wait_for_comm(self.comm_clock)
            self.occupy(action, self.optimizer_s)
        return True

    def offload(self, action: Action) -> None:
        """Start to copy to the host, once the copy before is done."""
        start = max(self.clock, self.out_clock)
        self.copying_s += start - self.clock
        self.clock, self.out_clock = start, start + self.times.copy_s[action.segment]
        self.offloaded[action.segment, action.micro_batch] = self.out_clock
        self.note(action, start, self.out_clock)

    def fetch(self, action: Action) -> None:
        """Start to copy back, after other copies back and its copy out."""
        cell = action.segment, action.micro_batch
        start = max(self.clock, self.back_clock, self.offloaded.pop(cell))
        self.fetched[cell] = self.back_clock = start + self.times.copy_s[action.segment]
        self.note(action, start, self.back_clock)

    def send(self, action: Action) -> None:
        """Start a message; sending takes the stage no time."""
        forward = action.kind is ActionKind.SEND_ACTIVATIONS
        target = action.segment + 1 if forward else action.segment - 1
        arrival = self.clock + self.times.send_s[min(action.segment, target)]
        key = 2 * (target * self.num_micro_batches + action.micro_batch) + forward
        self.messages[key] = arrival
        if self.record:
            self.sent.append(Event(action=action, start_s=self.clock, end_s=arrival))

    def occupy(self, action: Action, seconds: float) -> None:
        """Compute for ``seconds``, longer where communication runs beside it."""
        start = self.clock
        while self.comm and self.comm[0][1] <= start:
            self.comm.popleft()
        clock, left, share = start, seconds, 1 - self.slowdown
        for begin, end in self.comm:
            free = max(0.0, begin - clock)
            if left <= free:
                break
            clock, left = clock + free, left - free
            within = max(0.0, end - clock)
            if left <= share * within:
                clock, left = clock + left / share if left else clock, 0.0
                break
            clock, left = clock + within, left - share * within
        self.clock = clock + left
        self.busy_s += self.clock - start
        self.note(action, start, self.clock)

    def communicate(self, action: Action, seconds: float) -> float | None:
        """Queue a collective; the time at which it is done, None while that is not known."""
        if seconds == 0.0:
            return 0.0
        own = max(self.clock, self.comm_clock)
        start = self.meeting.begins(self.num_collectives, self.number, own)
        if start is None:
            return None
        self.num_collectives += 1
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
