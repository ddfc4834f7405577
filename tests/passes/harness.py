"""Run a program on ranks that are threads, and put the global loss and gradients together again.

Segments run as on real ranks: what one receives is a leaf of its own autograd graph, and gradients
go back from segment to segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.graph import ModelGraph, Role, ValueId
from autopar.ir.mesh import LAYOUT_AXES, Mesh
from autopar.ir.moves import assemble, take_shard
from autopar.ir.placement import INVARIANT, Placement, State, StateKind, parse_state
from autopar.ir.program import Program, Segment, bind_axes
from autopar.runtime.threads import Meeting, ThreadGroup, run_ranks, thread_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step gives: loss and weight as scalars, gradients by parameter, all global."""

    loss: Tensor
    weight: Tensor | None
    gradients: Mapping[str, Tensor]


def run_program(
    program: Program,
    model: ModelGraph,
    mesh: Mesh,
    parameters: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
) -> Outcome:
    """Forward and backward of one micro-batch on a thread for each rank of a stage.

    Args:
        parameters: Whole tensors by parameter name.
        inputs: The global micro-batch.
    """

    def rank_step(groups: Mapping[str, ThreadGroup]) -> dict[ValueId, Tensor]:
        at = tuple(groups[axis] for axis in LAYOUT_AXES)
        values: dict[ValueId, Tensor] = {}
        for value, local in program.values.items():
            if value.role is Role.ACTIVATION:
                continue
            whole = _whole(value, model, parameters, inputs)
            placed = place(whole, local.placement, at).detach().clone()
            assert tuple(placed.shape) == local.shape, f"{value}: {placed.shape}, not {local.shape}"
            trained = value.role is Role.PARAMETER and local.requires_grad
            values[value] = placed.requires_grad_(trained)
        return step(bind_axes(program, groups), model, values)

    results = on_grid(mesh, rank_step)
    placements = {value: local.placement for value, local in program.values.items()}

    def gathered(value: ValueId, *, dual: bool = False) -> Tensor:
        placement = placements[value]
        if dual:
            placement = tuple(state.dual() for state in placement)
        parts = [rank[value] for rank in results]
        return combine(parts, placement, mesh.layout_sizes(), str(value))

    return Outcome(
        loss=gathered(model.loss),
        weight=None if model.weight is None else gathered(model.weight),
        gradients={
            value.name: gathered(value, dual=True)
            for value, local in program.values.items()
            if value.role is Role.PARAMETER and local.requires_grad
        },
    )


def step(
    program: Program, model: ModelGraph, values: Mapping[ValueId, Tensor]
) -> dict[ValueId, Tensor]:
    """One rank's forward and backward: the final values, and the gradients of its parameters."""
    tape: list[tuple[Segment, dict[ValueId, Tensor], dict[ValueId, Tensor]]] = []
    passed: dict[ValueId, Tensor] = {}
    for segment in program.segments:
        received = {
            value: passed[value].detach().requires_grad_(program.values[value].requires_grad)
            for value in segment.received
        }
        arguments = [received[v] if v in received else values[v] for v in segment.arguments]
        passed = dict(zip(segment.results, segment.module(*arguments), strict=True))
        for value, tensor in passed.items():
            assert tuple(tensor.shape) == program.values[value].shape, str(value)
        tape.append((segment, received, passed))
    final = passed
    gradients: dict[ValueId, Tensor] = {model.loss: torch.ones_like(final[model.loss])}
    for _, received, results in reversed(tape):
        roots = [value for value in gradients if results[value].requires_grad]
        torch.autograd.backward([results[v] for v in roots], [gradients[v] for v in roots])
        gradients = {v: t.grad for v, t in received.items() if t.grad is not None}
    found = {value: tensor.detach() for value, tensor in final.items()}
    for value, tensor in values.items():
        if tensor.requires_grad:
            found[value] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    return found


def on_grid(
    mesh: Mesh, function: Callable[[Mapping[str, ThreadGroup]], dict[ValueId, Tensor]]
) -> list[dict[ValueId, Tensor]]:
    """``function`` on every rank of a stage, given its groups; results in order of rank."""
    groups: dict[int, dict[str, ThreadGroup]] = {rank: {} for rank in range(mesh.num_ranks)}
    meetings: list[Meeting] = []
    for axis in LAYOUT_AXES:
        for ranks in mesh.groups(axis):
            members = thread_groups(axis, len(ranks))
            meetings.append(members[0].meeting)
            for rank, member in zip(ranks, members, strict=True):
                groups[rank][axis] = member
    num_ranks = mesh.num_ranks // mesh.pp
    return run_ranks(num_ranks, lambda rank: function(groups[rank]), meetings=meetings)


def placed(text: str) -> Placement:
    """``"S(0) I"``: states on the data and the tensor axis; ``I`` on all others."""
    outer, inner = map(parse_state, text.split(" "))
    between = [INVARIANT] * (len(LAYOUT_AXES) - 2)
    return (outer, *between, inner)


def place(tensor: Tensor, placement: Placement, at: Sequence[ThreadGroup]) -> Tensor:
    """One rank's part of a whole tensor; partial sums get unequal terms."""
    for state, group in zip(placement, at, strict=True):
        if state.is_sharded:
            tensor = take_shard(tensor, state, group.rank, group.size)
        elif state.kind is StateKind.PARTIAL:
            tensor = tensor * (2 * (group.rank + 1) / (group.size * (group.size + 1)))
    return tensor


def combine(
    parts: Sequence[Tensor], placement: Placement, sizes: Sequence[int], what: str
) -> Tensor:
    """The whole tensor from all ranks' parts (the last axis fastest), the innermost axis first."""
    parts = list(parts)
    for state, size in reversed(list(zip(placement, sizes, strict=True))):
        groups = [parts[start : start + size] for start in range(0, len(parts), size)]
        parts = [_combine_axis(group, state, what) for group in groups]
    (whole,) = parts
    return whole


def _combine_axis(parts: list[Tensor], state: State, what: str) -> Tensor:
    if state.is_sharded:
        return assemble(parts, state)
    if state.kind is StateKind.PARTIAL:
        return torch.stack(parts).sum(0)
    for part in parts[1:]:
        message = f"{what} is {state}, but differs between ranks"
        torch.testing.assert_close(part, parts[0], msg=message, equal_nan=True)
    return parts[0]


def _whole(
    value: ValueId,
    model: ModelGraph,
    parameters: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
) -> Tensor:
    if value.role is Role.PARAMETER:
        return parameters[value.name]
    if value.role is Role.INPUT:
        return inputs[value.name]
    return model.constants[value.name]
