"""Lower a model under a layout to what its ranks run: the order of the passes stands here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx

from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph, Role, info
from autopar.ir.kernels import DEFAULT_KERNELS, runnable_kernels
from autopar.ir.layout import Layout
from autopar.ir.mesh import DATA_AXIS, LAYOUT_AXES, Mesh
from autopar.ir.moves import Collective, backward_of, collective_of, move
from autopar.ir.placement import parse_state
from autopar.ir.plan import Plan
from autopar.ir.program import AXIS_HANDLE, Program
from autopar.ir.typecheck import check_kind, check_model, check_moved
from autopar.passes.base import Pass, TypedKind
from autopar.passes.choose_kernels import choose_kernels
from autopar.passes.chunk_loss import ChunkLoss
from autopar.passes.fuse_chains import fuse_chains
from autopar.passes.idle_axes import settle_idle_axes
from autopar.passes.insert_moves import InsertMoves
from autopar.passes.localize import localize
from autopar.passes.remove_dead_code import RemoveDeadCode
from autopar.passes.segments import Cut, build_segments
from autopar.passes.values import local_values


def kind_passes(mesh: Mesh) -> tuple[Pass, ...]:
    """The rewrites of a typed kind, in order."""
    return (
        RemoveDeadCode(),  # first: what nobody reads needs no moves
        InsertMoves(mesh=mesh),
    )


def lower_plan(model: ModelGraph, plan: Plan) -> Program:
    """The program of ``plan``, and its ``rest`` for a last micro-batch that is shorter; see
    ``lower``.

    Raises:
        PlacementError: A dim does not divide; also at the size of the last micro-batch.
        InputError: The plan names kernels that nothing here runs.
    """
    return lower_at(model, plan.typed_layout(), plan)


def lower_at(
    model: ModelGraph, layout: Layout, plan: Plan, *, fewer_chunks: bool = False
) -> Program:
    """``model`` under ``layout``, at the sizes and cuts of ``plan``; see ``lower_plan``.

    Args:
        fewer_chunks: See ``lower``.
    """
    mesh, batch = plan.device_mesh(), plan.batch
    if batch.shares:
        _require_apart(model, layout, mesh, batch.micro_batch_size)

    def at(micro_batch_size: int) -> Program:
        return lower(
            model,
            layout,
            mesh=mesh,
            micro_batch_size=micro_batch_size,
            segments=plan.segments,
            kernels=plan.schedule.kernels,
            loss_chunks=plan.schedule.loss_chunks,
            fewer_chunks=fewer_chunks or micro_batch_size != batch.micro_batch_size,
        )

    program, last_size = at(batch.micro_batch_size), batch.last_size(mesh.batch_ranks)
    if last_size == batch.micro_batch_size:
        return program
    return dataclasses.replace(program, rest=at(last_size))


def _require_apart(model: ModelGraph, layout: Layout, mesh: Mesh, micro_batch_size: int) -> None:
    """Raise ``InputError`` if data ranks talk within a micro-batch: those with a smaller share of
    the batch would not be there.
    """
    typed = place(model, layout, mesh=mesh, batch=micro_batch_size * mesh.batch_ranks)
    for kind in typed.values():
        for node in kind.kind.graph.nodes:
            if node.target is not move:
                continue
            _, handle, *states = node.args
            assert isinstance(handle, fx.Node)
            if handle.target != AXIS_HANDLE.format(DATA_AXIS):
                continue
            source, target = (parse_state(str(state)) for state in states)
            needed = {collective_of(source, target), collective_of(*backward_of(source, target))}
            if needed != {Collective.NONE}:
                raise InputError(
                    "data ranks have unequal shares of the batch, but in a micro-batch they need "
                    f"each other: {source} → {target}",
                    where=info(node).source or kind.kind.name,
                    hint="plan with equal shares",
                )


def lower(
    model: ModelGraph,
    layout: Layout,
    *,
    mesh: Mesh,
    micro_batch_size: int,
    segments: Sequence[Cut],
    kernels: str = DEFAULT_KERNELS,
    loss_chunks: int = 1,
    fewer_chunks: bool = False,
) -> Program:
    """The program that the ranks of ``mesh`` run, one graph for each kind of block.

    Args:
        layout: A typing of every node of every kind: each node's own is well-typed; between nodes
            moves are inserted.
        micro_batch_size: Sequences per data rank.
        segments: Runs of blocks with their stages, in order.
        kernels: By which it is computed.
        loss_chunks: Slices of the tokens whose loss is computed one after the other.
        fewer_chunks: Take fewer where there cannot be so many.

    Raises:
        PlacementError: The layout does not type-check, or a dim does not divide, or the loss cannot
            be computed in so many chunks.
        InputError: The segments are not runs that cover the model, or the micro-batch is empty, or
            nothing here runs the kernels.
    """
    if micro_batch_size < 1:
        raise InputError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
    chosen = runnable_kernels(kernels)
    batch = micro_batch_size * mesh.batch_ranks
    typed = place(model, layout, mesh=mesh, batch=batch)
    values = local_values(model, typed, mesh=mesh, batch=batch)
    settled = settle_idle_axes(layout, mesh)
    chunk_loss = ChunkLoss(
        model=model,
        mesh=mesh,
        batch=batch,
        num_chunks=loss_chunks,
        kernels=chosen,
        at_most=fewer_chunks,
    )
    kinds: dict[str, fx.GraphModule] = {}
    for name, kind in typed.items():
        local = chunk_loss(localize(kind, mesh=mesh, batch=batch), kind, settled[name])
        choose_kernels(local.graph, chosen)
        kinds[name] = _module(fuse_chains(local, chosen, mesh).graph, name)
    return Program(
        kinds=kinds,
        segments=build_segments(model, segments, kinds),
        values=values,
        parameters={
            value.name: local for value, local in values.items() if value.role is Role.PARAMETER
        },
    )


def place(model: ModelGraph, layout: Layout, *, mesh: Mesh, batch: int) -> dict[str, TypedKind]:
    """The kinds of ``model`` with the moves that ``layout`` needs; each is rewritten once.

    Args:
        batch: Sequences in the global micro-batch.

    Raises:
        PlacementError: The layout does not type-check.
    """
    degrees = mesh.degrees()
    settled = settle_idle_axes(layout, mesh)
    check_model(model, settled, degrees=degrees, batch=batch)
    placed: dict[str, TypedKind] = {}
    for name, kind in model.kinds.items():
        typed = TypedKind(kind=kind, layout=settled[name])
        placed[name] = run_passes(typed, kind_passes(mesh), degrees=degrees, batch=batch)
        check_moved(placed[name].kind, placed[name].layout)
    return placed


def run_passes(
    typed: TypedKind, passes: Sequence[Pass], *, degrees: Mapping[str, int], batch: int
) -> TypedKind:
    """All ``passes`` on one kind, type-checked after each that changed something.

    Raises:
        PlacementError: The kind does not type-check any more: a pass is wrong.
    """
    for rewrite in passes:
        rewritten = rewrite(typed)
        if rewritten is not typed:
            check_kind(rewritten.kind, rewritten.layout, degrees=degrees, batch=batch)
        typed = rewritten
    return typed


def _module(graph: fx.Graph, name: str) -> fx.GraphModule:
    """A graph module without the groups of its axes, which are bound on each rank."""
    handles = {AXIS_HANDLE.format(axis): None for axis in LAYOUT_AXES}
    return fx.GraphModule(handles, graph, class_name=name)
