"""Objectives and GPU ranges as arguments of ``autopar.plan``: what they need and give."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import pytest

import autopar
from autopar import Cluster, Plan
from autopar.api.arguments import PlanArguments
from autopar.api.goal import clusters_of
from autopar.ir.errors import InfeasibleError, InputError, PlanFormatError
from tests.models import tiny_transformer

CLUSTER = Cluster("cpu-local", gpus_per_node=2)


def plan(**arguments: Unpack[PlanArguments]) -> Plan:
    module, inputs, loss_fn = tiny_transformer(1)
    given: PlanArguments = {
        "pin": {"recompute": "none", "tp": 1},
        "example_batch": inputs,
        "loss_fn": loss_fn,
    }
    given.update(arguments)
    return autopar.plan(module, CLUSTER, **given)


def test_a_range_of_gpus_is_planned_in_one_call():
    found = plan(gpus=(1, 4), objective="cost", price_per_gpu_hour=3.0, global_batch_size=8)
    assert found.objective is not None
    assert [count.num_gpus for count in found.objective.by_count] == [1, 2, 4]
    used = found.device_mesh().num_ranks
    assert found.cluster.nodes * found.cluster.gpus_per_node == used
    tokens_s = found.prediction.tokens_per_s
    assert found.objective.value == pytest.approx(used * 3.0 / 3600 / tokens_s * 1e6)
    assert found.objective.settings == {"price_per_gpu_hour": 3.0}
    assert "least cost" in found.explain()


def test_without_a_range_every_gpu_is_used_and_the_batch_is_that_of_the_most():
    found = plan()
    assert found.device_mesh().num_ranks == 2
    assert found.objective is not None
    assert (found.objective.name, found.objective.value) == ("step_time", found.prediction.step_s)
    assert found.objective.bound == found.certificate.bound_s
    assert "shortest step" not in found.explain()
    assert plan(gpus=(1, 16)).batch.global_batch_size == 16


def test_the_batch_of_the_shortest_training_is_chosen():
    found = plan(objective="training_time", token_budget=1e5, critical_batch_size=16)
    assert found.objective is not None
    best, batch = found.objective.value, found.batch.global_batch_size
    for other in (batch // 2, 2 * batch):
        given = plan(
            objective="training_time",
            token_budget=1e5,
            critical_batch_size=16,
            global_batch_size=other,
        )
        assert given.batch.global_batch_size == other
        assert given.objective is not None
        assert best <= given.objective.value


def test_fewest_gpus_for_a_training():
    slow = plan(objective="gpus", gpus=(1, 4), deadline_s=1e9, token_budget=1e5)
    assert slow.device_mesh().num_ranks == 1
    with pytest.raises(InfeasibleError, match="no number of GPUs"):
        plan(objective="gpus", gpus=(1, 4), deadline_s=1e-6, token_budget=1e5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"objective": "speed"}, "objective is 'speed'"),
        ({"objective": "cost"}, "objective 'cost' needs price_per_gpu_hour"),
        ({"objective": "gpus", "token_budget": 1.0}, "objective 'gpus' needs deadline_s"),
        ({"price_per_gpu_hour": 1.0}, "objective 'step_time' has no use for it"),
        ({"objective": "gpus", "deadline_s": 1, "critical_batch_size": 8}, "without token_budget"),
        ({"objective": "training_time", "token_budget": 1e6}, "critical_batch_size, which is"),
        ({"objective": "cost", "price_per_gpu_hour": -1.0}, "must be a positive number"),
        ({"gpus": (4, 2)}, r"gpus is \(4, 2\)"),
        ({"gpus": 0}, "gpus is 0"),
        ({"gpus": 3}, "none of it is whole nodes of 2 GPUs"),
        ({"gpus": (2, 4), "pin": {"tp": 16}}, "tp=16"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_capture(arguments, said, monkeypatch):
    monkeypatch.setattr("autopar.api.planning.capture", lambda *_, **__: pytest.fail("captured"))
    with pytest.raises(InputError, match=said):
        plan(**arguments)


def test_the_clusters_of_a_range_are_of_the_hardware_whatever_its_nodes():
    assert [c.num_gpus for c in clusters_of(CLUSTER, (1, 6))] == [1, 2, 4, 6]
    assert clusters_of(CLUSTER, None) == (CLUSTER,)
    assert [c.nodes for c in clusters_of(Cluster("a100-80gb", nodes=4), 16)] == [2]


def test_an_old_plan_and_a_limit_are_arguments(tmp_path: Path):
    old = plan(gpus=4, global_batch_size=8)
    old.save(tmp_path / "old.json")
    cold, warm = plan(global_batch_size=12), plan(global_batch_size=12, warm_start=old)
    limited = plan(global_batch_size=12, warm_start=tmp_path / "old.json", time_limit_s=0)
    for found in (warm, cold, limited):
        assert found.device_mesh().num_ranks == 2
    assert (warm.mesh, warm.schedule, warm.batch) == (cold.mesh, cold.schedule, cold.batch)
    assert warm.certificate.bound_s == cold.certificate.bound_s
    assert limited.certificate.num_solved == 1
    assert limited.certificate.bound_s <= cold.prediction.step_s <= limited.prediction.step_s
    assert limited.schedule.name == old.schedule.name
    with pytest.raises(InputError, match="time_limit_s is -1"):
        plan(time_limit_s=-1)
    with pytest.raises(PlanFormatError, match=r"none\.json"):
        plan(warm_start=tmp_path / "none.json")
