"""A request: a model, a cluster and a training, with what the user left open filled in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import pydantic
from torch import nn

from autopar.api.arguments import (
    OPTIMIZER_DEFAULTS,
    ObjectiveArguments,
    OpenArguments,
    OptimizerArguments,
    RequestArguments,
    only,
)
from autopar.api.goal import Goal, clusters_of, make_goal
from autopar.api.training_pins import training_pins
from autopar.capture import ModelSource, open_model
from autopar.ir.errors import InputError
from autopar.ir.plan import Plan, TrainingPlan, read_plan
from autopar.solver import Cluster
from autopar.solver.pins import check_pins


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to plan.

    Attributes:
        cluster, global_batch_size: The last of ``points``.
        points: Clusters with batches to choose from; one, unless more were asked for.
        goal: What is to be best.
        pin: What the solver may not choose.
        warm_start, time_limit_s, what_if: As of ``plan``.
        defaults: What the user left open, in words.
    """

    source: ModelSource
    cluster: Cluster
    global_batch_size: int
    points: tuple[tuple[Cluster, int], ...]
    goal: Goal
    seq_len: int | None
    training: TrainingPlan
    pin: Mapping[str, int | str]
    warm_start: Plan | None
    time_limit_s: float | None
    what_if: bool
    defaults: tuple[str, ...]


def open_request(
    model: str | Path | nn.Module, cluster: Cluster, arguments: OpenArguments
) -> Request:
    """The request of these arguments, for the model that they describe."""
    source = open_model(
        model,
        example_inputs=arguments.get("example_batch"),
        loss_fn=arguments.get("loss_fn"),
    )
    return make_request(source, cluster, **only(RequestArguments, arguments))


def make_request(
    source: ModelSource, cluster: Cluster, **arguments: Unpack[RequestArguments]
) -> Request:
    """A request with its defaults filled in.

    Raises:
        InputError: An argument is wrong, or a pin cannot hold: known before the model is captured.
    """
    given: RequestArguments = {**OPTIMIZER_DEFAULTS, **arguments}
    defaults: list[str] = []
    settings, layout = training_pins(
        given.get("pin") or {},
        {
            "precision": given.get("precision"),
            "gradient_dtype": given.get("gradient_dtype"),
            "reduce_dtype": given.get("reduce_dtype"),
        },
        cluster.default_precision,
    )
    precision = settings.get("precision")
    gradient_dtype, reduce_dtype = settings.get("gradient_dtype"), settings.get("reduce_dtype")
    global_batch_size, seq_len = given.get("global_batch_size"), given.get("seq_len")
    for name, value in (("global_batch_size", global_batch_size), ("seq_len", seq_len)):
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise InputError(f"{name} is {value}; it must be a whole number, at least 1")
    goal = make_goal(only(ObjectiveArguments, given), batch_is_given=global_batch_size is not None)
    clusters = clusters_of(cluster, given.get("gpus"))
    batches = (global_batch_size,) if global_batch_size is not None else goal.batches()
    if not batches:
        batches = (max(8, clusters[-1].num_gpus),)
        defaults.append(f"global_batch_size {batches[0]}")
    if seq_len is None:
        defaults.append("sequences as long as the model takes")
    if precision is None:
        precision = cluster.default_precision
        defaults.append(f"precision {precision}")
    if gradient_dtype is None:
        gradient_dtype = "float64" if precision == "float64" else "fp32"
    try:
        training = TrainingPlan(
            precision=precision,
            gradient_dtype=gradient_dtype,
            reduce_dtype=reduce_dtype or gradient_dtype,
            **only(OptimizerArguments, given),
        )
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{first['loc'][0]} is {first['input']!r}: {first['msg']}") from None
    _check_training(training)
    points = _possible(clusters, batches, layout)
    return Request(
        source=source,
        cluster=points[-1][0],
        global_batch_size=points[-1][1],
        points=points,
        goal=goal,
        seq_len=seq_len,
        training=training,
        pin=layout,
        warm_start=_old_plan(given.get("warm_start")),
        time_limit_s=_time_limit(given.get("time_limit_s")),
        what_if=given.get("what_if", False),
        defaults=tuple(defaults),
    )


def _old_plan(old: Plan | str | Path | None) -> Plan | None:
    return old if old is None or isinstance(old, Plan) else read_plan(old)


def _time_limit(seconds: float | None) -> float | None:
    if seconds is not None and not seconds >= 0:
        raise InputError(f"time_limit_s is {seconds}; it must be 0 or more")
    return seconds


def _possible(
    clusters: Sequence[Cluster], batches: Sequence[int], pin: Mapping[str, int | str]
) -> tuple[tuple[Cluster, int], ...]:
    """Clusters with batches where the pins can hold, as far as is known before the capture.

    Raises:
        InputError: They hold nowhere.
    """
    found: list[tuple[Cluster, int]] = []
    refused: InputError | None = None
    for cluster, batch in itertools.product(clusters, batches):
        try:
            check_pins(pin, cluster, batch)
        except InputError as error:
            refused = error
        else:
            found.append((cluster, batch))
    if not found:
        assert refused is not None
        raise refused
    return tuple(found)


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
