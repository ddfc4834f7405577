"""Backwards in two parts, and more micro-batches in flight: complete, free of deadlock, with the
order, memory and bubbles of the paper (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble  # the oracle

from autopar.ir.errors import ScheduleError
from autopar.ir.schedule import COMPUTING, Action, ActionKind, Schedule
from autopar.ir.schedule_checks import makespan, peak_live, validate
from autopar.ir.schedules import (
    contiguous_stages,
    interleaved_1f1b,
    layered,
    make_schedule,
    modular_stages,
    one_f_one_b,
    zero_bubble,
)

SMALL = list(itertools.product(range(1, 6), range(1, 10)))
"""All stages p ≤ 5 and micro-batches M ≤ 9."""

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
KINDS = {"FORWARD": F, "BACKWARD_INPUT": INPUT, "BACKWARD_WEIGHT": WEIGHT}
"""By torch's names."""


@pytest.mark.parametrize(("p", "m"), SMALL)
def test_all_small_schedules_are_valid(p: int, m: int):
    for v, zero_stage, extra in itertools.product((1, 2), range(4), range(p + 1)):
        for make in (one_f_one_b, zero_bubble):
            stages = contiguous_stages(p, v)
            validate(make(stages, m, zero_stage=zero_stage, extra_in_flight=extra))


@given(
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    m=st.integers(1, 6),
    zero_stage=st.integers(0, 3),
)
def test_stages_may_have_any_numbers_of_segments(widths: list[int], m: int, zero_stage: int):
    stages = [stage for stage, width in enumerate(widths) for _ in range(width)]
    validate(zero_bubble(stages, m, zero_stage=zero_stage))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SMALL if p > 1])
