"""What the block that makes the loss costs when it computes the loss in chunks.

Backward then runs the chunks' forwards, too, and everything of the region (``ir.loss_region``) once
for each chunk, on so much smaller tensors. Kept from forward to backward is what the region reads,
and what other ops keep. At the fullest moment there is beside it all that a chunk keeps and its op
that needs most, and the gradients of what the region reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.errors import InputError
from autopar.ir.graph import Role, TensorInfo
from autopar.ir.layout import KindLayout
from autopar.ir.loss_region import LossKind, LossRegion, NoLossRegion, most_in_chunks
from autopar.ir.losses import sum_dtype
from autopar.ir.mesh import TENSOR_AXIS
from autopar.ir.placement import State
from autopar.solver.costs.saved import own_bytes
from autopar.solver.facts import BlockCosts, Floats, least_kind_costs
from autopar.solver.layout.check import kind_costs
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.decode import join_kind, kind_typing
from autopar.solver.layout.frame import FrameOp, KeptInside
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.outer import AxisTyping, NodeView, shard
from autopar.solver.layout.outer_comm import OuterComm
from autopar.solver.layout.problem import KindCost, OpOption, Problem, Solution

NUMBERS = (2, 4, 8, 16, 32, 64)
"""Chunks that are searched; other numbers can be pinned."""


def check_chunks(facts: ModelFacts, num_chunks: int) -> None:
    """Raise ``InputError`` if the loss is pinned to so many chunks, and no layout can have them."""
    if num_chunks <= 1 or facts.most_in_chunks(num_chunks):
        return
    found = facts.loss
    if isinstance(found, LossKind):
        most = most_in_chunks(found, facts.rules[found.kind.name], num_chunks)
        assert isinstance(most, NoLossRegion)
        found = most
    raise InputError(
        f"loss_chunks={num_chunks} is pinned, but {found.reason}",
        where=found.where or None,
        hint="loss_chunks=1, or a number that divides the sequences or their positions",
    )


def least_in_chunks(facts: ModelFacts, problem: Problem, least: BlockCosts, num: int) -> BlockCosts:
    """``least``, with what the block that makes the loss keeps and needs at the least where it may
    compute it in ``num``, or a multiple of so many chunks: that of ops which are in no region.
    """
    inside, block = facts.most_in_chunks(num), facts.loss_block
    if not inside:
        return least
    kind = problem.kinds.index(facts.model.blocks[block].kind)
    ops = tuple(op for op in problem.ops if op.kind != kind or op.node not in inside)
    cost = least_kind_costs(replace(problem, ops=ops))[kind]
    held, temporary = least.held_bytes.copy(), least.temporary_bytes.copy()
    held[block] = min(held[block], cost.held_bytes)
    temporary[block] = min(temporary[block], cost.transient_bytes)
    return replace(least, held_bytes=held, temporary_bytes=temporary)


def loss_layout(
    facts: ModelFacts,
    own: LossKind,
    problem: Problem,
    solution: Solution,
    typed: Mapping[str, AxisTyping],
) -> KindLayout:
    """The layout of the kind that makes the loss; ``typed`` are the axes but the tensor axis."""
    kind = own.kind.name
    tensor = kind_typing(own.kind, facts.classes, problem, solution)
    return join_kind({**{axis: found[kind] for axis, found in typed.items()}, TENSOR_AXIS: tensor})


def with_loss(costs: BlockCosts, block: int, found: ChunkedCost, adding_s: float) -> BlockCosts:
    """``costs``, whose ``block`` is that of ``found`` or costs more, with its loss in chunks.

    Args:
        adding_s: Seconds of adding gradients up once for each chunk but one.
    """
    whole, chunked = found.whole, found.cost

    def changed(values: Floats, by: float) -> Floats:
        values = values.copy()
        values[block] += by
        return values

    forward = _forward_s(chunked) - _forward_s(whole)
    backward = _backward_s(chunked) - _backward_s(whole) + adding_s
    return replace(
        costs,
        forward_s=changed(costs.forward_s, forward),
        backward_s=changed(costs.backward_s, backward),
        forward_comm_s=changed(costs.forward_comm_s, chunked.forward_comm_s - whole.forward_comm_s),
        backward_comm_s=changed(
            costs.backward_comm_s, chunked.backward_comm_s - whole.backward_comm_s
        ),
        held_bytes=changed(costs.held_bytes, chunked.held_bytes - whole.held_bytes),
        temporary_bytes=changed(
            costs.temporary_bytes, chunked.transient_bytes - whole.transient_bytes
        ),
    )


def _forward_s(cost: KindCost) -> float:
    return max(cost.forward_s, cost.forward_launch_s)


def _backward_s(cost: KindCost) -> float:
    return max(cost.backward_s, cost.backward_launch_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedCost:
    """What the block that makes the loss costs in chunks, without adding gradients up.

    Attributes:
        cost: Of the block.
        whole: The same without chunks.
        num_parameters, numel: Parameters whose gradients come in chunks, and their elements.
    """

    cost: KindCost
    whole: KindCost
    num_parameters: int
    numel: int


def chunked_cost(
    own: LossKind,
    region: LossRegion,
    problem: Problem,
    solution: Solution,
    coster: Coster,
    comm: OuterComm,
    *,
    num_chunks: int,
) -> ChunkedCost:
    """The cost of the block of ``own`` under a solution, with its region in chunks: no less than
    without, in either direction together.
    """
    chunker = _Chunker(own, region, problem, solution, coster, comm, num_chunks)
    whole = kind_costs(problem, solution)[chunker.kind]
    return ChunkedCost(
        cost=chunker.cost(whole),
        whole=whole,
        num_parameters=len(chunker.parameters()),
        numel=sum(chunker.parameters().values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """An op of the kind with its option; of the region, with what a chunk sees of it."""

    op: FrameOp
    option: OpOption
    part: NodeView | None

    @property
    def is_inside(self) -> bool:
        return self.part is not None


class _Chunker:
    def __init__(
        self,
        own: LossKind,
        region: LossRegion,
        problem: Problem,
        solution: Solution,
        coster: Coster,
        comm: OuterComm,
        num_chunks: int,
    ) -> None:
        self.own, self.region, self.problem, self.solution = own, region, problem, solution
        self.coster, self.comm, self.num_chunks = coster, comm, num_chunks
        self.kind = problem.kinds.index(own.kind.name)
        self.ops = [
            _Op(op=frame_op, option=op.options[choice], part=self._view(frame_op))
            for frame_op, op, choice in zip(
                problem.frame.ops, problem.ops, solution.choices, strict=True
            )
            if op.kind == self.kind
        ]
        self.produced: dict[int, State] = {}
        for number, value in enumerate(problem.values):
            if value.kind == self.kind and value.state_class is not None:
                self.produced[number] = self._state_of_class(value.state_class)
        for found in self.ops:
            self.produced.update(zip(found.op.results, found.option.option.results, strict=True))
        self.entries = self._entries()

    def _state_of_class(self, number: int) -> State:
        return self.problem.classes[number].states[self.solution.states[number]]

    def _view(self, op: FrameOp) -> NodeView | None:
        """What a chunk sees of an op of the region."""
        typing = self.region.typing.get(op.node.name)
        if typing is None:
            return None
        return replace(
            op.view,
            operands=tuple(map(self._part, op.view.operands, typing.operands)),
            results=tuple(map(self._part, op.view.results, typing.results)),
        )

    def _part(self, tensor: TensorInfo, state: State) -> TensorInfo:
        """What a chunk has of a tensor."""
        if not state.is_sharded:
            return tensor
        dim, shape = state.dim, list(tensor.shape)
        size = shape[dim]
        shape[dim] = size // self.num_chunks if isinstance(size, int) else size / self.num_chunks
        return replace(tensor, shape=tuple(shape))

    def _split(self, value: int) -> State | None:
        """The state on the axis of chunks of a value of the region; None of others."""
        found = self.problem.values[value]
        typing = self.region.typing.get(found.node) if found.kind == self.kind else None
        return None if typing is None else typing.results[found.result]

    # What the region reads

    def _entries(self) -> dict[tuple[int, State], _Entry]:
        """By value and state, in which it is read, on the tensor axis."""
        found: dict[tuple[int, State], _Entry] = {}
        for own in self.ops:
            if not own.is_inside:
                continue
            splits = self.region.typing[own.op.node.name].operands
            for value, state, tensor, split in zip(
                own.op.operands,
                own.option.option.operands,
                own.op.view.operands,
                splits,
                strict=True,
            ):
                if self._split(value) is None:
                    found[value, state] = self._entry(value, state, tensor, split)
        return found

    def _entry(self, value: int, state: State, tensor: TensorInfo, split: State) -> _Entry:
        role = self.problem.frame.values[value].role
        is_stored = role in (Role.INPUT, Role.CONSTANT) or (
            role is Role.PARAMETER and self.produced[value] == state
        )
        size = self.coster.bytes(tensor, state)
        is_parameter = is_stored and role is Role.PARAMETER
        wide = self.coster.numel(tensor, state) * sum_dtype(tensor.dtype).itemsize
        gradient = 0
        if tensor.requires_grad and not is_parameter:
            gradient = size if split.is_sharded else wide
        learned = self.coster.numel(tensor, state) if is_parameter and tensor.requires_grad else 0
        return _Entry(
            num_bytes=0 if is_stored else size, gradient_bytes=gradient, learned_numel=learned
        )

    def parameters(self) -> dict[int, int]:
        """Elements of the parameters whose gradients come in chunks."""
        return {
            value: entry.learned_numel
            for (value, _), entry in self.entries.items()
            if entry.learned_numel
        }

    # Seconds

    def cost(self, whole: KindCost) -> KindCost:
        """In chunks; ``whole`` is the cost without."""
        forward = np.array([whole.forward_s, whole.forward_comm_s, whole.forward_launch_s])
        backward = np.array([whole.backward_s, whole.backward_comm_s, whole.backward_launch_s])
        for own in self.ops:
            if own.part is None:
                continue
            option = own.option
            forward -= (option.forward_s, option.forward_comm_s, option.forward_launch_s)
            backward -= (option.backward_s, option.backward_comm_s, option.backward_launch_s)
            backward += self.num_chunks * self._op_in_chunk(own, own.part)
        for value, state in self._moved():
            source, tensor = self.produced[value], self.problem.frame.values[value].tensor
            split = self._split(value)
            assert split is not None
            cost = self.coster.move(tensor, source, state)
            part = self.coster.move(self._part(tensor, split), source, state)
            in_chunks = self.num_chunks * (part.forward_s + part.backward_s)
            forward[:2] -= cost.forward_s
            backward[:2] += in_chunks - cost.backward_s
        forward = np.maximum(forward, 0.0)
        # Tiles of small matrices, and kernels that hide launches of others, may say that it is
        # faster so: no bound knows that.
        least = _forward_s(whole) + _backward_s(whole) - max(forward[0], forward[2])
        return KindCost(
            forward_s=float(forward[0]),
            backward_s=float(max(backward[0], whole.backward_s, least)),
            forward_comm_s=float(forward[1]),
            backward_comm_s=float(backward[1]),
            held_bytes=self._held_bytes(),
            transient_bytes=self._transient_bytes(),
            forward_launch_s=float(forward[2]),
            backward_launch_s=float(backward[2]),
        )

    def _op_in_chunk(self, own: _Op, part: NodeView) -> Floats:
        """Forward and backward together: seconds, those of collectives, those of launches."""
        node, chosen = own.op.node, own.option.option
        seconds = self.coster.op(node, part, chosen)
        outer = 0.0
        for result, state in enumerate(chosen.results):
            split = self.region.typing[node.name].results[result]
            for found in self.comm.traffic.moves.get((self.own.kind.name, node.name, result), ()):
                tensor = self._part(shard(found.tensor, state, self.comm.size), split)
                cost = self.comm.costers[found.axis].move(tensor, found.source, found.target)
                outer += cost.forward_s + cost.backward_s
        return np.array(
            [
                seconds.forward_s + seconds.backward_s + outer,
                seconds.forward_comm_s + seconds.backward_comm_s + outer,
                seconds.forward_launch_s + seconds.backward_launch_s,
            ]
        )

    def _moved(self) -> set[tuple[int, State]]:
        """Values of the region that move on the tensor axis, and to which state."""
        demanded = {
            (value, state)
            for own in self.ops
            for value, state in zip(own.op.operands, own.option.option.operands, strict=True)
        }
        demanded |= {
            (delivery.value, self._state_of_class(delivery.state_class))
            for delivery in self.problem.deliveries
            if delivery.kind == self.kind
        }
        return {
            (value, state)
            for value, state in demanded
            if self._split(value) is not None and self.produced[value] != state
        }

    # Bytes

    def _held_bytes(self) -> int:
        """What is kept from forward to backward: by ops outside the region, and what it reads."""
        kept = {number for own in self.ops if not own.is_inside for number in own.option.held}
        held = self.problem.held
        known = {(held[number].tensor, held[number].num_bytes) for number in kept}
        total = sum(held[number].num_bytes for number in kept if not self._is_stored(number))
        for (value, _), entry in self.entries.items():
            if (value, entry.num_bytes) not in known:
                total += entry.num_bytes
        return total

    def _is_stored(self, number: int) -> bool:
        """Whether what is kept is a parameter where it lies."""
        held = self.problem.held[number]
        if held.made is None:
            return False
        value = held.made
        return self.problem.values[value].states.index(self.produced[value]) in held.free

    def _transient_bytes(self) -> int:
        """Of the op that needs most outside the region, or of a chunk with the gradients of what
        the region reads.
        """
        outside = [own.option.transient_bytes for own in self.ops if not own.is_inside]
        inside = [
            self.coster.transient_bytes(own.op.node, own.part, own.option.option)
            for own in self.ops
            if own.part is not None
        ]
        kept: dict[int, int] = {}
        for own in self.ops:
            if own.part is not None:
                kept.update(
                    {number: self._in_chunk(number, own.part) for number in own.option.held}
                )
        gradients = sum(entry.gradient_bytes for entry in self.entries.values())
        return max([*outside, gradients + sum(kept.values()) + max(inside)])

    def _in_chunk(self, number: int, part: NodeView) -> int:
        """Bytes of what an op of the region keeps of a chunk, beside what is kept anyway."""
        held = self.problem.held[number]
        if held.tensor >= 0:
            split = self._split(held.tensor)
            if split is None:
                return 0
            return held.num_bytes // self.num_chunks if split.is_sharded else held.num_bytes
        what = self.problem.frame.held[number].what
        assert isinstance(what, KeptInside)
        coster = self.coster
        shapes = coster.operand_shapes(part, what.option)
        dispatch, style = coster.dispatch(part, what.option), coster.style(what.node)
        return math.ceil(own_bytes(what.node, shapes, dispatch=dispatch, style=style))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What the region reads: bytes that it keeps of it, bytes of its gradient, and elements whose
    gradients come in chunks, if it is a parameter where it lies.
    """

    num_bytes: int
    gradient_bytes: int
    learned_numel: int
