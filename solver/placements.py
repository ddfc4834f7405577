"""Placements of a mesh: splits of its data ranks, and orders of its axes.

Which of them is best follows from what else is decided, so that candidates leave them open: one
with all placements costs no more than any of them, and it is split into them where it may be best.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.ir.mesh import (
    CONTEXT_AXIS,
    EXPERT_AXIS,
    MESH_AXES,
    PIPELINE_AXIS,
    REPLICATE_AXIS,
    SHARD_AXIS,
    TENSOR_AXIS,
    Mesh,
)
from autopar.ir.moves import Collective
from autopar.solver.candidates import Placement
from autopar.solver.costs.comm import Group, Links, group_of, group_over
from autopar.solver.hardware import Cluster
from autopar.solver.pins import Pins, fixes_gpus, pinned_axes, pinned_degrees
from autopar.solver.sites import border_between, sites_of


def placements(cluster: Cluster, mesh: Mesh, pin: Pins) -> tuple[Placement, ...]:
    """All placements that the pins allow of a mesh that shards over some data ranks, or over none;
    that which shards over most ranks, its axes as ever, comes first.
    """
    return tuple(
        Placement(replicate, shard, order)
        for replicate, shard in _splits(cluster, mesh, pin)
        for order in _orders(cluster, _with(mesh, replicate, shard), pin)
    )


def _orders(cluster: Cluster, mesh: Mesh, pin: Pins) -> Iterator[tuple[str, ...]]:
    """Orders of the axes, one of those that differ in axes of a single rank only: the pipeline
    outside the data axes, between them or inside. Others are not searched: context, expert and
    tensor axes have collectives in each op, shards more than replicas, and want the fastest links.
    On a single node all orders are alike; on several groups of nodes the ranks of a stage come one
    after the other. A mesh all of whose degrees are pinned is one that somebody has: its pipeline
    is outermost unless the pins say otherwise.
    """
    pinned = pinned_axes(pin)
    if pinned is not None:
        yield pinned
        return
    yield MESH_AXES
    if cluster.is_mixed or cluster.nodes == 1 or fixes_gpus(pinned_degrees(pin)):
        return
    data = [axis for axis in (REPLICATE_AXIS, SHARD_AXIS) if mesh.size(axis) > 1]
    unused = [axis for axis in (REPLICATE_AXIS, SHARD_AXIS) if mesh.size(axis) == 1]
    for place in range(1, len(data) + 1) if mesh.pp > 1 else ():
        order = (*data[:place], PIPELINE_AXIS, *data[place:])
        yield (*unused, *order, CONTEXT_AXIS, EXPERT_AXIS, TENSOR_AXIS)


def _splits(cluster: Cluster, mesh: Mesh, pin: Pins) -> Iterator[tuple[int, int]]:
    """(dp_replicate, dp_shard): sharded over all data ranks, then over those of a node. Others have
    to be pinned: with several tensor ranks the bounds of ZeRO 3 are looser there.
    """
    if mesh.dp_shard == 1 or "dp_replicate" in pin or "dp_shard" in pin:
        yield mesh.dp_replicate, mesh.dp_shard
        return
    in_node = math.gcd(mesh.dp, max(1, cluster.gpus_per_node // (mesh.tp * mesh.cp * mesh.ep)))
    for shard in sorted({mesh.dp, in_node} - {1}, reverse=True):
        yield mesh.dp // shard, shard


def _with(mesh: Mesh, replicate: int, shard: int) -> Mesh:
    return dataclasses.replace(mesh, dp_replicate=replicate, dp_shard=shard)


def undominated(
    cluster: Cluster, mesh: Mesh, found: Sequence[Placement], *, is_sharded: bool
) -> tuple[Placement, ...]:
    """Without those than which another one is nowhere dearer: neither in seconds of any gather,
    reduction or message, however large, nor in memory. As a step takes no less where its actions
    take no less, no plan with them is faster.

    Args:
        cluster: Its groups in the order of ranks.
        mesh: Of which these are placements.
        found: The placements.
        is_sharded: Whether ZeRO shards anything.
    """
    costs = np.array([_costs(cluster, mesh, own, is_sharded=is_sharded) for own in found])
    kept: list[int] = []
    for number, own in enumerate(costs):
        no_dearer = (costs <= own).all(axis=1)
        dearer = (costs[no_dearer] < own).any(axis=1)
        if not dearer.any() and not any(no_dearer[other] for other in kept):
            kept.append(number)
    return tuple(found[number] for number in kept)


_SIZES = (1.0, 1e18)
"""Bytes that are sent: seconds are linear in them, and none where nothing is."""


def _costs(cluster: Cluster, mesh: Mesh, own: Placement, *, is_sharded: bool) -> list[float]:
    """All that placements of a mesh differ in."""
    placed = dataclasses.replace(mesh, **own._asdict())
    per_stage = placed.num_ranks // placed.pp
    sites = sites_of(cluster, (), pp=placed.pp, ranks_per_stage=per_stage)
    found: list[float] = [-placed.dp_shard]
    for site in sites.clusters:
        found += _traffic(Links(site), placed, is_sharded=is_sharded)
        data = group_of(site, size=placed.dp, stride=placed.data_stride)
        kinds = [kind for kind in Collective if kind is not Collective.NONE]
        found += [Links(site).seconds(kind, size, data) for kind in kinds for size in _SIZES]
        for stage in range(placed.pp):
            stride = placed.stage_stride
            border = border_between(
                sites, stage, pp=placed.pp, stride=stride, outermost=stride == per_stage
            )
            found += [
                Links(site).message_seconds(
                    size,
                    crosses_nodes=border.crosses_nodes,
                    sharing=min(stride, site.gpus_per_node),
                )
                for size in _SIZES
            ]
    return found


def _traffic(links: Links, placed: Mesh, *, is_sharded: bool) -> list[float]:
    """Seconds of gathers and reductions of parameters and of experts, of one or of both."""
    shards: tuple[str, ...] = (SHARD_AXIS, CONTEXT_AXIS)
    if not is_sharded:
        shards = (REPLICATE_AXIS, *shards)

    def group(axes: Sequence[str]) -> Group:
        return group_over(links.cluster, [(placed.size(own), placed.stride(own)) for own in axes])

    whole, apart, others = group((*shards, EXPERT_AXIS)), group(shards), group((REPLICATE_AXIS,))
    found: list[float] = []
    for size, experts in itertools.product((0.0, *_SIZES), repeat=2):
        if not is_sharded:
            found.append(
                links.seconds(Collective.ALL_REDUCE, size, whole)
                + links.seconds(Collective.ALL_REDUCE, experts, apart)
            )
            continue
        gathered, reduced = (
            links.seconds(kind, size, whole) + links.seconds(kind, experts, apart)
            for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        )
        left = size / whole.size + experts / apart.size
        found += [gathered, reduced + links.seconds(Collective.ALL_REDUCE, left, others)]
    return found
