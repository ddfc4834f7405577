"""Seconds of collectives, from bytes, ranks, and the links that the ranks of a group share.

Ranks are numbered node after node. Inside a node all ranks share a switch; out of it, all groups
that cross a node's border share the node's links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.moves import Collective
from autopar.solver.hardware import Cluster
from autopar.solver.hardware.spec import Pace

_RING = Pace(latency=1.0, bandwidth=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of ranks, as its links see it.

    Attributes:
        size: Ranks of the group.
        per_node: Ranks of the group in one node.
        sharing: Groups that talk through one node's border at the same time.
    """

    size: int
    per_node: int
    sharing: int

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.per_node)


def group_of(cluster: Cluster, *, size: int, stride: int) -> Group:
    """The group of ``size`` ranks that are ``stride`` ranks apart, all such groups busy at once."""
    per_node = max(1, min(size, cluster.gpus_per_node // stride))
    used = min(cluster.gpus_per_node, size * stride)
    return Group(size=size, per_node=per_node, sharing=max(1, used // per_node))


def group_over(cluster: Cluster, axes: Sequence[tuple[int, int]]) -> Group:
    """The group of ranks along several axes, each with its number of ranks and their distance:
    ``group_of`` where they are next to each other.
    """
    runs: list[tuple[int, int]] = []
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if runs and runs[-1][0] * runs[-1][1] == stride:
            runs[-1] = runs[-1][0] * size, runs[-1][1]
        elif size > 1:
            runs.append((size, stride))
    if len(runs) < 2:
        size, stride = runs[0] if runs else (1, 1)
        return group_of(cluster, size=size, stride=stride)
    inside = (max(1, min(size, cluster.gpus_per_node // stride)) for size, stride in runs)
    per_node, used = math.prod(inside), min(cluster.gpus_per_node, math.prod(runs[-1]))
    size = math.prod(size for size, _ in runs)
    return Group(size=size, per_node=per_node, sharing=max(1, used // per_node))


@dataclass(frozen=True, slots=True)
class Links:
    """Times of collectives and messages on a cluster."""

    cluster: Cluster

    def seconds(self, collective: Collective, num_bytes: float, group: Group) -> float:
        """Seconds of a collective.

        Args:
            collective: What is done.
            num_bytes: Size of the whole tensor: the operand of an all-reduce or reduce-scatter,
                the result of an all-gather, all shards together of an all-to-all.
            group: Who does it.
        """
        if collective is Collective.NONE or group.size == 1 or num_bytes == 0:
            return 0.0
        rounds = 2 if collective is Collective.ALL_REDUCE else 1
        pace = self._pace(collective)
        if collective is Collective.ALL_TO_ALL:
            return self._all_to_all(num_bytes, group, pace)
        traffic = rounds * num_bytes * (group.size - 1) / group.size
        inside = 0.0
        if group.per_node > 1:
            inside = traffic / (self._node_bandwidth(group.per_node) * pace.bandwidth)
        outside = 0.0
        if group.num_nodes > 1:  # one ring: what crosses each border is what each rank passes on
            outside = traffic * group.sharing / self._network_bandwidth()
        return self._latency(group, pace) * (1 + rounds) / 3 + max(inside, outside)

    def message_seconds(self, num_bytes: float, *, crosses_nodes: bool, sharing: int) -> float:
        """Seconds of one message to a rank; ``sharing`` ranks of the node send at the same time."""
        link, network = self.cluster.hardware.node_link, self.cluster.hardware.network
        if not crosses_nodes:
            bandwidth = link.bytes_per_s * link.in_step * link.message.bandwidth
            return link.latency_s / 2 * link.message.latency + num_bytes / bandwidth
        return network.latency_s + num_bytes * sharing / self._network_bandwidth()

    def _all_to_all(self, num_bytes: float, group: Group, pace: Pace) -> float:
        """Each rank holds a part of the tensor, and sends a part of that to each other rank."""
        share = num_bytes / group.size**2
        inside = share * (group.per_node - 1)
        outside = share * (group.size - group.per_node) * group.per_node * group.sharing
        return (
            self._latency(group, pace)
            + inside / (self._node_bandwidth(max(2, group.per_node)) * pace.bandwidth)
            + outside / self._network_bandwidth()
        )

    def _pace(self, collective: Collective) -> Pace:
        link = self.cluster.hardware.node_link
        return {
            Collective.ALL_GATHER: link.all_gather,
            Collective.REDUCE_SCATTER: link.reduce_scatter,
            Collective.ALL_TO_ALL: link.all_to_all,
        }.get(collective, _RING)

    def _latency(self, group: Group, pace: Pace) -> float:
        link, network = self.cluster.hardware.node_link, self.cluster.hardware.network
        inside = (link.latency_s + group.per_node * link.latency_per_rank_s) * pace.latency
        return (inside if group.per_node > 1 else 0.0) + network.latency_s * (group.num_nodes - 1)

    def _node_bandwidth(self, num_ranks: int) -> float:
        link = self.cluster.hardware.node_link
        return link.bytes_per_s * (1 - link.lost_per_rank / num_ranks) * link.in_step

    def _network_bandwidth(self) -> float:
        return self.cluster.hardware.network.bytes_per_s
