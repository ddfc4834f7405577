"""What holds of every simulated step: exact when compact, within its limits, monotone in every
duration, with a bubble that more micro-batches do not enlarge.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.schedule import COMPUTING, Action, ActionKind, CompactSchedule, Schedule
from autopar.ir.schedules import (
    DEEPENED,
    ZeroStages,
    compact_schedule,
    contiguous_stages,
    modular_stages,
)
from autopar.solver.simulate import SegmentTimes, Simulation, simulate

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
DURATIONS = ("forward_s", "backward_s", "gather_s", "reduce_s", "send_s", "copy_s")

seconds = st.one_of(st.floats(0.01, 3.0), st.sampled_from([0.5, 1.0, 2.0]))
maybe_seconds = st.one_of(st.just(0.0), seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule by name and map, and what its actions take."""

    name: str
    stages: tuple[int, ...]
    num_micro_batches: int
    zero_stage: ZeroStages
    times: SegmentTimes
    optimizer_s: tuple[float, ...]
    slowdown: float
    extra_in_flight: int = 0
    offloaded: tuple[int, ...] = ()

    def simulate(self, *, num: int | None = None, plain: bool = False) -> Simulation:
        compact = self.compact(num or self.num_micro_batches)
        return simulate(
            compact.expand() if plain else compact,
            self.times,
            optimizer_s=self.optimizer_s,
            slowdown=self.slowdown,
            record=plain,
        )

    def compact(self, num: int) -> CompactSchedule:
        return compact_schedule(
            self.name,
            self.stages,
            num,
            zero_stage=self.zero_stage,
            extra_in_flight=self.extra_in_flight,
            offloaded=self.offloaded,
        )

    def schedule(self) -> Schedule:
        return self.compact(self.num_micro_batches).expand()


@st.composite
def cases(
    draw: st.DrawFn, *, communicates: bool = True, sends: bool = True, offloads: bool = True
) -> Case:
    """All schedules, of a few segments; what is not drawn to be there takes no time."""
    p, v = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    name = draw(st.sampled_from(["1f1b", "zero_bubble", "interleaved", "layered", "modular"]))
    if name in DEEPENED:
        stages = contiguous_stages(p, v)
    elif name == "interleaved":
        width = draw(st.integers(1, 2))
        stages = tuple(c % p for c in range(p * v) for _ in range(width))
    else:
        stages = modular_stages(p, v) if name == "modular" else contiguous_stages(p, 1)
    n = len(stages)
    zero_stage: ZeroStages = draw(st.integers(0, 3)) if communicates else 0
    if zero_stage and draw(st.booleans()):
        zero_stage = tuple(draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)))

    def each(strategy: st.SearchStrategy[float], *, is_there: bool = True) -> tuple[float, ...]:
        found = draw(st.lists(strategy, min_size=n, max_size=n))
        return tuple(found) if is_there else (0.0,) * n

    weight_s = each(seconds)
    offloaded: set[int] = set()
    if offloads and draw(st.booleans()):
        offloaded = draw(st.sets(st.integers(0, n - 1), min_size=1))
    return Case(
        name="layered" if name == "modular" else name,
        stages=stages,
        num_micro_batches=draw(st.integers(1, 7)),
        zero_stage=zero_stage,
        extra_in_flight=draw(st.integers(0, 2)) if name in DEEPENED else 0,
        times=SegmentTimes(
            forward_s=each(seconds),
            backward_s=tuple(map(sum, zip(weight_s, each(seconds), strict=True))),
            weight_s=weight_s,
            weight_bytes=tuple(draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))),
            gather_s=each(maybe_seconds, is_there=zero_stage != 0),
            reduce_s=each(maybe_seconds, is_there=communicates),
            send_s=each(maybe_seconds, is_there=sends),
            held_bytes=tuple(draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))),
            copy_s=each(maybe_seconds),
        ),
        offloaded=tuple(sorted(offloaded)),
        optimizer_s=(draw(maybe_seconds),) * (max(stages) + 1),
        slowdown=draw(st.sampled_from([0.0, 0.2, 1.0])) if communicates else 0.0,
    )


