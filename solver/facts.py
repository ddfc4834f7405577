"""What a model costs block by block, under a layout or at the least."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Role, info
from autopar.ir.placement import INVARIANT
from autopar.ir.plan import RecomputeName
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.problem import KindCost, Problem

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartCosts:
    """What blocks cost that do a part again in backward: their ops by ``by_op``, what tensor ranks
    gather by ``gathers``, or both.

    Attributes:
        again_s: By how much backward is longer.
        held_bytes: What autograd keeps.
        rebuilt_bytes: What is there beside it then.
    """

    by_op: bool
    gathers: bool
    again_s: Floats
    held_bytes: Floats
    rebuilt_bytes: Floats

    @property
    def key(self) -> Part:
        """Which part it is."""
        return self.by_op, self.gathers


Part = tuple[bool, bool]
"""Whether ops are computed again, and whether what tensor ranks gather is gathered again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockCosts:
    """Costs of every block, in order. All per micro-batch; bytes and elements are a rank's.

    Where stages are on nodes of different kinds, seconds have a row for each stage (``joined``).

    Attributes:
        forward_s, backward_s: Without recomputation.
        forward_comm_s, backward_comm_s: The part of the tensor axis's collectives.
        held_bytes: What autograd keeps.
        rebuilt_bytes: What is there beside it when backward has computed single ops again.
        parts: Of blocks that do a part again, for each that is open.
        temporary_bytes: What the op that needs most has beside it.
        input_s, weight_s: Of ``backward_s``, the two parts of a backward in two.
        waiting_bytes: What is kept between the parts.
        input_bytes: The block's activations inputs: what recomputation starts from.
        border_bytes: What passes from block ``i - 1`` and before to block ``i`` and after.
        sent_bytes, gathered_bytes: What a rank sends of it, either way, and what tensor ranks then
            gather: each sends its part of what all of them have whole, its gradient too.
        numel: Elements of parameters at their first use; ``shared_numel`` at every use.
        expert_numel, shared_expert_numel: The part of them that an expert axis shards.
        recomputed: For each way of recomputing whole blocks, 1 for the blocks that it repeats.
        step_s: Reductions over the tensor axis, once a step.
        parameters: Local elements of each parameter by name, and whether an expert axis shards
            it, for each block.
    """

    forward_s: Floats
    backward_s: Floats
    forward_comm_s: Floats
    backward_comm_s: Floats
    held_bytes: Floats
    rebuilt_bytes: Floats
    temporary_bytes: Floats
    input_s: Floats
    weight_s: Floats
    waiting_bytes: Floats
    input_bytes: Floats
    border_bytes: Floats
    sent_bytes: Floats
    gathered_bytes: Floats
    numel: Floats
    shared_numel: Floats
    expert_numel: Floats
    shared_expert_numel: Floats
    recomputed: Mapping[RecomputeName, Floats]
    step_s: Floats
    parameters: tuple[Mapping[str, tuple[int, bool]], ...] = field(repr=False)
    parts: tuple[PartCosts, ...] = ()

    @property
    def part_seconds(self) -> Floats:
        """Seconds of each part again (rows), then of all of a block; where stages have seconds of
        their own, of each stage.
        """
        each = [*(part.again_s for part in self.parts), self.forward_s]
        return np.stack(np.broadcast_arrays(*each), axis=-2)

    @functools.cached_property
    def part_saved_bytes(self) -> Floats:
        """What a micro-batch keeps less of each block that does a part again, by part (rows)."""
        less = [self.held_bytes - part.held_bytes for part in self.parts]
        found = np.array(less).reshape(len(less), self.num_blocks)
        return np.maximum(found, 0.0) * self.again("full")

    @property
    def num_blocks(self) -> int:
        return len(self.held_bytes)

    @functools.cached_property
    def known_borders(self) -> dict[Hashable, Floats]:
        """Seconds of messages before each block, as far as somebody has asked for them."""
        return {}

    @functools.cached_property
    def known_traffic(self) -> dict[Hashable, Floats]:
        """Seconds of gathers and reductions, as far as somebody has asked for them."""
        return {}

    @functools.cached_property
    def known_kept(self) -> dict[Hashable, Floats]:
        """Bytes that cuts into virtual stages keep, as far as somebody has asked for them."""
        return {}

    @functools.cached_property
    def num_parameters(self) -> Floats:
        """Parameters of each block."""
        return np.array([float(len(names)) for names in self.parameters])

    @functools.cached_property
    def num_first_parameters(self) -> Floats:
        """Parameters of each block that no block before it uses."""
        seen: set[str] = set()
        counts: list[float] = []
        for names in self.parameters:
            counts.append(float(len(names.keys() - seen)))
            seen |= names.keys()
        return np.array(counts)

    @functools.cached_property
    def shares_parameters(self) -> bool:
        """Whether several blocks use a parameter."""
        return sum(map(len, self.parameters)) > len(set().union(*self.parameters))

    @functools.cached_property
    def shared(self) -> tuple[tuple[Floats, float, float], ...]:
        """Of parameters that several blocks use: 1 for these, elements, and those of experts."""
        users: dict[str, list[int]] = {}
        for block, names in enumerate(self.parameters):
            for name in names:
                users.setdefault(name, []).append(block)
        found: dict[tuple[int, ...], tuple[float, float]] = {}
        for name, blocks in users.items():
            if len(blocks) > 1:
                elements, is_expert = self.parameters[blocks[0]][name]
                numel, experts = found.get(tuple(blocks), (0.0, 0.0))
                found[tuple(blocks)] = (numel + elements, experts + elements * is_expert)
        return tuple(
            (np.bincount(blocks, minlength=self.num_blocks).astype(np.float64), *numels)
            for blocks, numels in found.items()
        )

    def again(self, recompute: RecomputeName) -> Floats:
        """1 for blocks that ``recompute`` repeats as a whole, 0 for others."""
        return self.recomputed[recompute]


