"""Evaluation: forwards of the eval graph on the parameters that are trained."""

from __future__ import annotations

from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.schedules import forward_only
from autopar.ir.zero_stages import segment_zero_stages
from autopar.runtime.communicator import Communicator
from autopar.runtime.executor import Executor
from autopar.runtime.parameter_store import ParameterStore
from autopar.runtime.step_end import Totals, agree
from autopar.runtime.step_state import StepInputs, StepState


class Evaluator:
    """See the module.

    Args:
        program: Uses the parameters of ``trained`` on the same stages, placed alike.
        model: The captured model of ``program``.
        trained: The program that is trained.
        plan: Whose sizes and cuts both have.
        store: Holds the parameters.
        communicator: Of the rank.

    Raises:
        InputError: The programs do not fit together.
    """

    def __init__(
        self,
        program: Program,
        model: ModelGraph,
        *,
        trained: Program,
        plan: Plan,
        store: ParameterStore,
        communicator: Communicator,
    ) -> None:
        _require_same_parameters(program, trained)
        self.model = model
        self._program, self._plan, self._communicator = program, plan, communicator
        schedule = forward_only(
            [segment.stage for segment in plan.segments],
            plan.batch.num_micro_batches,
            zero_stage=segment_zero_stages(plan),
        )
        self.executor = Executor(program, model, plan, schedule, store, communicator, learns=False)

    def run(self, inputs: StepInputs) -> Totals:
        """Loss and weight of a batch, the same on all ranks."""
        outcome: list[Totals] = []

        def end(step: StepState) -> None:
            outcome.append(
                agree(
                    step,
                    inputs,
                    self._program,
                    self.model,
                    self._plan,
                    self._communicator,
                    store=None,
                )
            )

        self.executor.run(inputs, end)
        (totals,) = outcome
        return totals


def _require_same_parameters(program: Program, trained: Program) -> None:
    """Raise unless each segment of ``program`` finds its parameters where ``trained`` has them."""
    for segment, other in zip(program.segments, trained.segments, strict=True):
        foreign = set(segment.parameters) - set(other.parameters)
        if foreign or segment.blocks != other.blocks or segment.stage != other.stage:
            raise InputError(
                "the graph to evaluate is not cut as the one to train is: "
                + (f"segment {segment.index} reads {min(foreign)}" if foreign else "other blocks")
            )
    for name, local in program.parameters.items():
        known = trained.parameters[name]
        if (local.shape, local.dtype) != (known.shape, known.dtype):
            raise InputError(f"parameter {name} is placed otherwise in the graph to evaluate")
