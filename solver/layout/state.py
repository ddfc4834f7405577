"""Which states an axis allows: data axes shard the batch and nothing else, tensor axes all else."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from autopar.ir.graph import Role, TensorInfo
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATED, State, sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRule:
    """What the states of an axis may be.

    Attributes:
        name: Name of the axis.
        shards_batch: True for data axes: they shard dims that grow with the batch, and only those.
        idle: True for an axis of one rank: everything is ``I`` (``R`` without gradient).
    """

    name: str
    shards_batch: bool
    idle: bool = False

    def allows(self, state: State, tensor: TensorInfo) -> bool:
        """Whether ``tensor`` may be in ``state`` on this axis."""
        if self.idle:
            return state == (INVARIANT if tensor.requires_grad else REPLICATED)
        return not state.is_sharded or self.shards_batch == grows(tensor.shape[state.dim])

    def pinned(self, role: Role, tensor: TensorInfo) -> tuple[State, ...] | None:
        """The states of placeholders without choice: inputs, constants, data-parallel weights."""
        if role is Role.ACTIVATION or (role is Role.PARAMETER and self.idle):
            return None
        if role is Role.PARAMETER:
            return (REPLICATED,) if self.shards_batch else None
        growing = [dim for dim, size in enumerate(tensor.shape) if grows(size)]
        return (sharded(growing[0]),) if self.shards_batch and growing else (REPLICATED,)

    def loss_states(self, *, requires_grad: bool) -> tuple[State, ...]:
        """States in which the loss (or its weight) may leave the last block."""
        if self.idle:
            return (INVARIANT if requires_grad else REPLICATED,)
        return (INVARIANT if requires_grad else REPLICATED, PARTIAL)


def grows(size: int | sympy.Expr) -> bool:
    """True for a size that depends on the batch."""
    return not isinstance(size, int) and bool(size.free_symbols)