def layout_costs(
    facts: ModelFacts,
    problem: Problem,
    kinds: tuple[KindCost, ...],
    parts: Mapping[Part, tuple[KindCost, ...]],
    states: tuple[int, ...],
) -> BlockCosts:
    """The costs of all blocks under a solution: ``kinds``, by ``parts`` those that do a part again,
    and the state of each class.
    """
    chosen = {
        number: _chosen(problem, number, (state,))
        for number, state in enumerate(states)
        if state >= 0
    }
    return with_parts(_block_costs(facts, kinds, chosen), facts, parts)


def with_parts(
    costs: BlockCosts, facts: ModelFacts, parts: Mapping[Part, tuple[KindCost, ...]]
) -> BlockCosts:
    """``costs`` of blocks, with those of the same blocks that do a part again."""
    found = tuple(
        PartCosts(
            by_op=by_op,
            gathers=gathers,
            again_s=np.array([max(cost.again_s, cost.again_launch_s) for cost in again]),
            held_bytes=np.array([float(cost.held_bytes) for cost in again]),
            rebuilt_bytes=np.array([float(cost.rebuilt_bytes) for cost in again]),
        )
        for (by_op, gathers), kinds in parts.items()
        for again in (_costs_of(facts, kinds),)
    )
    return replace(costs, parts=found)


def _costs_of(facts: ModelFacts, kinds: tuple[KindCost, ...]) -> list[KindCost]:
    """Of each block."""
    order = {name: number for number, name in enumerate(facts.model.kinds)}
    return [kinds[order[block.kind]] for block in facts.model.blocks]


def least_costs(facts: ModelFacts, problem: Problem, kinds: tuple[KindCost, ...]) -> BlockCosts:
    """What no layout is below: ``kinds`` are lower bounds, classes have their smallest state."""
    chosen = {
        number: _chosen(problem, number, range(len(found.states)))
        for number, found in enumerate(problem.classes)
        if found.states
    }
    found = _block_costs(facts, kinds, chosen)
    inputs = dict(zip(facts.model.kinds, _least_input_s(problem), strict=True))
    return replace(found, input_s=np.array([inputs[block.kind] for block in facts.model.blocks]))


