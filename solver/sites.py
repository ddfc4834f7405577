"""Which nodes the ranks of each stage are on, and what that makes of its costs.

Ranks are numbered stage after stage, and nodes in the order of the groups of the cluster: a stage
lies in one group of nodes, or across several. What each stage costs is priced on every *site* of
it: the nodes of one group, as a cluster of its own. Where it lies across groups it is in each
respect as slow, and as small in memory, as the worst of its sites, whose collectives and messages
out of a node go through the links between groups where those are slower.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.facts import Floats
from autopar.solver.hardware import Cluster
from autopar.solver.hardware.spec import Memory, Network

Site = tuple[Cluster, ...]
"""Nodes of one kind, each as a cluster; several where ranks lie across groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """What a message from a stage to the next goes through.

    Attributes:
        site: Of the ranks on both sides.
        crosses_nodes: Whether it leaves a node.
    """

    site: Site
    crosses_nodes: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Sites:
    """Where the stages of a candidate are.

    Attributes:
        of_stage: The site of each stage.
        borders: Between each stage and the next, and from the last to the first.
        own: For each part of a site, the group as it is among its own nodes.
    """

    of_stage: tuple[Site, ...]
    borders: tuple[Border, ...]
    own: Mapping[Cluster, Cluster]

    @functools.cached_property
    def clusters(self) -> tuple[Cluster, ...]:
        """All nodes that some stage is on."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.of_stage)))

    def names(self, stage: int) -> str:
        """The kinds of nodes that a stage is on."""
        return " and ".join(cluster.name for cluster in self.of_stage[stage])

    @functools.cached_property
    def is_mixed(self) -> bool:
        """Whether stages differ."""
        return len(set(self.of_stage)) > 1

    def most(self, values: Callable[[Cluster], Floats]) -> Floats:
        """Of each block the largest of its values on the site of a stage: a row for each stage
        where stages differ, and one value for each block where they do not.
        """
        known = {cluster: values(cluster) for cluster in self.clusters}
        if not self.is_mixed:
            return most_of(known, self.of_stage[0])
        rows = {site: most_of(known, site) for site in set(self.of_stage)}
        return np.stack([rows[site] for site in self.of_stage])

    @functools.cached_property
    def usable_bytes(self) -> Floats:
        """What a rank of each stage may fill."""
        return np.array(
            [
                float(min(cluster.hardware.chip.usable_bytes for cluster in site))
                for site in self.of_stage
            ]
        )

    @functools.cached_property
    def memory(self) -> tuple[Memory, ...]:
        """What tensors of each stage cannot use."""
        known = {site: _worst_memory(site) for site in set(self.of_stage)}
        return tuple(known[site] for site in self.of_stage)

    @functools.cached_property
    def slowdown(self) -> Floats:
        """By how much communication slows compute of each stage down, as a share of it."""
        return self._each(lambda cluster: cluster.hardware.overlap.slowdown)

    @functools.cached_property
    def step_s(self) -> Floats:
        """What the runtime adds to a step, on each stage."""
        return self._each(lambda cluster: cluster.hardware.runtime.step_s)

    def _each(self, value: Callable[[Cluster], float]) -> Floats:
        return np.array([max(map(value, site)) for site in self.of_stage])


def most_of(known: dict[Cluster, Floats], site: Site) -> Floats:
    """The largest value on any part of a site."""
    return functools.reduce(np.maximum, [known[cluster] for cluster in site])


def sites_of(cluster: Cluster, order: Sequence[int], *, pp: int, ranks_per_stage: int) -> Sites:
    """The sites of ``pp`` stages.

    Args:
        cluster: All nodes.
        order: Positions of its groups in the order of ranks; empty: as they are.
    """
    return _sites_of(cluster, tuple(order), pp, ranks_per_stage)


@functools.lru_cache(maxsize=1024)
def _sites_of(cluster: Cluster, order: tuple[int, ...], pp: int, ranks_per_stage: int) -> Sites:
    groups = cluster.reordered(order).groups
    starts = [0, *itertools.accumulate(group.num_gpus for group in groups)]
    places = [
        tuple(
            number
            for number in range(len(groups))
            if starts[number] < (stage + 1) * ranks_per_stage
            and stage * ranks_per_stage < starts[number + 1]
        )
        for stage in range(pp)
    ]

    def site(numbers: tuple[int, ...]) -> Site:
        if len(numbers) == 1:
            return (groups[numbers[0]],)
        assert cluster.between is not None
        return tuple(_across(groups[number], cluster.between) for number in numbers)

    def border(stage: int) -> Border:
        both = tuple(sorted({*places[stage], *places[(stage + 1) % pp]}))
        crosses = True
        if len(both) == 1:
            group = groups[both[0]]
            begins, per_node = (stage + 1) * ranks_per_stage - starts[both[0]], group.gpus_per_node
            crosses = ranks_per_stage >= per_node or begins % per_node == 0
            crosses = crosses and group.nodes > 1
        return Border(site=site(both), crosses_nodes=crosses)

    own = {group: group for group in groups}
    if cluster.between is not None:
        own |= {_across(group, cluster.between): group for group in groups}
    return Sites(
        of_stage=tuple(map(site, places)),
        borders=tuple(map(border, range(pp))),
        own=own,
    )


def border_between(sites: Sites, stage: int, *, pp: int, stride: int, outermost: bool) -> Border:
    """The border of ``sites`` after a stage, where ranks that have the same place on two stages are
    ``stride`` apart; stages are as ``sites`` says where they are ``outermost``.
    """
    border = sites.borders[stage]
    if outermost:
        return border
    (cluster,) = border.site
    per_node, all_stages = cluster.gpus_per_node, pp * stride
    if per_node % all_stages == 0:
        crosses = False
    elif all_stages % per_node or stage == pp - 1:
        crosses = True
    else:
        crosses = stride >= per_node or (stage + 1) * stride % per_node == 0
    return replace(border, crosses_nodes=crosses and cluster.nodes > 1)


@functools.lru_cache(maxsize=256)
def _across(group: Cluster, between: Network) -> Cluster:
    """Nodes of a group whose ranks talk to those of others."""
    own = group.hardware.network
    slower = min(own, between, key=lambda network: network.bytes_per_s)
    network = replace(slower, latency_s=max(own.latency_s, between.latency_s))
    return group.with_hardware(replace(group.hardware, network=network), "across groups")


def _worst_memory(site: Site) -> Memory:
    known = [cluster.hardware.memory for cluster in site]
    return Memory(
        context_bytes=max(memory.context_bytes for memory in known),
        fragmentation=max(memory.fragmentation for memory in known),
        overlap_fragmentation=max(memory.overlap_fragmentation for memory in known),
        reserve=max(memory.reserve for memory in known),
    )
