"""Schedules: complete, free of deadlock, with the orders, memory, bubbles and traffic that the
design states.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (  # the oracle of orders
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from autopar.ir.errors import ScheduleError
from autopar.ir.schedule import Action, ActionKind, Run, Schedule
from autopar.ir.schedule_checks import makespan, peak_live, validate
from autopar.ir.schedules import (
    compact_schedule,
    contiguous_stages,
    interleaved_1f1b,
    layered,
    make_schedule,
    modular_stages,
    one_f_one_b,
)

SMALL = list(itertools.product(range(1, 5), range(1, 4), range(1, 9)))
"""All stages p ≤ 4, segments per stage v ≤ 3, micro-batches M ≤ 8."""

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
KINDS = {"FORWARD": F, "FULL_BACKWARD": B}
"""By torch's names."""


def all_small(zero_stage: int) -> list[Schedule]:
    schedules: list[Schedule] = []
    for p, v, m in SMALL:
        schedules.append(one_f_one_b(contiguous_stages(p, v), m, zero_stage=zero_stage))
        schedules.append(layered(contiguous_stages(p, v), m, zero_stage=zero_stage))
        schedules.append(layered(modular_stages(p, v), m, zero_stage=zero_stage))
        schedules.append(interleaved_1f1b(modular_stages(p, v), m, zero_stage=zero_stage))
        schedules.append(interleaved_1f1b(blocks_of(p, v), m, zero_stage=zero_stage))
    return schedules


def blocks_of(p: int, v: int) -> list[int]:
    """Modular stages whose virtual stages have one or two segments each."""
    return [c % p for c in range(p * v) for _ in range(1 + c % 2)]


def compute(schedule: Schedule, stage: int) -> list[Action]:
    return [action for action in schedule.actions[stage] if action.kind in (F, B)]


@pytest.mark.parametrize("zero_stage", range(4))
def test_all_small_schedules_are_valid(zero_stage: int):
    for schedule in all_small(zero_stage):
        validate(schedule)


@given(
    stages=st.integers(1, 4).flatmap(
        lambda p: st.lists(st.integers(0, p - 1), min_size=1, max_size=8)
    ),
    m=st.integers(1, 6),
    zero_stage=st.integers(0, 3),
)
def test_layered_takes_any_map_of_segments(stages: list[int], m: int, zero_stage: int):
    dense = {stage: index for index, stage in enumerate(sorted(set(stages)))}
    validate(layered([dense[stage] for stage in stages], m, zero_stage=zero_stage))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in range(1, 5) for m in range(p, 9)])
def test_1f1b_has_the_order_of_torch(p: int, m: int):
    oracle: Any = Schedule1F1B.__new__(Schedule1F1B)
    oracle._num_stages = oracle.pp_group_size = p
    oracle._n_microbatches = m
    orders = oracle._get_pipeline_order()
    schedule = one_f_one_b(contiguous_stages(p, 1), m)
    for stage in range(p):
        order = [a for a in orders[stage] if a is not None and a.computation_type.name in KINDS]
        expected = [(KINDS[a.computation_type.name], a.microbatch_index) for a in order]
        if stage == p - 1:  # torch numbers the forwards of the last stage from 1
            expected = [(kind, j - (kind is F)) for kind, j in expected]
        assert [(a.kind, a.micro_batch) for a in compute(schedule, stage)] == expected


