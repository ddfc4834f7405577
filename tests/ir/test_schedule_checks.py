"""The validator finds what is wrong, and names stage and action."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.errors import ScheduleError
from autopar.ir.schedule import Action, ActionKind, Schedule
from autopar.ir.schedule_checks import validate
from autopar.ir.schedules import layered, modular_stages, one_f_one_b

GOOD = layered(modular_stages(2, 2), 3, zero_stage=3)


def with_actions(schedule: Schedule, stage: int, actions: list[Action]) -> Schedule:
    changed = list(schedule.actions)
    changed[stage] = tuple(actions)
    return dataclasses.replace(schedule, actions=tuple(changed))


@given(data=st.data())
def test_no_action_may_be_missing_or_repeated(data: st.DataObject):
    stage = data.draw(st.integers(0, 1))
    actions = list(GOOD.actions[stage])
    position = data.draw(st.integers(0, len(actions) - 1))
    # parameters may stay gathered: the last free is for memory only
    if actions[position].kind is not ActionKind.FREE_PARAMETERS:
        with pytest.raises(ScheduleError, match=f"stage {stage}"):
            validate(with_actions(GOOD, stage, actions[:position] + actions[position + 1 :]))
    with pytest.raises(ScheduleError, match="stage"):
        validate(
            with_actions(GOOD, stage, [*actions[:position], actions[position], *actions[position:]])
        )


def move_action(schedule: Schedule, stage: int, text: str, before: str) -> Schedule:
    actions = list(schedule.actions[stage])
    moved = next(action for action in actions if str(action) == text)
    actions.remove(moved)
    position = next(index for index, action in enumerate(actions) if str(action) == before)
    actions.insert(position, moved)
    return with_actions(schedule, stage, actions)


@pytest.mark.parametrize(
    ("stage", "text", "before", "message"),
    [
        (0, "B0.0", "F0.0", "must come before"),
        (0, "SA0.0", "F0.0", "must come before"),
        (1, "R3", "F3.0", "no gradient"),
        (1, "X1", "F1.0", "not gathered"),
        (0, "SA0.2", "SA0.1", "must come before"),
        (1, "RA1.2", "RA1.0", "receives"),
        (0, "O", "R2", "last"),
    ],
)
def test_wrong_orders_are_found(stage: int, text: str, before: str, message: str):
    with pytest.raises(ScheduleError, match=message):
        validate(move_action(GOOD, stage, text, before))


def test_deadlock_is_found():
    schedule = one_f_one_b([0, 1], 2)
    actions = [a for a in schedule.actions[0] if str(a) != "F0.1" and str(a) != "SA0.1"]
    late = [Action(ActionKind.FORWARD, 0, 1), Action(ActionKind.SEND_ACTIVATIONS, 0, 1)]
    position = next(index for index, a in enumerate(actions) if str(a) == "B0.0")
    backward_first = [*actions[: position + 1], *late, *actions[position + 1 :]]
    validate(with_actions(schedule, 0, backward_first))  # 0 may wait for its backward
    other = list(schedule.actions[1])
    forward = next(a for a in other if str(a) == "F1.1")
    other.remove(forward)
    receive = next(a for a in other if str(a) == "RA1.1")
    other.remove(receive)
    start = next(index for index, a in enumerate(other) if str(a) == "B1.0")
    other[start:start] = [
        receive,
        forward,
    ]  # and 1 its first backward for the second forward: both wait
    both = with_actions(with_actions(schedule, 0, backward_first), 1, other)
    with pytest.raises(ScheduleError, match="wait for each other"):
        validate(both)
