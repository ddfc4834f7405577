"""From a frame to a problem: what each choice costs on the ranks of one group, at one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from autopar.ir.families import Family, family_of
from autopar.ir.graph import TensorInfo
from autopar.ir.placement import State
from autopar.ir.recompute import is_gather
from autopar.ir.rules.core import Option
from autopar.solver.costs.experts import ExpertSizes
from autopar.solver.costs.saved import own_bytes
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.frame import (
    Frame,
    FrameClass,
    FrameHeld,
    FrameOp,
    GatheredAgain,
    KeptInside,
    KeptValue,
)
from autopar.solver.layout.outer_comm import NO_COMM, OuterComm
from autopar.solver.layout.problem import (
    Held,
    MoveCost,
    Op,
    OpOption,
    Problem,
    StateClass,
    Value,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """What was priced already on some ranks at some batch, by the numbers of what is alike."""

    options: dict[int, tuple[OpOption, ...]] = field(default_factory=dict)
    moves: dict[int, dict[tuple[int, int], MoveCost]] = field(default_factory=dict)
    transfers: dict[TensorInfo, dict[tuple[State, State], MoveCost]] = field(default_factory=dict)


def price(
    frame: Frame, coster: Coster, comm: OuterComm = NO_COMM, known: Priced | None = None
) -> Problem:
    """The problem whose choices are those of ``frame``, for ranks that cost what ``coster`` says.

    Args:
        comm: What the axes send that are typed already.
        known: Of frames of the same model that were priced by such a coster; it learns from this.
    """
    known = known or Priced()
    return Problem(
        frame=frame,
        values=_values(frame, coster, known),
        ops=_ops(frame, coster, comm, known),
        classes=_classes(frame, coster, comm),
        held=held_tensors(frame, coster),
    )


def _values(frame: Frame, coster: Coster, known: Priced) -> tuple[Value, ...]:
    found: list[Value] = []
    for value in frame.values:
        moves = known.moves.get(value.alike)
        if moves is None:
            transfers = known.transfers.setdefault(value.tensor, {})
            moves = known.moves[value.alike] = {
                (i, j): _move(coster, value.tensor, value.states[i], value.demanded[j], transfers)
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


def _ops(frame: Frame, coster: Coster, comm: OuterComm, known: Priced) -> tuple[Op, ...]:
    found: list[Op] = []
    sending: dict[int, tuple[OpOption, ...]] = {}
    for op in frame.ops:
        own = sending if op.sends else known.options  # what is sent depends on other axes, too
        options = own.get(op.alike)
        if options is None:
            options = own[op.alike] = _options(op, frame.kinds[op.kind], coster, comm)
        found.append(
            Op(
                kind=op.kind,
                node=op.node.name,
                operands=op.operands,
                results=op.results,
                options=tuple(
                    option if option.held == held else _keeping(option, held)
                    for option, held in zip(options, op.held, strict=True)
                ),
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
        weight_s=option.weight_s,
        waiting_bytes=option.waiting_bytes,
        waiting=option.waiting,
        held=held,
    )


def _options(op: FrameOp, kind: str, coster: Coster, comm: OuterComm) -> tuple[OpOption, ...]:
    found: list[OpOption] = []
    for option, held in zip(op.options, op.held, strict=True):
        seconds, name = coster.op(op.node, op.view, option), op.node.name
        outer = [comm.helped(kind, name, option)]
        outer += [comm.made(kind, name, n, state) for n, state in enumerate(option.results)]
        forward = sum(cost.forward_s for cost in outer)
        backward = sum(cost.backward_s for cost in outer)
        found.append(
            OpOption(
                option=option,
                forward_s=seconds.forward_s + forward,
                backward_s=seconds.backward_s + backward,
                forward_comm_s=seconds.forward_comm_s + forward,
                backward_comm_s=seconds.backward_comm_s + backward,
                forward_launch_s=seconds.forward_launch_s,
                backward_launch_s=seconds.backward_launch_s,
                transient_bytes=coster.transient_bytes(op.node, op.view, option),
                held=held,
                **_parts(op, option, coster),
            )
        )
    return tuple(found)


class _Parts(TypedDict, total=False):
    weight_s: float
    waiting_bytes: int
    waiting: tuple[tuple[int, int], ...]


def _parts(op: FrameOp, option: Option, coster: Coster) -> _Parts:
    """Of an op whose weights have their gradients later: seconds of that, and what is kept until
    then.

    That are its other operands and the gradients of its result. Experts keep those of their two
    products: rows and their features before each, and gradients behind each.
    """
    if not op.weights:
        return {}
    weight_s = coster.weight_seconds(op.node, op.view, option, op.weights)
    if family_of(op.node) is Family.EXPERTS:
        shapes = coster.operand_shapes(op.view, option)
        sizes = ExpertSizes.of(op.node, shapes, coster.dispatch(op.view, option))
        return {"weight_s": weight_s, "waiting_bytes": math.ceil(sizes.waiting_bytes)}
    results = zip(op.view.results, option.results, strict=True)
    return {
        "weight_s": weight_s,
        "waiting_bytes": sum(coster.bytes(tensor, state) for tensor, state in results),
        "waiting": tuple(
            (place, coster.bytes(tensor, state))
            for place, (tensor, state) in enumerate(
                zip(op.view.operands, option.operands, strict=True)
            )
            if place not in op.weights
        ),
    }


def _classes(frame: Frame, coster: Coster, comm: OuterComm) -> tuple[StateClass, ...]:
    outer: list[dict[int, tuple[MoveCost, ...]]] = [{} for _ in frame.classes]
    for value in frame.values:
        if value.state_class is None:
            continue
        costs = [
            comm.made(frame.kinds[value.kind], value.node, value.result, state)
            for state in value.states
        ]
        own = outer[value.state_class]
        known = own.get(value.kind, (_NO_MOVE,) * len(costs))
        total = tuple(
            MoveCost(a.forward_s + b.forward_s, a.backward_s + b.backward_s)
            for a, b in zip(known, costs, strict=True)
        )
        if any(cost != _NO_MOVE for cost in total):
            own[value.kind] = total
    return tuple(
        _state_class(found, coster, costs)
        for found, costs in zip(frame.classes, outer, strict=True)
    )


def _state_class(
    found: FrameClass, coster: Coster, outer: Mapping[int, tuple[MoveCost, ...]]
) -> StateClass:
    return StateClass(
        role=found.role,
        states=found.states,
        step_s=tuple(
            found.num_members * coster.parameter_step_seconds(found.tensor, state)
            for state in found.states
        ),
        numel=tuple(coster.numel(found.tensor, state) for state in found.states),
        num_members=found.num_members,
        outer=outer,
    )


def held_tensors(frame: Frame, coster: Coster) -> tuple[Held, ...]:
    """The tensors of ``frame`` that may be kept, with their bytes."""
    return tuple(_held(frame, held, coster) for held in frame.held)


def _held(frame: Frame, held: FrameHeld, coster: Coster) -> Held:
    what, again_s, rebuilt, gather_s = held.what, 0.0, 0, math.inf
    if isinstance(what, KeptValue) and what.state.is_whole and coster.group.size > 1:
        states = frame.values[held.tensor].states
        gather_s = min(
            (
                coster.move(what.tensor, state, what.state).forward_s
                for state in states
                if is_gather(state, what.state)
            ),
            default=math.inf,
        )
    if isinstance(what, GatheredAgain):
        again_s = coster.move(what.tensor, what.source, what.target).forward_s
        rebuilt = coster.bytes(what.tensor, what.target)
    return Held(
        kind=held.kind,
        num_bytes=held_bytes(held, coster),
        tensor=held.tensor,
        made=held.made,
        free=held.free,
        again_s=again_s,
        rebuilt_bytes=rebuilt,
        gather_s=gather_s,
    )


def held_bytes(held: FrameHeld, coster: Coster) -> int:
    """Bytes of a tensor that is kept, on one rank."""
    what = held.what
    if isinstance(what, KeptInside):
        return inside_bytes(what, coster)
    if isinstance(what, GatheredAgain):
        return 0
    return math.ceil(coster.bytes(what.tensor, what.state) * what.copies)


def inside_bytes(inside: KeptInside, coster: Coster) -> int:
    """Bytes of what only an op knows, on one rank."""
    return math.ceil(
        own_bytes(
            inside.node,
            coster.operand_shapes(inside.view, inside.option),
            dispatch=coster.dispatch(inside.view, inside.option),
            style=coster.style(inside.node),
        )
    )
