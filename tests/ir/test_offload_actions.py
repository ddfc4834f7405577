"""Copies of offloaded activations in schedules: valid, few at a time, and early enough."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.errors import ScheduleError
from autopar.ir.offload import ACTIVATION_BUFFERS
from autopar.ir.schedule import COMPUTING, COPYING, RETURNING, Action, ActionKind, Schedule
from autopar.ir.schedule_checks import validate
from autopar.ir.schedules import contiguous_stages, make_schedule, modular_stages

OUT, BACK = COPYING
NAMES = ("1f1b", "layered", "interleaved", "zero_bubble")


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, frozenset[int]]:
    """One of a few segments, and those that offload."""
    name, p, v = draw(st.sampled_from(NAMES)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stages = modular_stages(p, v) if name == "interleaved" else contiguous_stages(p, v)
    offloaded = draw(st.sets(st.integers(0, len(stages) - 1), min_size=1))
    made = make_schedule(
        name,
        stages,
        draw(st.integers(1, 6)),
        zero_stage=draw(st.integers(0, 3)),
        offloaded=offloaded,
    )
    return made, frozenset(offloaded)


@given(schedules())
def test_schedules_with_copies_are_valid_and_otherwise_the_same(
    found: tuple[Schedule, frozenset[int]],
) -> None:
    schedule, offloaded = found
    validate(schedule)
    cells = {
        (action.segment, action.micro_batch)
        for actions in schedule.actions
        for action in actions
        if action.kind is OUT
    }
    assert cells == {(k, m) for k in offloaded for m in range(schedule.num_micro_batches)}


@given(schedules())
def test_few_offloaded_forwards_are_on_the_device(
    found: tuple[Schedule, frozenset[int]],
) -> None:
    """One that leaves is gone when the next one starts to leave."""
    schedule, offloaded = found
    for actions in schedule.actions:
        here, leaving = set[tuple[int, int]](), None
        for action in actions:
            cell = action.segment, action.micro_batch
            if action.segment not in offloaded:
                continue
            if action.kind is OUT:
                here.discard(leaving) if leaving is not None else None
                leaving = cell
            elif action.kind is ActionKind.FORWARD or action.kind is BACK:
                leaving = None if cell == leaving else leaving
                here.add(cell)
            elif action.kind in RETURNING:
                here.remove(cell)
            assert len(here) <= ACTIVATION_BUFFERS


@given(schedules())
def test_a_copy_back_starts_with_the_computing_run_before_its_backward(
    found: tuple[Schedule, frozenset[int]],
) -> None:
    schedule, _ = found
    for actions in schedule.actions:
        for place, action in enumerate(actions):
            if action.kind is not BACK:
                continue
            backward = _backward(actions[place:], action)
            between = [a for a in actions[place + 1 :] if a.kind in COMPUTING]
            before = [a for a in actions[:place] if a.kind in COMPUTING]
            last_forward = Action(ActionKind.FORWARD, action.segment, action.micro_batch)
            assert between[0] != backward or before[-1] == last_forward


def _backward(actions: Sequence[Action], fetch: Action) -> Action:
    cell = fetch.segment, fetch.micro_batch
    return next(a for a in actions if a.kind in RETURNING and (a.segment, a.micro_batch) == cell)


@pytest.mark.parametrize("kind", COPYING)
def test_half_a_copy_is_found(kind: ActionKind) -> None:
    schedule = make_schedule("1f1b", [0, 0], 1, offloaded=[0])
    (actions,) = schedule.actions
    broken = tuple(action for action in actions if action.kind is not kind)
    with pytest.raises(ScheduleError, match="the action is missing"):
        validate(
            Schedule(
                name=schedule.name,
                num_micro_batches=1,
                stage_of_segment=schedule.stage_of_segment,
                actions=(broken,),
            )
        )


def test_the_order_of_copies() -> None:
    schedule = make_schedule("1f1b", [0, 0, 0], 1, offloaded=[0, 1])
    text = " ".join(str(a) for a in schedule.actions[0] if a.micro_batch >= 0)
    assert text == "F0.0 OA0.0 F1.0 OA1.0 F2.0 FA1.0 B2.0 FA0.0 B1.0 B0.0"
