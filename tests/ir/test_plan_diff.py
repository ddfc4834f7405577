"""Plans side by side: all that differs is told, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.ir.plan import Plan
from autopar.ir.plan_diff import PlanDiff, diff_plans
from tests.solver.small import TWO_NODES, plan


@pytest.fixture(scope="module")
def one() -> Plan:
    return plan(pin={"pp": 2, "tp": 2})


@pytest.fixture(scope="module")
def other() -> Plan:
    return plan(TWO_NODES, {"tp": 4, "micro_batch_size": 1}, batch=16)


def test_a_plan_does_not_differ_from_itself(one: Plan):
    found = diff_plans(one, one)
    assert (found.decisions, found.notes) == ((), ())
    assert all(first == second for first, second in found.seconds_by_cause.values())
    assert "all decisions are the same" in found.explain()


def test_every_decision_that_differs_is_told_and_no_other(one: Plan, other: Plan):
    found = {decision.name: decision for decision in diff_plans(one, other).decisions}
    for part in ("mesh", "batch", "schedule"):
        first, second = (dataclasses.asdict(getattr(plan, part)) for plan in (one, other))
        for field, before in first.items():
            name = "schedule" if field == "name" else field
            assert (name in found) == (before != second[field])
            if before != second[field]:
                assert (found[name].one, found[name].other) == (str(before), str(second[field]))
    assert (found["pinned pp"].one, found["pinned pp"].other) == ("2", None)
    assert not any(name.startswith("training") for name in found)


def test_causes_are_those_of_the_plans(one: Plan, other: Plan):
    found = diff_plans(one, other)
    sums = [sum(pair[place] for pair in found.seconds_by_cause.values()) for place in (0, 1)]
    assert sums == pytest.approx([one.prediction.step_s, other.prediction.step_s], rel=0.02)
    sums = [sum(pair[place] for pair in found.bytes_by_cause.values()) for place in (0, 1)]
    assert sums == [one.prediction.fullest.peak_bytes, other.prediction.fullest.peak_bytes]


def test_placements_that_differ_are_told(one: Plan):
    name, parameter = next(
        (name, found) for name, found in one.parameters.items() if found.placement[1] != "R"
    )
    changed = dataclasses.replace(parameter, placement=(parameter.placement[0], "R"))
    moved = dataclasses.replace(one, parameters={**one.parameters, name: changed})
    (only,) = diff_plans(one, moved).decisions
    assert (only.one, only.other) == (parameter.placement[1], "R")
    assert only.name.endswith("on tp")


def _reversed(found: PlanDiff) -> list[tuple[str, str | None, str | None]]:
    return sorted((d.name, d.other, d.one) for d in found.decisions)


def test_the_other_way_round_it_says_the_same(one: Plan, other: Plan):
    forth, back = diff_plans(one, other), diff_plans(other, one)
    assert _reversed(back) == sorted((d.name, d.one, d.other) for d in forth.decisions)


def test_what_cannot_be_compared_is_noted(one: Plan, other: Plan):
    renamed = dataclasses.replace(other.model, name="another", fingerprint="0")
    notes = diff_plans(one, dataclasses.replace(other, model=renamed)).notes
    assert len(notes) == 3
    for said in ("different models (small and another)", "different clusters", "64 and 128 tokens"):
        assert any(said in note for note in notes)
