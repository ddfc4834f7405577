"""Instances whose bounds were above a plan once, and one at every memory: no plan is faster.

``test_whole_plans`` draws others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from autopar.solver import Cluster
from autopar.solver.instance import Instance, make_instance
from tests.solver.drawn import changed
from tests.solver.graphs import block_model
from tests.solver.small import FOUR, TRAINING
from tests.solver.test_whole_plans import check

Body = list[tuple[str, int]]
Pins = Mapping[str, int | str]

MLP: Body = [("linear", 0), ("relu", 0), ("linear", 0), ("add", 0)]
PRODUCTS: Body = [("mul", 0), ("add", 0), ("mul", 0), ("mul", 0)]


def instance(
    body: Body, num_blocks: int, cluster: Cluster, batch: int, pin: Pins | None = None
) -> Instance:
    model = block_model(body, num_blocks=num_blocks)
    return make_instance(model, cluster, global_batch_size=batch, training=TRAINING, pin=pin or {})


def cluster(usable_bytes: int, *, nodes: int = 1, inside: int = 4, **scales: Any) -> Cluster:
    made = Cluster("cpu-local", nodes=nodes, gpus_per_node=inside).with_memory(usable_bytes)
    return made.scaled(**scales)


@pytest.mark.parametrize("usable_bytes", [11_000, 13_000, 16_000, 20_000, 2**31])
def test_no_plan_is_faster_at_any_memory(usable_bytes: int) -> None:
    pin: Pins = {"tp": 2, "micro_batch_size": 2}
    check(instance(MLP, 3, FOUR.with_memory(usable_bytes), 8, pin))


def test_a_hidden_second_slows_an_action_down_by_less_than_its_share_of_the_slowdown() -> None:
    """The simulator counts overlap with an action before it is lengthened."""
    pin: Pins = {"pp": 1, "tp": 4, "schedule": "layered", "micro_batch_size": 1, "gather_again": 0}
    check(instance(MLP, 4, cluster(12_000, nodes=2), 8, pin))


def test_what_just_fits_is_not_excluded_by_rounding() -> None:
    """The bytes of a rank are sums of whole numbers, those of bounds are not."""
    two = changed(cluster(8_934, inside=2, network=0.1, node=10), latency=0.01, launch=0)
    check(instance([("add", 0), ("linear", 0)], 3, two, 1, {"pp": 2}))


def test_the_last_block_of_a_layered_schedule_keeps_one_input() -> None:
    slow = cluster(6_951, nodes=2, inside=5, compute=0.01, memory=0.001, node=0.1, network=1000)
    pin: Pins = {"virtual_stages": 1, "zero_stage": 1, "schedule": "layered", "tp": 2}
    check(instance([("mul", 0), ("add", 0)], 2, changed(slow, slowdown=1.0), 20, pin))


def test_reductions_beside_a_stage_that_waits_slow_nothing_down() -> None:
    four = changed(cluster(11_808, network=0.1), launch=0)
    pin: Pins = {"pp": 2, "tp": 1, "zero_stage": 2}
    check(instance(PRODUCTS, 3, four, 6, pin))
