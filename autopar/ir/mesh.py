"""The device mesh: named axes over ranks, in some order, of which the last varies fastest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.errors import InputError

PIPELINE_AXIS = "pp"
REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"
CONTEXT_AXIS = "cp"
EXPERT_AXIS = "ep"
TENSOR_AXIS = "tp"
DATA_AXIS = "dp"
"""The calculus sees both data axes as one: ``dp`` is ``dp_replicate`` × ``dp_shard``, flattened."""

MESH_AXES = (PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS, CONTEXT_AXIS, EXPERT_AXIS, TENSOR_AXIS)
"""All axes of a mesh, outermost first, as they are numbered unless a mesh says otherwise:
tensor-parallel ranks are neighbors inside a node.
"""

LAYOUT_AXES = (DATA_AXIS, CONTEXT_AXIS, EXPERT_AXIS, TENSOR_AXIS)
"""The axes on which tensors have states, outermost first."""

BATCH_AXES = (DATA_AXIS, EXPERT_AXIS)
"""The axes that divide the batch. Expert ranks have their own sequences, and share experts."""

_COMBINED = "·"


def combined_axis(axes: Sequence[str]) -> str:
    """The name of several mesh axes flattened into one, the outermost first; ``""`` for none."""
    return _COMBINED.join(axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Degrees of the mesh axes. Rank r has the coordinates of r in mixed radix, the last axis of
    ``axis_order`` fastest: which axes lie inside of a node, as ranks are numbered node after node.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    axis_order: tuple[str, ...] = MESH_AXES

    def __post_init__(self) -> None:
        if sorted(self.axis_order) != sorted(MESH_AXES):
            raise InputError(
                f"the axes of a mesh are {', '.join(MESH_AXES)}, each once; its order is "
                f"{', '.join(self.axis_order) or 'empty'}"
            )
        for axis in MESH_AXES:
            if self.size(axis) < 1:
                raise InputError(
                    f"mesh axis {axis} has size {self.size(axis)}; it must be at least 1"
                )

    @property
    def dp(self) -> int:
        """Ranks of the flattened data axis."""
        return self.dp_replicate * self.dp_shard

    @property
    def batch_ranks(self) -> int:
        """Ranks among which the batch is divided: those of ``BATCH_AXES``."""
        return self.dp * self.ep

    @property
    def num_ranks(self) -> int:
        return math.prod(self.size(axis) for axis in MESH_AXES)

    def degrees(self) -> dict[str, int]:
        """Ranks of each of ``LAYOUT_AXES``."""
        return {axis: self.size(axis) for axis in LAYOUT_AXES}

    def layout_sizes(self) -> tuple[int, ...]:
        """Ranks of each of ``LAYOUT_AXES``, in their order."""
        return tuple(self.size(axis) for axis in LAYOUT_AXES)

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``: a mesh axis, ``dp``, or a combined axis."""
        return math.prod(getattr(self, name) for name in axis.split(_COMBINED) if name)

    def simplest(self, axis: str) -> str:
        """A combined axis without its axes of one rank; ``""`` if none is left."""
        return combined_axis([name for name in _mesh_axes(axis) if self.size(name) > 1])

    def group_axes(self) -> tuple[str, ...]:
        """All axes that have groups of ranks, in the order in which every rank makes them.

        Beside single axes these are the combined ones over which gradients are summed: data axes
        with context or expert axis, or both. ``""`` stands for groups of one rank.
        """
        found: dict[str, None] = dict.fromkeys((*MESH_AXES, DATA_AXIS, ""))
        for first in ((SHARD_AXIS,), (REPLICATE_AXIS, SHARD_AXIS)):
            for more in ((), (CONTEXT_AXIS,), (EXPERT_AXIS,), (CONTEXT_AXIS, EXPERT_AXIS)):
                found[self.simplest(combined_axis((*first, *more)))] = None
        return tuple(found)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of ``rank`` on every mesh axis, and on the flattened ``dp``."""
        if not 0 <= rank < self.num_ranks:
            raise InputError(f"rank {rank} is outside a mesh of {self.num_ranks} ranks")
        found: dict[str, int] = {}
        rest = rank
        for axis in reversed(self.axis_order):
            rest, found[axis] = divmod(rest, self.size(axis))
        found[DATA_AXIS] = found[REPLICATE_AXIS] * self.dp_shard + found[SHARD_AXIS]
        return found

    def batch_coordinate(self, rank: int) -> int:
        """Which of the ``batch_ranks`` parts of the batch is that of ``rank``."""
        at = self.coordinates(rank)
        return at[DATA_AXIS] * self.ep + at[EXPERT_AXIS]

    def rank_at(self, *, pp: int = 0, dp: int = 0, cp: int = 0, ep: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates (``dp`` flattened)."""
        replica, shard = divmod(dp, self.dp_shard)
        at = {PIPELINE_AXIS: pp, REPLICATE_AXIS: replica, SHARD_AXIS: shard}
        return self._rank_of(at | {CONTEXT_AXIS: cp, EXPERT_AXIS: ep, TENSOR_AXIS: tp})

    def on_stage(self, rank: int, stage: int) -> int:
        """The rank of ``stage`` with all other coordinates as those of ``rank``."""
        return self._rank_of(self.coordinates(rank) | {PIPELINE_AXIS: stage})

    def place_on_stage(self, rank: int) -> int:
        """The place of ``rank`` among all ranks of its stage."""
        at = self.coordinates(rank)
        axes = [axis for axis in self.axis_order if axis != PIPELINE_AXIS]
        return self._mixed_radix(axes, at)

    def stride(self, axis: str) -> int:
        """By how much the ranks of two neighbors on a mesh axis differ."""
        inner = self.axis_order[self.axis_order.index(axis) + 1 :]
        return math.prod(self.size(name) for name in inner)

    @property
    def stage_stride(self) -> int:
        """By how much ranks differ that have the same place on two neighboring stages."""
        return self.num_ranks if self.pp == 1 else self.stride(PIPELINE_AXIS)

    @property
    def data_stride(self) -> int:
        """By how much ranks differ that are neighbors on the data axes."""
        return self.stride(SHARD_AXIS if self.dp_shard > 1 else REPLICATE_AXIS)

    def _rank_of(self, at: Mapping[str, int]) -> int:
        return self._mixed_radix(self.axis_order, at)

    def _mixed_radix(self, axes: Sequence[str], at: Mapping[str, int]) -> int:
        number = 0
        for axis in axes:
            number = number * self.size(axis) + at[axis]
        return number

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only in ``axis``, each in order of its coordinate.

        The order of groups is the same on every rank, so that process groups can be made from it.
        """
        members: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        varying = _mesh_axes(axis)
        for rank in range(self.num_ranks):
            at = self.coordinates(rank)
            key = tuple(at[other] for other in MESH_AXES if other not in varying)
            own = tuple(at[name] for name in varying)
            members.setdefault(key, []).append((own, rank))
        return tuple(tuple(rank for _, rank in sorted(ranks)) for ranks in members.values())


def _mesh_axes(axis: str) -> list[str]:
    """The mesh axes that an axis consists of, outermost first."""
    names = axis.split(_COMBINED)
    if DATA_AXIS in names:
        names += [REPLICATE_AXIS, SHARD_AXIS]
    return [name for name in MESH_AXES if name in names]
