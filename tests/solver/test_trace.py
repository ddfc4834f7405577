"""The step of a plan, simulated again from its file, and its trace for Perfetto."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from typing import Any

import pytest

from autopar.ir.errors import InputError, PlanFormatError
from autopar.ir.plan import Plan, TrainingPlan, from_json, to_json
from autopar.solver import Cluster, solve
from autopar.solver.pins import Pins
from autopar.solver.replay import simulate_plan
from autopar.solver.trace import COMMUNICATION, COMPUTE, trace
from tests.solver.graphs import block_model

MODEL = block_model([("linear", 0), ("relu", 0), ("linear", 0), ("add", 0)], num_blocks=6)
TRAINING = TrainingPlan(
    precision="fp32",
    optimizer="adamw",
    learning_rate=1e-3,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-8,
    max_grad_norm=1.0,
    seed=0,
)
PINS: tuple[Pins, ...] = (
    {"pp": 1, "tp": 2},
    {"pp": 2, "dp_shard": 2, "zero_stage": 1, "schedule": "1f1b"},
    {"pp": 2, "dp_shard": 2, "zero_stage": 3, "recompute": "full", "schedule": "1f1b"},
    {"pp": 2, "dp_shard": 2, "zero_stage": 2, "virtual_stages": 2},
    {"pp": 2, "dp_shard": 2, "zero_stage": 3, "virtual_stages": 2, "schedule": "layered"},
    {"pp": 4, "schedule": "layered"},
)
each_plan = pytest.mark.parametrize("pin", PINS, ids=str)


def plan(pin: Pins) -> Plan:
    made = solve(
        MODEL,
        Cluster("cpu-local"),
        global_batch_size=8,
        training=TRAINING,
        pin={**pin, "micro_batch_size": 1},
    )
    return from_json(to_json(made))


@each_plan
def test_a_plan_read_from_its_file_simulates_to_its_prediction(pin):
    found = plan(pin)
    for record in (False, True):
        simulation = simulate_plan(found, record=record)
        assert simulation.step_s == pytest.approx(found.prediction.step_s, rel=1e-9)
        for stage, rank in enumerate(found.prediction.ranks):
            seconds = rank.seconds_by_cause
            exposed = seconds["exposed data-parallel communication"]
            assert simulation.exposed_s[stage] == pytest.approx(exposed, rel=1e-9, abs=1e-12)
            waiting = seconds["waiting for other stages"]
            assert simulation.waiting_s[stage] == pytest.approx(waiting, rel=1e-9, abs=1e-12)


def make_trace(pin: Pins) -> tuple[Plan, list[dict[str, Any]], Any]:
    found = plan(pin)
    simulation = simulate_plan(found, record=True)
    document = json.loads(json.dumps(trace(found, simulation), allow_nan=False))
    return found, document["traceEvents"], simulation


@each_plan
def test_slices_of_a_thread_follow_each_other(pin):
    found, events, simulation = make_trace(pin)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["args"].keys() <= {"segment", "blocks", "micro_batch"}
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        for (_, end), (start, _) in itertools.pairwise(slices):
            assert end <= start + 1e-6  # µs: what floats leave of whole nanoseconds
    assert {pid for pid, _ in threads} == set(range(found.mesh.pp))
    assert max(end for slices in threads.values() for _, end in slices) == pytest.approx(
        simulation.step_s * 1e6, abs=1e-3
    )


@each_plan
def test_the_slices_of_a_process_sum_to_what_its_stage_computes_and_communicates(pin):
    found, events, simulation = make_trace(pin)
    costs = found.prediction.action_costs
    assert costs is not None
    num = found.batch.num_micro_batches
    for stage in range(found.mesh.pp):
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == stage]
        busy = sum(e["dur"] for e in slices if e["tid"] == COMPUTE)
        rounding = 1e-3 * len(slices)  # µs
        assert busy == pytest.approx(simulation.busy_s[stage] * 1e6, abs=rounding)
        sums = {"gather_parameters": 0.0, "reduce_gradients": 0.0}
        for event in slices:
            if event["tid"] == COMMUNICATION:
                segment = costs.segments[event["args"]["segment"]]
                gathers = event["cat"] == "gather_parameters"
                sums[event["cat"]] += segment.gather_s if gathers else segment.reduce_s
        communicated = sum(e["dur"] for e in slices if e["tid"] == COMMUNICATION)
        assert communicated == pytest.approx(sum(sums.values()) * 1e6, abs=rounding)
        own = [k for k, segment in enumerate(found.segments) if segment.stage == stage]
        counts = [sum(e["cat"] == kind for e in slices) for kind in ("forward", "backward")]
        assert counts == [num * len(own)] * 2


@each_plan
def test_the_counter_of_memory_starts_and_ends_empty_and_peaks_as_simulated(pin):
    found, events, simulation = make_trace(pin)
    for stage in range(found.mesh.pp):
        counts = [e for e in events if e["ph"] == "C" and e["pid"] == stage]
        times = [e["ts"] for e in counts]
        assert times == sorted(times)
        assert all(isinstance(v, int) for e in counts for v in e["args"].values())
        held = [e["args"]["held activations"] for e in counts]
        assert (held[0], held[-1], min(held)) == (0, 0, 0)
        assert max(held) == simulation.peak_held_bytes[stage]
        base = {e["args"]["parameters and optimizer"] for e in counts}
        causes = found.prediction.ranks[stage].bytes_by_cause
        assert len(base) == 1
        assert causes["parameters"] + causes["optimizer"] <= base.pop() <= sum(causes.values())


@each_plan
def test_each_message_is_one_flow_to_the_slice_that_waits_for_it(pin):
    found, events, _ = make_trace(pin)
    by_id: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if "id" in event:
            assert event["ph"] not in by_id[event["id"]]
            by_id[event["id"]][event["ph"]] = event
    stages = [segment.stage for segment in found.segments]
    borders = sum(a != b for a, b in itertools.pairwise(stages))
    assert len(by_id) == 2 * borders * found.batch.num_micro_batches
    slices = {(e["pid"], e["name"]): e for e in events if e["ph"] == "X"}
    for message in by_id.values():
        assert message.keys() == {"b", "e", "s", "f"}
        assert message["s"]["ts"] <= message["b"]["ts"] <= message["e"]["ts"]
        kind, rest = message["b"]["name"][:2], message["b"]["name"][2:]
        segment, micro_batch = map(int, rest.split("."))
        target = segment + 1 if kind == "SA" else segment - 1
        name = f"{'F' if kind == 'SA' else 'B'}{target}.{micro_batch}"
        waits = slices[message["f"]["pid"], name]
        assert waits["ts"] >= message["e"]["ts"] - 1e-3
        assert waits["ts"] <= message["f"]["ts"] <= waits["ts"] + waits["dur"] + 1e-6


def test_a_plan_without_costs_loads_and_says_why_it_cannot_be_simulated():
    found = plan({"pp": 2, "schedule": "1f1b"})
    document = json.loads(to_json(found))
    del document["prediction"]["action_costs"]
    old = from_json(json.dumps(document))
    assert old.prediction.action_costs is None
    with pytest.raises(InputError, match="does not store the costs") as error:
        simulate_plan(old)
    assert "plan again" in str(error.value)


def test_costs_that_do_not_fit_the_plan_are_refused():
    found = plan({"pp": 2, "schedule": "1f1b"})
    costs = found.prediction.action_costs
    assert costs is not None
    for wrong, said in (
        (dataclasses.replace(costs, segments=costs.segments[:-1]), "segments on 2 stages"),
        (dataclasses.replace(costs, optimizer_s=(1.0,)), "on 1 stages"),
        (dataclasses.replace(costs, slowdown=-0.1), "-0.1 is out of range"),
    ):
        prediction = dataclasses.replace(found.prediction, action_costs=wrong)
        with pytest.raises(PlanFormatError, match=said):
            from_json(to_json(dataclasses.replace(found, prediction=prediction)))