@given(case=cases())
def test_a_compact_schedule_takes_as_long_as_all_its_actions(case: Case):
    compact, plain = case.simulate(), case.simulate(plain=True)
    assert compact.step_s == pytest.approx(plain.step_s, rel=1e-12)
    assert compact.busy_s == pytest.approx(plain.busy_s, rel=1e-12)
    assert compact.copying_s == pytest.approx(plain.copying_s, rel=1e-12, abs=1e-12)
    assert compact.exposed_s == pytest.approx(plain.exposed_s, rel=1e-12, abs=1e-12)
    assert compact.peak_held_bytes == plain.peak_held_bytes


@given(case=cases())
def test_a_step_is_between_the_critical_path_and_the_serial_sum(case: Case):
    """No chain of actions that need each other is longer; and one action at a time, each as slow as
    all communication beside it would make it, takes at least as long.
    """
    result = case.simulate()
    serial = communication = 0.0
    for stage, actions in enumerate(case.schedule().actions):
        for action in actions:
            taken = duration(case, stage, action)
            serial += taken
            if action.kind in (ActionKind.GATHER_PARAMETERS, ActionKind.REDUCE_GRADIENTS):
                communication += taken
    assert critical_path(case) <= result.step_s * (1 + 1e-12)
    assert result.step_s <= (serial + case.slowdown * communication) * (1 + 1e-12)


@given(case=cases(), data=st.data())
def test_a_step_is_monotone_in_every_duration(case: Case, data: st.DataObject):
    """The order of actions is fixed, so that there are no anomalies of list scheduling. It takes a
    slowdown of at most 1: beside communication that comes earlier, less must not be done.
    """
    name = data.draw(st.sampled_from(DURATIONS))
    segment = data.draw(st.integers(0, len(case.stages) - 1))
    values = list(getattr(case.times, name))
    values[segment] += data.draw(seconds)
    longer = dataclasses.replace(case.times, **{name: tuple(values)})
    more = dataclasses.replace(case, times=longer).simulate()
    assert more.step_s >= case.simulate().step_s * (1 - 1e-12)


@given(case=cases(), more=st.floats(0.1, 2.0))
def test_a_step_is_monotone_in_the_optimizer_and_the_slowdown(case: Case, more: float):
    before = case.simulate().step_s * (1 - 1e-12)
    slower = tuple(taken + more for taken in case.optimizer_s)
    assert dataclasses.replace(case, optimizer_s=slower).simulate().step_s >= before
    if case.slowdown < 1:
        assert dataclasses.replace(case, slowdown=1.0).simulate().step_s >= before


@given(case=cases(sends=False, offloads=False))
def test_more_micro_batches_never_enlarge_the_bubble(case: Case):
    """Of the same size, where messages take no time and overlap slows nothing down; of interleaved
    1F1B where p divides M, and parameters are not gathered again for each run of uses (ZeRO 3: with
    M = p it has fewer).
    """
    zero = case.zero_stage
    zero_stage = zero if isinstance(zero, int) else max(zero)  # one for all segments
    if case.name == "interleaved":
        zero_stage = min(zero_stage, 2)
    case = dataclasses.replace(case, zero_stage=zero_stage, slowdown=0.0)
    assert_bubbles_shrink(case, step=max(case.stages) + 1 if case.name == "interleaved" else 1)


@given(case=cases(offloads=False))
def test_more_micro_batches_never_enlarge_the_bubble_of_layered_ones(case: Case):
    """However long messages take: nothing limits what is in flight."""
    if case.name == "layered" and isinstance(case.zero_stage, int):
        assert_bubbles_shrink(case, step=1)


@given(p=st.integers(1, 4), v=st.integers(1, 3), send=seconds, forward=seconds, backward=seconds)
def test_more_rounds_of_1f1b_never_enlarge_the_bubble_whatever_messages_take(
    p: int, v: int, send: float, forward: float, backward: float
):
    """Of uniform segments and whole rounds of p, interleaved with several virtual stages. Otherwise
    1F1B, which has few in flight, may wait longer for messages in a later round than in the first.
    """
    n = p * v
    schedules = [("1f1b", contiguous_stages(p, v)), ("interleaved", modular_stages(p, v))]
    for name, stages in schedules[: 1 if v == 1 else 2]:
        case = Case(
            name=name,
            stages=stages,
            num_micro_batches=1,
            zero_stage=0,
            times=SegmentTimes(
                forward_s=(forward,) * n,
                backward_s=(backward,) * n,
                gather_s=(0.0,) * n,
                reduce_s=(0.0,) * n,
                send_s=(send,) * n,
                held_bytes=(1,) * n,
            ),
            optimizer_s=(0.0,) * p,
            slowdown=0.0,
        )
        assert_bubbles_shrink(case, step=p)


