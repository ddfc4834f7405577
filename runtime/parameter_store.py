"""The parameters of a pipeline stage: its units, what each segment uses of them, and the end of a
step.

A parameter that several segments of the stage use is stored, gathered and reduced once for all of
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.ir.deferral import Deferred
from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph
from autopar.ir.mesh import (
    CONTEXT_AXIS,
    DATA_AXIS,
    EXPERT_AXIS,
    LAYOUT_AXES,
    PIPELINE_AXIS,
    REPLICATE_AXIS,
    SHARD_AXIS,
    TENSOR_AXIS,
    combined_axis,
)
from autopar.ir.placement import INVARIANT, Placement, State, StateKind, local_shape
from autopar.ir.program import LocalTensor, Program
from autopar.runtime.communicator import Communicator, Work
from autopar.runtime.host_copies import HostCopies
from autopar.runtime.parameter_layout import ParameterLayout, master_dtype
from autopar.runtime.parameter_unit import HeldGradients, ParameterUnit, UnitGroups


@dataclass(frozen=True, slots=True)
class _Sums:
    """How a unit is stored and its gradients are summed; the same on every rank.

    Attributes:
        shard_axis: Axes that store it sharded, ``""`` for none.
        replicate_axis: Axes that repeat it, ``""`` for none.
        is_partial: Whether gradients differ between all these ranks.
        complete: Axes of these whose ranks have the same gradients.
    """

    shard_axis: str
    replicate_axis: str
    is_partial: bool
    complete: tuple[str, ...]


_UnitKey = tuple[tuple[int, ...], tuple[int, ...], bool, torch.dtype, _Sums]
"""Segments that use the unit, stages that have it, trained or not, compute type, sums."""


class ParameterStore:
    """See the module.

    Args:
        program: What the ranks run.
        model: The captured model.
        communicator: Of this rank.
        is_sharded: Parameters are stored as shards over ``dp_shard``, and over context and expert
            axes where they are whole on them (ZeRO 1 to 3); otherwise whole on every data rank.
        reduced_each: Segments that the schedule reduces after each backward instead of once a step.
        gradient_dtype, reduce_dtype, host: See ``ParameterUnit``.
    """

    def __init__(
        self,
        program: Program,
        model: ModelGraph,
        communicator: Communicator,
        *,
        is_sharded: bool,
        reduced_each: Collection[int],
        gradient_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        host: HostCopies | None = None,
    ) -> None:
        self._communicator, self._host = communicator, host
        self._reduced_each = frozenset(reduced_each)
        self._gradient_dtype, self._reduce_dtype = gradient_dtype, reduce_dtype
        self._coordinates = communicator.mesh.coordinates(communicator.rank)
        self._stage = self._coordinates[PIPELINE_AXIS]
        self._sharded = is_sharded
        self._locals = {**_unused(program, model), **program.parameters}
        used_on = parameter_stages(program)
        self.stages = {name: used_on.get(name, (0,)) for name in self._locals}
        self.dtypes: Mapping[str, torch.dtype] = {
            name: master_dtype(local.dtype) if local.requires_grad else local.dtype
            for name, local in self._locals.items()
        }
        self.kept_gradients: dict[str, Tensor] = {}
        self.num_gathers: dict[int, int] = {}
        self.num_reductions: dict[int, int] = {}
        segments = [segment for segment in program.segments if segment.stage == self._stage]
        self._units: dict[_UnitKey, ParameterUnit] = {}
        self._units_of: dict[int, tuple[ParameterUnit, ...]] = {}
        self._held: set[int] = set()
        self._remaining_reductions: dict[int, int] = {}
        self._pending: list[tuple[Iterator[Work], Work]] = []
        users: dict[str, list[int]] = {
            name: [] for name, stages in self.stages.items() if self._stage in stages
        }
        for segment in segments:
            for name in segment.parameters:
                users[name].append(segment.index)
        members: dict[_UnitKey, list[ParameterLayout]] = {}
        for name, used_by in users.items():
            local = self._locals[name]
            stages = self.stages[name]
            sums = self._sums(name, local.placement)
            key = (tuple(used_by), stages, local.requires_grad, local.dtype, sums)
            members.setdefault(key, []).append(self._layout(name, model))
        for key, layouts in members.items():
            self._units[key] = self._make_unit(key, layouts)
        for segment in segments:
            self._units_of[segment.index] = tuple(
                unit for key, unit in self._units.items() if segment.index in key[0]
            )
        self.layouts = {
            layout.name: layout for unit in self._units.values() for layout in unit.layouts
        }
        self.parameters: Mapping[str, nn.Parameter] = {
            name: parameter
            for unit in self._units.values()
            for name, parameter in unit.parameters.items()
        }

    @property
    def trained(self) -> set[str]:
        """Names of the parameters of all stages that take gradients."""
        return {name for name, local in self._locals.items() if local.requires_grad}

    @property
    def ties(self) -> tuple[str, ...]:
        """Trained parameters of this stage that other stages have too, in an order common to all
        stages.
        """
        return tuple(
            sorted(
                name
                for name, parameter in self.parameters.items()
                if len(self.stages[name]) > 1 and parameter.requires_grad
            )
        )

    def tensor(self, name: str) -> Tensor:
        """The parameter as segments use it."""
        return self._unit_of(name).tensors[name]

    @contextmanager
    def holding(self) -> Iterator[HeldGradients]:
        """While active, gradients are held for ``finish``, and not accumulated as they come, where
        the schedule reduces after each backward: what is accumulated has to be of one micro-batch
        then, and is there only until it is reduced.
        """
        held: HeldGradients = {}
        units = tuple(unit for key, unit in self._units.items() if self._is_reduced_each(key))
        for unit in units:
            unit.held = held
        try:
            yield held
        finally:
            for unit in units:
                unit.held = None

    def finish(self, held: HeldGradients, deferred: Deferred, names: Sequence[str]) -> None:
        """Accumulate gradients of a segment and micro-batch: those held, and those of ``names``
        that were deferred, as if they had come together.
        """
        for (unit, index), gradient in held.items():
            unit.put_back(index, gradient)
        tensors = (self.tensor(name) for name in names)
        deferred.finish([tensor for tensor in tensors if tensor.requires_grad])
        for unit, index in held:
            unit.accumulate_left(index)

    def start_gather(self, segment: int) -> None:
        """Start to gather what ``segment`` uses and is not gathered yet."""
        self.num_gathers[segment] = self.num_gathers.get(segment, 0) + 1
        self._held.add(segment)
        for unit in self._units_of[segment]:
            unit.start_gather()

    def finish_gather(self, segment: int) -> None:
        """Wait until ``segment`` can be used."""
        for unit in self._units_of[segment]:
            unit.finish_gather()

    def free(self, segment: int) -> None:
        """Free what no other gathered segment uses."""
        self._held.discard(segment)
        for key, unit in self._units.items():
            if segment in key[0] and self._held.isdisjoint(key[0]):
                unit.free()

    def start_reduce(self, segment: int) -> None:
        """Start to reduce the gradients that ``segment``'s backward completed; earlier reductions
        go one step on.
        """
        self.num_reductions[segment] = self.num_reductions.get(segment, 0) + 1
        self._advance()
        remaining = self._remaining_reductions
        remaining[segment] -= 1
        for key, unit in self._units.items():
            if segment not in key[0] or not unit.trainable:
                continue
            is_last = all(remaining[user] == 0 for user in key[0])
            if is_last or self._is_reduced_each(key):
                self._start(unit.start_reduce(is_last=is_last))

    def begin_step(self, num_reductions: Mapping[int, int]) -> None:
        """Forget the last step; ``num_reductions`` says how often this one reduces each segment."""
        self._held.clear()
        self._remaining_reductions = dict(num_reductions)
        self.num_gathers, self.num_reductions = {}, {}
        self.drop_gradients()
        for unit in self._units.values():
            unit.outdate()

    def finish_gradients(self) -> None:
        """Wait for all reductions, and add up the gradients of parameters that other stages have
        too.
        """
        while self._pending:
            self._advance()
        for name in self.ties:
            group = self._communicator.tied_group(self.stages[name])
            unit = self._unit_of(name)
            for work in unit.start_sum(unit.gradient_of(name), group):
                work.wait()
        for unit in self.trained_units():
            unit.attach_gradients()

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared norm of all gradients, each element counted on one rank;
        float64.
        """
        at = self._coordinates
        total = torch.zeros((), dtype=torch.float64, device=self._communicator.device)
        for key, unit in self._units.items():
            replica = self._communicator.group(key[-1].replicate_axis).rank
            if unit.trainable and self._stage == key[1][0] and replica == 0:
                total += unit.sum_of_squares(only_tensor_sharded=at[TENSOR_AXIS] != 0)
        return total

    def keep_gradients(self) -> None:
        """Keep copies of all gradients in ``kept_gradients``."""
        self.kept_gradients = {
            name: unit.gradient_view(index).clone()
            for unit in self.trained_units()
            for index, name in enumerate(unit.parameters)
        }

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""
        for unit in self.trained_units():
            assert unit.gradient is not None
            unit.gradient.mul_(factor)

    def drop_gradients(self) -> None:
        """Free all gradients."""
        self._pending.clear()
        for unit in self._units.values():
            unit.drop_gradients()

    def renew(self) -> None:
        """Parameters were loaded: use them."""
        for unit in self._units.values():
            unit.renew()

    def trained_units(self) -> tuple[ParameterUnit, ...]:
        """Units whose parameters take gradients."""
        return tuple(unit for unit in self._units.values() if unit.trainable)

    def _is_reduced_each(self, key: _UnitKey) -> bool:
        return not self._reduced_each.isdisjoint(key[0])

    def _start(self, reduction: Iterator[Work]) -> None:
        work = next(reduction, None)
        if work is not None:
            self._pending.append((reduction, work))

    def _advance(self) -> None:
        pending, self._pending = self._pending, []
        for reduction, work in pending:
            work.wait()
            self._start(reduction)

    def _unit_of(self, name: str) -> ParameterUnit:
        return next(unit for unit in self._units.values() if name in unit.tensors)

    def _layout(self, name: str, model: ModelGraph) -> ParameterLayout:
        logical = model.parameters[name]
        mesh = self._communicator.mesh
        placement = self._locals[name].placement
        shape = local_shape(logical.shape, placement, mesh.layout_sizes())
        shard_axis = self._sums(name, placement).shard_axis
        return ParameterLayout(
            name=name,
            names=logical.names,
            shape=logical.shape,
            placement=placement,
            local_shape=shape or (1,),
            stages=self.stages[name],
            shard_axis=shard_axis,
            num_shards=mesh.size(shard_axis),
            shard=self._communicator.group(shard_axis).rank,
        )

    def _sums(self, name: str, placement: Placement) -> _Sums:
        """Over which axes a parameter of this placement is stored sharded and its gradient summed.

        Raises:
            InputError: The data axis shards it.
        """
        mesh = self._communicator.mesh
        states: dict[str, State] = dict(zip(LAYOUT_AXES, placement, strict=True))
        if states[DATA_AXIS].is_sharded:
            raise InputError(
                f"parameter {name} is used {states[DATA_AXIS]} on the data axis",
                hint="ZeRO shards parameters in storage; segments use whole ones",
            )
        whole = [a for a in (CONTEXT_AXIS, EXPERT_AXIS) if not states[a].is_sharded]
        shard, replicate = combined_axis((SHARD_AXIS, *whole)), REPLICATE_AXIS
        if not self._sharded:
            shard, replicate = "", combined_axis((REPLICATE_AXIS, SHARD_AXIS, *whole))
        shared = [axis for axis in (DATA_AXIS, *whole) if mesh.size(axis) > 1]
        complete = [axis for axis in shared if states[axis].kind is not StateKind.REPLICATED]
        return _Sums(
            shard_axis=mesh.simplest(shard),
            replicate_axis=mesh.simplest(replicate),
            is_partial=len(complete) < len(shared),
            complete=tuple(complete),
        )

    def _make_unit(self, key: _UnitKey, layouts: Sequence[ParameterLayout]) -> ParameterUnit:
        group = self._communicator.group
        return ParameterUnit(
            sorted(layouts, key=lambda layout: _tensor_order(layout.tensor_state)),
            trainable=key[2],
            compute_dtype=key[3],
            is_partial=key[4].is_partial,
            counts=all(self._coordinates[axis] == 0 for axis in key[4].complete),
            gradient_dtype=self._gradient_dtype,
            reduce_dtype=self._reduce_dtype,
            groups=UnitGroups(
                shard=group(key[4].shard_axis) if key[4].shard_axis else None,
                replicate=group(key[4].replicate_axis),
                tensor=group(TENSOR_AXIS),
            ),
            device=self._communicator.device,
            host=self._host,
        )


def parameter_stages(program: Program) -> Mapping[str, tuple[int, ...]]:
    """The stages that use each parameter, in order."""
    stages: dict[str, set[int]] = {}
    for segment in program.segments:
        for name in segment.parameters:
            stages.setdefault(name, set()).add(segment.stage)
    return {name: tuple(sorted(found)) for name, found in stages.items()}


def _unused(program: Program, model: ModelGraph) -> dict[str, LocalTensor]:
    """Parameters that no segment uses: the first stage keeps them as they are, for checkpoints."""
    return {
        name: LocalTensor(
            shape=parameter.shape,
            dtype=master_dtype(parameter.dtype)
            if parameter.dtype.is_floating_point
            else parameter.dtype,
            requires_grad=False,
            placement=(INVARIANT,) * len(LAYOUT_AXES),
        )
        for name, parameter in model.parameters.items()
        if name not in program.parameters
    }


def _tensor_order(state: State) -> int:
    """Partial gradients first, sharded parameters last: both are runs of a unit's buffers."""
    if state.is_sharded:
        return 2
    return 1 if str(state) == "I" else 0
