"""One choice of everything but layout and stage cuts: degrees, micro-batches, ZeRO, schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from autopar.ir.kernels import DEFAULT_KERNELS
from autopar.ir.mesh import (
    CONTEXT_AXIS,
    EXPERT_AXIS,
    MESH_AXES,
    TENSOR_AXIS,
    Mesh,
)
from autopar.ir.plan import RecomputeName, ScheduleName
from autopar.ir.zero_stages import exceptions_of, zero_text
from autopar.solver.costs.comm import Group, group_over
from autopar.solver.hardware import Cluster
from autopar.solver.sites import Sites, sites_of

CutsName = Literal["balanced", "even"]
"""Stage cuts for the fastest step, or with as many layers on each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisible:
    """What of a model the mesh has to divide.

    Attributes:
        num_blocks: Blocks; a stage has at least one.
        seq_len: Positions, among which a context axis divides; None where nobody knows.
        num_experts: Routed experts, among which an expert axis divides; 0 without.
        kinds: The kind of each block; none where nobody knows.
    """

    num_blocks: int
    seq_len: int | None = None
    num_experts: int = 0
    kinds: tuple[str, ...] = ()

    @property
    def block_kinds(self) -> tuple[str, ...]:
        """Of every block, empty where nobody knows."""
        return self.kinds or ("",) * self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How blocks are computed, whatever the degrees.

    Attributes:
        kernels: By which kernels (``autopar.ir.kernels``).
        sequence_parallel: Whether the tensor axis shards positions between blocks; None: as is
            fastest.
        loss_parallel: Whether the tensor axis may share the vocabulary of a loss.
        recompute: ``selective`` or ``selective_op`` where backward computes some ops again.
        loss_chunks: In how many slices of the tokens the loss is computed; 0 where that is open.
        gather_again: Whether backward gathers again what tensor ranks have gathered from shards;
            None where that is open to each block.
    """

    kernels: str
    sequence_parallel: bool | None
    loss_parallel: bool
    recompute: RecomputeName
    loss_chunks: int = 1
    gather_again: bool | None = False


class Placement(NamedTuple):
    """How data ranks are split, and in what order the axes of the mesh are."""

    dp_replicate: int
    dp_shard: int
    axis_order: tuple[str, ...] = MESH_AXES


SettingKey = tuple[int, int, int, int, tuple[int, int, int], Way]
"""Degrees of the context, expert and tensor axis, a micro-batch size, the distance of ranks on
these axes, and a way.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One choice of everything but layout and stage cuts.

    A last micro-batch that is shorter counts as a full one: that bounds its costs from above. With
    ``chunks_open`` the loss may be computed in more chunks than ``loss_chunks``, if that pays; with
    ``zero_open`` blocks may have lower ZeRO stages than ``zero_stage``, down to 1. With
    ``placements`` or ``depths`` it stands for all of them, in any combination: it is split over
    most ranks, has the least in flight, and its bounds are those of none in particular.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int = 1
    ep: int = 1
    tp: int
    micro_batch_size: int
    num_micro_batches: int
    zero_stage: int
    recompute: RecomputeName
    schedule: ScheduleName
    virtual_stages: int = 1
    recomputed_blocks: tuple[int, ...] = ()  # of recompute "blocks", once they are chosen: whole
    recomputed_by_op: tuple[int, ...] = ()  # the same, of which single ops are
    gather_again: bool | None = False  # whether all blocks gather again, or, if that is open,
    gathered_again: tuple[int, ...] = ()  # which do, once they are chosen
    kernels: str = DEFAULT_KERNELS
    sequence_parallel: bool | None = None
    loss_parallel: bool = True
    cuts: CutsName = "balanced"
    extra_in_flight: int = 0  # beyond what 1F1B needs; see ``orders.most_forwards``
    depths: tuple[int, ...] = ()  # numbers of it that are open, from ``extra_in_flight`` on
    loss_chunks: int = 1
    chunks_open: bool = False
    offload_optimizer: bool = False  # master weights and optimizer state are on the host
    offload_activations: int = 0  # so many blocks of each stage have theirs on the host meanwhile
    offloaded_blocks: tuple[int, ...] = ()  # these, once cuts are known
    zero_stages: tuple[int, ...] = ()  # of each block, where some have another than zero_stage
    zero_open: bool = False
    axis_order: tuple[str, ...] = MESH_AXES  # outermost first
    placements: tuple[Placement, ...] = ()  # that are open; none: it is as it says
    group_order: tuple[int, ...] = ()  # groups of nodes in the order of ranks; of one kind: none
    shares: tuple[int, ...] = ()  # micro-batches of a data rank of each group; none: all alike

    @property
    def way(self) -> Way:
        """How its blocks are computed."""
        by_op = self.recompute in ("selective", "selective_op")
        return Way(
            kernels=self.kernels,
            sequence_parallel=self.sequence_parallel if self.tp > 1 else None,
            loss_parallel=self.loss_parallel or self.tp == 1,
            recompute=self.recompute if by_op else "none",
            loss_chunks=0 if self.chunks_open else self.loss_chunks,
            gather_again=self.gather_again if self.tp > 1 else False,
        )

    @property
    def setting_key(self) -> SettingKey:
        """What candidates with the same layouts and costs of blocks have in common."""
        degrees = self.cp, self.ep, self.tp, self.micro_batch_size
        return *degrees, self.layout_strides, self.way

    @property
    def has_one_layout(self) -> bool:
        """Whether nothing is left but to simulate some cuts: virtual stages are searched with the
        fastest layout, and with ``virtual_cuts``.
        """
        return self.virtual_stages > 1

    @property
    def leaves_offloaded_open(self) -> bool:
        """Whether cuts have to say which blocks have their activations offloaded."""
        return self.offload_activations > 0 and not self.offloaded_blocks

    @property
    def leaves_again_open(self) -> bool:
        """Whether it is to be chosen what is computed again."""
        return self.recompute == "blocks" and not self.recomputes

    @property
    def recomputes(self) -> bool:
        """Whether blocks are chosen that do something again."""
        return bool(self.recomputed_blocks or self.recomputed_by_op or self.gathered_again)

    @property
    def dp(self) -> int:
        """Ranks of the data axes."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.dp * self.cp * self.ep * self.tp

    @property
    def batch_ranks(self) -> int:
        """Ranks among which the batch is divided."""
        return self.dp * self.ep

    @property
    def num_shards(self) -> int:
        """Ranks over which ZeRO shards parameters that all of them use whole."""
        return self.dp_shard * self.cp * self.ep

    @property
    def layout_strides(self) -> tuple[int, int, int]:
        """By how much ranks differ that are neighbors on the context, expert and tensor axis."""
        if self.axis_order == MESH_AXES:
            return self.ep * self.tp, self.tp, 1
        mesh = self.mesh()
        return mesh.stride(CONTEXT_AXIS), mesh.stride(EXPERT_AXIS), mesh.stride(TENSOR_AXIS)

    @property
    def data_stride(self) -> int:
        """By how much ranks differ that are neighbors on the data axes."""
        return self.mesh().data_stride

    def group(self, cluster: Cluster, axes: Sequence[str]) -> Group:
        """The group of ranks along some axes."""
        mesh = self.mesh()
        return group_over(cluster, [(mesh.size(axis), mesh.stride(axis)) for axis in axes])

    def sites(self, cluster: Cluster) -> Sites:
        """On which nodes of a cluster its stages are."""
        return sites_of(cluster, self.group_order, pp=self.pp, ranks_per_stage=self.ranks_per_stage)

    @property
    def stage_stride(self) -> int:
        """By how much ranks differ that have the same place on two neighboring stages."""
        return self.ranks_per_stage if self.axis_order == MESH_AXES else self.mesh().stage_stride

    def placed(self, placement: Placement) -> Candidate:
        """With one of its placements."""
        return replace(self, placements=(), **placement._asdict())

    @property
    def deepest(self) -> Candidate:
        """With as many micro-batches in flight as may be."""
        return replace(self, depths=(), extra_in_flight=self.depths[-1]) if self.depths else self

    @property
    def stands_for_several(self) -> bool:
        """Whether it is to be split into ``members`` before it is solved."""
        return bool(self.placements or self.depths)

    @property
    def num_members(self) -> int:
        """How many candidates it stands for."""
        return max(1, len(self.placements)) * max(1, len(self.depths))

    def members(self) -> tuple[Candidate, ...]:
        """All candidates that it stands for: itself where nothing is open."""
        placed = tuple(map(self.placed, self.placements)) or (self,)
        if not self.depths:
            return placed
        return tuple(
            replace(own, depths=(), extra_in_flight=depth)
            for own in placed
            for depth in self.depths
        )

    @property
    def of_any_zero(self) -> Candidate:
        """What candidates share that differ in ZeRO, in ranks among which it shards, and in what
        may be in flight beyond the least.
        """
        alike = dict.fromkeys(Placement(self.dp, 1, own.axis_order) for own in self.placements)
        return replace(
            self,
            zero_stage=0,
            zero_open=False,
            dp_replicate=self.dp,
            dp_shard=1,
            placements=tuple(alike),
            depths=(),
        )

    def mesh(self) -> Mesh:
        """The mesh of these degrees."""
        return Mesh(
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            cp=self.cp,
            ep=self.ep,
            tp=self.tp,
            axis_order=self.axis_order,
        )

    @property
    def has_parts(self) -> bool:
        """Whether its backwards are in two parts."""
        return self.schedule == "zero_bubble"

    @property
    def per_block(self) -> bool:
        """Whether each block is a segment: then its gathers and reductions overlap with others.

        Otherwise a virtual stage is one segment. The layered order passes all micro-batches through
        a segment before the next: with several stages a virtual stage has to be one segment, or it
        would wait for all but the last segment of the one before.
        """
        if self.schedule == "layered" and self.pp > 1:
            return False
        by_block = self.recompute in ("full", "selective_layer") or self.zero_stages != ()
        by_block = by_block or self.offload_activations > 0
        return self.dp * self.cp * self.ep > 1 or by_block or self.schedule == "layered"

    def _data_text(self) -> str:
        if len({own.dp_shard for own in self.placements}) > 1:
            return f"{self.dp} in any split"
        return f"{self.dp_replicate}·{self.dp_shard}"

    def _axes_text(self) -> str:
        if len({own.axis_order for own in self.placements}) > 1:
            return " in any order"
        if self.axis_order == MESH_AXES:
            return ""
        used = [axis for axis in self.axis_order if self.mesh().size(axis) > 1]
        return f" in the order {' '.join(used)}"

    def _zero_text(self) -> str:
        if self.zero_open:
            return f"1 to {self.zero_stage}"
        return zero_text(self.zero_stage, exceptions_of(self.zero_stage, self.zero_stages))

    def _recompute_text(self) -> str:
        listed = ((self.recomputed_blocks, ""), (self.recomputed_by_op, " by op"))
        parts = [
            f"{len(blocks)} block{'s' * (len(blocks) > 1)}{how}" for blocks, how in listed if blocks
        ]
        if self.gathered_again:
            parts.append(f"{len(self.gathered_again)} gathered again")
        return " and ".join(parts) or self.recompute

    def _offloaded_text(self) -> str:
        if not self.offload_activations:
            return ""
        num = len(self.offloaded_blocks) or f"{self.offload_activations} of each stage"
        return f", activations of {num} block{'s' * (num != 1)} offloaded"

    def _depth_text(self) -> str:
        if self.depths:
            return f", {self.depths[0]} to {self.depths[-1]} more in flight"
        return f", {self.extra_in_flight} more in flight" if self.extra_in_flight else ""

    def _number_text(self) -> str:
        return " or ".join(map(str, self.shares or (self.num_micro_batches,)))

    def _order_text(self) -> str:
        if list(self.group_order) == sorted(self.group_order):
            return ""
        return f", groups of nodes in the order {', '.join(str(n + 1) for n in self.group_order)}"

    def __str__(self) -> str:
        more = "".join(
            f" × {name} {size}" for name, size in (("cp", self.cp), ("ep", self.ep)) if size > 1
        )
        return (
            f"pp {self.pp} × dp {self._data_text()}{more} × tp {self.tp}{self._axes_text()}, "
            f"micro-batch {self.micro_batch_size} × {self._number_text()}, "
            f"ZeRO {self._zero_text()}, recompute {self._recompute_text()}, {self.schedule}"
            + (f" × {self.virtual_stages} virtual stages" if self.virtual_stages > 1 else "")
            + self._depth_text()
            + (f", loss in {self.loss_chunks} chunks" if self.loss_chunks > 1 else "")
            + ", gathering again" * bool(self.gather_again and self.tp > 1)
            + ", optimizer state offloaded" * self.offload_optimizer
            + self._offloaded_text()
            + self._order_text()
        )
