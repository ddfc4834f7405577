"""The simulator: bubbles as in the formulas, and never outside its natural limits."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.schedule import ActionKind
from autopar.ir.schedules import (
    contiguous_stages,
    layered,
    modular_stages,
    one_f_one_b,
    zero_bubble,
)
from autopar.solver.simulate import SegmentTimes, simulate


def uniform(num: int, forward: float = 1.0, backward: float = 2.0, **other: float) -> SegmentTimes:
    return SegmentTimes(
        forward_s=(forward,) * num,
        backward_s=(backward,) * num,
        gather_s=(other.get("gather", 0.0),) * num,
        reduce_s=(other.get("reduce", 0.0),) * num,
        send_s=(other.get("send", 0.0),) * num,
        held_bytes=(1,) * num,
    )


@given(p=st.integers(1, 5), v=st.integers(1, 3), more=st.integers(0, 6))
def test_bubble_of_1f1b_is_p_minus_1_over_m(p, v, more):
    num = p + more
    schedule = one_f_one_b(contiguous_stages(p, v), num)
    result = simulate(schedule, uniform(p * v), optimizer_s=[0.0] * p)
    assert result.step_s == pytest.approx(3 * v * (num + p - 1))
    assert result.peak_held_bytes == tuple(v * min(num, p - s) for s in range(p))


@given(p=st.integers(1, 4), v=st.integers(1, 4), num=st.integers(1, 8))
def test_bubble_of_the_modular_pipeline_is_as_derived(p, v, num):
    schedule = layered(modular_stages(p, v), num)
    step = simulate(schedule, uniform(p * v, 1.0, 1.0), optimizer_s=[0.0] * p).step_s
    ideal = (v * max(num, p) + min(num, p) - 1) * 2
    assert step <= ideal + 1e-9  # the last segment alternates, which can only hide more


def test_hidden_gathers_cost_only_the_slowdown():
    schedule = layered((0, 0, 0), 8, zero_stage=3)
    free = simulate(schedule, uniform(3), optimizer_s=[0.0])
    hidden = simulate(schedule, uniform(3, gather=2.0), optimizer_s=[0.0])
    slowed = simulate(schedule, uniform(3, gather=2.0), optimizer_s=[0.0], slowdown=0.1)
    assert hidden.step_s == pytest.approx(free.step_s + 2.0)  # only the first gather is waited for
    assert hidden.step_s < slowed.step_s <= hidden.step_s + 0.1 * 2.0 * 5


def test_more_in_flight_hides_messages():
    """A latency of c costs 1F1B 2c·((p − 1)·M/p + p − 2): 5.8 % of a step with p 8, M 64 and c a
    tenth of a forward. With 2(p − s) + 1 in flight it costs 0.7 %: the way there and back.
    """
    p, num, send = 8, 64, 0.1

    def step_s(extra: int, **other: float) -> float:
        schedule = one_f_one_b(contiguous_stages(p, 1), num, extra_in_flight=extra)
        return simulate(schedule, uniform(p, **other), optimizer_s=[0.0] * p).step_s

    free = 3 * (num + p - 1)
    assert step_s(0) == step_s(p - 1) == pytest.approx(free)
    lost = 2 * send * ((p - 1) * num / p + p - 2)
    assert step_s(0, send=send) - free == pytest.approx(lost)
    assert lost / free == pytest.approx(0.058, abs=5e-4)
    assert step_s(p - 1, send=send) - free == pytest.approx(2 * send * (p - 1))
    assert 2 * send * (p - 1) / free == pytest.approx(0.007, abs=5e-4)
    steps = [step_s(extra, send=send) for extra in range(p)]
    assert steps == sorted(steps, reverse=True)


@given(p=st.integers(1, 5), more=st.integers(0, 6), weight=st.sampled_from([0.25, 0.5, 1.0]))
def test_bubble_and_memory_of_backwards_in_two_parts(p, more, weight):
    """(p − 1)(f + b − w); and what waits for its weight part is held as long as it waits."""
    num = p + more
    times = dataclasses.replace(
        uniform(p), held_bytes=(5,) * p, weight_s=(weight,) * p, weight_bytes=(3,) * p
    )
    result = simulate(zero_bubble(contiguous_stages(p, 1), num), times, optimizer_s=[0.0] * p)
    assert result.step_s == pytest.approx(3 * num + (p - 1) * (3 - 2 * weight))
    assert result.busy_s == pytest.approx((3 * num,) * p)
    waiting = [min(s, num - (p - s)) for s in range(p)]
    assert result.peak_held_bytes == tuple(5 * (p - s) + 3 * waiting[s] for s in range(p))


def test_weight_parts_do_not_wait_for_gathers():
    """ZeRO 3 gathers the next segment while weight parts run."""
    schedule = zero_bubble([0, 0, 1, 1], 4, zero_stage=3)
    times = dataclasses.replace(uniform(4, gather=0.5), weight_s=(1.0,) * 4)
    recorded = simulate(schedule, times, optimizer_s=[0.0] * 2, record=True)
    for events in recorded.timeline:
        assert any(event.action.kind is ActionKind.BACKWARD_WEIGHT for event in events)
    slower = dataclasses.replace(times, weight_s=(0.0,) * 4)
    assert recorded.step_s < simulate(schedule, slower, optimizer_s=[0.0] * 2).step_s
