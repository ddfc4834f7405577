"""Keyword arguments of ``plan``, ``estimate`` and ``compile``: their names, types and meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, cast

from autopar.capture import Inputs, LossFn
from autopar.ir.plan import Plan, PrecisionName
from autopar.ir.plan_search import ObjectiveName

OptimizerName = Literal["adamw", "adam", "sgd"]
Progress = Callable[[str], None]

Names = TypeVar("Names")


class ModelArguments(TypedDict, total=False):
    """What a module in memory needs beside itself.

    Attributes:
        example_batch: Inputs of a module that is not from Hugging Face, batch first.
        loss_fn: ``loss_fn(output, batch)`` for a module whose output is no loss.
    """

    example_batch: Inputs | None
    loss_fn: LossFn | None


class NumberArguments(TypedDict, total=False):
    """Numbers of the optimizer, and ``seed``, that of initial weights and of random numbers.

    Attributes:
        max_grad_norm: Global clipping; None switches it off.
    """

    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    max_grad_norm: float | None
    seed: int


class OptimizerArguments(NumberArguments, total=False):
    """``NumberArguments`` and ``optimizer``: ``adamw`` (default), ``adam`` or ``sgd``."""

    optimizer: OptimizerName


class BatchArguments(TypedDict, total=False):
    """What a step has, and in which numbers.

    Attributes:
        global_batch_size: Sequences per optimizer step; default: one per GPU, at least 8.
        seq_len: Tokens per sequence; default: the model's longest.
        precision: Of compute; default: the hardware's (bf16 on GPUs). Masters are fp32 or wider;
            fp16 scales the loss.
        gradient_dtype: In which gradients are accumulated; default: fp32 (float64 under float64).
        reduce_dtype: In which gradients are sent to be summed; default: as they are accumulated.
    """

    global_batch_size: int | None
    seq_len: int | None
    precision: PrecisionName | None
    gradient_dtype: PrecisionName | None
    reduce_dtype: PrecisionName | None


class SearchArguments(TypedDict, total=False):
    """What may be chosen, and how it is searched.

    Attributes:
        pin: Decisions to fix: ``tp, pp, cp, ep, dp_replicate, dp_shard, micro_batch_size,
            zero_stage, recompute, schedule, virtual_stages, extra_in_flight, sequence_parallel,
            loss_parallel, loss_chunks, offload_optimizer, offload_activations, gather_again,
            kernel, cuts, shares, group_order, axis_order, zero_stages, precision, comm_precision,
            grads_fp32``.
    """

    pin: Mapping[str, int | str] | None


class ObjectiveArguments(TypedDict, total=False):
    """What is to be best, over which GPUs.

    Attributes:
        objective: ``step_time`` (default): seconds of a step; ``cost``: money per token;
            ``gpus``: fewest GPUs that meet a deadline; ``training_time``: of a token budget, the
            batch chosen too unless it is given.
        gpus: How many GPUs of the cluster's kind, or (fewest, most) to choose from, whatever nodes
            the cluster has: divisors of a node, and whole nodes. Default: all of the cluster.
        price_per_gpu_hour: For ``cost``.
        deadline_s: For ``gpus``: seconds of a step at most; with ``token_budget`` of the training.
        token_budget: Tokens that a training takes with small batches.
        critical_batch_size: Sequences of the batch that takes twice as many of them, in twice the
            fewest steps; default: a training takes its budget with any batch.
    """

    objective: ObjectiveName
    gpus: int | tuple[int, int] | None
    price_per_gpu_hour: float | None
    deadline_s: float | None
    token_budget: float | None
    critical_batch_size: float | None


class ReportArguments(TypedDict, total=False):
    """What a plan tells beside its decisions.

    Attributes:
        what_if: Also what changes of the cluster would buy, and what runners-up cost that are only
            bounded otherwise. Takes a search for each change.
    """

    what_if: bool


class LimitArguments(TypedDict, total=False):
    """Where the search begins, and when it ends.

    Attributes:
        warm_start: A plan, or the file of one, whose decisions are tried first, as far as this
            cluster and batch have them: after a node was lost, or the batch changed.
        time_limit_s: Seconds of searching after which the best that was found is taken, with what
            is proved of it then. Something is found whatever it takes.
    """

    warm_start: Plan | str | Path | None
    time_limit_s: float | None


class RequestArguments(
    OptimizerArguments,
    BatchArguments,
    SearchArguments,
    LimitArguments,
    ObjectiveArguments,
    ReportArguments,
    total=False,
):
    """What is asked for of a model and a cluster."""


class OpenArguments(ModelArguments, RequestArguments, total=False):
    """What is asked for of a model that is not open yet."""


class PlanArguments(OpenArguments, total=False):
    """Arguments of ``plan``.

    Attributes:
        progress: Called with a line of text now and then.
    """

    progress: Progress | None


class EstimateArguments(ModelArguments, OptimizerArguments, BatchArguments, total=False):
    """Arguments of ``estimate``."""


class SweepArguments(
    ModelArguments, OptimizerArguments, BatchArguments, SearchArguments, total=False
):
    """Arguments of ``sweep``; ``progress`` as of ``plan``."""

    progress: Progress | None


class CompileArguments(
    ModelArguments,
    NumberArguments,
    BatchArguments,
    SearchArguments,
    LimitArguments,
    total=False,
):
    """Arguments of ``compile`` beside its own."""


OPTIMIZER_DEFAULTS: OptimizerArguments = {
    "optimizer": "adamw",
    "learning_rate": 3e-4,
    "weight_decay": 0.1,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 0,
}
"""Of a training about which nothing is said."""


def check_names(function: str, given: Mapping[str, Any], known: type) -> None:
    """Raise ``TypeError``, as Python does, for an argument that ``function`` does not take.

    Args:
        function: Its name, for the message.
        given: Keyword arguments.
        known: The ``TypedDict`` that names them.
    """
    for name in given:
        if name not in known.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def only(known: type[Names], given: Mapping[str, Any]) -> Names:
    """Those of ``given`` that the ``TypedDict`` names."""
    names = known.__annotations__
    return cast("Names", {name: value for name, value in given.items() if name in names})
