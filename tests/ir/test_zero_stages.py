"""ZeRO stages of single blocks: their text, and what schedules do with them."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.errors import InputError, PlanFormatError, ScheduleError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import from_json, to_json
from autopar.ir.schedule import FINISHING, ActionKind, Schedule
from autopar.ir.schedule_checks import validate
from autopar.ir.schedules import make_schedule
from autopar.ir.zero_stages import (
    block_zero_stages,
    exceptions_of,
    parse_zero_stages,
    with_exceptions,
    zero_text,
)
from tests.runtime.cases import Setup, make_plan

G, X, R = (
    ActionKind.GATHER_PARAMETERS,
    ActionKind.FREE_PARAMETERS,
    ActionKind.REDUCE_GRADIENTS,
)


@given(
    stages=st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=12),
    zero_stage=st.sampled_from([1, 2, 3]),
)
def test_exceptions_and_stages_of_blocks_say_the_same(stages: list[int], zero_stage: int):
    exceptions = exceptions_of(zero_stage, stages)
    assert with_exceptions(zero_stage, exceptions, [""] * len(stages)) == tuple(stages)
    if exceptions:
        text = ", ".join(f"{name}={stage}" for name, stage in exceptions.items())
        assert parse_zero_stages(text) == exceptions


def test_blocks_are_named_by_number_or_kind():
    kinds = ("first", "layer", "layer", "layer", "last")
    exceptions = parse_zero_stages("layer=2, 0=1, 2-3=1")
    assert with_exceptions(3, exceptions, kinds) == (1, 2, 1, 1, 3)
    assert zero_text(3, exceptions) == "3, 2 of blocks layer, 1 of blocks 0, 1 of blocks 2-3"


def test_of_stages_of_the_same_blocks_the_last_holds():
    exceptions = parse_zero_stages("0=1, 0-1=2, 0=3")
    assert with_exceptions(1, exceptions, ("layer",) * 3) == (3, 2, 1)


@pytest.mark.parametrize(
    "text", ["", "0", "0=", "=1", "0=0", "0=4", "0=x", "0=1,", "5=1", "1-5=2", "2-1=2", "1-=2"]
)
def test_what_names_no_blocks_or_no_stage_is_refused(text: str):
    with pytest.raises(InputError, match="zero_stages"):
        with_exceptions(3, parse_zero_stages(text), ("first", "layer", "layer", "layer", "last"))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, list[int]]:
    """A schedule whose segments have ZeRO stages of their own."""
    p, v = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    name = draw(st.sampled_from(["1f1b", "interleaved", "layered", "zero_bubble"]))
    width = draw(st.integers(1, 3))
    stages = [c % p for c in range(p * v) for _ in range(width)]
    if name == "1f1b":
        stages = sorted(stages)
    zero = draw(st.lists(st.integers(1, 3), min_size=len(stages), max_size=len(stages)))
    return make_schedule(name, stages, draw(st.integers(1, 5)), zero_stage=zero), zero


@given(drawn=schedules())
def test_each_segment_is_gathered_and_reduced_by_its_own_stage(drawn: tuple[Schedule, list[int]]):
    schedule, zero = drawn
    validate(schedule)
    counts = Counter((a.kind, a.segment) for actions in schedule.actions for a in actions)
    for segment, stage in enumerate(zero):
        if stage < 3:
            assert counts[G, segment] == 1
            assert counts[X, segment] == 0
        else:
            assert counts[G, segment] == counts[X, segment] >= 1
        reduces_each = stage > 1 and schedule.name != "layered"
        assert counts[R, segment] == (schedule.num_micro_batches if reduces_each else 1)
    for actions in schedule.actions:
        finished = -1
        for action in actions:
            if action.kind in FINISHING:
                finished = action.segment
            assert action.kind is not R or action.segment == finished


@given(drawn=schedules())
def test_two_segments_at_most_wait_to_be_freed(drawn: tuple[Schedule, list[int]]):
    schedule, zero = drawn
    for actions in schedule.actions:
        held: set[int] = set()
        for action in actions:
            if action.kind is G and zero[action.segment] == 3:
                held.add(action.segment)
            elif action.kind is X:
                held.remove(action.segment)
            assert len(held) <= 2


def test_what_stays_gathered_gives_others_time_to_come():
    """Segment 3 is gathered while 2 and 1 are used for a backward, long before its forward."""
    schedule = make_schedule("1f1b", [0] * 5, 2, zero_stage=[3, 1, 1, 3, 2])
    assert str(schedule) == (
        "0: G0 G1 F0.0 X0 G2 F1.0 G3 F2.0 G4 F3.0 X3 G3 F4.0 B4.0 R4 G0 B3.0 R3 X3 G3 B2.0 B1.0 "
        "B0.0 R0 F0.1 X0 F1.1 F2.1 F3.1 X3 G3 F4.1 B4.1 R4 G0 B3.1 R3 X3 B2.1 R2 B1.1 R1 B0.1 R0 "
        "X0 O"
    )


def test_stages_of_segments_are_checked():
    with pytest.raises(ScheduleError, match="2 ZeRO stages of 3 segments"):
        make_schedule("1f1b", [0, 0, 1], 2, zero_stage=[1, 2])
    with pytest.raises(ScheduleError, match="ZeRO stage 4"):
        make_schedule("1f1b", [0, 0, 1], 2, zero_stage=[1, 2, 4])


MIXED = Setup(mesh=Mesh(dp_shard=2), zero_stage=3, zero_stages="0=1, 2-3=2")


def test_a_plan_keeps_the_stages_of_its_blocks():
    plan = make_plan(MIXED)
    assert from_json(to_json(plan)) == plan
    assert block_zero_stages(plan) == (1, 3, 2, 2)
    document = json.loads(to_json(plan))
    del document["schedule"]["zero_stages"]  # as older plans are
    assert block_zero_stages(from_json(json.dumps(document))) == (3,) * 4


@pytest.mark.parametrize(
    ("zero_stage", "zero_stages", "said"),
    [
        (3, {"7": 1}, "no blocks '7'"),
        (3, {"x": 1}, "no blocks 'x'"),
        (3, {"": 1}, "no blocks ''"),
        (3, {"0": 0}, "ZeRO stage 0 beside others"),
        (0, {"0": 1}, "ZeRO stage 0 beside others"),
        (0, {"0-3": 1}, "ZeRO stage 0 beside others"),
        (3, {"0": 4}, "ZeRO stage 4 beside others"),
    ],
)
def test_a_plan_with_other_stages_is_refused(zero_stage: int, zero_stages: object, said: str):
    document = json.loads(to_json(make_plan(MIXED)))
    document["schedule"] |= {"zero_stage": zero_stage, "zero_stages": zero_stages}
    with pytest.raises(PlanFormatError, match=f"field schedule.zero_stages: .*{said}"):
        from_json(json.dumps(document))


def test_a_segment_has_one_stage():
    document = json.loads(to_json(make_plan(MIXED)))
    document["segments"] = [{"stage": 0, "first_block": 0, "last_block": 3}]
    with pytest.raises(PlanFormatError, match="segment 0 has blocks of several stages"):
        from_json(json.dumps(document))
