"""The simulator: bubbles as in the formulas, and never outside its natural limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.schedules import (
    contiguous_stages,
    layered,
    modular_stages,
    one_f_one_b,
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
