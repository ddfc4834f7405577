"""Ranges of GPUs and batches: equal to planning each, and more of anything is never worse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.errors import InfeasibleError, InputError
from autopar.ir.plan import Plan, from_json, to_json
from autopar.solver import Cluster, solve
from autopar.solver.objectives import (
    FewestGpus,
    Objective,
    Point,
    StepTime,
    TokenCost,
    TrainingTime,
)
from autopar.solver.predict import product_flops
from autopar.solver.ranges import gpu_counts, solve_range
from autopar.solver.training_length import TrainingLength
from tests.solver.graphs import block_model
from tests.solver.small import MODEL, TRAINING, instance

NODE = Cluster("cpu-local", gpus_per_node=2)
LENGTH = TrainingLength.to_budget(1e6, seq_len=8, critical_batch=8)
TINY = block_model([("linear", 0), ("relu", 0)], num_blocks=2)


def clusters(cluster: Cluster, low: int, high: int) -> list[Cluster]:
    return [cluster.with_gpus(count) for count in gpu_counts(cluster, low, high)]


def plan_range(
    points: Sequence[tuple[Cluster, int]], objective: Objective, **pin: int | str
) -> Plan:
    return solve_range(MODEL, points, objective, training=TRAINING, pin=pin)


def test_counts_are_whole_nodes_and_divisors_of_one():
    eight = Cluster("a100-80gb")
    assert gpu_counts(eight, 1, 33) == (1, 2, 4, 8, 16, 24, 32)
    assert gpu_counts(eight, 3, 8) == (4, 8)
    assert gpu_counts(eight, 9, 15) == ()
    assert gpu_counts(eight, 1, 3) == (1, 2)
    nodes = [count // 8 for count in gpu_counts(eight, 8, 8 * 32)]
    assert nodes == [*range(1, 17), 18, 20, 21, 24, 25, 27, 28, 30, 32]
    assert gpu_counts(eight, 8 * 31, 8 * 31) == (8 * 31,)
    for most in (8, 100, 300, 1000):  # what is possible with fewer stays possible
        assert set(gpu_counts(eight, 1, most)) <= set(gpu_counts(eight, 1, 2 * most))


POINTS = list(itertools.product(clusters(NODE, 1, 6), (4, 8)))


@pytest.fixture(scope="module")
def steps() -> dict[tuple[int, int], float]:
    """Seconds of the best step at each point, planned by itself."""
    return {
        (cluster.num_gpus, batch): solve(
            MODEL, cluster, global_batch_size=batch, training=TRAINING
        ).prediction.step_s
        for cluster, batch in POINTS
    }


@pytest.mark.parametrize("name", ["step_time", "cost", "gpus", "training_time"])
def test_a_range_is_as_good_as_planning_each_point(name: str, steps: dict[tuple[int, int], float]):
    objectives: dict[str, Objective] = {
        "step_time": StepTime(),
        "cost": TokenCost(price_per_gpu_hour=2.0),
        "gpus": FewestGpus(deadline_s=sorted(steps.values())[len(steps) // 2]),
        "training_time": TrainingTime(length=LENGTH),
    }
    objective = objectives[name]
    found = plan_range(POINTS, objective)
    values = {
        (num, batch): objective.value(
            Point(num_gpus=num, global_batch_size=batch, seq_len=8), step_s
        )
        for (num, batch), step_s in steps.items()
    }
    assert found.objective is not None
    assert found.objective.value == pytest.approx(min(values.values()))
    chosen = (found.cluster.nodes * found.cluster.gpus_per_node, found.batch.global_batch_size)
    assert values[chosen] == found.objective.value
    assert found.objective.bound <= found.objective.value
    for count in found.objective.by_count:
        of_count = [value for (num, _), value in values.items() if num == count.num_gpus]
        bound = math.inf if count.bound is None else count.bound
        assert bound <= min(of_count) * (1 + 1e-9)
        assert found.objective.bound <= bound
        if count.value is not None:
            assert count.value >= min(of_count) * (1 - 1e-9)
    assert found.objective.gap == pytest.approx(1 - found.objective.bound / found.objective.value)
    assert from_json(to_json(found)) == found
    assert "  6 GPUs  " in found.explain()


def test_flops_at_the_peak_are_below_the_roofline_of_every_candidate():
    made = instance(NODE.with_nodes(2))
    peak = NODE.hardware.chip.peak_flops.fp32 * 4
    least = product_flops(MODEL, made.global_batch_size) / peak
    lowest = min(made.search.refiner.scalar(candidate) for candidate in made.candidates)
    assert 0 < least <= lowest


def test_what_cannot_be_better_is_not_solved():
    points = [(cluster, 8) for cluster in clusters(NODE, 1, 16)]
    found = plan_range(points, FewestGpus(deadline_s=10.0), tp=1, recompute="none").objective
    assert found is not None
    assert (found.value, found.bound, found.gap) == (1.0, 1.0, 0.0)
    assert [count.num_gpus for count in found.by_count if count.step_s is not None] == [1]


def test_a_deadline_that_nothing_meets_is_an_error_that_says_what_is_possible():
    points = [(cluster, 8) for cluster in clusters(NODE, 1, 4)]
    with pytest.raises(InfeasibleError, match=r"no number of GPUs .* 4 take at least"):
        plan_range(points, FewestGpus(deadline_s=1e-7))


def test_counts_where_pins_cannot_hold_are_passed_over():
    points = [(cluster, 8) for cluster in clusters(NODE, 1, 4)]
    found = plan_range(points, TokenCost(price_per_gpu_hour=1.0), pp=4)
    assert found.objective is not None
    assert found.mesh.pp == 4
    assert [count.bound is None for count in found.objective.by_count] == [True, True, False]
    with pytest.raises(InputError, match="pp=5"):
        plan_range(points, StepTime(), pp=5)


FACTORS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])
CLUSTERS = st.builds(
    lambda gpus, usable, compute, memory, node, network: (
        Cluster("cpu-local", gpus_per_node=gpus)
        .with_memory(usable)
        .scaled(compute=compute, memory=memory, node=node, network=network)
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([10_000, 20_000, 40_000, 2**31]),
    FACTORS,
    FACTORS,
    FACTORS,
    FACTORS,
)
MORE = {
    "memory": lambda cluster: cluster.with_memory(2 * cluster.usable_bytes),
    "network": lambda cluster: cluster.scaled(network=2),
    "links": lambda cluster: cluster.scaled(node=2),
    "bandwidth of memory": lambda cluster: cluster.scaled(memory=2),
    "compute": lambda cluster: cluster.scaled(compute=2),
}


def up_to(cluster: Cluster, most: int, batch: int) -> Plan | None:
    """The best step on up to ``most`` GPUs; None: nothing fits."""
    points = [(some, batch) for some in clusters(cluster, 1, most)]
    try:
        return solve_range(TINY, points, StepTime(), training=TRAINING)
    except InfeasibleError:
        return None


@settings(max_examples=8)
@given(
    cluster=CLUSTERS,
    most=st.sampled_from([1, 2, 4]),
    batch=st.sampled_from([2, 4, 6]),
    more=st.sampled_from(sorted(MORE)),
)
def test_more_of_anything_never_makes_the_best_plan_slower(
    cluster: Cluster, most: int, batch: int, more: str
):
    """The new bound is never above the old objective; with more GPUs nor is the new objective."""
    before = up_to(cluster, most, batch)
    if before is None:
        return
    assert before.objective is not None
    wider = up_to(cluster, 2 * most, batch)
    assert wider is not None
    assert wider.objective is not None
    assert wider.objective.value <= before.objective.value * (1 + 1e-9)
    richer = up_to(MORE[more](cluster), most, batch)
    assert richer is not None
    assert richer.objective is not None
    assert richer.objective.bound <= before.objective.value * (1 + 1e-9)
