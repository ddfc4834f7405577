"""From a frame to a problem: what each choice costs on the ranks of one group, at one batch."""

from __future__ import annotations

import math

from autopar.ir.graph import TensorInfo
from autopar.ir.placement import State
from autopar.solver.costs.saved import own_bytes
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.frame import Frame, FrameClass, FrameHeld, FrameOp, KeptInside
from autopar.solver.layout.problem import (
    Held,
    MoveCost,
    Op,
    OpOption,
    Problem,
    StateClass,
    Value,
)


def price(frame: Frame, coster: Coster) -> Problem:
    """The problem whose choices are those of ``frame``, for ranks that cost what ``coster`` says.

    Ops that are twins, and tensors that are alike, are costed once.
    """
    return Problem(
        frame=frame,
        values=_values(frame, coster),
        ops=_ops(frame, coster),
        classes=tuple(_state_class(found, coster) for found in frame.classes),
        held=tuple(
            Held(
                kind=held.kind,
                num_bytes=held_bytes(held, coster),
                tensor=held.tensor,
                moved=held.moved,
            )
            for held in frame.held
        ),
    )


def _values(frame: Frame, coster: Coster) -> tuple[Value, ...]:
    found: list[Value] = []
    costs: dict[TensorInfo, dict[tuple[State, State], MoveCost]] = {}
    for number, value in enumerate(frame.values):
        if value.twin < number:
            moves = found[value.twin].moves
        else:
            known = costs.setdefault(value.tensor, {})
            moves = {
                (i, j): _move(coster, value.tensor, value.states[i], value.demanded[j], known)
                for i, j in value.moves
            }
        found.append(
            Value(
                kind=value.kind,
                node=value.node,
                result=value.result,
                states=value.states,
                demanded=value.demanded,
                moves=moves,
                state_class=value.state_class,
            )
        )
    return tuple(found)


def _move(
    coster: Coster,
    tensor: TensorInfo,
    source: State,
    target: State,
    known: dict[tuple[State, State], MoveCost],
) -> MoveCost:
    if source == target:
        return _NO_MOVE
    cost = known.get((source, target))
    if cost is None:
        cost = known[source, target] = coster.move(tensor, source, target)
    return cost


_NO_MOVE = MoveCost(0.0, 0.0)


def _ops(frame: Frame, coster: Coster) -> tuple[Op, ...]:
    found: list[Op] = []
    for number, op in enumerate(frame.ops):
        if op.twin < number:
            options = tuple(
                _keeping(option, held)
                for option, held in zip(found[op.twin].options, op.held, strict=True)
            )
        else:
            options = _options(op, coster)
        found.append(
            Op(
                kind=op.kind,
                node=op.node.name,
                operands=op.operands,
                results=op.results,
                options=options,
            )
        )
    return tuple(found)


def _keeping(option: OpOption, held: tuple[int, ...]) -> OpOption:
    """The same costs for an op that keeps other tensors."""
    return OpOption(
        option=option.option,
        forward_s=option.forward_s,
        backward_s=option.backward_s,
        forward_comm_s=option.forward_comm_s,
        backward_comm_s=option.backward_comm_s,
        forward_launch_s=option.forward_launch_s,
        backward_launch_s=option.backward_launch_s,
        transient_bytes=option.transient_bytes,
        held=held,
    )


def _options(op: FrameOp, coster: Coster) -> tuple[OpOption, ...]:
    found: list[OpOption] = []
    for option, held in zip(op.options, op.held, strict=True):
        seconds = coster.op(op.node, op.view, option)
        found.append(
            OpOption(
                option=option,
                forward_s=seconds.forward_s,
                backward_s=seconds.backward_s,
                forward_comm_s=seconds.forward_comm_s,
                backward_comm_s=seconds.backward_comm_s,
                forward_launch_s=seconds.forward_launch_s,
                backward_launch_s=seconds.backward_launch_s,
                transient_bytes=coster.transient_bytes(op.node, op.view, option),
                held=held,
            )
        )
    return tuple(found)


def _state_class(found: FrameClass, coster: Coster) -> StateClass:
    return StateClass(
        role=found.role,
        states=found.states,
        step_s=tuple(
            found.num_members * coster.parameter_step_seconds(found.tensor, state)
            for state in found.states
        ),
        numel=tuple(coster.numel(found.tensor, state) for state in found.states),
        num_members=found.num_members,
    )


def held_bytes(held: FrameHeld, coster: Coster) -> int:
    """Bytes of a tensor that is kept, on one rank."""
    what = held.what
    if isinstance(what, KeptInside):
        return math.ceil(
            own_bytes(
                what.node,
                coster.operand_shapes(what.view, what.option),
                dispatch=coster.dispatch(what.view, what.option),
                style=coster.style(what.node),
            )
        )
    return math.ceil(coster.bytes(what.tensor, what.state) * what.copies)
