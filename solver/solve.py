"""From a captured model and a cluster to the plan of the fastest step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Literal, Protocol

from autopar.ir.errors import InputError, PlacementError
from autopar.ir.graph import ModelGraph, Role
from autopar.ir.layout import Layout
from autopar.ir.mesh import DATA_AXIS, TENSOR_AXIS, Mesh
from autopar.ir.plan import (
    BatchPlan,
    Certificate,
    MeshPlan,
    ModelRef,
    MovePlan,
    ParameterPlan,
    Plan,
    SchedulePlan,
    SegmentPlan,
    TrainingPlan,
    layout_text,
    placement_text,
    plan_axes,
)
from autopar.ir.recompute import recomputed_blocks
from autopar.ir.typecheck import check_model
from autopar.ir.zero_stages import exceptions_of
from autopar.solver.candidates import Candidate
from autopar.solver.data_axis import DataAxis
from autopar.solver.hardware import Cluster
from autopar.solver.infeasible import infeasible_error
from autopar.solver.instance import Instance, make_instance
from autopar.solver.layout.decode import axis_typing, join_axes
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.offloading import run_instance
from autopar.solver.pins import Pins
from autopar.solver.predict import predict
from autopar.solver.reasons import NUM_ALTERNATIVES, alternatives, search_report
from autopar.solver.search import Progress
from autopar.solver.search_result import SearchResult
from autopar.solver.shares import share_plans
from autopar.solver.solved import Solved
from autopar.solver.unruled import replicated_ops
from autopar.solver.what_if import shadow_prices, solve_runners_up

_EXACT = 1e-6


class DescribeMoves(Protocol):
    """Lists the moves that a layout makes necessary; the passes know."""

    def __call__(
        self, model: ModelGraph, layout: Layout, /, *, mesh: Mesh, micro_batch_size: int
    ) -> tuple[MovePlan, ...]: ...


def solve(
    model: ModelGraph | ModelFacts,
    cluster: Cluster,
    *,
    global_batch_size: int,
    training: TrainingPlan,
    seq_len: int | None = None,
    pin: Pins | None = None,
    source: str | None = None,
    describe_moves: DescribeMoves | None = None,
    what_if: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """The plan of the fastest step that was found, with a certificate of how good it is.

    Args:
        model: The captured model, or its facts.
        cluster: The GPUs; all are used unless all four degrees are pinned.
        global_batch_size: Sequences per step.
        training: Numerics and optimizer.
        seq_len: Tokens per sequence; default: the second dim of the model's inputs.
        pin: Decisions to fix, by the names of ``candidates``.
        source: What rebuilds the model, for the plan.
        describe_moves: Fills ``Plan.moves``; without it they are left out.
        what_if: Also search clusters with one change each, for ``Plan.what_if``, and solve
            runners-up that are only bounded otherwise.
        progress: Called with a line of text now and then.

    Raises:
        InputError: A pin that cannot hold.
        InfeasibleError: Nothing fits into memory.
    """
    instance = make_instance(
        model,
        cluster,
        global_batch_size=global_batch_size,
        training=training,
        seq_len=seq_len,
        pin=pin,
        progress=progress,
    )
    return solve_instance(instance, source=source, describe_moves=describe_moves, what_if=what_if)


def solve_instance(
    instance: Instance,
    *,
    source: str | None = None,
    describe_moves: DescribeMoves | None = None,
    what_if: bool = False,
) -> Plan:
    """``solve`` of an instance.

    Raises:
        InputError: A pin that cannot hold.
        InfeasibleError: Nothing fits into memory.
    """
    started = time.perf_counter()
    instance, result = run_instance(instance)
    if result.best is None:
        raise infeasible_error(instance)
    return make_plan(
        instance,
        result,
        solve_s=instance.made_s + time.perf_counter() - started,
        source=source,
        describe_moves=describe_moves,
        what_if=what_if,
    )


def make_plan(
    instance: Instance,
    result: SearchResult,
    *,
    solve_s: float,
    source: str | None = None,
    describe_moves: DescribeMoves | None = None,
    what_if: bool = False,
) -> Plan:
    """The plan of the best that a search found; arguments are those of ``solve``.

    Raises:
        InputError: A pinned micro-batch leaves a last one that the layout does not fit.
    """
    assert result.best is not None
    best, candidate = result.best, result.best.candidate
    search, facts = instance.search, instance.facts
    model, cluster, training = facts.model, instance.cluster, instance.training
    global_batch_size, seq_len = instance.global_batch_size, instance.seq_len
    more = solve_runners_up(instance, result, NUM_ALTERNATIVES) if what_if else []
    layout = best_layout(facts, search.pricer.data_axis, best)
    mesh = candidate.mesh()
    batch = BatchPlan(
        global_batch_size=global_batch_size,
        micro_batch_size=candidate.micro_batch_size,
        num_micro_batches=candidate.num_micro_batches,
        shares=share_plans(cluster, candidate),
    )
    check_last(model, layout, batch, mesh)
    axes = plan_axes(mesh)
    moves: tuple[MovePlan, ...] = ()
    if describe_moves is not None:
        moves = describe_moves(
            model, layout, mesh=mesh, micro_batch_size=candidate.micro_batch_size
        )
    return Plan(
        model=ModelRef(
            name=model.name,
            source=source,
            seq_len=seq_len,
            num_parameters=sum(math.prod(p.shape) for p in model.parameters.values()),
            fingerprint=model.fingerprint,
        ),
        cluster=cluster.ref(candidate.group_order),
        mesh=MeshPlan.of(mesh),
        batch=batch,
        schedule=SchedulePlan(
            name=candidate.schedule,
            recompute=candidate.recompute,
            zero_stage=candidate.zero_stage,
            kernels=candidate.kernels,
            virtual_stages=candidate.virtual_stages,
            recomputed_blocks=candidate.recomputed_blocks,
            recomputed_by_op=candidate.recomputed_by_op,
            gathered_again=_gathered_again(facts, candidate),
            extra_in_flight=candidate.extra_in_flight,
            loss_chunks=candidate.loss_chunks,
            offload_optimizer=candidate.offload_optimizer,
            offloaded_blocks=candidate.offloaded_blocks,
            zero_stages=exceptions_of(candidate.zero_stage, candidate.zero_stages),
        ),
        training=training,
        pins=instance.pin,
        parameters=_parameters(model, axes, layout, best),
        segments=tuple(
            SegmentPlan(stage=stage, first_block=first, last_block=last)
            for stage, first, last in best.segments
        ),
        layout_axes=axes,
        layout=layout_text(layout, axes),
        moves=moves,
        replicated_ops=replicated_ops(
            model,
            cluster,
            sequences=candidate.micro_batch_size * mesh.batch_ranks,
            num_micro_batches=candidate.num_micro_batches,
        ),
        certificate=_certificate(result, best, solve_s),
        prediction=predict(
            best, model, cluster, training, global_batch_size=global_batch_size, seq_len=seq_len
        ),
        alternatives=alternatives(result, best, more),
        search=search_report(result, best),
        what_if=shadow_prices(instance, best) if what_if else (),
    )


def _gathered_again(facts: ModelFacts, candidate: Candidate) -> tuple[int, ...]:
    """The blocks that gather again: those that were chosen, or all where that is pinned."""
    if not (candidate.gather_again and candidate.tp > 1):
        return candidate.gathered_again
    again = recomputed_blocks(facts.model, candidate.recompute, candidate.recomputed_blocks)
    blocks = {block.index for block in facts.model.blocks}
    return tuple(sorted(blocks - again - {facts.loss_block}))


def best_layout(facts: ModelFacts, data_axis: DataAxis, best: Solved) -> Layout:
    """The layout over all axes, type-checked for the degrees of the plan."""
    candidate = best.candidate
    tensor = axis_typing(facts.model, facts.classes, best.setting.problem, best.solution)
    between = best.setting.axes.typings(cp=candidate.cp, ep=candidate.ep)
    layout = join_axes({DATA_AXIS: data_axis.typing(), **between, TENSOR_AXIS: tensor})
    mesh = candidate.mesh()
    batch = candidate.micro_batch_size * mesh.batch_ranks
    check_model(facts.model, layout, degrees=mesh.degrees(), batch=batch)
    return layout


def check_last(model: ModelGraph, layout: Layout, batch: BatchPlan, mesh: Mesh) -> None:
    """Raise ``InputError`` if the layout does not fit a last micro-batch that is shorter."""
    last = batch.last_size(mesh.batch_ranks)
    if last == batch.micro_batch_size:
        return
    try:
        check_model(model, layout, degrees=mesh.degrees(), batch=last * mesh.batch_ranks)
    except PlacementError as error:
        raise InputError(
            f"micro_batch_size={batch.micro_batch_size} is pinned and leaves {last} sequences for "
            f"the last micro-batch, which the best layout does not divide: {error.what}",
            where=error.where,
            hint="pin a size that divides a data rank's sequences, or leave it open",
        ) from None


def _parameters(
    model: ModelGraph, axes: tuple[str, ...], layout: Layout, best: Solved
) -> Mapping[str, ParameterPlan]:
    placements: dict[str, tuple[str, ...]] = {}
    stages: dict[str, dict[int, None]] = {}
    stage_of = {b: stage for stage, i, j in best.segments for b in range(i, j + 1)}
    for block in model.blocks:
        stage = stage_of[block.index]
        kind = model.kind_of(block)
        for node, value in zip(kind.placeholders, block.bindings, strict=True):
            if value.role is Role.PARAMETER:
                placement = layout[block.kind][node.name].results[0]
                placements[value.name] = placement_text(placement, axes)
                stages.setdefault(value.name, {})[stage] = None
    return {
        name: ParameterPlan(
            names=parameter.names,
            shape=parameter.shape,
            dtype=str(parameter.dtype).removeprefix("torch."),
            requires_grad=parameter.requires_grad,
            placement=placements.get(name, ("R",) * len(axes)),
            stages=tuple(stages.get(name, {0: None})),
        )
        for name, parameter in model.parameters.items()
    }


def _certificate(result: SearchResult, best: Solved, seconds: float) -> Certificate:
    gap = max(0.0, 1 - result.bound_s / best.step_s)
    status: Literal["optimal", "feasible"] = "optimal" if gap <= _EXACT else "feasible"
    statement = (
        "optimal in this cost model"
        if status == "optimal"
        else f"proved within {gap:.2%} of the optimum of this cost model"
    )
    if any(candidate.cp * candidate.ep > 1 for candidate in result.bounds):
        statement += ", context and expert axes typed each by itself"
    return Certificate(
        status=status,
        objective_s=best.step_s,
        bound_s=best.step_s * (1 - gap),
        gap=gap,
        solve_s=seconds,
        num_candidates=result.num_candidates,
        num_solved=len(result.solved),
        statement=statement,
    )
