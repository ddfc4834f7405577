"""The interpreter of schedules: performs one rank's actions with tensors."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from autopar.ir.deferral import Deferred
from autopar.ir.errors import AutoparError, InputError, RankFailedError
from autopar.ir.graph import ModelGraph, Role, ValueId
from autopar.ir.mesh import DATA_AXIS, LAYOUT_AXES, PIPELINE_AXIS, TENSOR_AXIS
from autopar.ir.plan import Plan
from autopar.ir.program import Program, bind_axes
from autopar.ir.randomness import Drawing
from autopar.ir.schedule import COMPUTING, COPYING, Action, ActionKind, Schedule
from autopar.ir.schedule_checks import channel_of
from autopar.runtime.communicator import CommunicationError, Communicator
from autopar.runtime.message_parts import Part, part_of
from autopar.runtime.micro_batches import own_rows, sequences
from autopar.runtime.offloaded_activations import OffloadedActivations
from autopar.runtime.parameter_store import ParameterStore
from autopar.runtime.parameter_unit import HeldGradients
from autopar.runtime.segment_runner import failing_op
from autopar.runtime.stage_form import StageForm
from autopar.runtime.step_state import Incoming, StepInputs, StepState, Tape, Unfinished

_MESSAGES = (
    ActionKind.SEND_ACTIVATIONS,
    ActionKind.RECEIVE_ACTIVATIONS,
    ActionKind.SEND_GRADIENTS,
    ActionKind.RECEIVE_GRADIENTS,
)


class Executor:
    """Performs a schedule on one rank, once for each step.

    Args:
        program: What the ranks run.
        model: The captured model.
        plan: Whose sizes and recomputation hold.
        schedule: What the rank does; forwards only, or with backwards.
        store: The parameters.
        communicator: Of the rank.
        learns: Whether gradients are computed.
    """

    def __init__(
        self,
        program: Program,
        model: ModelGraph,
        plan: Plan,
        schedule: Schedule,
        store: ParameterStore,
        communicator: Communicator,
        *,
        learns: bool,
    ) -> None:
        self.schedule = schedule
        self.stage = communicator.mesh.coordinates(communicator.rank)[PIPELINE_AXIS]
        self._model, self._plan = model, plan
        self._store, self._communicator = store, communicator
        self._learns = learns
        self._actions = schedule.actions[self.stage]
        data_rank = communicator.mesh.coordinates(communicator.rank)[DATA_AXIS]
        self._num_micro_batches = plan.batch.micro_batches_of(data_rank)
        self._num_reductions = num_reductions(schedule, self.stage)
        self._offloaded = OffloadedActivations(communicator.device)
        self._offloads = {
            a.segment for a in self._actions if a.kind is ActionKind.OFFLOAD_ACTIVATIONS
        }
        self._in_parts = any(a.kind is ActionKind.BACKWARD_WEIGHT for a in self._actions)
        bound = bind_axes(
            program,
            {axis: communicator.group(axis) for axis in LAYOUT_AXES},
            communicator.device,
        )
        self.form = StageForm(bound, model, plan, communicator, in_parts=self._in_parts)
        self._last_form = self.form
        if bound.rest is not None:
            self._last_form = StageForm(
                bound.rest,
                model,
                plan,
                communicator,
                constants=self.form.constants,
                in_parts=self._in_parts,
            )
        self._inputs: StepInputs | None = None
        self._state = StepState()

    def run(self, inputs: StepInputs, update: Callable[[StepState], None]) -> None:
        """Perform all actions on a batch; ``update`` is the optimizer's.

        Raises:
            InputError: Of ``update``: found on every rank alike.
            RankFailedError: This or another rank failed; no further step is possible.
        """
        self._state, self._inputs = StepState(), inputs
        self._store.begin_step(self._num_reductions)
        for action in self._actions:
            self._perform(action, update)
        self._offloaded.clear()
        self._state, self._inputs = StepState(), None

    def _perform(self, action: Action, update: Callable[[StepState], None]) -> None:
        try:
            match action.kind:
                case _ if self._is_empty(action):
                    if action.kind in COMPUTING:
                        self._store.finish_gather(action.segment)
                case ActionKind.FORWARD:
                    self._forward(action)
                case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                    self._backward(action)
                case ActionKind.BACKWARD_WEIGHT:
                    self._finish_backward(action)
                case ActionKind.SEND_ACTIVATIONS | ActionKind.SEND_GRADIENTS:
                    self._send(action)
                case ActionKind.RECEIVE_ACTIVATIONS | ActionKind.RECEIVE_GRADIENTS:
                    self._receive(action)
                case ActionKind.GATHER_PARAMETERS:
                    self._store.start_gather(action.segment)
                case ActionKind.FREE_PARAMETERS:
                    self._store.free(action.segment)
                case ActionKind.REDUCE_GRADIENTS:
                    self._store.start_reduce(action.segment)
                case ActionKind.OFFLOAD_ACTIVATIONS:
                    self._offloaded.offload((action.segment, action.micro_batch))
                case ActionKind.FETCH_ACTIVATIONS:
                    self._offloaded.fetch((action.segment, action.micro_batch))
                case ActionKind.OPTIMIZER:
                    for work in self._state.sends:
                        work.wait()
                    update(self._state)
        except InputError:  # found on every rank alike
            raise
        except Exception as error:
            raise self._failure(action, error) from error
        message = self._communicator.failure()
        if message is not None:
            self._let_go()
            raise RankFailedError(message, where=self._where(action))

    def _is_empty(self, action: Action) -> bool:
        """Whether it is of a micro-batch that this rank and all of its pipeline have not: other
        data ranks have a larger share of the batch. Parameters are gathered and gradients reduced
        all the same, as those take part.
        """
        per_micro_batch = action.kind in (*COMPUTING, *COPYING, *_MESSAGES)
        return per_micro_batch and action.micro_batch >= self._num_micro_batches

    def _forward(self, action: Action) -> None:
        cell, form = (action.segment, action.micro_batch), self._form_of(action)
        segment = form.segment(action.segment)
        received = self._state.activations.pop(cell).wait() if segment.received else ()
        leaves = tuple(
            tensor.detach().requires_grad_(self._learns and form.value(value).requires_grad)
            for value, tensor in zip(segment.received, received, strict=True)
        )
        passed = dict(zip(segment.received, leaves, strict=True))
        self._store.finish_gather(action.segment)
        arguments = [
            passed[value] if value in passed else self._argument(value, action)
            for value in segment.arguments
        ]
        deferred = Deferred() if self._in_parts else None
        numbers = self._numbers(action.micro_batch)
        keeping: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if action.segment in self._offloads:
            keeping = self._offloaded.shelf(cell, arguments).hooks()
        with torch.set_grad_enabled(self._learns), keeping:
            made = form.runners[action.segment](arguments, numbers, deferred)
        results = dict(zip(segment.results, made, strict=True))
        seed = None
        if action.segment == self.schedule.num_segments - 1:
            loss = results[self._model.loss]
            assert self._inputs is not None
            share = self._share(action.micro_batch)
            seed = torch.full_like(loss, self._inputs.loss_seed * share)
            self._state.losses.append((loss.detach(), share))
            if self._model.weight is not None:
                self._state.weights.append(results[self._model.weight].detach())
            roots: tuple[Tensor, ...] = (loss,)
        else:
            roots = tuple(results[value] for value in form.differentiated(segment.sent))
            self._hand_on(action, tuple(results[value].detach() for value in segment.sent))
        if self._learns:
            edges = tuple(
                torch.autograd.graph.get_gradient_edge(root) if root.requires_grad else None
                for root in roots
            )
            self._state.tapes[cell] = Tape(leaves=leaves, edges=edges, seed=seed, deferred=deferred)

    def _backward(self, action: Action) -> None:
        cell = (action.segment, action.micro_batch)
        tape = self._state.tapes.pop(cell)
        gradients = (
            (tape.seed,) if tape.seed is not None else self._state.gradients.pop(cell).wait()
        )
        self._store.finish_gather(action.segment)
        self._offloaded.wait(cell)
        roots = [
            (edge, gradient)
            for edge, gradient in zip(tape.edges, gradients, strict=True)
            if edge is not None
        ]
        is_part = action.kind is ActionKind.BACKWARD_INPUT
        holds = is_part and self._form_of(action).runners[action.segment].leaves_weights
        held: HeldGradients = {}
        with contextlib.ExitStack() as stack:
            if holds:
                held = stack.enter_context(self._store.holding())
            if roots:
                torch.autograd.backward([edge for edge, _ in roots], [g for _, g in roots])
        if tape.deferred is not None:
            self._state.unfinished[cell] = Unfinished(held=held, deferred=tape.deferred)
            if not is_part:
                self._finish_backward(action)
        if action.segment > 0:
            back = tuple(
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                for leaf in tape.leaves
                if leaf.requires_grad
            )
            before = (action.segment - 1, action.micro_batch)
            if self.schedule.stage_of_segment[action.segment - 1] == self.stage:
                self._state.gradients[before] = Incoming(tensors=back)
            else:
                self._state.outgoing_gradients[cell] = back

    def _finish_backward(self, action: Action) -> None:
        """The weight part: gradients of the segment's parameters."""
        unfinished = self._state.unfinished.pop((action.segment, action.micro_batch))
        names = self._form_of(action).segment(action.segment).parameters
        self._store.finish(unfinished.held, unfinished.deferred, names)

    def _hand_on(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        following = (action.segment + 1, action.micro_batch)
        if self.schedule.stage_of_segment[action.segment + 1] == self.stage:
            self._state.activations[following] = Incoming(tensors=tensors)
        else:
            self._state.outgoing[action.segment, action.micro_batch] = tensors

    def _send(self, action: Action) -> None:
        sends_activations = action.kind is ActionKind.SEND_ACTIVATIONS
        outgoing = self._state.outgoing if sends_activations else self._state.outgoing_gradients
        form = self._form_of(action)
        segment = form.segment(action.segment)
        values = segment.sent if sends_activations else form.differentiated(segment.received)
        channel = channel_of(self.schedule, action)
        assert channel is not None
        tensors = outgoing.pop((action.segment, action.micro_batch))
        works = []
        for tensor, part in zip(tensors, self._parts(form, values), strict=True):
            sent = tensor.contiguous() if part is None else part.of(tensor)
            works.append(self._communicator.start_send(sent, channel))
        self._state.add_sends(works)

    def _receive(self, action: Action) -> None:
        form = self._form_of(action)
        segment = form.segment(action.segment)
        receives_activations = action.kind is ActionKind.RECEIVE_ACTIVATIONS
        values = segment.received if receives_activations else form.differentiated(segment.sent)
        channel = channel_of(self.schedule, action)
        assert channel is not None
        device, parts = self._communicator.device, self._parts(form, values)
        buffers = tuple(
            torch.empty(
                value.shape if part is None else (part.numel,), dtype=value.dtype, device=device
            )
            for value, part in zip(map(form.value, values), parts, strict=True)
        )
        works = tuple(self._communicator.start_receive(buffer, channel) for buffer in buffers)
        incoming = self._state.activations if receives_activations else self._state.gradients
        cell = (action.segment, action.micro_batch)
        incoming[cell] = Incoming(tensors=buffers, works=works, parts=parts)

    def _parts(self, form: StageForm, values: tuple[ValueId, ...]) -> tuple[Part | None, ...]:
        """Of each value, what tensor ranks send."""
        group = self._communicator.group(TENSOR_AXIS)
        return tuple(part_of(form.value(value), group) for value in values)

    def _argument(self, value: ValueId, action: Action) -> Tensor:
        form, inputs = self._form_of(action), self._inputs
        match value.role:
            case Role.PARAMETER:
                return self._store.tensor(value.name)
            case Role.CONSTANT:
                return form.constants[value.name]
            case Role.INPUT:
                assert inputs is not None
                return form.slicer.input(
                    value.name, action.micro_batch, inputs.batch, local=inputs.is_local
                )
            case Role.ACTIVATION:
                raise AssertionError(f"{value} is neither received nor made here")

    def _form_of(self, action: Action) -> StageForm:
        is_last = action.micro_batch == self.schedule.num_micro_batches - 1
        return self._last_form if is_last else self.form

    def _share(self, micro_batch: int) -> float:
        """What the loss of a micro-batch counts: a shorter one less, unless its weight says so."""
        if self._model.weight is not None:
            return 1.0
        mesh = self._communicator.mesh
        part = mesh.batch_coordinate(self._communicator.rank)
        rows = own_rows(self._plan.batch, mesh, part, micro_batch)
        return (rows.stop - rows.start) / self._plan.batch.micro_batch_size

    def _numbers(self, micro_batch: int) -> Drawing:
        """What random ops draw in a micro-batch of this step."""
        assert self._inputs is not None
        rows = sequences(self._plan.batch, self._communicator.mesh, micro_batch)
        return replace(self._inputs.numbers, sequences=rows)

    def _failure(self, action: Action, error: Exception) -> RankFailedError:
        """Turn an error into one that names where it happened, and end the other ranks."""
        if isinstance(error, CommunicationError):
            message = self._communicator.final_failure()
            if message is None:
                message = f"rank {self._communicator.rank} lost the others: {error}"
        else:
            op = failing_op(error.__traceback__)
            message = f"{self._where(action)}: {type(error).__name__}: {error}" + (
                f" in {op}" if op else ""
            )
        self._let_go()
        self._communicator.report_failure(message)
        hint = error.hint if isinstance(error, AutoparError) else None
        return RankFailedError(message, where=self._where(action), hint=hint)

    def _let_go(self) -> None:
        """Of what a step that failed has made."""
        self._state = StepState()
        self._offloaded.clear()
        self._store.drop_gradients()

    def _where(self, action: Action) -> str:
        return f"rank {self._communicator.rank}, stage {self.stage}, action {action}"


def num_reductions(schedule: Schedule, stage: int) -> Mapping[int, int]:
    """How often a stage reduces the gradients of each of its segments in a step."""
    return Counter(
        action.segment
        for action in schedule.actions[stage]
        if action.kind is ActionKind.REDUCE_GRADIENTS
    )
