"""Moves: changes of a tensor's state on one axis. The backward of a move is the move between the
duals, reversed.

One function, ``transfer``, is both directions, so that forward and backward cannot disagree:

===========  ==================  ===========  ==================
move         traffic             move         traffic
===========  ==================  ===========  ==================
``I→R``      none                ``S→R``      all-gather
``I→S``      none (slice)        ``S→I``      all-gather
``I→P``      none (mask)         ``S→S'``     all-to-all
``R→I``      none                ``S→P``      none (pad)
``R→S``      none (slice)        ``P→I``      all-reduce
``R→P``      none (mask)         ``P→R``      all-reduce
..           ..                  ``P→S``      reduce-scatter
===========  ==================  ===========  ==================
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from autopar.ir.axis_group import AxisGroup
from autopar.ir.placement import State, StateKind, parse_state


class Collective(Enum):
    """The traffic of one direction of a move."""

    NONE = "none"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


def collective_of(source: State, target: State) -> Collective:
    """The collective that the forward of ``source → target`` issues."""
    if source == target:
        return Collective.NONE
    if source.kind is StateKind.PARTIAL:
        return Collective.REDUCE_SCATTER if target.is_sharded else Collective.ALL_REDUCE
    if source.is_sharded:
        if target.is_whole:
            return Collective.ALL_GATHER
        if target.is_sharded:
            same_dim = source.dim == target.dim  # other blocks of the same dim: gather, then slice
            return Collective.ALL_GATHER if same_dim else Collective.ALL_TO_ALL
    return Collective.NONE


def backward_of(source: State, target: State) -> tuple[State, State]:
    """The move that the gradient makes: from the dual of ``target`` to the dual of ``source``."""
    return target.dual(), source.dual()


def move(tensor: Tensor, axis: AxisGroup, source: str, target: str) -> Tensor:
    """``tensor`` brought from state ``source`` to ``target`` on ``axis``; differentiable.

    States are texts (``"S(1)"``), so that printed graphs can be read.
    """
    moved: Tensor = _Move.apply(tensor, axis, parse_state(source), parse_state(target))
    return moved


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: AxisGroup, source: State, target: State) -> Tensor:
        ctx.axis, ctx.states = axis, (source, target)
        moved = transfer(tensor, axis, source, target)
        return moved.view_as(moved) if moved is tensor else moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return transfer(gradient, ctx.axis, *backward_of(*ctx.states)), None, None, None


def transfer(tensor: Tensor, axis: AxisGroup, source: State, target: State) -> Tensor:
    """One direction of a move, without autograd."""
    if source == target or axis.size == 1 or (source.is_whole and target.is_whole):
        return tensor
    if source.is_whole:
        if target.is_sharded:
            return take_shard(tensor, target, axis.rank, axis.size).contiguous()
        return tensor if axis.rank == 0 else torch.zeros_like(tensor)
    if source.kind is StateKind.PARTIAL:
        if target.is_whole:
            return axis.all_reduce(tensor.contiguous())
        return axis.reduce_scatter(_stack_shards(tensor, target, axis.size))
    if target.kind is StateKind.PARTIAL:
        return _pad_shard(tensor, source, axis)
    if target.is_sharded and target.dim != source.dim:
        received = axis.all_to_all(_stack_shards(tensor, target, axis.size))
        return assemble(received.chunk(axis.size), source)
    gathered = axis.all_gather(tensor.contiguous())
    if target.is_whole and _is_one_run(tensor, source):
        size = axis.size * tensor.shape[source.dim]
        return gathered.reshape(
            (*tensor.shape[: source.dim], size, *tensor.shape[source.dim + 1 :])
        )
    whole = assemble(gathered.chunk(axis.size), source)
    return (
        whole if target.is_whole else take_shard(whole, target, axis.rank, axis.size).contiguous()
    )


def take_shard(tensor: Tensor, state: State, rank: int, num_ranks: int) -> Tensor:
    """The shard of ``rank`` of a whole tensor: a view, or a copy where blocks must be joined, or
    zeros added to a padded one.
    """
    dim = state.dim
    size = tensor.shape[dim]
    shares = state.shares(size, num_ranks)
    assert shares is not None, (
        f"size {size} of dim {dim} does not divide into {state} over {num_ranks} ranks"
    )
    if state.padded_size:
        start = min(size, rank * shares[0])
        held = tensor.narrow(dim, start, min(size - start, shares[0]))
        missing = list(held.shape)
        missing[dim] = shares[0] - held.shape[dim]
        return torch.cat([held, held.new_zeros(missing)], dim) if missing[dim] else held
    pieces: list[Tensor] = []
    start = 0
    for share in shares:
        pieces.append(tensor.narrow(dim, start + rank * share, share))
        start += share * num_ranks
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def assemble(shards: tuple[Tensor, ...] | list[Tensor], state: State) -> Tensor:
    """The whole tensor from the shards of all ranks, in order of rank, without padding."""
    dim, blocks = state.dim, state.blocks
    if state.padded_size:
        return torch.cat(tuple(shards), dim).narrow(dim, 0, state.padded_size)
    if len(blocks) == 1:
        return torch.cat(tuple(shards), dim)
    unit = shards[0].shape[dim] // sum(blocks)
    parts = [shard.split([unit * block for block in blocks], dim) for shard in shards]
    return torch.cat([part[index] for index in range(len(blocks)) for part in parts], dim)


def _is_one_run(tensor: Tensor, state: State) -> bool:
    """Whether the shards of all ranks, one after the other, are the whole tensor: nothing has to be
    copied.
    """
    is_simple = len(state.blocks) == 1 and not state.padded_size
    return is_simple and math.prod(tensor.shape[: state.dim]) == 1


def _stack_shards(tensor: Tensor, state: State, num_ranks: int) -> Tensor:
    """All ranks' shards of a whole tensor, one after the other along dim 0."""
    if _is_one_run(tensor, state):
        share = tensor.shape[state.dim] // num_ranks
        stacked = (*tensor.shape[: state.dim], share, *tensor.shape[state.dim + 1 :])
        return tensor.reshape((num_ranks * stacked[0], *stacked[1:])).contiguous()
    return torch.cat([take_shard(tensor, state, rank, num_ranks) for rank in range(num_ranks)])


def _pad_shard(tensor: Tensor, state: State, axis: AxisGroup) -> Tensor:
    zeros = torch.zeros_like(tensor)
    return assemble([tensor if rank == axis.rank else zeros for rank in range(axis.size)], state)
