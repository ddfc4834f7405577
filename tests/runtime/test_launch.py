"""Ranks that run must be those of the plan."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.ir.errors import ClusterError
from autopar.ir.mesh import Mesh
from autopar.runtime import connect, is_launched
from tests.runtime.cases import Setup, make_batch, make_plan
from tests.runtime.harness import make_engine

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)


def test_processes_that_torchrun_started_are_known(monkeypatch: pytest.MonkeyPatch):
    assert not is_launched()
    launch(monkeypatch)
    assert is_launched()


def test_a_wrong_number_of_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch):
    launch(monkeypatch)
    with pytest.raises(ClusterError, match="for 4 ranks, but 2 run"):
        connect(make_plan(Setup(mesh=Mesh(dp_shard=4))))


def test_a_lone_process_cannot_run_a_plan_for_several():
    with pytest.raises(ClusterError, match="runs alone"):
        connect(make_plan(Setup(mesh=Mesh(dp_shard=4))))


def test_a_missing_device_is_an_error():
    plan = make_plan(Setup())
    elsewhere = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device="xpu"))
    with pytest.raises(ClusterError, match="has not"):
        connect(elsewhere)


def test_a_bad_timeout_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AUTOPAR_TIMEOUT_S", "soon")
    with pytest.raises(ClusterError, match="no number of seconds"):
        connect(make_plan(Setup()))


def test_a_lone_process_runs_a_plan_for_one():
    engine = make_engine(Setup(), connect(make_plan(Setup())))
    losses = [engine.train_step(make_batch("llama", seed=0)).loss for _ in range(2)]
    engine.close()
    engine.close()
    assert losses[1] < losses[0]
