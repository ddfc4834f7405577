"""Stages on nodes of different kinds: what each costs, which cuts they get, and what is told."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.errors import InfeasibleError, InputError
from autopar.ir.mesh import MESH_AXES
from autopar.ir.plan import from_json, to_json
from autopar.ir.plan_diff import diff_plans
from autopar.solver import Cluster
from autopar.solver.estimate import estimate
from autopar.solver.passing import Passing, least_share
from autopar.solver.replay import simulate_plan
from autopar.solver.runs import Runs
from autopar.solver.sites import sites_of
from autopar.solver.trace import trace
from tests.solver.small import MODEL, TRAINING, instance, plan

SLOW = Cluster("cpu-local", nodes=2, gpus_per_node=2)
FAST = SLOW.scaled(compute=3, memory=3)
BETWEEN = dataclasses.replace(SLOW.hardware.network, node_bytes_per_s=1e8, latency_s=1e-3)
MIXED = Cluster.of_groups([SLOW, FAST], BETWEEN)


def test_a_stage_lies_in_one_group_or_across_several():
    three = Cluster.of_groups([SLOW, FAST, SLOW], BETWEEN)
    slow, fast, last = three.groups
    alone = sites_of(three, (), pp=6, ranks_per_stage=2)
    assert alone.of_stage == ((slow,), (slow,), (fast,), (fast,), (last,), (last,))
    assert [border.crosses_nodes for border in alone.borders] == [True] * 6
    turned = sites_of(three, (1, 0, 2), pp=3, ranks_per_stage=4)
    assert turned.of_stage == ((fast,), (slow,), (last,))
    across = sites_of(three, (), pp=2, ranks_per_stage=6)
    assert [[part.name for part in site] for site in across.of_stage] == [["cpu-local"] * 2] * 2
    assert [across.own[part] for part in across.of_stage[0]] == [slow, fast]
    assert [part.hardware.network for part in across.of_stage[0]] == [BETWEEN] * 2


def test_messages_go_through_the_link_between_groups_where_they_cross_it():
    search = instance(MIXED).search
    candidate = next(
        found
        for found in instance(MIXED).candidates
        if found.pp == 4 and found.dp == 2 and found.group_order == (0, 1)
    )
    stager = search.pricer.stager(candidate, search.pricer.setting(candidate).least)
    inside, crossing, last = (stager.message_s(1e6, border) for border in range(3))
    assert inside == last < crossing
    assert crossing == pytest.approx(1e-3 + 2e6 / BETWEEN.bytes_per_s)


def test_a_stage_across_groups_is_in_each_respect_as_bad_as_the_worst():
    small = FAST.with_memory(2**29)
    wide = dataclasses.replace(SLOW.hardware.memory, context_bytes=12345)
    slow = SLOW.with_hardware(dataclasses.replace(SLOW.hardware, memory=wide))
    sites = sites_of(Cluster.of_groups([slow, small], BETWEEN), (), pp=1, ranks_per_stage=8)
    assert sites.usable_bytes.tolist() == [2**29]
    assert sites.memory[0].context_bytes == max(12345, small.hardware.memory.context_bytes)

    def step_s(cluster: Cluster) -> float:
        return plan(cluster, {"pp": 1, "tp": 1}).prediction.step_s

    assert step_s(MIXED) >= step_s(Cluster.of_groups([FAST, FAST], BETWEEN))
    assert step_s(MIXED) >= step_s(SLOW.with_nodes(4)) * (1 - 1e-12)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_groups_that_are_alike_cost_what_nodes_of_one_kind_do(pp):
    """Two groups of the same nodes, with the same links between: nothing may differ."""
    pin: dict[str, int | str] = {"pp": pp, "virtual_stages": 1}
    whole = plan(SLOW.with_nodes(4), {**pin, "axis_order": ",".join(MESH_AXES)})
    parts = plan(Cluster.of_groups([SLOW, SLOW], SLOW.hardware.network), pin)
    assert parts.mesh == whole.mesh
    assert parts.segments == whole.segments
    assert parts.prediction.step_s == whole.prediction.step_s
    assert parts.certificate.bound_s == pytest.approx(whole.certificate.bound_s, rel=1e-12)


def test_faster_nodes_get_more_blocks():
    """Wherever they are along the pipeline; blocks are equal but for the first and the last one."""
    chip = FAST.hardware.chip
    fast = dataclasses.replace(chip, launch_s=chip.launch_s / 3, kernel_s=chip.kernel_s / 3)
    groups = [SLOW, FAST.with_hardware(dataclasses.replace(FAST.hardware, chip=fast))]
    pin: dict[str, int | str] = {"pp": 2, "tp": 1, "micro_batch_size": 1, "virtual_stages": 1}
    even = plan(SLOW.with_nodes(4), pin, batch=64)
    for order in ((0, 1), (1, 0)):
        network = SLOW.hardware.network
        cluster = Cluster.of_groups([groups[place] for place in order], network)
        found = instance(cluster, pin, batch=64)
        own = [candidate for candidate in found.candidates if candidate.group_order == (0, 1)]
        best = found.search.run(own).best
        assert best is not None
        lengths = [end - first for first, end in itertools.pairwise(best.cuts)]
        assert lengths[order.index(1)] > lengths[order.index(0)]
        assert best.step_s < even.prediction.step_s


def test_a_mixed_cluster_is_between_its_slow_and_its_fast_nodes():
    pin: dict[str, int | str] = {"virtual_stages": 1}
    network = SLOW.hardware.network
    clusters = [[SLOW, SLOW], [SLOW, FAST], [FAST, FAST]]
    plans = [plan(Cluster.of_groups(groups, network), pin, batch=16) for groups in clusters]
    steps = [found.prediction.step_s for found in plans]
    bounds = [found.certificate.bound_s for found in plans]
    assert steps[0] >= bounds[1]
    assert steps[1] >= bounds[2]
    assert steps[0] > steps[2]


def named(*names: str) -> Cluster:
    """Slow and fast nodes by these names."""
    groups = [SLOW, FAST]
    return Cluster.of_groups(
        [
            group.with_hardware(dataclasses.replace(group.hardware, name=name))
            for group, name in zip(groups, names, strict=True)
        ],
        BETWEEN,
    )


def test_a_plan_says_on_which_nodes_each_stage_is():
    found = plan(named("old", "new"), {"pp": 2, "tp": 1, "micro_batch_size": 1}, batch=32)
    assert from_json(to_json(found)) == found
    assert simulate_plan(found).step_s == found.prediction.step_s
    order = [group.name for group in found.cluster.groups]
    assert [rank.nodes for rank in found.prediction.ranks] == order
    told = found.explain()
    assert all(f"on {name}" in told for name in order)
    assert "of 8 GPUs (2 × 2 × " in told
    events: Any = trace(found, simulate_plan(found, record=True))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split(" on ")[-1] for name in names] == order
    other = plan(named("new", "old"), {"pp": 2, "tp": 1, "micro_batch_size": 1}, batch=32)
    assert "different clusters: 2 × 2 ×" in str(diff_plans(found, other))


def test_slowdown_by_overlap_is_that_of_each_stage():
    slowed = dataclasses.replace(FAST.hardware.overlap, slowdown=0.9)
    fast = FAST.with_hardware(dataclasses.replace(FAST.hardware, overlap=slowed))
    found = plan(Cluster.of_groups([SLOW, fast], BETWEEN), {"pp": 2, "tp": 1})
    costs = found.prediction.action_costs
    assert costs is not None
    assert sorted(costs.slowdowns) == [SLOW.hardware.overlap.slowdown, 0.9]
    assert simulate_plan(found).step_s == found.prediction.step_s


def test_what_does_not_fit_is_told_with_its_nodes():
    tiny = named("old", "new")
    small = Cluster.of_groups(
        [tiny.groups[0].with_memory(2**29), tiny.groups[1].with_memory(2**10)], BETWEEN
    )
    with pytest.raises(InfeasibleError, match=r"on new of pp"):
        plan(small, {"pp": 2})


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"schedule": "interleaved"}, "interleaved"),
        ({"virtual_stages": 2}, "virtual_stages=2"),
        ({"tp": 8}, "does not divide the 4 GPUs"),
        ({"group_order": "old"}, "group_order='old' is pinned; it can be all of"),
    ],
)
def test_what_several_groups_of_nodes_cannot_have_is_refused(pin, said):
    with pytest.raises(InputError, match=said):
        plan(MIXED, pin)


@st.composite
def rows(draw: Any) -> np.ndarray:
    stages = draw(st.integers(2, 4))
    blocks = draw(st.integers(stages, 6))
    value = st.floats(0, 9)
    return np.array(
        [draw(st.lists(value, min_size=blocks, max_size=blocks)) for _ in range(stages)]
    )


@given(values=rows(), data=st.data())
def test_what_passes_is_the_least_over_all_cuts(values, data):
    stages, num = values.shape
    stage = data.draw(st.integers(0, stages - 1))
    first = 0 if stage == 0 else data.draw(st.integers(stage, num - (stages - stage)))
    end = (
        num
        if stage == stages - 1
        else data.draw(st.integers(first + 1, num - (stages - 1 - stage)))
    )

    def least(wanted: slice, at: tuple[int, int] | None) -> float:
        found = []
        for inner in itertools.combinations(range(1, num), stages - 1):
            cuts = (0, *inner, num)
            if at is None or (cuts[stage], cuts[stage + 1]) == at:
                sums = [values[s, cuts[s] : cuts[s + 1]].sum() for s in range(stages)]
                found.append(sum(sums[wanted]))
        return min(found)

    passing = Passing(values)
    runs = Runs(stage=np.array(stage), first=np.array(first), end=np.array(end))
    assert passing.total == pytest.approx(least(slice(None), None))
    assert float(passing.before(runs)) == pytest.approx(least(slice(stage), (first, end)))
    own = values[stage, first:end].sum()
    through = float(passing.through(runs, own, np.array(0.0)))
    assert through == pytest.approx(least(slice(None), (first, end)))
    assert runs.sums(values) == pytest.approx(own)
    assert runs.maxima(values) == pytest.approx(values[stage, first:end].max())
    best = min(
        max(values[s, cuts[s] : cuts[s + 1]].sum() for s in range(stages))
        for inner in itertools.combinations(range(1, num), stages - 1)
        for cuts in [(0, *inner, num)]
    )
    assert least_share(values, stages) <= best * (1 + 1e-9)


def test_the_order_of_groups_can_be_pinned():
    cluster = named("old", "new")
    for names in (["old", "new"], ["new", "old"]):
        found = plan(cluster, {"pp": 2, "tp": 1, "group_order": ",".join(names)}, batch=16)
        assert [group.name for group in found.cluster.groups] == names
        assert [rank.nodes for rank in found.prediction.ranks] == names
    turned = plan(cluster, {"pp": 1, "tp": 1, "group_order": "new, old"}, batch=20)
    assert [group.name for group in turned.cluster.groups] == ["new", "old"]
    assert [rank.nodes for rank in turned.prediction.ranks] == ["new", "old"]
    assert len(turned.batch.shares) == 2
    with pytest.raises(InputError, match="nodes are of one kind"):
        plan(SLOW, {"group_order": "cpu-local"})


def test_an_estimate_takes_the_groups_as_the_file_has_them():
    layout: dict[str, int | str] = {
        "pp": 2,
        "dp_replicate": 4,
        "dp_shard": 1,
        "tp": 1,
        "micro_batch_size": 1,
        "zero_stage": 0,
        "recompute": "none",
        "schedule": "1f1b",
    }
    clusters = (named("old", "new"), named("old", "new").reordered((1, 0)))
    found = [
        estimate(MODEL, cluster, global_batch_size=16, training=TRAINING, pin=layout)
        for cluster in clusters
    ]
    turned = {**layout, "group_order": "new,old"}
    again = estimate(MODEL, clusters[0], global_batch_size=16, training=TRAINING, pin=turned)
    assert found[0].step_s != found[1].step_s == again.step_s
