"""``plan``: capture → solve → plan. No weights, no GPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Unpack

from torch import nn

from autopar.api.arguments import PlanArguments, Progress, check_names
from autopar.api.request import Request, open_request
from autopar.capture import ModelSource, capture, open_model
from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph
from autopar.ir.plan import Plan, PrecisionName
from autopar.ir.precision import DTYPES
from autopar.passes import plan_moves
from autopar.solver import Cluster
from autopar.solver.instance import sequence_length
from autopar.solver.ranges import solve_range

_log = logging.getLogger("autopar")


def plan(
    model: str | Path | nn.Module, cluster: Cluster, **arguments: Unpack[PlanArguments]
) -> Plan:
    """The best plan for training ``model`` on ``cluster``: of the fastest step, unless another
    objective is named.

    Args:
        model: A Hugging Face config directory or ``config.json``, ``"package.module:function"``, or
            a module.
        cluster: The GPUs to use; all of them are used unless mesh degrees are pinned.
        arguments: See ``PlanArguments`` and what it is made of (``autopar.api.arguments``).

    Raises:
        InputError: An argument is wrong, or a pin cannot hold.
        CaptureError: The model cannot be captured.
        InfeasibleError: No plan fits into memory, or meets a deadline.
    """
    check_names("plan", arguments, PlanArguments)
    request = open_request(model, cluster, arguments)
    progress = arguments.get("progress")
    return solve_request(request, capture_request(request, progress), progress)


def capture_request(request: Request, progress: Progress | None = None) -> ModelGraph:
    """The graph of the request's model, in its compute dtype."""
    if progress is not None:
        progress(f"capturing {request.source.name}")
    return capture_model(request.source, request.seq_len, request.training.precision)


def capture_source(source: ModelSource, plan: Plan, *, training: bool = True) -> ModelGraph:
    """The graph of a model as ``plan`` trains it, or evaluates it."""
    return capture_model(source, plan.model.seq_len, plan.training.precision, training=training)


def capture_model(
    source: ModelSource,
    seq_len: int | None,
    precision: PrecisionName,
    *,
    training: bool = True,
) -> ModelGraph:
    """The graph of a model, in this compute dtype, in train or in eval mode."""
    return capture(
        source.build(device="meta"),
        source.example_inputs(seq_len),
        loss_fn=source.loss_fn,
        compute_dtype=DTYPES[precision],
        training=training,
        name=source.name,
    )


def solve_request(request: Request, graph: ModelGraph, progress: Progress | None = None) -> Plan:
    """The best plan for a captured model. Says once what defaults it has."""
    if request.defaults:
        _log.info(
            "not given, so chosen: %s; planned for %s (learning rate %g) and %s",
            ", ".join(request.defaults),
            request.training.optimizer,
            request.training.learning_rate,
            "the model's own loss" if request.source.loss_fn is None else "the loss function given",
        )
    return solve_range(
        graph,
        request.points,
        request.goal.objective(sequence_length(graph) or 1),
        training=request.training,
        pin=request.pin,
        source=request.source.spec,
        describe_moves=plan_moves,
        what_if=request.what_if,
        warm_start=request.warm_start,
        time_limit_s=request.time_limit_s,
        progress=progress,
    )


def plan_source(plan: Plan) -> ModelSource:
    """The model that a plan names, to be built again.

    Raises:
        InputError: It was given in memory.
    """
    if plan.model.source is None:
        raise InputError(
            f"the plan's model {plan.model.name} was given in memory and cannot be built again",
            hint="plan from a config or package.module:function, or pass plan and module to "
            "autopar.compile",
        )
    return open_model(plan.model.source)
