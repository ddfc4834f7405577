"""``plan``: capture → solve → plan. No weights, no GPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pydantic
from torch import nn

from autopar.api.training_pins import training_pins
from autopar.capture import (
    Inputs,
    LossFn,
    ModelSource,
    capture,
    open_model,
)
from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph
from autopar.ir.plan import Plan, PrecisionName, TrainingPlan
from autopar.ir.precision import DTYPES
from autopar.passes import plan_moves
from autopar.solver import Cluster, solve
from autopar.solver.candidates import check_pins

_log = logging.getLogger("autopar")

OptimizerName = Literal["adamw", "adam", "sgd"]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to plan. ``defaults`` says in words what the user left open, ``pin`` what the solver
    may not choose.
    """

    source: ModelSource
    cluster: Cluster
    global_batch_size: int
    seq_len: int | None
    training: TrainingPlan
    pin: Mapping[str, int | str]
    defaults: tuple[str, ...]


def plan(
    model: str | Path | nn.Module,
    cluster: Cluster,
    *,
    example_batch: Inputs | None = None,
    loss_fn: LossFn | None = None,
    global_batch_size: int | None = None,
    seq_len: int | None = None,
    precision: PrecisionName | None = None,
    gradient_dtype: PrecisionName | None = None,
    reduce_dtype: PrecisionName | None = None,
    optimizer: OptimizerName = "adamw",
    learning_rate: float = 3e-4,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
    pin: Mapping[str, int | str] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan for training ``model`` on ``cluster``.

    Args:
        model: A Hugging Face config directory or ``config.json``, ``"package.module:function"``, or
            a module.
        cluster: The GPUs to use; all of them are used unless mesh degrees are pinned.
        example_batch: Inputs of a module that is not from Hugging Face, batch first.
        loss_fn: ``loss_fn(output, batch)`` for a module whose output is no loss.
        global_batch_size: Sequences per optimizer step; default: one per GPU, at least 8.
        seq_len: Tokens per sequence; default: the model's longest.
        precision: Of compute; default: the hardware's (bf16 on GPUs). Masters are fp32 or wider;
            fp16 scales the loss.
        gradient_dtype: In which gradients are accumulated; default: fp32 (float64 under float64).
        reduce_dtype: In which gradients are sent to be summed; default: as they are accumulated.
        optimizer, learning_rate, weight_decay, betas, eps, max_grad_norm, seed: How to train.
        pin: Decisions to fix: ``tp, pp, cp, ep, dp_replicate, dp_shard, micro_batch_size,
            zero_stage, recompute, schedule, virtual_stages, sequence_parallel, kernel, cuts,
            precision, comm_precision, grads_fp32``.
        progress: Called with a line of text now and then.

    Raises:
        InputError: An argument is wrong, or a pin cannot hold.
        CaptureError: The model cannot be captured.
        InfeasibleError: No plan fits into memory.
    """
    request = make_request(
        open_model(model, example_inputs=example_batch, loss_fn=loss_fn),
        cluster,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        precision=precision,
        gradient_dtype=gradient_dtype,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        betas=betas,
        eps=eps,
        max_grad_norm=max_grad_norm,
        seed=seed,
        pin=pin,
    )
    return solve_request(request, capture_request(request, progress), progress)


def make_request(
    source: ModelSource,
    cluster: Cluster,
    *,
    global_batch_size: int | None,
    seq_len: int | None,
    precision: PrecisionName | None = None,
    gradient_dtype: PrecisionName | None = None,
    reduce_dtype: PrecisionName | None = None,
    optimizer: OptimizerName = "adamw",
    learning_rate: float = 3e-4,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
    pin: Mapping[str, int | str] | None,
) -> Request:
    """A request with its defaults filled in.

    Raises:
        InputError: An argument is wrong, or a pin cannot hold: known before the model is captured.
    """
    defaults: list[str] = []
    settings, layout = training_pins(
        pin or {},
        {"precision": precision, "gradient_dtype": gradient_dtype, "reduce_dtype": reduce_dtype},
        cluster.default_precision,
    )
    precision = settings.get("precision")
    gradient_dtype, reduce_dtype = settings.get("gradient_dtype"), settings.get("reduce_dtype")
    if global_batch_size is None:
        global_batch_size = max(8, cluster.num_gpus)
        defaults.append(f"global_batch_size {global_batch_size}")
    if seq_len is None:
        defaults.append("sequences as long as the model takes")
    if precision is None:
        precision = cluster.default_precision
        defaults.append(f"precision {precision}")
    if gradient_dtype is None:
        gradient_dtype = "float64" if precision == "float64" else "fp32"
    for name, value in (("global_batch_size", global_batch_size), ("seq_len", seq_len)):
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise InputError(f"{name} is {value}; it must be a whole number, at least 1")
    try:
        training = TrainingPlan(
            precision=precision,
            gradient_dtype=gradient_dtype,
            reduce_dtype=reduce_dtype or gradient_dtype,
            optimizer=optimizer,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
            max_grad_norm=max_grad_norm,
            seed=seed,
        )
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{first['loc'][0]} is {first['input']!r}: {first['msg']}") from None
    _check_training(training)
    check_pins(layout, cluster, global_batch_size)
    return Request(
        source=source,
        cluster=cluster,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        training=training,
        pin=layout,
        defaults=tuple(defaults),
    )


def _check_training(training: TrainingPlan) -> None:
    """Raise ``InputError`` for what no optimizer takes; the search itself would not notice."""
    for name, value in (
        ("learning_rate", training.learning_rate),
        ("eps", training.eps),
        ("max_grad_norm", training.max_grad_norm),
    ):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{name} is {value}; it must be a positive number")
    if not 0 <= training.weight_decay < math.inf:
        raise InputError(f"weight_decay is {training.weight_decay}; it must be 0 or more")
    if not all(0 <= beta < 1 for beta in training.betas):
        raise InputError(f"betas are {training.betas}; each must be at least 0 and below 1")
    if not 0 <= training.seed < 2**63:
        raise InputError(f"seed is {training.seed}; it must be 0 or more, and below 2^63")


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
    return solve(
        graph,
        request.cluster,
        global_batch_size=request.global_batch_size,
        training=request.training,
        pin=request.pin,
        source=request.source.spec,
        describe_moves=plan_moves,
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