@pytest.mark.parametrize(("p", "v", "m"), [(p, v, m) for p, v, m in SMALL if p > 1])
def test_interleaved_has_the_order_of_torch(p: int, v: int, m: int):
    """Torch takes numbers of micro-batches that its rounds divide; ours takes the others, too."""
    rounds = max(1, m // p)
    schedule = interleaved_1f1b(modular_stages(p, v), m)
    validate(schedule)
    if m % rounds:
        return
    oracle: Any = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    oracle.pp_group_size, oracle.n_local_stages, oracle._n_microbatches = p, v, m
    oracle.number_of_rounds, oracle.microbatches_per_round = rounds, m // rounds
    for stage in range(p):
        order = [a for a in oracle._calculate_single_rank_operations(stage) if a is not None]
        expected = [
            (KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in order
        ]
        own = [(a.kind, a.segment, a.micro_batch) for a in compute(schedule, stage)]
        assert own == expected


@pytest.mark.parametrize(
    ("p", "v", "rounds"), list(itertools.product(range(2, 5), range(1, 4), (1, 2, 3)))
)
def test_interleaved_has_the_bubble_and_memory_of_the_formulas(p: int, v: int, rounds: int):
    m = p * rounds
    schedule = interleaved_1f1b(modular_stages(p, v), m)
    bubble = makespan(schedule, forward=1, backward=2) / (3.0 * v * m) - 1
    assert bubble == pytest.approx((v * max(m, p) + min(m, p) - 1) / (v * m) - 1)
    assert peak_live(schedule) == tuple(
        min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p)
    )


def test_interleaved_on_one_stage_is_1f1b():
    schedule = interleaved_1f1b([0, 0, 0], 4)
    assert schedule.actions == one_f_one_b([0, 0, 0], 4).actions


@pytest.mark.parametrize("stages", [[0, 1, 0], [0, 1, 1, 0], [1, 0], [0, 1, 2, 0, 2, 1]])
def test_interleaved_refuses_what_does_not_go_round(stages: list[int]):
    with pytest.raises(ScheduleError, match="go round"):
        interleaved_1f1b(stages, 4)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "layered"])
@pytest.mark.parametrize("zero_stage", range(4))
def test_the_compact_form_is_as_short_as_its_messages_and_collectives_allow(name, zero_stage):
    """Two runs a micro-batch and virtual stage, but where each segment is gathered or reduced."""
    p, m, width = 3, 12, 5
    stages = [s for s in range(p) for _ in range(width if name != "layered" else 1)]
    compact = compact_schedule(name, stages, m, zero_stage=zero_stage)
    counts = [sum(isinstance(item, Run) for item in items) for items in compact.items]
    if name == "layered" or zero_stage <= 1:
        assert max(counts) <= 2 * m + 2 * width
    elif zero_stage == 2:  # each backward is reduced
        assert max(counts) <= m * (width + 1) + width
    else:
        assert max(counts) <= 2 * m * width


@pytest.mark.parametrize(("p", "v", "m"), SMALL)
def test_modular_layered_has_the_order_of_looped_bfs(p: int, v: int, m: int):
    """But for the last segment, which alternates, and for the order of micro-batches in backward,
    which is theirs reversed: gradients come in the order in which the last segment makes them.
    """
    schedule = layered(modular_stages(p, v), m)
    for stage in range(p):
        oracle: Any = ScheduleLoopedBFS.__new__(ScheduleLoopedBFS)
        oracle._stages, oracle.pp_group_size, oracle._n_microbatches = [None] * v, p, m
        order = [a for a in oracle._calculate_single_rank_operations(stage) if a is not None]
        kinds = [KINDS[a.computation_type.name] for a in order]
        cells = [(a.stage_index, a.microbatch_index) for a in order]
        forwards = [cell for kind, cell in zip(kinds, cells, strict=True) if kind is F]
        backwards = [(k, m - 1 - j) for kind, (k, j) in zip(kinds, cells, strict=True) if kind is B]
        own = compute(schedule, stage)
        assert [(a.segment, a.micro_batch) for a in own if a.kind is F] == forwards
        assert [(a.segment, a.micro_batch) for a in own if a.kind is B] == backwards
        other = [a for a in own if a.segment != p * v - 1]
        assert [a.kind for a in other] == sorted((a.kind for a in other), key=(F, B).index)


def test_last_segment_of_layered_alternates():
    schedule = layered(modular_stages(2, 2), 3)
    last = [str(action) for action in compute(schedule, 1) if action.segment == 3]
    assert last == ["F3.0", "B3.0", "F3.1", "B3.1", "F3.2", "B3.2"]


@pytest.mark.parametrize(("p", "v", "m"), SMALL)
def test_bubbles_equal_the_formulas(p: int, v: int, m: int):
    """Forward 1, backward 2: bubble over compute per stage, without transfer time."""

    def bubble(schedule: Schedule) -> float:
        work = 3.0 * v * m
        return makespan(schedule, forward=1, backward=2) / work - 1

    assert bubble(one_f_one_b(contiguous_stages(p, v), m)) == pytest.approx((p - 1) / m)
    if v == 1:
        assert bubble(layered(contiguous_stages(p, 1), m)) == pytest.approx((p - 1) / m)
    expected = (v * max(m, p) + min(m, p) - 1) / (v * m) - 1
    assert bubble(layered(modular_stages(p, v), m)) == pytest.approx(expected)


