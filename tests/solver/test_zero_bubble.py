"""Plans with backwards in two parts, and with more in flight: what they predict is what is
simulated, their bounds are below every plan, and memory grows as the formulas say.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from autopar.ir.errors import InputError
from autopar.ir.plan import Plan, from_json, to_json
from autopar.ir.schedule import ActionKind
from autopar.ir.schedules import DEEPENED, contiguous_stages, modular_stages, zero_bubble
from autopar.solver import Cluster
from autopar.solver.candidates import Divisible
from autopar.solver.in_flight import in_flight, in_parts
from autopar.solver.layout.model_facts import model_facts
from autopar.solver.replay import simulate_plan
from autopar.solver.space import candidates
from tests.solver.drawn import TRAININGS, batches, clusters, made, models, tighter_cluster
from tests.solver.small import instance, plan
from tests.solver.test_whole_plans import check
from tests.solver.whole_plans import TooLarge

PP4: Mapping[str, int | str] = {"pp": 4, "tp": 1, "micro_batch_size": 1, "recompute": "none"}
PINS: list[dict[str, int | str]] = [
    {"schedule": "zero_bubble", "virtual_stages": 1},
    {"schedule": "zero_bubble", "virtual_stages": 2},
    {"schedule": "zero_bubble", "virtual_stages": 2, "extra_in_flight": 1},
    {"schedule": "zero_bubble", "extra_in_flight": 1},
    {"schedule": "1f1b", "extra_in_flight": 1},
    {"extra_in_flight": 2},
]


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_a_pin_is_planned_stored_and_simulated_again(pins: dict[str, int | str]):
    found = plan(pin={"pp": 2, **pins})
    assert found.schedule.name in ([pins["schedule"]] if "schedule" in pins else DEEPENED)
    assert found.schedule.extra_in_flight == pins.get("extra_in_flight", 0)
    assert from_json(to_json(found)) == found
    again = simulate_plan(found, record=True)
    assert again.step_s == pytest.approx(found.prediction.step_s)
    costs = found.prediction.action_costs
    assert costs is not None
    assert any(segment.weight_s > 0 for segment in costs.segments) == (
        found.schedule.name == "zero_bubble"
    )
    assert found.certificate.bound_s <= found.prediction.step_s


def both(**more: int | str) -> tuple[Plan, Plan]:
    pins = {**PP4, **more}
    return tuple(plan(pin={**pins, "schedule": name}) for name in ("1f1b", "zero_bubble"))  # type: ignore[return-value]


def test_two_parts_are_faster_and_keep_more_on_later_stages():
    whole, parts = both(zero_stage=0)
    assert parts.prediction.step_s < whole.prediction.step_s
    kept = [
        [rank.bytes_by_cause["activations"] for rank in found.prediction.ranks]
        for found in (whole, parts)
    ]
    assert kept[1][0] >= kept[0][0]
    assert kept[1][-1] > kept[0][-1]


def test_the_plan_says_what_it_does():
    text = plan(pin={"pp": 2, "schedule": "zero_bubble", "extra_in_flight": 1}).explain()
    assert "zero_bubble, 1 more in flight" in text


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"schedule": "zero_bubble", "pp": 1}, "zero_bubble' and pp=1 are pinned"),
        ({"schedule": "layered", "extra_in_flight": 1}, "only 1f1b and zero_bubble"),
        ({"extra_in_flight": -1}, "must be a whole number ≥ 0"),
    ],
)
def test_pins_that_cannot_hold_are_refused(pin: dict[str, int | str], message: str):
    with pytest.raises(InputError, match=message):
        instance(pin=pin)


def test_zero_bubble_is_searched_where_there_are_stages():
    cluster = Cluster("cpu-local", gpus_per_node=8)
    model = Divisible(num_blocks=6)
    found = candidates(cluster, global_batch_size=16, model=model, pin={})
    assert {c.schedule for c in found} == {"1f1b", "interleaved", "layered", "zero_bubble"}
    assert {c.schedule for c in found if c.pp == 1} == {"1f1b", "layered"}
    assert {c.extra_in_flight for c in found} == {0}
    pinned = candidates(cluster, global_batch_size=16, model=model, pin={"schedule": "zero_bubble"})
    assert {c.schedule for c in pinned} == {"zero_bubble"}
    assert all(c.pp > 1 for c in pinned)
    assert {c.virtual_stages for c in pinned} == {1, 2, 3}


@given(p=st.integers(2, 4), v=st.integers(2, 3), num=st.integers(1, 20), extra=st.integers(0, 3))
def test_moments_of_virtual_stages_are_those_of_the_schedule(p: int, v: int, num: int, extra: int):
    pins = {"pp": p, "tp": 1, "dp_replicate": 1, "dp_shard": 1, "micro_batch_size": 1}
    (candidate,) = candidates(
        Cluster("cpu-local", gpus_per_node=p),
        global_batch_size=num,
        model=Divisible(num_blocks=p * v),
        pin={
            **pins,
            "schedule": "zero_bubble",
            "virtual_stages": v,
            "extra_in_flight": extra,
            "recompute": "none",
        },
    )
    schedule = zero_bubble(modular_stages(p, v), num, extra_in_flight=extra)
    for stage, actions in enumerate(schedule.actions):
        live = [0] * (2 * v)
        seen: set[tuple[int, ...]] = set()
        for action in actions:
            round_ = action.segment // p
            live[round_] += action.kind is ActionKind.FORWARD
            if action.kind is ActionKind.BACKWARD_INPUT:
                live[round_], live[v + round_] = live[round_] - 1, live[v + round_] + 1
            if action.kind is ActionKind.BACKWARD_WEIGHT:
                live[v + round_] -= 1
            seen.add(tuple(live))
        moments = [tuple(map(int, row)) for row in in_parts(candidate, stage)]
        for one in seen:
            assert any(all(map(operator.le, one, moment)) for moment in moments)
        assert set(moments) <= seen


@given(pp=st.integers(2, 6), num=st.integers(1, 12), extra=st.integers(0, 5))
def test_moments_are_those_of_the_schedule(pp: int, num: int, extra: int):
    """All that a stage has at a time, in flight and between the parts, is within a moment."""
    pins = {"pp": pp, "tp": 1, "dp_replicate": 1, "dp_shard": 1, "micro_batch_size": 1}
    (candidate,) = candidates(
        Cluster("cpu-local", gpus_per_node=pp),
        global_batch_size=num,
        model=Divisible(num_blocks=pp),
        pin={
            **pins,
            "schedule": "zero_bubble",
            "virtual_stages": 1,
            "extra_in_flight": extra,
            "recompute": "none",
        },
    )
    schedule = zero_bubble(contiguous_stages(pp, 1), num, extra_in_flight=extra)
    for stage, actions in enumerate(schedule.actions):
        flying = waiting = 0
        seen: set[tuple[int, int]] = set()
        for action in actions:
            flying += (action.kind is ActionKind.FORWARD) - (
                action.kind is ActionKind.BACKWARD_INPUT
            )
            waiting += (action.kind is ActionKind.BACKWARD_INPUT) - (
                action.kind is ActionKind.BACKWARD_WEIGHT
            )
            seen.add((flying, waiting))
        moments = [tuple(map(int, row)) for row in in_parts(candidate, stage)]
        assert set(moments) <= seen
        assert all(any(f <= m and w <= n for m, n in moments) for f, w in seen)
        assert in_flight(candidate, stage).max() == max(flying for flying, _ in seen)


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_no_plan_is_faster_than_what_is_proved(data: st.DataObject):
    """Of drawn instances with either pin, all plans enumerated and simulated."""
    model, cluster = data.draw(models(max_ops=3)), data.draw(clusters(max_gpus=8))
    training, batch = data.draw(TRAININGS), data.draw(batches(cluster))
    degrees = [pp for pp in (2, 3, 4) if cluster.num_gpus % pp == 0]
    if not degrees:
        reject()
    pin = {"pp": data.draw(st.sampled_from(degrees)), **data.draw(st.sampled_from(PINS))}
    pin["zero_stage"] = data.draw(st.integers(0, 3))
    share = data.draw(st.sampled_from([None, 1.0, 0.8, 0.6]))
    try:
        found = made(model_facts(model), cluster, batch, training, pin)
        if share is not None:
            less = tighter_cluster(found.facts, cluster, batch, training, share, pin)
            found = made(found.facts, less, batch, training, pin)
        check(found, most_layouts=60)
    except (InputError, TooLarge):
        reject()
