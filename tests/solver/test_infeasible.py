"""What does not fit: which pins conflict, and changes that a search confirms."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import pytest

from autopar.ir.errors import InfeasibleError, InputError
from autopar.solver import Cluster, solve
from autopar.solver.instance import Instance, make_instance
from autopar.solver.relaxations import may_fit, relaxations
from tests.solver.small import FOUR, MODEL, TRAINING, TWO_NODES, instance, plan

Pin = Mapping[str, int | str]
TIGHT = FOUR.with_memory(20_000)
PINS: tuple[Pin, ...] = (
    {"micro_batch_size": 8},
    {"zero_stage": 0, "tp": 1, "pp": 1},
    {"tp": 1, "schedule": "1f1b", "recompute": "none"},
    {"pp": 1, "tp": 1, "recompute": "none", "micro_batch_size": 2},
)


def step_of(made: Instance) -> float | None:
    """Seconds of the best step; None where nothing fits."""
    best = made.search.run(made.candidates).best
    return None if best is None else best.step_s


def with_pins(pin: Pin) -> Instance | None:
    try:
        return instance(TIGHT, pin, batch=8)
    except InputError:
        return None


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: "-".join(pin))
def test_pins_that_conflict_are_a_smallest_set_that_leaves_no_way(pin: Pin):
    made = with_pins(pin)
    assert made is not None
    assert step_of(made) is None
    found = relaxations(made)
    assert found.conflict
    conflict = {name: pin[name] for name in pin if f"{name}={pin[name]}" in found.conflict}
    assert len(conflict) == len(found.conflict)
    alone = with_pins(conflict)
    assert alone is not None
    assert step_of(alone) is None
    for name in conflict:
        fewer = with_pins({other: value for other, value in conflict.items() if other != name})
        assert fewer is not None
        assert may_fit(fewer)


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: "-".join(pin))
def test_every_change_was_verified_by_solving(pin: Pin):
    made = with_pins(pin)
    assert made is not None
    found = relaxations(made)
    assert found.changes
    steps = {}
    for num in range(1, len(pin) + 1):
        for names in itertools.combinations(pin, num):
            kept = with_pins({name: value for name, value in pin.items() if name not in names})
            steps[names] = None if kept is None else step_of(kept)
        if any(steps.values()):  # fewer need not be left open
            break
    left_open = {}
    for change in found.changes:
        named, _, then = change.text.removeprefix("leave ").partition(" open: ")
        names = tuple(part.partition("=")[0] for part in named.split(" and "))
        left_open[names] = change.step_s
        assert [part.partition("=")[0] for part in then.split(", ")] == list(names)
        changed = [part.partition("=")[2] for part in then.split(", ")]
        assert changed != [str(pin[name]) for name in names]
    fitting = {names: step for names, step in steps.items() if step is not None}
    if len(next(iter(fitting))) == 1:
        assert left_open == pytest.approx(fitting)
    else:  # one smallest set is enough
        assert left_open.items() <= {n: pytest.approx(s) for n, s in fitting.items()}.items()
    assert [change.step_s for change in found.changes] == sorted(left_open.values())


def test_without_pins_more_nodes_are_counted_and_verified():
    small, pins = TWO_NODES.with_memory(11_000), {"offload_optimizer": 0, "offload_activations": 0}
    found = relaxations(instance(small, batch=16))
    assert found.conflict == ()
    (nodes,) = (change for change in found.changes if change.text.endswith("nodes"))
    num = int(nodes.text.split()[0])
    assert num > small.nodes
    assert nodes.step_s >= plan(small.with_nodes(num), batch=16).prediction.step_s
    with pytest.raises(InfeasibleError):
        plan(small.with_nodes(num - 1), pins, batch=16)


def test_gradients_in_16_bits_are_offered_where_they_help():
    training = dataclasses.replace(TRAINING, precision="bf16")
    cluster = Cluster("a100-80gb", gpus_per_node=1)
    needs = [
        solve(
            MODEL, cluster, global_batch_size=1, training=each, pin={"recompute": "full"}
        ).prediction.fullest.peak_bytes
        for each in (training, dataclasses.replace(training, gradient_dtype="bf16"))
    ]
    assert needs[1] < needs[0]
    tight = cluster.with_memory(sum(needs) // 2)
    found = relaxations(make_instance(MODEL, tight, global_batch_size=1, training=training))
    assert [change.text for change in found.changes][-1:] == ["gradient_dtype=bf16"]


def test_the_error_says_all_of_it():
    with pytest.raises(InfeasibleError) as caught:
        plan(FOUR.with_memory(15_000), {"micro_batch_size": 8}, batch=8)
    text = str(caught.value)
    for said in ("too much", "stage 0", "pinned micro_batch_size=8 leaves no way to fit"):
        assert said in text
    assert "leave micro_batch_size=8 open: micro_batch_size=" in text
    assert "(a step then takes at most " in text
