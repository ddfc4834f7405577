"""``compile``: a model that trains in parallel on the ranks that run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from torch import Tensor, nn

from autopar.api.arguments import (
    CompileArguments,
    OptimizerName,
    RequestArguments,
    check_names,
    only,
)
from autopar.api.planning import capture_request, capture_source, plan_source, solve_request
from autopar.api.request import make_request
from autopar.capture import ModelSource, open_model
from autopar.ir.errors import ClusterError, PlanFormatError
from autopar.ir.graph import ModelGraph
from autopar.ir.plan import ClusterRef, Plan, from_json, read_plan, to_json
from autopar.ir.program import Program
from autopar.passes import lower_evaluation, lower_plan
from autopar.runtime import (
    Engine,
    EvalResult,
    OptimizerFactory,
    StepResult,
    connect,
    num_launched,
    share_text,
)
from autopar.solver import Cluster

Evaluation = Callable[[], tuple[Program, ModelGraph]]
"""Makes the program that evaluates a model, and the graph that it is of."""


class CompiledModel:
    """A model under a plan, on this rank. Make it with ``compile`` or ``compile_plan``.

    It is a context manager: leaving it ends the communication.
    """

    def __init__(self, plan: Plan, engine: Engine, evaluation: Evaluation) -> None:
        self.plan = plan
        self._engine = engine
        self._evaluation = evaluation

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._engine.communicator.rank

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, those before a checkpoint included."""
        return self._engine.num_steps

    def train_step(self, batch: Mapping[str, Tensor], *, local: bool = False) -> StepResult:
        """One optimizer step on a global batch; every rank calls it.

        Args:
            batch: Inputs by name, ``[global_batch_size, …]``, the same on every rank; with
                ``local``, ``[global_batch_size / dp, …]``: this rank's share only.
            local: Whether ``batch`` is this rank's share only.

        Raises:
            InputError: The batch does not fit the plan, or has no valid token.
            RankFailedError: This or another rank failed; no further step is possible.
        """
        return self._engine.train_step(batch, local=local)

    def eval_step(self, batch: Mapping[str, Tensor], *, local: bool = False) -> EvalResult:
        """The loss of a global batch in eval mode, without gradients; every rank calls it.

        The model's eval graph runs on the parameters as they are, under the plan's placements. It
        is captured at the first call. Arguments and errors are those of ``train_step``.

        Raises:
            CaptureError: The model cannot be captured in eval mode.
        """
        if not self._engine.can_evaluate:
            self._engine.set_evaluation(*self._evaluation())
        return self._engine.eval_step(batch, local=local)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters, optimizer state and step, global, on the CPU; every rank calls it."""
        return self._engine.state_dict()

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that any plan of this model can load; every rank calls it."""
        self._engine.save(path)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, under whatever plan it was written; every rank calls it."""
        self._engine.load(path)

    def close(self) -> None:
        """End the communication; every rank calls it."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._engine.abort(error)  # the others must not wait for this rank
        self.close()


def compile(
    model: str | Path | nn.Module,
    cluster: Cluster,
    *,
    plan: Plan | str | Path | None = None,
    optimizer: OptimizerName | OptimizerFactory = "adamw",
    **arguments: Unpack[CompileArguments],
) -> CompiledModel:
    """Plan ``model`` for ``cluster`` and make it run on the ranks that call this.

    Every rank calls it alike, under ``torchrun``. The first rank plans, the others get its plan.
    A module in memory trains from the weights that it has; it is not changed. For a Hugging Face
    model ``model`` and ``cluster`` are enough.

    Args:
        plan: Use this plan, or the one in this file, instead of searching one; the arguments that
            planning takes are ignored.
        optimizer: A name, or a function from a list of parameters (this rank's shards) to an
            optimizer; memory is then planned as for AdamW.
        arguments: As of ``autopar.plan``; see ``CompileArguments`` (``autopar.api.arguments``).

    Raises:
        ClusterError: The ranks that run are not those of the cluster.
        PlanFormatError: The plan is for another model.
        InputError, CaptureError, InfeasibleError: As ``autopar.plan``.
    """
    check_names("compile", arguments, CompileArguments)
    source = open_model(
        model,
        example_inputs=arguments.get("example_batch"),
        loss_fn=arguments.get("loss_fn"),
    )
    _check_ranks(cluster.num_gpus, "cluster")
    named: OptimizerName = "adamw"
    factory: OptimizerFactory | None = None
    if callable(optimizer):
        factory = optimizer
    else:
        named = optimizer
    if isinstance(plan, str | Path):
        plan = read_plan(plan)
    if plan is not None:
        if plan.cluster.fingerprint != cluster.fingerprint:
            raise ClusterError(
                f"the plan is for {_describe(plan.cluster)}, not for {_describe(cluster.ref())}",
                hint="plan again for this cluster",
            )
        return _run_plan(plan, source, capture_source(source, plan), factory)
    given = only(RequestArguments, {**arguments, "optimizer": named})
    request = make_request(source, cluster, **given)
    graph = capture_request(request)
    text = share_text("plan", lambda: to_json(solve_request(request, graph)))
    return _run_plan(from_json(text, where="the first rank's plan"), source, graph, factory)


def compile_plan(plan: Plan, *, optimizer: OptimizerFactory | None = None) -> CompiledModel:
    """The model that ``plan`` names, built again and initialized from the plan's seed.

    Raises:
        InputError: The plan's model was given in memory: pass both to ``compile``.
        PlanFormatError: The model has changed since it was planned.
        ClusterError: The ranks that run are not those of the plan.
    """
    source = plan_source(plan)
    _check_ranks(plan.device_mesh().num_ranks, "plan")
    return _run_plan(plan, source, capture_source(source, plan), optimizer)


def _check_ranks(num_ranks: int, what: str) -> None:
    """Known before the model is captured."""
    if num_ranks != num_launched():
        raise ClusterError(
            f"the {what} has {num_ranks} ranks, but {num_launched()} run",
            hint=f"start {num_ranks} processes with torchrun, or plan for those that run",
        )


def _describe(cluster: ClusterRef) -> str:
    return f"{cluster} ({cluster.fingerprint[:8]})"


def _run_plan(
    plan: Plan, source: ModelSource, graph: ModelGraph, optimizer: OptimizerFactory | None
) -> CompiledModel:
    if graph.fingerprint != plan.model.fingerprint:
        raise PlanFormatError(
            f"the plan is for another model than {source.name}",
            where=plan.model.name,
            hint="plan again: the model, its shapes or its precision have changed",
        )
    program, weights = lower_plan(graph, plan), source.weights(plan.training.seed)
    communicator = connect(plan)
    try:
        engine = Engine(program, graph, plan, communicator, optimizer=optimizer)
        engine.load_parameters(weights)
    except BaseException as error:  # the others must not wait for this rank
        communicator.report_failure(
            f"rank {communicator.rank}, before the first step: {type(error).__name__}: {error}"
        )
        communicator.close()
        raise

    def evaluation() -> tuple[Program, ModelGraph]:
        return lower_evaluation(graph, plan, capture_source(source, plan, training=False))

    return CompiledModel(plan, engine, evaluation)
