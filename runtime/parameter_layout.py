"""Which part of a logical parameter a rank holds: its shard over layout axes, then a run of rows of
that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.mesh import LAYOUT_AXES, TENSOR_AXIS
from autopar.ir.moves import assemble, take_shard
from autopar.ir.placement import Placement, State, StateKind
from autopar.runtime.communicator import Group

_ALIGNMENT = 64
"""Parameters start at multiples of this many elements, so that kernels find them aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """A parameter on this rank.

    Attributes:
        shape: Global.
        placement: States on the layout axes, as segments use it.
        local_shape: Of the shard over layout axes, which segments use; at least one dim (scalars
            get one).
        shard_axis: Axis (a combined one, maybe) over which storage is sharded, ``""`` for none.
        num_shards: Ranks of it, among which rows of the local shape are divided, in equal chunks;
            the last chunks may be short or empty.
        shard: Which of these this rank holds.
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    placement: Placement
    local_shape: tuple[int, ...]
    stages: tuple[int, ...]
    shard_axis: str
    num_shards: int
    shard: int

    @property
    def row_numel(self) -> int:
        """Elements of a row."""
        return math.prod(self.local_shape[1:])

    @property
    def chunk_rows(self) -> int:
        """Rows of a full chunk."""
        return -(-self.local_shape[0] // self.num_shards)

    @property
    def rows(self) -> slice:
        """This rank's rows of the local shape."""
        first = min(self.shard * self.chunk_rows, self.local_shape[0])
        return slice(first, min(first + self.chunk_rows, self.local_shape[0]))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return (self.rows.stop - self.rows.start, *self.local_shape[1:])

    @property
    def chunk_numel(self) -> int:
        """Elements of a full chunk, with padding to the alignment."""
        return -(-self.chunk_rows * self.row_numel // _ALIGNMENT) * _ALIGNMENT

    @property
    def tensor_state(self) -> State:
        """State on the tensor axis."""
        return self.placement[LAYOUT_AXES.index(TENSOR_AXIS)]

    @property
    def is_tensor_partial(self) -> bool:
        """True if the gradient is a partial sum on each rank of the tensor axis."""
        return self.tensor_state.kind is StateKind.REPLICATED

    def take(self, whole: Tensor, group_of: Callable[[str], Group]) -> Tensor:
        """This rank's shard of the global tensor; ``group_of`` gives the group of an axis."""
        for axis, state in zip(LAYOUT_AXES, self.placement, strict=True):
            if state.is_sharded:
                group = group_of(axis)
                whole = take_shard(whole, state, group.rank, group.size)
        return whole.reshape(self.local_shape)[self.rows]

    def assemble(self, shard: Tensor, group_of: Callable[[str], Group]) -> Tensor:
        """The global tensor, from all ranks' shards; every rank of the stage calls it."""
        local = shard
        if self.num_shards > 1:
            padded = shard.new_zeros((self.chunk_rows, *self.local_shape[1:]))
            padded[: shard.shape[0]] = shard
            local = group_of(self.shard_axis).all_gather(padded)[: self.local_shape[0]]
        for axis, state in reversed(list(zip(LAYOUT_AXES, self.placement, strict=True))):
            group = group_of(axis)
            if state.is_sharded and group.size > 1:
                gathered = group.all_gather(local.contiguous())
                local = assemble(gathered.chunk(group.size), state)
        return local.reshape(self.shape)

    def add_to_chunks(self, chunks: Tensor, values: Tensor) -> None:
        """Add a tensor of the local shape to ``chunks [num_shards, ≥ rows of a chunk × row]``, in
        place.
        """
        for target, source in self._chunked(chunks, values):
            target.add_(source)

    def copy_from_chunks(self, values: Tensor, chunks: Tensor) -> None:
        """Fill ``values``, of the local shape, from chunks."""
        for source, target in self._chunked(chunks, values):
            target.copy_(source)

    def _chunked(self, chunks: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Equal-shaped views of both, which cover ``values``: full chunks, and the short one."""
        rows, row_numel = self.chunk_rows, self.row_numel
        num_full, rest = divmod(self.local_shape[0], rows)
        width, rest = rows * row_numel, rest * row_numel
        values = values.reshape(-1)
        whole = values if rest == 0 else values[: num_full * width]
        views = [(chunks[:num_full, :width], whole.view(num_full, width))]
        if rest:
            views.append((chunks[num_full, :rest], values[num_full * width :]))
        return views


def master_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Type of trained parameters, gradients and optimizer state: float32, or wider where compute is
    wider.
    """
    return torch.promote_types(compute_dtype, torch.float32)
