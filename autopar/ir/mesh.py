"""The device mesh: named axes over ranks, the outermost first, the last axis varying fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.ir.errors import InputError

PIPELINE_AXIS = "pp"
REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"
TENSOR_AXIS = "tp"
DATA_AXIS = "dp"
"""The calculus sees both data axes as one: ``dp`` is ``dp_replicate`` × ``dp_shard``, flattened."""

MESH_AXES = (PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS)
"""All axes of a mesh, outermost first: tensor-parallel ranks are neighbours inside a node."""

LAYOUT_AXES = (DATA_AXIS, TENSOR_AXIS)
"""The axes on which tensors have states, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Degrees of the mesh axes. Rank r has the coordinates of r in mixed radix, ``tp`` fastest."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in MESH_AXES:
            if self.size(axis) < 1:
                raise InputError(
                    f"mesh axis {axis} has size {self.size(axis)}; it must be at least 1"
                )

    @property
    def dp(self) -> int:
        """Ranks among which the batch is divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_ranks(self) -> int:
        return math.prod(self.size(axis) for axis in MESH_AXES)

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis`` (a mesh axis or ``dp``)."""
        size: int = getattr(self, axis)
        return size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of ``rank`` on every mesh axis, and on the flattened ``dp``."""
        if not 0 <= rank < self.num_ranks:
            raise InputError(f"rank {rank} is outside a mesh of {self.num_ranks} ranks")
        found: dict[str, int] = {}
        rest = rank
        for axis in reversed(MESH_AXES):
            rest, found[axis] = divmod(rest, self.size(axis))
        found[DATA_AXIS] = found[REPLICATE_AXIS] * self.dp_shard + found[SHARD_AXIS]
        return found

    def rank_at(self, *, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        """The rank at a pipeline, (flattened) data and tensor coordinate."""
        return (pp * self.dp + dp) * self.tp + tp

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only in ``axis``, each in order of its coordinate.

        The order of groups is the same on every rank, so that process groups can be made from it.
        """
        members: dict[tuple[int, ...], list[int]] = {}
        varying = {axis, REPLICATE_AXIS, SHARD_AXIS} if axis == DATA_AXIS else {axis}
        for rank in range(self.num_ranks):
            at = self.coordinates(rank)
            key = tuple(at[other] for other in MESH_AXES if other not in varying)
            members.setdefault(key, []).append(rank)
        return tuple(tuple(ranks) for ranks in members.values())