@given(case=cases(communicates=False, offloads=False))
def test_one_stage_and_one_rank_communicate_and_wait_for_nothing(case: Case):
    one = dataclasses.replace(
        case, stages=(0,) * len(case.stages), optimizer_s=case.optimizer_s[:1], name="1f1b"
    )
    for name in ("1f1b", "layered", "interleaved"):
        case = dataclasses.replace(one, name=name, extra_in_flight=0)
        result = case.simulate()
        computed = sum(case.times.forward_s) + sum(case.times.backward_s)
        expected = case.num_micro_batches * computed + case.optimizer_s[0]
        assert result.step_s == pytest.approx(expected, rel=1e-12)
        assert result.exposed_s == (0.0,)
        recorded = case.simulate(plain=True)
        kinds = {event.action.kind for event in recorded.timeline[0]}
        assert kinds == {F, B, ActionKind.OPTIMIZER}
        assert recorded.messages == ((),)


def assert_bubbles_shrink(case: Case, *, step: int) -> None:
    """The share of all stages' time that is not compute, of 1, 2, … times ``step`` micro-batches;
    of the step without its optimizer, which comes once.
    """
    case = dataclasses.replace(case, optimizer_s=(0.0,) * len(case.optimizer_s))
    computed = sum(case.times.forward_s) + sum(case.times.backward_s)
    num_stages = max(case.stages) + 1
    shares = [
        1 - num * computed / (num_stages * case.simulate(num=num).step_s)
        for num in range(step, 6 * step, step)
    ]
    for before, after in itertools.pairwise(shares):
        assert after <= before + 1e-12


def duration(case: Case, stage: int, action: Action) -> float:
    times, segment = case.times, action.segment
    if action.kind in COMPUTING:
        return times.seconds(action.kind, segment)
    match action.kind:
        case ActionKind.SEND_ACTIVATIONS:
            return times.send_s[segment]
        case ActionKind.SEND_GRADIENTS:
            return times.send_s[segment - 1]
        case ActionKind.GATHER_PARAMETERS:
            return times.gather_s[segment]
        case ActionKind.REDUCE_GRADIENTS:
            return times.reduce_s[segment]
        case ActionKind.OFFLOAD_ACTIVATIONS | ActionKind.FETCH_ACTIVATIONS:
            return times.copy_s[segment]
        case ActionKind.OPTIMIZER:
            return case.optimizer_s[stage]
        case _:
            return 0.0


def critical_path(case: Case) -> float:
    """The longest chain of actions of which each needs the one before, as if every stage could do
    any number of them at once.
    """
    ends: dict[tuple[ActionKind, int], float] = {}  # the same for each micro-batch
    times, stages, last = case.times, case.stages, len(case.stages) - 1
    later = times.weight_s if case.name == "zero_bubble" else (0.0,) * (last + 1)
    for kind, segment in chain(last + 1):
        ready = 0.0
        if kind is F and segment > 0:
            ready = ends[F, segment - 1] + sent(case, segment - 1)
        elif kind is B:
            ready = ends[F, segment]
            if segment < last:
                ready = max(ready, ends[B, segment + 1] + sent(case, segment))
            if segment in case.offloaded:
                ready = max(ready, ends[F, segment] + 2 * times.copy_s[segment])
        if kind is F:
            ready = max(ready, times.gather_s[segment])
        own: Mapping[ActionKind, float] = {
            F: times.forward_s[segment],
            B: times.backward_s[segment] - later[segment],
        }
        ends[kind, segment] = ready + own[kind]
    return max(
        ends[B, k] + later[k] + times.reduce_s[k] + case.optimizer_s[stages[k]]
        for k in range(last + 1)
    )


def chain(num: int) -> Iterator[tuple[ActionKind, int]]:
    yield from ((F, segment) for segment in range(num))
    yield from ((B, segment) for segment in reversed(range(num)))


def sent(case: Case, segment: int) -> float:
    """Seconds of a message over the border after ``segment``, where there is one."""
    crosses = case.stages[segment] != case.stages[segment + 1]
    return case.times.send_s[segment] if crosses else 0.0