def _least_input_s(problem: Problem) -> list[float]:
    """For each kind, seconds of the input part of a backward: every op at its fastest."""
    found = [0.0] * len(problem.kinds)
    for op in problem.ops:
        found[op.kind] += min(option.backward_s - option.weight_s for option in op.options)
    for state_class in problem.classes:
        for kind, costs in state_class.outer.items():
            found[kind] += min(cost.backward_s for cost in costs)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """A member of a class: its elements on a rank, those that a message has, those that are then
    gathered, and seconds once a step.
    """

    numel: int = 0
    sent_numel: float = 0.0
    gathered_numel: int = 0
    step_s: float = 0.0


def _chosen(problem: Problem, number: int, states: Iterable[int]) -> _Chosen:
    """The least of some states of a class."""
    found, size = problem.classes[number], problem.axis_size
    divided = [size > 1 and found.states[state] == INVARIANT for state in states]
    numels = [found.numel[state] for state in states]
    pairs = list(zip(numels, divided, strict=True))
    return _Chosen(
        numel=min(numels),
        sent_numel=min(numel / size if is_divided else numel for numel, is_divided in pairs),
        gathered_numel=min(numel if is_divided else 0 for numel, is_divided in pairs),
        step_s=min(found.step_s[state] for state in states) / max(1, found.num_members),
    )


def least_kind_costs(problem: Problem, *, may_gather: bool = False) -> tuple[KindCost, ...]:
    """For each kind: every op at its fastest, no moves, and every kept tensor at its smallest; what
    can be gathered again is not kept if it may be.
    """
    num = len(problem.kinds)
    forward, backward, held, temporary = [0.0] * num, [0.0] * num, [0] * num, [0] * num
    weight, rebuilt, waiting = [0.0] * num, [0] * num, [0] * num
    awaited: dict[int, list[int]] = {}
    launches, again = [[0.0, 0.0] for _ in range(num)], [[0.0, 0.0] for _ in range(num)]
    kept: dict[int, int] = {}
    for op in problem.ops:
        forward[op.kind] += min(option.forward_s for option in op.options)
        once = min(option.backward_s - option.again_s for option in op.options)
        backward[op.kind] += once + min(option.again_s for option in op.options)
        weight[op.kind] += min(option.weight_s for option in op.options)
        launches[op.kind][0] += min(option.forward_launch_s for option in op.options)
        once = min(option.backward_launch_s - option.again_launch_s for option in op.options)
        launches[op.kind][1] += once + min(option.again_launch_s for option in op.options)
        again[op.kind][0] += min(option.again_s for option in op.options)
        again[op.kind][1] += min(option.again_launch_s for option in op.options)
        smallest = min(option.transient_bytes for option in op.options)
        temporary[op.kind] = max(temporary[op.kind], smallest)
        rebuilt[op.kind] += min(option.rebuilt_bytes for option in op.options)
        waiting[op.kind] += min(option.waiting_bytes for option in op.options)
        for place, value in enumerate(op.operands):
            sizes = [dict(option.waiting).get(place, 0) for option in op.options]
            awaited.setdefault(value, []).append(min(sizes))
        tensors = [{problem.held[q].tensor for q in option.held} for option in op.options]
        always = {tensor for tensor in set.intersection(*tensors) if tensor >= 0}
        kept.update(dict.fromkeys(always, op.kind))
        own = [
            sum(problem.held[q].num_bytes for q in option.held if problem.held[q].tensor < 0)
            for option in op.options
        ]
        held[op.kind] += min(own)
    for found in problem.classes:
        for kind, costs in found.outer.items():
            forward[kind] += min(cost.forward_s for cost in costs)
            backward[kind] += min(cost.backward_s for cost in costs)
    smallest_of: dict[int, int] = {}
    for entry in problem.held:
        is_kept = entry.made is None and not (may_gather and math.isfinite(entry.gather_s))
        size = entry.num_bytes if is_kept else 0
        smallest_of[entry.tensor] = min(smallest_of.get(entry.tensor, size), size)
    for tensor, kind in kept.items():
        held[kind] += smallest_of[tensor]
    for value, least in awaited.items():  # those that several ops keep alike count once
        waiting[problem.values[value].kind] += max(least)
    return tuple(
        KindCost(
            forward_s=forward[kind],
            backward_s=backward[kind],
            forward_comm_s=0.0,
            backward_comm_s=0.0,
            held_bytes=held[kind],
            rebuilt_bytes=rebuilt[kind],
            transient_bytes=temporary[kind],
            weight_s=weight[kind],
            waiting_bytes=waiting[kind],
            forward_launch_s=launches[kind][0],
            backward_launch_s=launches[kind][1],
            again_s=again[kind][0],
            again_launch_s=again[kind][1],
        )
        for kind in range(num)
    )