@pytest.mark.parametrize(("p", "v", "m"), SMALL)
def test_live_activations_equal_the_formulas(p: int, v: int, m: int):
    one = peak_live(one_f_one_b(contiguous_stages(p, v), m))
    assert one == tuple(v * min(m, p - stage) for stage in range(p))
    breadth = peak_live(layered(modular_stages(p, v), m))
    assert breadth[:-1] == (v * m,) * (p - 1)
    assert breadth[-1] == (v - 1) * m + 1


@pytest.mark.parametrize(("p", "v", "m"), SMALL)
def test_layered_zero3_gathers_twice_and_reduces_once(p: int, v: int, m: int):
    for stages in (contiguous_stages(p, v), modular_stages(p, v)):
        counts = _counts(layered(stages, m, zero_stage=3))
        for segment in range(p * v):
            assert 1 <= counts[ActionKind.GATHER_PARAMETERS, segment] <= 2
            assert counts[ActionKind.REDUCE_GRADIENTS, segment] == 1


@pytest.mark.parametrize(("p", "v", "m"), SMALL)
def test_1f1b_zero3_gathers_once_or_twice_per_micro_batch(p: int, v: int, m: int):
    counts = _counts(one_f_one_b(contiguous_stages(p, v), m, zero_stage=3))
    for segment in range(p * v):
        gathers = counts[ActionKind.GATHER_PARAMETERS, segment]
        assert gathers <= 2 * m
        assert gathers == 1 if v == 1 else gathers >= m
        assert counts[ActionKind.REDUCE_GRADIENTS, segment] == m


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_other_zero_stages_gather_once_and_never_free(zero_stage: int):
    for schedule in all_small(zero_stage):
        counts = _counts(schedule)
        for segment in range(schedule.num_segments):
            assert counts[ActionKind.GATHER_PARAMETERS, segment] == 1
            assert counts[ActionKind.FREE_PARAMETERS, segment] == 0


def test_zero3_holds_three_gathered_segments_at_most_and_prefetches():
    """The segment in use, and the next one while it comes; freed before the one after that is
    gathered.
    """
    for schedule in all_small(3):
        for actions in schedule.actions:
            held: set[int] = set()
            for action in actions:
                if action.kind is ActionKind.GATHER_PARAMETERS:
                    held.add(action.segment)
                elif action.kind is ActionKind.FREE_PARAMETERS:
                    held.remove(action.segment)
                assert len(held) <= 2


def test_receives_are_posted_one_compute_action_ahead():
    schedule = one_f_one_b(contiguous_stages(2, 1), 2)
    assert " ".join(map(str, schedule.actions[1])) == (
        "RA1.0 G1 F1.0 RA1.1 B1.0 SG1.0 F1.1 B1.1 SG1.1 R1 O"
    )


def test_schedules_are_made_by_name():
    assert make_schedule("layered", [0, 1], 2) == layered([0, 1], 2)
    assert make_schedule("1f1b", [0, 1], 2) == one_f_one_b([0, 1], 2)
    assert make_schedule("interleaved", [0, 1, 0, 1], 2) == interleaved_1f1b([0, 1, 0, 1], 2)
    with pytest.raises(ScheduleError, match="no schedule"):
        make_schedule("gpipe", [0], 1)


@pytest.mark.parametrize(
    ("stages", "m", "zero_stage"), [([], 1, 0), ([0, 2], 1, 0), ([0], 0, 0), ([0], 1, 4)]
)
def test_bad_arguments_are_refused(stages: list[int], m: int, zero_stage: int):
    with pytest.raises(ScheduleError):
        layered(stages, m, zero_stage=zero_stage)


def test_1f1b_refuses_modular_stages():
    with pytest.raises(ScheduleError, match="contiguous"):
        one_f_one_b([0, 1, 0, 1], 2)


def _counts(schedule: Schedule) -> Counter[tuple[ActionKind, int]]:
    return Counter((a.kind, a.segment) for actions in schedule.actions for a in actions)
