"""Collectives: nothing on one rank, more bytes take longer, and links are shared."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.moves import Collective
from autopar.solver.costs.comm import Links, group_of
from autopar.solver.hardware import Cluster
from autopar.solver.hardware.spec import Pace

CLUSTER = Cluster("a100-80gb", nodes=8)
TRAFFIC = [collective for collective in Collective if collective is not Collective.NONE]


@pytest.mark.parametrize("collective", list(Collective))
def test_one_rank_communicates_nothing(collective):
    group = group_of(CLUSTER, size=1, stride=1)
    assert Links(CLUSTER).seconds(collective, 1e9, group) == 0.0


@given(
    collective=st.sampled_from(TRAFFIC),
    size=st.sampled_from([2, 4, 8, 16, 64]),
    stride=st.sampled_from([1, 2, 4, 8]),
    num_bytes=st.floats(1, 1e11),
    more=st.floats(1.0, 10.0),
)
def test_more_bytes_take_no_less_time(collective, size, stride, num_bytes, more):
    group, links = group_of(CLUSTER, size=size, stride=stride), Links(CLUSTER)
    less = links.seconds(collective, num_bytes, group)
    assert 0.0 < less <= links.seconds(collective, num_bytes * more, group)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    group, links = group_of(CLUSTER, size=8, stride=1), Links(CLUSTER)
    parts = [Collective.REDUCE_SCATTER, Collective.ALL_GATHER]
    halves = sum(links.seconds(part, 1e9, group) for part in parts)
    assert links.seconds(Collective.ALL_REDUCE, 1e9, group) == pytest.approx(halves, rel=0.01)


def test_groups_that_leave_a_node_share_its_links():
    alone = group_of(CLUSTER, size=64, stride=1)
    eight = group_of(CLUSTER, size=8, stride=8)
    assert (alone.per_node, alone.sharing) == (8, 1)
    assert (eight.per_node, eight.sharing) == (1, 8)
    gather = Collective.ALL_GATHER
    assert Links(CLUSTER).seconds(gather, 1e9, eight) > Links(CLUSTER).seconds(gather, 1e9, alone)


def test_bus_bandwidth_inside_a_node_is_near_what_nccl_reaches():
    link = CLUSTER.hardware.node_link
    seconds = Links(CLUSTER).seconds(
        Collective.ALL_REDUCE, 2**30, group_of(CLUSTER, size=8, stride=1)
    )
    assert 2 * 7 / 8 * 2**30 / seconds == pytest.approx(230e9 * link.in_step, rel=0.05)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_collective_has_its_own_pace_inside_a_node(name):
    def seconds(num_bytes: float, cluster: Cluster, other: str = name) -> float:
        group = group_of(cluster, size=8, stride=1)
        return Links(cluster).seconds(Collective(other), num_bytes, group)

    link = CLUSTER.hardware.node_link
    paced = replace(link, **{name: Pace(latency=3.0, bandwidth=0.5)})  # type: ignore[arg-type]
    slow = CLUSTER.with_hardware(replace(CLUSTER.hardware, node_link=paced))
    latency = seconds(1e-9, CLUSTER)
    assert seconds(1e-9, slow) == pytest.approx(3 * latency)
    traffic = seconds(1e9, CLUSTER) - latency
    assert seconds(1e9, slow) == pytest.approx(3 * latency + 2 * traffic)
    assert seconds(1e9, slow, "all_reduce") == seconds(1e9, CLUSTER, "all_reduce")


def test_a_message_has_its_own_pace_inside_a_node():
    paced = replace(CLUSTER.hardware.node_link, message=Pace(latency=3.0, bandwidth=0.5))
    slow = CLUSTER.with_hardware(replace(CLUSTER.hardware, node_link=paced))

    def seconds(num_bytes: float, cluster: Cluster, *, crosses: bool) -> float:
        return Links(cluster).message_seconds(num_bytes, crosses_nodes=crosses, sharing=1)

    assert seconds(0, slow, crosses=False) == pytest.approx(3 * seconds(0, CLUSTER, crosses=False))
    traffic = [
        seconds(1e9, c, crosses=False) - seconds(0, c, crosses=False) for c in (slow, CLUSTER)
    ]
    assert traffic[0] == pytest.approx(2 * traffic[1])
    assert seconds(1e9, slow, crosses=True) == seconds(1e9, CLUSTER, crosses=True)
