"""A simulated step as a trace for Perfetto or chrome://tracing (Chrome's trace event format).

One process for each pipeline stage, whose ranks all do the same, with a thread for compute, one for
communication, and where activations are offloaded two for copies, to the host and back. Messages
are asynchronous events of the sender, with a flow from the slice that made them to the slice that
waits for them. A counter shows the memory: what is always there, and what forwards keep until their
backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.plan import Plan
from autopar.ir.schedule import COMPUTING, RETURNING, Action, ActionKind
from autopar.solver.replay import segment_times_of
from autopar.solver.simulate import Event, Simulation

TraceEvent = dict[str, object]
"""One event, ready for JSON: times in µs, with whole nanoseconds."""

COMPUTE, COMMUNICATION, COPIES_OUT, COPIES_BACK = 1, 2, 3, 4
"""Thread ids."""

PERSISTENT = ("parameters", "master weights", "optimizer", "gradients", "context")
"""Causes of a rank's bytes that are there during the whole step."""

_THREADS = {
    ActionKind.GATHER_PARAMETERS: COMMUNICATION,
    ActionKind.REDUCE_GRADIENTS: COMMUNICATION,
    ActionKind.OFFLOAD_ACTIVATIONS: COPIES_OUT,
    ActionKind.FETCH_ACTIVATIONS: COPIES_BACK,
}


def trace(plan: Plan, simulation: Simulation) -> dict[str, object]:
    """The document of a plan and its simulation, which has to have a timeline."""
    events: list[TraceEvent] = []
    for stage in range(plan.mesh.pp):
        events += _names(plan, stage)
        events += (_slice(plan, stage, event) for event in simulation.timeline[stage])
        events += _memory(plan, stage, simulation.timeline[stage])
    events += _messages(simulation)
    schedule, batch = plan.schedule, plan.batch
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "model": plan.model.name,
            "schedule": f"{schedule.name}, ZeRO {schedule.zero_stage}, {schedule.recompute}",
            "micro_batches": batch.num_micro_batches,
            "step_s": simulation.step_s,
        },
        "traceEvents": events,
    }


def _names(plan: Plan, stage: int) -> Iterator[TraceEvent]:
    ranks = plan.device_mesh().num_ranks // plan.mesh.pp
    name = f"stage {stage} (each of {ranks} ranks)" if ranks > 1 else f"stage {stage}"
    nodes = plan.prediction.of_stage(stage).nodes
    name += f" on {nodes}" if nodes else ""
    yield _metadata(stage, "process_name", {"name": name})
    yield _metadata(stage, "process_sort_index", {"sort_index": stage})
    threads = {COMPUTE: "compute", COMMUNICATION: "communication"}
    if plan.schedule.offloaded_blocks:
        threads |= {COPIES_OUT: "copies to the host", COPIES_BACK: "copies back"}
    for thread, what in threads.items():
        yield _metadata(stage, "thread_name", {"name": what}) | {"tid": thread}


def _metadata(stage: int, name: str, args: dict[str, object]) -> TraceEvent:
    return {"ph": "M", "pid": stage, "name": name, "args": args}


def _slice(plan: Plan, stage: int, event: Event) -> TraceEvent:
    start, end = _nanoseconds(event.start_s), _nanoseconds(event.end_s)
    kind = event.action.kind
    return {
        "ph": "X",
        "pid": stage,
        "tid": _THREADS.get(kind, COMPUTE),
        "name": str(event.action),
        "cat": kind.name.lower(),
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": _arguments(plan, event.action),
    }


def _arguments(plan: Plan, action: Action) -> dict[str, object]:
    found: dict[str, object] = {}
    if action.segment >= 0:
        segment = plan.segments[action.segment]
        found["segment"] = action.segment
        found["blocks"] = f"{segment.first_block}–{segment.last_block}"
    if action.micro_batch >= 0:
        found["micro_batch"] = action.micro_batch
    return found


def _memory(plan: Plan, stage: int, events: tuple[Event, ...]) -> Iterator[TraceEvent]:
    """Forwards take what they hold when they start, backwards give it back when they end; input
    parts leave what weight parts need.
    """
    costs = plan.prediction.action_costs
    assert costs is not None
    times = segment_times_of(costs)
    causes = plan.prediction.of_stage(stage).bytes_by_cause
    base, held = sum(causes.get(cause, 0) for cause in PERSISTENT), 0
    yield _counter(stage, 0.0, base, held)
    for event in events:
        action = event.action
        if action.kind in COMPUTING:
            held += times.more_bytes(action.kind, action.segment)
            is_forward = action.kind is ActionKind.FORWARD
            yield _counter(stage, event.start_s if is_forward else event.end_s, base, held)


def _counter(stage: int, seconds: float, base: int, held: int) -> TraceEvent:
    return {
        "ph": "C",
        "pid": stage,
        "name": "memory",
        "ts": _nanoseconds(seconds) / 1e3,
        "args": {"parameters and optimizer": base, "held activations": held},
    }


def _messages(simulation: Simulation) -> Iterator[TraceEvent]:
    slices = {
        event.action: (stage, event)
        for stage, events in enumerate(simulation.timeline)
        for event in events
    }
    number = 0
    for stage, messages in enumerate(simulation.messages):
        for message in messages:
            action, number = message.action, number + 1
            forward = action.kind is ActionKind.SEND_ACTIVATIONS
            kinds = (ActionKind.FORWARD,) if forward else RETURNING
            target = action.segment + 1 if forward else action.segment - 1
            _, made = _first(slices, kinds, action.segment, action.micro_batch)
            receiver, waits = _first(slices, kinds, target, action.micro_batch)
            common: TraceEvent = {"cat": "message", "name": str(action), "id": number}
            for phase, seconds in (("b", message.start_s), ("e", message.end_s)):
                time = _nanoseconds(seconds) / 1e3
                yield common | {"ph": phase, "pid": stage, "tid": COMMUNICATION, "ts": time}
            yield common | {"ph": "s", "pid": stage, "tid": COMPUTE, "ts": _middle(made)}
            yield common | {
                "ph": "f",
                "bp": "e",
                "pid": receiver,
                "tid": COMPUTE,
                "ts": _middle(waits),
            }


_Slices = Mapping[Action, tuple[int, Event]]
"""Stage and event of each action."""


def _first(
    slices: _Slices, kinds: tuple[ActionKind, ...], segment: int, micro_batch: int
) -> tuple[int, Event]:
    """The slice of the first of ``kinds`` that the schedule has."""
    actions = (Action(kind, segment, micro_batch) for kind in kinds)
    return next(slices[action] for action in actions if action in slices)


def _middle(event: Event) -> float:
    """A time inside of the slice: a flow belongs to the slice in which its end lies."""
    return (_nanoseconds(event.start_s) + _nanoseconds(event.end_s)) // 2 / 1e3


def _nanoseconds(seconds: float) -> int:
    """Rounded alike for the end of a slice and the start of the next: none overlap."""
    return round(seconds * 1e9)