def _block_costs(
    facts: ModelFacts,
    kinds: tuple[KindCost, ...],
    chosen: Mapping[int, _Chosen],
) -> BlockCosts:
    model, classes = facts.model, facts.classes
    costs = _costs_of(facts, kinds)
    backward_s = np.array([_backward_s(cost) for cost in costs])
    weight_s = np.array([min(cost.weight_s, cost.backward_s) for cost in costs])
    held = np.array([float(cost.held_bytes) for cost in costs])
    rebuilt = np.array([float(cost.rebuilt_bytes) for cost in costs])
    num = len(costs)
    numel, shared, step_s = np.zeros(num), np.zeros(num), np.zeros(num)
    experts, shared_experts = np.zeros(num), np.zeros(num)
    inputs, borders = np.zeros(num), np.zeros(num)
    sent, gathered = np.zeros(num), np.zeros(num)
    parameters: list[dict[str, tuple[int, bool]]] = [{} for _ in range(num)]
    seen: set[str] = set()
    passes: dict[str, tuple[int, int, int, _Chosen]] = {}
    for block in model.blocks:
        kind = model.kind_of(block)
        for index, (node, value) in enumerate(zip(kind.placeholders, block.bindings, strict=True)):
            number = classes.of[block.kind, "in", index]
            one = chosen.get(number, _Chosen())
            elements = one.numel
            if value.role is Role.PARAMETER:
                is_expert = number in facts.experts
                parameters[block.index][value.name] = (elements, is_expert)
                shared[block.index] += elements
                shared_experts[block.index] += elements * is_expert
                if value.name not in seen:
                    seen.add(value.name)
                    numel[block.index] += elements
                    experts[block.index] += elements * is_expert
                    step_s[block.index] += one.step_s
            elif value.role is Role.ACTIVATION:
                itemsize = info(node).tensor.dtype.itemsize
                inputs[block.index] += elements * itemsize
                producer, _ = model.producer(value)
                passes[value.name] = (producer, block.index, itemsize, one)
    for producer, last, itemsize, one in passes.values():
        borders[producer + 1 : last + 1] += one.numel * itemsize
        sent[producer + 1 : last + 1] += one.sent_numel * itemsize
        gathered[producer + 1 : last + 1] += one.gathered_numel * itemsize
    return BlockCosts(
        forward_s=np.array([max(cost.forward_s, cost.forward_launch_s) for cost in costs]),
        backward_s=backward_s,
        forward_comm_s=np.array([cost.forward_comm_s for cost in costs]),
        backward_comm_s=np.array([cost.backward_comm_s for cost in costs]),
        held_bytes=held,
        rebuilt_bytes=rebuilt,
        temporary_bytes=np.array([float(cost.transient_bytes) for cost in costs]),
        input_s=backward_s - weight_s,
        weight_s=weight_s,
        waiting_bytes=np.array([float(cost.waiting_bytes) for cost in costs]),
        input_bytes=inputs,
        border_bytes=borders,
        sent_bytes=sent,
        gathered_bytes=gathered,
        numel=numel,
        shared_numel=shared,
        expert_numel=experts,
        shared_expert_numel=shared_experts,
        recomputed={name: facts.repeated_blocks(name) for name in get_args(RecomputeName)},
        step_s=step_s,
        parameters=tuple(parameters),
    )


def _backward_s(cost: KindCost) -> float:
    """What is computed again is launched when backward needs it: it hides no other launches."""
    once = max(cost.backward_s - cost.again_s, cost.backward_launch_s - cost.again_launch_s)
    return once + max(cost.again_s, cost.again_launch_s)
