"""How many micro-batches more than 1F1B needs are in flight: searched where it may pay."""

from __future__ import annotations

import itertools

import pytest

from autopar.ir.orders import most_forwards
from autopar.solver import Cluster
from autopar.solver.candidates import Candidate, Divisible
from autopar.solver.instance import Instance, make_instance
from autopar.solver.pins import Pins
from autopar.solver.space import candidates
from tests.solver.drawn import changed
from tests.solver.graphs import block_model
from tests.solver.small import TRAINING
from tests.solver.test_whole_plans import check, with_memory

CLUSTER = Cluster("cpu-local", gpus_per_node=4)


def found(pin: Pins, *, batch: int = 16) -> tuple[Candidate, ...]:
    model = Divisible(num_blocks=8)
    return candidates(CLUSTER, global_batch_size=batch, model=model, pin=pin)


def flying(pp: int, num: int, extra: int) -> list[int]:
    return [most_forwards(pp, stage, num, extra) for stage in range(pp)]


@pytest.mark.parametrize(("pp", "num"), list(itertools.product((2, 4), (1, 2, 3, 5, 16))))
def test_all_depths_differ_and_none_is_deeper(pp: int, num: int) -> None:
    pin: Pins = {"pp": pp, "tp": 4 // pp, "micro_batch_size": 1, "virtual_stages": 1}
    (only,) = (one for one in found(pin, batch=num) if one.schedule == "1f1b")
    depths = only.depths or (only.extra_in_flight,)
    orders = [flying(pp, num, depth) for depth in depths]
    assert depths[0] == 0
    assert all(one != other for one, other in itertools.pairwise(orders))
    assert flying(pp, num, depths[-1]) == flying(pp, num, pp)
    assert [own.extra_in_flight for own in only.members()] == list(depths)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_pinned_schedule_has_none_more_unless_it_is_pinned(schedule: str) -> None:
    pin: Pins = {"pp": 4, "schedule": schedule}
    assert {(one.depths, one.extra_in_flight) for one in found(pin)} == {((), 0)}
    deeper = found({**pin, "extra_in_flight": 2})
    assert {(one.depths, one.extra_in_flight) for one in deeper} == {((), 2)}


@pytest.mark.parametrize("depth", [0, 3])
def test_more_are_in_flight_where_messages_take_long(depth: int) -> None:
    """As there is memory for, which is for less than all micro-batches of a layered order; and no
    plan is faster.
    """
    model = block_model([("linear", 0), ("relu", 0)], num_blocks=2)
    slow = changed(CLUSTER, latency=20.0)
    pin: Pins = {"pp": 4, "tp": 1, "micro_batch_size": 1, "zero_stage": 0, "recompute": "none"}

    def on(cluster: Cluster, more: Pins) -> Instance:
        own = {**pin, **more}
        return make_instance(model, cluster, global_batch_size=12, training=TRAINING, pin=own)

    pinned = on(slow, {"schedule": "1f1b", "extra_in_flight": depth})
    plan = pinned.search.run(pinned.candidates).best
    assert plan is not None
    needed = max(plan.stager.peak_bytes(plan.cuts)) + 64
    limited = on(with_memory(slow, int(needed)), {})
    check(limited)
    best = limited.search.run(limited.candidates).best
    assert best is not None
    assert (best.candidate.extra_in_flight > 0) == (depth > 0)
    assert best.step_s <= plan.step_s * (1 + 1e-12)
