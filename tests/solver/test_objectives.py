"""Objectives: never less for a longer step, and the physics of trainings in one place."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.errors import InputError
from autopar.solver.objectives import (
    FewestGpus,
    Objective,
    Point,
    StepTime,
    TokenCost,
    TrainingTime,
)
from autopar.solver.training_length import TrainingLength

LENGTH = TrainingLength.to_budget(1e9, seq_len=1000, critical_batch=500)
OBJECTIVES: tuple[Objective, ...] = (
    StepTime(),
    TokenCost(price_per_gpu_hour=2.0),
    FewestGpus(deadline_s=1.0),
    FewestGpus(deadline_s=1e4, length=LENGTH),
    TrainingTime(length=LENGTH),
)
POINTS = st.builds(
    Point,
    num_gpus=st.integers(1, 10**6),
    global_batch_size=st.integers(1, 10**5),
    seq_len=st.integers(1, 10**5),
)
SECONDS = st.floats(1e-6, 1e6)


@given(point=POINTS, one=SECONDS, other=SECONDS, objective=st.sampled_from(OBJECTIVES))
def test_no_objective_falls_when_a_step_takes_longer(point, one, other, objective):
    short, long = sorted((one, other))
    assert objective.value(point, short) <= objective.value(point, long)
    assert objective.value(point, math.inf) == math.inf


@given(point=POINTS, step_s=SECONDS, objective=st.sampled_from(OBJECTIVES))
def test_the_longest_step_of_a_value_is_its_inverse(point, step_s, objective):
    value = objective.value(point, step_s)
    if math.isfinite(value):
        longest = objective.longest_step_s(point, value)
        assert longest >= step_s * (1 - 1e-9)
        assert objective.value(point, longest * (1 - 1e-9)) <= value * (1 + 1e-9)
        assert objective.value(point, longest * (1 + 1e-6)) > value
    assert objective.longest_step_s(point, math.inf) > 0


def test_an_hour_of_a_gpu_costs_its_price():
    cost = TokenCost(price_per_gpu_hour=3.0)
    point = Point(num_gpus=2, global_batch_size=1000, seq_len=1000)
    assert cost.value(point, 3600.0) == pytest.approx(6.0)  # a million tokens in two GPU-hours


def test_a_deadline_is_of_a_step_or_of_a_training():
    point = Point(num_gpus=8, global_batch_size=500, seq_len=1000)
    step = FewestGpus(deadline_s=2.0)
    assert (step.value(point, 2.0), step.value(point, 2.01)) == (8.0, math.inf)
    training = FewestGpus(deadline_s=LENGTH.seconds(500, 3.0), length=LENGTH)
    assert training.step_deadline_s(500) == pytest.approx(3.0)


@given(batch=st.integers(1, 10**5))
def test_steps_follow_the_critical_batch(batch):
    """Twice the fewest steps and twice the fewest sequences at the critical batch; both are never
    below the fewest.
    """
    assert LENGTH.steps(500) == pytest.approx(2 * LENGTH.fewest_steps)
    assert 500 * LENGTH.steps(500) == pytest.approx(2 * LENGTH.fewest_sequences)
    assert LENGTH.steps(batch) > LENGTH.fewest_steps
    assert batch * LENGTH.steps(batch) >= LENGTH.fewest_sequences
    expected = LENGTH.fewest_steps * (1 + 500 / batch)
    assert LENGTH.steps(batch) == pytest.approx(expected)
    again = TrainingLength.at_critical_batch(LENGTH.steps(500), critical_batch=500)
    assert again.steps(batch) == pytest.approx(LENGTH.steps(batch))


def test_without_a_critical_batch_sequences_count_alone():
    length = TrainingLength.to_budget(1e9, seq_len=1000)
    assert [batch * length.steps(batch) for batch in (1, 10, 1000)] == pytest.approx([1e6] * 3)
    assert length.batches() == ()


def test_batches_worth_a_look_lie_around_the_critical_one():
    batches = LENGTH.batches()
    assert batches == (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    assert LENGTH.steps(max(batches)) < 1.25 * LENGTH.fewest_steps
    assert min(batches) * LENGTH.steps(min(batches)) < 1.02 * LENGTH.fewest_sequences


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_numbers_out_of_range_are_refused(value):
    for make in (
        lambda: TokenCost(price_per_gpu_hour=value),
        lambda: FewestGpus(deadline_s=value),
        lambda: TrainingLength.to_budget(value, seq_len=1),
        lambda: TrainingLength.to_budget(1e9, seq_len=1, critical_batch=value),
    ):
        with pytest.raises(InputError, match="must be a positive number"):
            make()
