"""`autopar simulate`: a table, JSON, a trace, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autopar
from tests.cli.helpers import assert_refused, run


def test_the_step_is_that_of_the_plan(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    step_s = autopar.read_plan(plan_file).prediction.step_s
    document = json.loads(run(capfd, "simulate", plan_file, "--json").out)
    assert document["step_s"] == pytest.approx(step_s, rel=1e-9)
    (stage,) = document["stages"]
    parts = stage["busy_s"] + stage["exposed_s"] + stage["waiting_s"]
    assert parts == pytest.approx(step_s, rel=1e-9)
    assert stage["peak_held_bytes"] > 0
    lines = run(capfd, "simulate", plan_file).out.splitlines()
    assert lines[0].startswith("step ")
    assert lines[2].split("  ")[0] == "stage"
    assert len(lines) == 4


def test_zero_stages_of_blocks_are_told(
    plan_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(plan_file.read_text())
    last = document["segments"][-1]["last_block"]
    document["schedule"] |= {"zero_stage": 3, "zero_stages": {f"0-{last}": 2}}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    lines = run(capfd, "simulate", tmp_path / "plan.json").out.splitlines()
    assert f"ZeRO stage 3, 2 of blocks 0-{last}, " in lines[0]


def test_a_trace_replaces_the_old_one(
    plan_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    assert run(capfd, "simulate", plan_file, "--trace", path).status == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X", "C"}
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    simulation = autopar.simulate(plan_file, trace=path)
    assert isinstance(simulation, autopar.Simulation)
    assert json.loads(path.read_text())["traceEvents"] == events


def test_a_place_that_cannot_be_written_is_named_and_left_alone(
    plan_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "nowhere" / "trace.json", tmp_path):
        done = run(capfd, "simulate", plan_file, "--trace", path)
        assert_refused(done, "cannot write the trace")
        assert str(path) in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_cannot_be_simulated_leaves_no_trace(
    plan_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(plan_file.read_text())
    del document["prediction"]["action_costs"]
    old = tmp_path / "old.json"
    old.write_text(json.dumps(document))
    trace = tmp_path / "trace.json"
    done = run(capfd, "simulate", old, "--trace", trace)
    assert_refused(done, "does not store the costs of its actions")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert_refused(run(capfd, "simulate", broken, "--trace", trace), "not a JSON document")
    assert_refused(run(capfd, "simulate", tmp_path / "none.json"), "cannot read the plan")
    assert not trace.exists()
