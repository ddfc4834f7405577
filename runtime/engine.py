"""A model under a plan, on one rank: what users of the runtime call."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph
from autopar.ir.mesh import PIPELINE_AXIS
from autopar.ir.plan import Plan
from autopar.ir.precision import DTYPES
from autopar.ir.program import Program
from autopar.ir.randomness import Drawing
from autopar.ir.schedule import Schedule
from autopar.ir.schedule_checks import Channel, channel_of, validate
from autopar.ir.schedules import make_schedule
from autopar.ir.zero_stages import segment_zero_stages
from autopar.runtime import state
from autopar.runtime.batches import checksum
from autopar.runtime.communicator import Communicator
from autopar.runtime.evaluator import Evaluator
from autopar.runtime.executor import Executor, num_reductions
from autopar.runtime.host_copies import HostCopies
from autopar.runtime.loss_scaler import LossScaler, num_loss_terms
from autopar.runtime.offloaded_optimizer import OffloadedOptimizer
from autopar.runtime.optimizers import (
    OptimizerFactory,
    optimizer_factory,
    require_elementwise,
)
from autopar.runtime.parameter_store import ParameterStore, parameter_stages
from autopar.runtime.results import EvalResult, StepResult
from autopar.runtime.step_end import Totals, Updated, agree, update
from autopar.runtime.step_state import StepInputs, StepState


class Engine:
    """A model under a plan, on one of its ranks.

    Args:
        program: The plan's local graphs, the same on every rank.
        model: The captured model.
        plan: All decisions.
        communicator: This rank's; its mesh is the plan's.
        optimizer: Makes the optimizer of this rank's shards; by default the plan's.
        keep_gradients: Keep the (unclipped) gradients of the last step for ``full_gradients``.

    Load parameters (``load_parameters`` or ``load``) before the first step.
    """

    def __init__(
        self,
        program: Program,
        model: ModelGraph,
        plan: Plan,
        communicator: Communicator,
        *,
        optimizer: OptimizerFactory | None = None,
        keep_gradients: bool = False,
    ) -> None:
        self.plan = plan
        self.communicator = communicator
        self.keep_gradients = keep_gradients
        self.num_steps = 0
        self.schedule = schedule_of(plan)
        validate(self.schedule)
        if communicator.mesh != plan.device_mesh():
            raise InputError("the communicator spans another mesh than the plan's")
        self._model, self._program = model, program
        stage = communicator.mesh.coordinates(communicator.rank)[PIPELINE_AXIS]
        communicator.open(_channels(self.schedule), _ties(program))
        host = HostCopies(communicator.device) if plan.schedule.offload_optimizer else None
        self.store = ParameterStore(
            program,
            model,
            communicator,
            is_sharded=plan.schedule.zero_stage > 0,
            reduced_each=[
                segment
                for segment, number in num_reductions(self.schedule, stage).items()
                if number > 1
            ],
            gradient_dtype=DTYPES[plan.training.gradient_dtype],
            reduce_dtype=DTYPES[plan.training.reduce_dtype],
            host=host,
        )
        self._trainer = Executor(
            program, model, plan, self.schedule, self.store, communicator, learns=True
        )
        self._evaluator: Evaluator | None = None
        self.stage = stage
        self.loss_scaler = LossScaler(
            is_active=plan.training.precision == "fp16",
            num_terms=num_loss_terms(model, plan.batch),
        )
        factory = optimizer or optimizer_factory(plan.training)
        trained = [p for p in self.store.parameters.values() if p.requires_grad]
        self.optimizer = require_elementwise(factory(trained)) if trained else None
        self._offloaded: OffloadedOptimizer | None = None
        if self.optimizer is not None and host is not None:
            units = self.store.trained_units()
            self._offloaded = OffloadedOptimizer(self.optimizer, units, host)
        self._is_loaded = torch.empty(0, device=communicator.device).is_meta

    def train_step(self, batch: Mapping[str, Tensor], *, local: bool = False) -> StepResult:
        """One optimizer step.

        Args:
            batch: Inputs by name: the global batch, the same on every rank, or with ``local`` this
                data rank's share. Data rank d takes the d-th of dp equal runs of rows, in micro-
                batches of consecutive rows.
            local: See ``batch``.

        Raises:
            InputError: the batch does not fit the plan, is not the same on every rank, has no valid
                token, or no parameters were loaded. Nothing was updated, and steps may go on.
            RankFailedError: this or another rank failed; no further step is possible.
        """
        started = time.perf_counter()
        inputs = self._inputs(self._trainer, self._model, batch, local=local)
        outcome: list[tuple[Totals, Updated]] = []
        scale = self.loss_scaler.scale

        def end(step: StepState) -> None:
            self.store.finish_gradients()
            totals = agree(
                step,
                inputs,
                self._program,
                self._model,
                self.plan,
                self.communicator,
                self.store,
            )
            done = update(
                totals,
                self.store,
                self.loss_scaler,
                self._step_optimizer,
                max_grad_norm=self.plan.training.max_grad_norm,
                keeps_gradients=self.keep_gradients,
            )
            outcome.append((totals, done))

        self._trainer.run(inputs, end)
        ((totals, done),) = outcome
        self.num_steps += 1
        return StepResult(
            loss=totals.mean_loss,
            grad_norm=done.grad_norm,
            num_tokens=self._num_tokens(totals, self._model),
            seconds=time.perf_counter() - started,
            skipped=done.skipped,
            loss_scale=scale,
        )

    def set_evaluation(self, program: Program, model: ModelGraph) -> None:
        """What ``eval_step`` runs: the model without its training behavior.

        Args:
            program: Uses the parameters of the training program on the same stages, placed alike.
            model: The captured model of ``program``.

        Raises:
            InputError: The programs do not fit together.
        """
        self._evaluator = Evaluator(
            program,
            model,
            trained=self._program,
            plan=self.plan,
            store=self.store,
            communicator=self.communicator,
        )

    @property
    def can_evaluate(self) -> bool:
        """True after ``set_evaluation``."""
        return self._evaluator is not None

    def eval_step(self, batch: Mapping[str, Tensor], *, local: bool = False) -> EvalResult:
        """The loss of a batch, without gradients; for arguments and errors see ``train_step``."""
        if self._evaluator is None:
            raise InputError("nothing to evaluate with was set", hint="set_evaluation")
        started = time.perf_counter()
        model = self._evaluator.model
        totals = self._evaluator.run(
            self._inputs(self._evaluator.executor, model, batch, local=local)
        )
        return EvalResult(
            loss=totals.mean_loss,
            num_tokens=self._num_tokens(totals, model),
            seconds=time.perf_counter() - started,
        )

    def load_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Take this rank's part of global parameters, given by any of their names.

        Raises:
            InputError: a parameter is missing or has another shape.
        """
        state.load_parameters(self.store, self.communicator, parameters)
        self._is_loaded = True

    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters, global, on every rank; every rank calls it."""
        return state.full_parameters(self.store, self.communicator, self._model)

    def full_gradients(self) -> dict[str, Tensor]:
        """All gradients of the last step, global and unclipped; needs ``keep_gradients``."""
        if not self.keep_gradients:
            raise InputError("gradients are kept with keep_gradients=True only")
        return state.full_gradients(self.store, self.communicator, self._model)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters, optimizer state and step: global tensors on the CPU, on every rank; every
        rank calls it.
        """
        tensors = state.full_tensors(self.store, self.communicator, self._model, self.optimizer)
        return tensors | self._numbers()

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that any plan for the same model can load; every rank calls it."""
        state.save(
            Path(path),
            self.store,
            self.communicator,
            self._model,
            self.optimizer,
            self._numbers(),
        )

    def load(self, path: str | Path) -> None:
        """Read a checkpoint that ``save`` wrote, under whatever plan.

        Raises:
            InputError: there is no checkpoint, or it belongs to another model.
        """
        numbers = state.load(Path(path), self.store, self.communicator, self.optimizer)
        self.num_steps = int(numbers[state.NUM_STEPS])
        self.loss_scaler.load(numbers)
        self._is_loaded = True

    def close(self) -> None:
        """End communication; every rank calls it."""
        self.communicator.close()

    def abort(self, error: BaseException) -> None:
        """End all ranks because of an error outside of a step; nothing waits."""
        self.communicator.report_failure(
            f"rank {self.communicator.rank}, stage {self.stage}, outside of a step: "
            f"{type(error).__name__}: {error}"
        )

    def _step_optimizer(self) -> None:
        if self._offloaded is not None:
            self._offloaded.step()
        elif self.optimizer is not None:
            self.optimizer.step()

    def _numbers(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside tensors of parameters."""
        return {state.NUM_STEPS: torch.tensor(self.num_steps)} | self.loss_scaler.state()

    def _inputs(
        self, executor: Executor, model: ModelGraph, batch: Mapping[str, Tensor], *, local: bool
    ) -> StepInputs:
        if not self._is_loaded:
            raise InputError("no parameters were loaded", hint="load_parameters or load")
        executor.form.slicer.check(batch, local=local)
        read = {name: batch[name] for name in model.inputs}
        return StepInputs(
            batch=read,
            is_local=local,
            checksum=0 if local else checksum(read),
            numbers=Drawing(seed=self.plan.training.seed, step=self.num_steps, sequences=()),
            loss_seed=self.loss_scaler.seed,
        )

    def _num_tokens(self, totals: Totals, model: ModelGraph) -> int:
        return self.plan.batch.global_batch_size if model.weight is None else round(totals.weight)


def schedule_of(plan: Plan) -> Schedule:
    """The schedule of a plan: what every rank does, in order."""
    return make_schedule(
        plan.schedule.name,
        [segment.stage for segment in plan.segments],
        plan.batch.num_micro_batches,
        zero_stage=segment_zero_stages(plan),
        extra_in_flight=plan.schedule.extra_in_flight,
        offloaded=plan.offloaded_segments(),
    )


def _channels(schedule: Schedule) -> list[Channel]:
    """All channels of a schedule, in the order in which every rank opens them."""
    found = (channel_of(schedule, a) for actions in schedule.actions for a in actions)
    return sorted({channel for channel in found if channel is not None})


def _ties(program: Program) -> list[tuple[int, ...]]:
    """Sets of stages that share parameters, in the order in which every rank makes their groups."""
    return sorted({stages for stages in parameter_stages(program).values() if len(stages) > 1})
