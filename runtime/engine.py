"""The interpreter: runs one rank's list of actions with tensors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autopar.ir.errors import AutoparError, InputError, RankFailedError
from autopar.ir.graph import ModelGraph, Role, ValueId
from autopar.ir.mesh import LAYOUT_AXES
from autopar.ir.placement import StateKind
from autopar.ir.plan import Plan
from autopar.ir.program import Program, Segment, bind_axes
from autopar.ir.randomness import Drawing
from autopar.ir.schedule import Action, ActionKind, Schedule
from autopar.ir.schedule_checks import Channel, channel_of, validate
from autopar.ir.schedules import make_schedule
from autopar.runtime import state
from autopar.runtime.batches import BatchSlicer
from autopar.runtime.communicator import WORLD_AXIS, CommunicationError, Communicator
from autopar.runtime.micro_batches import sequences
from autopar.runtime.optimizers import (
    OptimizerFactory,
    optimizer_factory,
    require_elementwise,
)
from autopar.runtime.parameter_store import ParameterStore, parameter_stages
from autopar.runtime.segment_runner import SegmentRunner, failing_op
from autopar.runtime.step_state import Incoming, StepState, Tape

_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One training step; the same on every rank, but for ``seconds``.

    Attributes:
        loss: Σ loss / Σ weight over the global batch.
        grad_norm: Of all gradients, before clipping.
        num_tokens: Valid tokens of the batch (sequences, if the loss is no sum over tokens).
        seconds: Of this step on this rank.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    seconds: float


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
        mesh = communicator.mesh
        if mesh != plan.device_mesh():
            raise InputError("the communicator spans another mesh than the plan's")
        self.stage = mesh.coordinates(communicator.rank)["pp"]
        self._model = model
        groups = {axis: communicator.group(axis) for axis in LAYOUT_AXES}
        self._program = bind_axes(program, groups)
        recompute = plan.schedule.recompute == "full"
        self._runners = {
            segment.index: SegmentRunner(segment, model, recompute=recompute)
            for segment in self._program.segments
            if segment.stage == self.stage
        }
        communicator.open(_channels(self.schedule), _ties(program))
        self._actions = self.schedule.actions[self.stage]
        self._num_reductions = Counter(
            action.segment for action in self._actions if action.kind is ActionKind.REDUCE_GRADIENTS
        )
        self.store = ParameterStore(
            self._program,
            model,
            communicator,
            zero_stage=plan.schedule.zero_stage,
            reduces_each=max(self._num_reductions.values()) > 1,
        )
        self._slicer = BatchSlicer(program, model, plan, communicator.rank, communicator.device)
        self._constants = {
            value.name: self._slicer.constant(value.name)
            for segment in self._own_segments()
            for value in segment.arguments
            if value.role is Role.CONSTANT
        }
        factory = optimizer or optimizer_factory(plan.training)
        trained = [p for p in self.store.parameters.values() if p.requires_grad]
        self.optimizer = require_elementwise(factory(trained)) if trained else None
        self._is_loaded = torch.empty(0, device=communicator.device).is_meta
        self._state = StepState()
        self._batch: Mapping[str, Tensor] = {}
        self._batch_is_local = False
        self._result = (0.0, 0.0, 0.0)

    def train_step(self, batch: Mapping[str, Tensor], *, local: bool = False) -> StepResult:
        """One optimizer step.

        Args:
            batch: Inputs by name: the global batch, the same on every rank, or with ``local`` this
                data rank's share. Data rank d takes the d-th of dp equal runs of rows, in micro-
                batches of consecutive rows.
            local: See ``batch``.

        Raises:
            InputError: the batch does not fit the plan, has no valid token, or no parameters were
                loaded.
            RankFailedError: this or another rank failed; no further step is possible.
        """
        if not self._is_loaded:
            raise InputError("no parameters were loaded", hint="load_parameters or load")
        self._slicer.check(batch, local=local)
        started = time.perf_counter()
        self._state, self._batch, self._batch_is_local = StepState(), batch, local
        self.store.begin_step(self._num_reductions)
        for action in self._actions:
            self._perform(action)
        self._state, self._batch = StepState(), {}
        self.num_steps += 1
        loss, grad_norm, weight = self._result
        num_sequences = self.plan.batch.global_batch_size
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            num_tokens=num_sequences if self._model.weight is None else round(weight),
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
        return state.full_state(
            self.store, self.communicator, self._model, self.optimizer, self.num_steps
        )

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that any plan for the same model can load; every rank calls it."""
        state.save(
            Path(path), self.store, self.communicator, self._model, self.optimizer, self.num_steps
        )

    def load(self, path: str | Path) -> None:
        """Read a checkpoint that ``save`` wrote, under whatever plan.

        Raises:
            InputError: there is no checkpoint, or it belongs to another model.
        """
        self.num_steps = state.load(Path(path), self.store, self.communicator, self.optimizer)
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

    def _own_segments(self) -> tuple[Segment, ...]:
        return tuple(runner.segment for runner in self._runners.values())

    def _perform(self, action: Action) -> None:
        try:
            match action.kind:
                case ActionKind.FORWARD:
                    self._forward(action)
                case ActionKind.BACKWARD:
                    self._backward(action)
                case ActionKind.SEND_ACTIVATIONS | ActionKind.SEND_GRADIENTS:
                    self._send(action)
                case ActionKind.RECEIVE_ACTIVATIONS | ActionKind.RECEIVE_GRADIENTS:
                    self._receive(action)
                case ActionKind.GATHER_PARAMETERS:
                    self.store.start_gather(action.segment)
                case ActionKind.FREE_PARAMETERS:
                    self.store.free(action.segment)
                case ActionKind.REDUCE_GRADIENTS:
                    self.store.start_reduce(action.segment)
                case ActionKind.OPTIMIZER:
                    self._update()
        except InputError:  # found on every rank alike
            raise
        except Exception as error:
            raise self._failure(action, error) from error
        message = self.communicator.failure()
        if message is not None:
            raise RankFailedError(message, where=self._where(action))

    def _forward(self, action: Action) -> None:
        cell = (action.segment, action.micro_batch)
        segment = self._runners[action.segment].segment
        received = self._state.activations.pop(cell).wait() if segment.received else ()
        leaves = tuple(
            tensor.detach().requires_grad_(self._program.values[value].requires_grad)
            for value, tensor in zip(segment.received, received, strict=True)
        )
        passed = dict(zip(segment.received, leaves, strict=True))
        self.store.finish_gather(action.segment)
        arguments = [
            passed[value] if value in passed else self._argument(value, action.micro_batch)
            for value in segment.arguments
        ]
        numbers = self._numbers(action.micro_batch)
        found = self._runners[action.segment](arguments, numbers)
        results = dict(zip(segment.results, found, strict=True))
        seed = None
        if action.segment == self.schedule.num_segments - 1:
            loss = results[self._model.loss]
            seed = torch.ones_like(loss)
            self._state.losses.append(loss.detach())
            if self._model.weight is not None:
                self._state.weights.append(results[self._model.weight].detach())
            roots: tuple[Tensor, ...] = (loss,)
        else:
            roots = tuple(results[value] for value in self._differentiated(segment.sent))
            self._hand_on(action, tuple(results[value].detach() for value in segment.sent))
        edges = tuple(
            torch.autograd.graph.get_gradient_edge(root) if root.requires_grad else None
            for root in roots
        )
        self._state.tapes[cell] = Tape(leaves=leaves, edges=edges, seed=seed)

    def _numbers(self, micro_batch: int) -> Drawing:
        """What random ops draw in a micro-batch of this step."""
        parts = self.communicator.mesh.batch_ranks
        return Drawing(
            seed=self.plan.training.seed,
            step=self.num_steps,
            sequences=sequences(self.plan.batch, micro_batch, parts),
        )

    def _backward(self, action: Action) -> None:
        cell = (action.segment, action.micro_batch)
        segment = self._runners[action.segment].segment
        tape = self._state.tapes.pop(cell)
        gradients = (
            (tape.seed,) if tape.seed is not None else self._state.gradients.pop(cell).wait()
        )
        self.store.finish_gather(action.segment)
        roots = [
            (edge, gradient)
            for edge, gradient in zip(tape.edges, gradients, strict=True)
            if edge is not None
        ]
        if roots:
            torch.autograd.backward([edge for edge, _ in roots], [g for _, g in roots])
        if action.segment > 0:
            back = tuple(
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                for value, leaf in zip(segment.received, tape.leaves, strict=True)
                if self._program.values[value].requires_grad
            )
            before = (action.segment - 1, action.micro_batch)
            if self.schedule.stage_of_segment[action.segment - 1] == self.stage:
                self._state.gradients[before] = Incoming(tensors=back)
            else:
                self._state.outgoing_gradients[cell] = back

    def _hand_on(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        following = (action.segment + 1, action.micro_batch)
        if self.schedule.stage_of_segment[action.segment + 1] == self.stage:
            self._state.activations[following] = Incoming(tensors=tensors)
        else:
            self._state.outgoing[action.segment, action.micro_batch] = tensors

    def _send(self, action: Action) -> None:
        sends_activations = action.kind is ActionKind.SEND_ACTIVATIONS
        outgoing = self._state.outgoing if sends_activations else self._state.outgoing_gradients
        channel = channel_of(self.schedule, action)
        assert channel is not None
        self._state.add_sends(
            [
                self.communicator.start_send(tensor.contiguous(), channel)
                for tensor in outgoing.pop((action.segment, action.micro_batch))
            ]
        )

    def _receive(self, action: Action) -> None:
        segment = self._runners[action.segment].segment
        receives_activations = action.kind is ActionKind.RECEIVE_ACTIVATIONS
        values = segment.received if receives_activations else self._differentiated(segment.sent)
        channel = channel_of(self.schedule, action)
        assert channel is not None
        buffers = tuple(
            torch.empty(
                self._program.values[value].shape,
                dtype=self._program.values[value].dtype,
                device=self.communicator.device,
            )
            for value in values
        )
        works = tuple(self.communicator.start_receive(buffer, channel) for buffer in buffers)
        incoming = self._state.activations if receives_activations else self._state.gradients
        cell = (action.segment, action.micro_batch)
        incoming[cell] = Incoming(tensors=buffers, works=works)

    def _update(self) -> None:
        """Finish gradients, agree on loss and norm, clip, and step the optimizer."""
        for work in self._state.sends:
            work.wait()
        self.store.finish_gradients()
        totals = torch.stack([*self._loss_and_weight(), self.store.squared_norm()])
        totals = self.communicator.group(WORLD_AXIS).all_reduce(totals)
        is_real = not totals.is_meta
        loss, weight, squares = totals.tolist() if is_real else (0.0, 1.0, 1.0)
        if self._model.weight is None:
            weight = float(self.plan.batch.num_micro_batches)
        if weight == 0:
            raise InputError("the batch has no valid token: its loss is not defined")
        grad_norm = squares**0.5 / weight
        self._result = (loss / weight, grad_norm, weight)
        limit = self.plan.training.max_grad_norm
        self.store.scale_gradients(1 / weight)
        if self.keep_gradients:
            self.store.keep_gradients()
        factor = 1.0 if limit is None else limit / (grad_norm + _CLIP_EPS)
        if not factor >= 1:  # also where the norm is not a number, as torch has it
            self.store.scale_gradients(factor)
        if self.optimizer is not None:
            self.optimizer.step()
        self.store.drop_gradients()

    def _loss_and_weight(self) -> tuple[Tensor, Tensor]:
        """This rank's terms of both sums, float64: zero where another rank counts the value."""
        return (
            self._own_term(self._model.loss, self._state.losses),
            self._own_term(self._model.weight, self._state.weights),
        )

    def _own_term(self, value: ValueId | None, found: list[Tensor]) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=self.communicator.device)
        if value is None or not found:
            return zero
        at = self.communicator.mesh.coordinates(self.communicator.rank)
        placement = self._program.values[value].placement
        for axis, placed in zip(LAYOUT_AXES, placement, strict=True):
            if placed.kind is not StateKind.PARTIAL and at[axis] != 0:
                return zero
        return torch.stack(found).double().sum()

    def _argument(self, value: ValueId, micro_batch: int) -> Tensor:
        match value.role:
            case Role.PARAMETER:
                return self.store.tensor(value.name)
            case Role.CONSTANT:
                return self._constants[value.name]
            case Role.INPUT:
                return self._slicer.input(
                    value.name, micro_batch, self._batch, local=self._batch_is_local
                )
            case Role.ACTIVATION:
                raise AssertionError(f"{value} is neither received nor made here")

    def _differentiated(self, values: tuple[ValueId, ...]) -> tuple[ValueId, ...]:
        return tuple(value for value in values if self._program.values[value].requires_grad)

    def _failure(self, action: Action, error: Exception) -> RankFailedError:
        """Turn an error into one that names where it happened, and end the other ranks."""
        if isinstance(error, CommunicationError):
            message = self.communicator.final_failure()
            if message is None:
                message = f"rank {self.communicator.rank} lost the others: {error}"
        else:
            op = failing_op(error.__traceback__)
            message = f"{self._where(action)}: {type(error).__name__}: {error}" + (
                f" in {op}" if op else ""
            )
        self._state = StepState()
        self.store.drop_gradients()
        self.communicator.report_failure(message)
        hint = error.hint if isinstance(error, AutoparError) else None
        return RankFailedError(message, where=self._where(action), hint=hint)

    def _where(self, action: Action) -> str:
        return f"rank {self.communicator.rank}, stage {self.stage}, action {action}"


def schedule_of(plan: Plan) -> Schedule:
    """The schedule of a plan: what every rank does, in order."""
    return make_schedule(
        plan.schedule.name,
        [segment.stage for segment in plan.segments],
        plan.batch.num_micro_batches,
        zero_stage=plan.schedule.zero_stage,
    )


def _channels(schedule: Schedule) -> list[Channel]:
    """All channels of a schedule, in the order in which every rank opens them."""
    found = (channel_of(schedule, a) for actions in schedule.actions for a in actions)
    return sorted({channel for channel in found if channel is not None})


def _ties(program: Program) -> list[tuple[int, ...]]:
    """Sets of stages that share parameters, in the order in which every rank makes their groups."""
    return sorted({stages for stages in parameter_stages(program).values() if len(stages) > 1})
