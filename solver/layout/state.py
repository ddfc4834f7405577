"""Which states an axis allows: data axes shard the batch, expert axes also the experts, context
axes activations, tensor axes all but the batch.
"""

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
        shards_batch: True for data and expert axes: they shard dims that grow with the batch.
        shards_experts: True for expert axes: they shard the experts' weights as well.
        shards_parameters: True for tensor axes.
        shards_activations: True for context axes: what blocks hand on is sharded where it can be,
            and positions may be sharded in stripes.
        idle: True for an axis of one rank: everything is ``I`` (``R`` without gradient).
        sequence_parallel: Whether what blocks hand on is sharded along positions (True), all ranks
            compute the residual stream whole (False), or both are open (None).
        loss_parallel: False where all ranks compute the loss of whole logits.
    """

    name: str
    shards_batch: bool = False
    shards_experts: bool = False
    shards_parameters: bool = False
    shards_activations: bool = False
    idle: bool = False
    sequence_parallel: bool | None = None
    loss_parallel: bool | None = None

    def allows(self, state: State, tensor: TensorInfo) -> bool:
        """Whether ``tensor`` may be in ``state`` on this axis."""
        if self.idle:
            return state == (INVARIANT if tensor.requires_grad else REPLICATED)
        if not state.is_sharded or self.shards_batch == grows(tensor.shape[state.dim]):
            return True
        return self.shards_experts and state.dim == 0 and not any(map(grows, tensor.shape))

    def pinned(
        self, role: Role, tensor: TensorInfo, *, is_expert: bool
    ) -> tuple[State, ...] | None:
        """The states of placeholders without choice: inputs, constants, whole weights."""
        if role is Role.ACTIVATION or (role is Role.PARAMETER and self.idle):
            return None
        if role is Role.PARAMETER:
            if self.shards_experts and is_expert:
                return (sharded(0),)
            return None if self.shards_parameters else (REPLICATED,)
        growing = [dim for dim, size in enumerate(tensor.shape) if grows(size)]
        return (sharded(growing[0]),) if self.shards_batch and growing else (REPLICATED,)

    def loss_states(self, *, requires_grad: bool) -> tuple[State, ...]:
        """States in which the loss (or its weight) may leave the last block."""
        if self.idle:
            return (INVARIANT if requires_grad else REPLICATED,)
        return (INVARIANT if requires_grad else REPLICATED, PARTIAL)


def is_positions(state: State, tensor: TensorInfo) -> bool:
    """Whether ``state`` shards the positions of hidden states [sequences, positions, features]."""
    shape = tensor.shape
    return state.is_sharded and state.dim == 1 and len(shape) == 3 and grows(shape[0])


def grows(size: int | sympy.Expr) -> bool:
    """True for a size that depends on the batch."""
    return not isinstance(size, int) and bool(size.free_symbols)