def test_the_order_is_that_of_torch(p: int, m: int):
    for v in (1, 2, 3):
        if m % max(1, m // p):  # torch takes rounds of one size only
            continue
        oracle: Any = ScheduleInterleavedZeroBubble.__new__(ScheduleInterleavedZeroBubble)
        oracle.pp_group_size, oracle.n_local_stages, oracle._n_microbatches = p, v, m
        oracle.microbatches_per_round = m // max(1, m // p)
        schedule = zero_bubble(modular_stages(p, v), m)
        for stage in range(p):
            if v == 1 and m < p - stage - 1:  # torch has more warm-ups than micro-batches then
                continue
            order = [a for a in oracle._calculate_single_rank_operations(stage) if a is not None]
            expected = [
                (KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in order
            ]
            own = [
                (a.kind, a.segment, a.micro_batch)
                for a in schedule.actions[stage]
                if a.kind in COMPUTING
            ]
            assert own == expected


@pytest.mark.parametrize(("p", "m"), SMALL)
def test_the_bubble_is_a_third_of_that_of_1f1b(p: int, m: int):
    """Forward, input part and weight part of one second each; with as many micro-batches as
    stages at least.
    """
    split = makespan(zero_bubble(contiguous_stages(p, 1), m), forward=1, backward=2, weight=1)
    whole = makespan(one_f_one_b(contiguous_stages(p, 1), m), forward=1, backward=2)
    assert whole - 3 * m == 3 * (p - 1)
    assert split <= whole
    if m >= p:
        assert split - 3 * m == p - 1


@pytest.mark.parametrize(
    ("p", "v", "rounds"), list(itertools.product(range(2, 6), range(2, 5), (1, 2, 3)))
)
def test_virtual_stages_shorten_the_bubble(p: int, v: int, rounds: int):
    """(p − 1)(f + b − w) of a virtual stage: a third of that of interleaved 1F1B, with p·v micro-
    batches of virtual stages on each stage, where that has more on the first.
    """
    m = p * rounds
    schedule, whole = (make(modular_stages(p, v), m) for make in (zero_bubble, interleaved_1f1b))
    taken = makespan(schedule, forward=1, backward=2, weight=1)
    assert taken - 3 * v * m == p - 1
    assert makespan(whole, forward=1, backward=2) - 3 * v * m == 3 * (p - 1)
    assert peak_live(schedule) == (v * p,) * p
    assert max(peak_live(whole)) >= v * p
    for extra in range(p):
        deeper = zero_bubble(modular_stages(p, v), m, extra_in_flight=extra)
        validate(deeper)
        assert makespan(deeper, forward=1, backward=2, weight=1) == taken
        more = [min(extra, p - 1 - stage) for stage in range(p)]
        assert peak_live(deeper) == tuple(min(v * m, v * p + k) for k in more)


@pytest.mark.parametrize(("p", "m"), SMALL)
def test_virtual_stages_of_any_numbers_are_valid(p: int, m: int):
    for v, zero_stage in itertools.product((2, 3), range(4)):
        validate(zero_bubble(modular_stages(p, v), m, zero_stage=zero_stage))
        uneven = [c % p for c in range(p * v) for _ in range(1 + c % 2)]
        validate(zero_bubble(uneven, m, zero_stage=zero_stage))


@given(
    p=st.integers(1, 5),
    more=st.integers(0, 5),
    forward=st.integers(2, 9),
    extra=st.integers(0, 9),
    share=st.integers(1, 4),
)
def test_the_bubble_is_that_of_the_paper(p: int, more: int, forward: int, extra: int, share: int):
    """(p − 1)(f + b − w), for weight parts that take no longer than forwards and input parts."""
    weight = forward * share / 4
    backward = forward + extra + weight
    schedule = zero_bubble(contiguous_stages(p, 1), p + more)
    taken = makespan(schedule, forward=forward, backward=backward, weight=weight)
    bubble = taken - (p + more) * (forward + backward)
    assert bubble == pytest.approx((p - 1) * (forward + backward - 2 * weight))


@given(
    p=st.integers(1, 5),
    m=st.integers(1, 9),
    forward=st.floats(0.1, 3),
    backward=st.floats(0.1, 3),
    weight=st.floats(0.0, 3),
)
def test_two_parts_are_never_slower_than_one(
    p: int, m: int, forward: float, backward: float, weight: float
):
    """Of uniform stages, whatever the parts take."""
    stages = contiguous_stages(p, 1)
    whole = makespan(one_f_one_b(stages, m), forward=forward, backward=backward + weight)
    split = zero_bubble(stages, m)
    taken = makespan(split, forward=forward, backward=backward + weight, weight=weight)
    assert taken <= whole * (1 + 1e-12)


@pytest.mark.parametrize(("p", "m"), SMALL)
def test_all_stages_hold_as_many_micro_batches_as_the_first_of_1f1b(p: int, m: int):
    for extra in range(p + 1):
        schedule = zero_bubble(contiguous_stages(p, 1), m, extra_in_flight=extra)
        more = [min(extra, p - 1 - stage) for stage in range(p)]
        assert peak_live(schedule) == tuple(min(m, p + k) for k in more)
    assert peak_live(one_f_one_b(contiguous_stages(p, 1), m))[0] == min(m, p)


@pytest.mark.parametrize(("p", "m"), SMALL)
def test_extra_micro_batches_are_in_flight_on_all_stages_but_the_last(p: int, m: int):
    for extra in range(p + 1):
        schedule = one_f_one_b(contiguous_stages(p, 1), m, extra_in_flight=extra)
        expected = tuple(min(m, p - s + min(extra, p - 1 - s)) for s in range(p))
        assert peak_live(schedule) == expected
        taken = makespan(schedule, forward=1, backward=2)
        assert taken == 3 * (m + p - 1)  # where messages take no time, it helps nobody


@pytest.mark.parametrize(("zero_stage", "reductions"), [(0, 1), (1, 1), (2, 6), (3, 6)])
def test_gradients_are_reduced_after_weight_parts(zero_stage: int, reductions: int):
    schedule = zero_bubble(contiguous_stages(3, 2), 6, zero_stage=zero_stage)
    for actions in schedule.actions:
        counts = Counter(a.segment for a in actions if a.kind is ActionKind.REDUCE_GRADIENTS)
        assert set(counts.values()) == {reductions}
        for before, action in itertools.pairwise(actions):
            if action.kind is ActionKind.REDUCE_GRADIENTS:
                kind = B if action.segment == 5 else WEIGHT
                assert (before.kind, before.segment) == (kind, action.segment)


def test_weight_parts_gather_nothing():
    """As many gathers as 1F1B: weight parts read no parameters."""
    for p, v, m in itertools.product(range(1, 4), range(1, 4), range(1, 6)):
        stages = contiguous_stages(p, v)
        one, split = (make(stages, m, zero_stage=3) for make in (one_f_one_b, zero_bubble))
        for kind in (ActionKind.GATHER_PARAMETERS, ActionKind.FREE_PARAMETERS):
            assert [num(one, stage, kind) for stage in range(p)] == [
                num(split, stage, kind) for stage in range(p)
            ]


def num(schedule: Schedule, stage: int, kind: ActionKind) -> int:
    return sum(action.kind is kind for action in schedule.actions[stage])


def test_the_segment_that_makes_the_loss_has_its_backward_whole():
    """Unless it is all of its stage."""
    for p, v, m in itertools.product(range(1, 4), range(1, 4), range(1, 4)):
        schedule = zero_bubble(contiguous_stages(p, v), m)
        whole = {a.segment for actions in schedule.actions for a in actions if a.kind is B}
        assert whole == ({p * v - 1} if v > 1 else set())


def test_the_text_names_both_parts():
    schedule = zero_bubble([0, 1], 2)
    assert str(schedule) == (
        "0: G0 F0.0 SA0.0 RG0.0 F0.1 SA0.1 I0.0 RG0.1 W0.0 I0.1 W0.1 R0 O\n"
        "1: RA1.0 G1 F1.0 RA1.1 I1.0 SG1.0 F1.1 I1.1 SG1.1 W1.0 W1.1 R1 O"
    )


def changed(schedule: Schedule, stage: int, actions: list[Action]) -> Schedule:
    every = list(schedule.actions)
    every[stage] = tuple(actions)
    return dataclasses.replace(schedule, actions=tuple(every))


@pytest.mark.parametrize(
    ("removed", "put", "message"),
    [
        ("W1.0", None, "missing"),
        ("I1.0", None, "missing"),
        ("I1.0", B, "does not belong here"),  # a whole backward beside a weight part
        ("W1.0", B, "does not belong here"),
    ],
)
def test_a_part_without_the_other_is_found(removed: str, put: ActionKind | None, message: str):
    schedule = zero_bubble([0, 1], 3)
    actions = [
        Action(put, a.segment, a.micro_batch) if put is not None and str(a) == removed else a
        for a in schedule.actions[1]
        if put is not None or str(a) != removed
    ]
    with pytest.raises(ScheduleError, match=message):
        validate(changed(schedule, 1, actions))


@pytest.mark.parametrize(
    ("text", "before", "message"),
    [
        ("W1.0", "I1.0", "I1.0 must come before"),
        ("SG1.0", "I1.0", "must come before"),
        ("I1.0", "F1.0", "must come before"),
        ("R1", "W1.0", "no gradient to reduce"),
        ("R1", "W1.2", "are not reduced"),
    ],
)
def test_wrong_orders_of_parts_are_found(text: str, before: str, message: str):
    schedule = zero_bubble([0, 1], 3)
    actions = list(schedule.actions[1])
    moved = next(action for action in actions if str(action) == text)
    actions.remove(moved)
    place = next(index for index, action in enumerate(actions) if str(action) == before)
    actions.insert(place, moved)
    with pytest.raises(ScheduleError, match=message):
        validate(changed(schedule, 1, actions))


def test_one_part_alone_may_be_whole_on_another_stage():
    """A stage may take its backwards whole beside one that takes them in parts."""
    split, whole = zero_bubble([0, 1], 3), one_f_one_b([0, 1], 3)
    for stage in (0, 1):
        validate(changed(split, stage, list(whole.actions[stage])))


def test_what_cannot_be_deeper_is_refused():
    with pytest.raises(ScheduleError, match="extra"):
        make_schedule("layered", [0, 1], 2, extra_in_flight=1)
    with pytest.raises(ScheduleError, match="extra"):
        one_f_one_b([0, 1], 2, extra_in_flight=-1)
    with pytest.raises(ScheduleError, match="zero-bubble schedule needs virtual stages that go"):
        zero_bubble([0, 1, 1, 0], 2)
    assert make_schedule("zero_bubble", [0, 1], 2) == zero_bubble([0, 1], 2)
    assert layered([0, 1], 2).name == "layered"
