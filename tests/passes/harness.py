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
from autopar.ir.mesh import DATA_AXIS, TENSOR_AXIS, Mesh
from autopar.ir.moves import assemble, take_shard
from autopar.ir.placement import Placement, State, StateKind
from autopar.ir.program import Program, Segment, bind_axes
from autopar.runtime.threads import ThreadGroup, run_ranks, thread_groups


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
    """Forward and backward of one micro-batch on ``mesh.dp × mesh.tp`` threads.

    Args:
        parameters: Whole tensors by parameter name.
        inputs: The global micro-batch.
    """

    def rank_step(groups: Mapping[str, ThreadGroup]) -> dict[ValueId, Tensor]:
        at = (groups[DATA_AXIS], groups[TENSOR_AXIS])
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
        return combine([[rank[value] for rank in row] for row in results], placement, str(value))

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
) -> list[list[dict[ValueId, Tensor]]]:
    """``function`` on every rank, given its groups; results by data and tensor coordinate."""
    data = [thread_groups(DATA_AXIS, mesh.dp) for _ in range(mesh.tp)]
    tensor = [thread_groups(TENSOR_AXIS, mesh.tp) for _ in range(mesh.dp)]

    def run(rank: int) -> dict[ValueId, Tensor]:
        dp, tp = divmod(rank, mesh.tp)
        return function({DATA_AXIS: data[tp][dp], TENSOR_AXIS: tensor[dp][tp]})

    meetings = [groups[0].meeting for groups in (*data, *tensor)]
    flat = run_ranks(mesh.dp * mesh.tp, run, meetings=meetings)
    return [flat[dp * mesh.tp : (dp + 1) * mesh.tp] for dp in range(mesh.dp)]


def place(tensor: Tensor, placement: Placement, at: Sequence[ThreadGroup]) -> Tensor:
    """One rank's part of a whole tensor; partial sums get unequal terms."""
    for state, group in zip(placement, at, strict=True):
        if state.is_sharded:
            tensor = take_shard(tensor, state, group.rank, group.size)
        elif state.kind is StateKind.PARTIAL:
            tensor = tensor * (2 * (group.rank + 1) / (group.size * (group.size + 1)))
    return tensor


def combine(grid: Sequence[Sequence[Tensor]], placement: Placement, what: str) -> Tensor:
    """The whole tensor from all ranks' parts, the innermost axis first."""
    outer, inner = placement
    rows = [_combine_axis(list(row), inner, what) for row in grid]
    return _combine_axis(rows, outer, what)


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
