"""From a model to the problem of an axis: the options of every op, the moves of every value.

What does not depend on costs is made once for all micro-batch sizes: see ``frame``.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from dataclasses import replace

from torch import fx

from autopar.ir.families import Family, copies, family_of
from autopar.ir.graph import BlockKind, Role, TensorInfo, info
from autopar.ir.layout import operands_of
from autopar.ir.placement import INVARIANT, REPLICATED, State
from autopar.ir.rules.core import Option, Rule, normal_state
from autopar.ir.typecheck import kind_options
from autopar.solver.costs.saved import rebuilt_nodes
from autopar.solver.layout.by_op import recomputing
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.draft import Draft
from autopar.solver.layout.frame import (
    ClassRole,
    Delivery,
    Frame,
    FrameClass,
    FrameOp,
    FrameValue,
)
from autopar.solver.layout.kept import KeptTensors
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.outer import NodeView, OuterAxes
from autopar.solver.layout.outer_comm import NO_COMM, OuterComm, OuterTraffic
from autopar.solver.layout.price import Priced, price
from autopar.solver.layout.problem import Problem
from autopar.solver.layout.state import AxisRule, grows, is_positions
from autopar.solver.layout.stream import residual_stream


def make_problem(
    facts: ModelFacts,
    axis: AxisRule,
    coster: Coster,
    outer: OuterAxes | None = None,
    comm: OuterComm = NO_COMM,
) -> Problem:
    """The problem of ``axis``, for ranks that cost what ``coster`` says.

    ``outer`` are the axes that are typed already, and ``comm`` is what they send.
    """
    outer = outer or OuterAxes()
    once = replace(coster, again=frozenset(), gathers_again=False)
    known = facts.priced.setdefault(once.fingerprint, Priced())
    problem = price(_frame(facts, axis, once, outer, comm.traffic), once, comm, known)
    if coster == once:
        return problem
    return computed_again(problem, facts, axis, coster, outer, comm)


def computed_again(
    problem: Problem,
    facts: ModelFacts,
    axis: AxisRule,
    coster: Coster,
    outer: OuterAxes,
    comm: OuterComm,
) -> Problem:
    """``problem``, which does all once, where backward computes ``coster.again`` again, or gathers
    again; the arguments are those of ``make_problem``.
    """
    return recomputing(problem, _frame(facts, axis, coster, outer, comm.traffic), coster)


def _frame(
    facts: ModelFacts, axis: AxisRule, coster: Coster, outer: OuterAxes, traffic: OuterTraffic
) -> Frame:
    """The frame of these axes and this way of computing, made once.

    Options of an axis that shares the batch may depend on it: not every size divides.
    """
    key = (
        axis,
        coster.group.size,
        coster.batch if axis.shards_batch else None,
        tuple((other.size, other.divides_batch, id(other.typing)) for other in outer.axes),
        id(coster.styles),
        coster.again,
        coster.gathers_again,
        id(traffic),
    )
    if key not in facts.frames:
        frame = _Maker(facts, axis, coster, outer, traffic).frame()
        facts.frames[key] = (
            frame,
            (coster.styles, traffic),
        )  # kept alive, as the key has their ids
    return facts.frames[key][0]


class _Maker:
    def __init__(
        self,
        facts: ModelFacts,
        axis: AxisRule,
        coster: Coster,
        outer: OuterAxes,
        traffic: OuterTraffic,
    ) -> None:
        self.model, self.facts, self.axis, self.coster = facts.model, facts, axis, coster
        self.outer, self.traffic = outer, traffic
        self.drafts: list[Draft] = []
        self.number: dict[tuple[str, str, int], int] = {}
        last = facts.model.blocks[facts.loss_block].kind
        again = (number for number, name in enumerate(facts.model.kinds) if name != last)
        gathers = frozenset(again) if coster.gathers_again else frozenset[int]()
        self.kept = KeptTensors(coster, self.drafts, gathers)
        self.options: dict[tuple[str, str], tuple[Option, ...]] = {}
        self.views_of_matrices: set[tuple[int, str]] = set()
        self.streams: dict[str, frozenset[fx.Node]] = {}
        self.rebuilt = {
            kind.name: rebuilt_nodes(kind.graph, coster.again, coster.styles)
            for kind in facts.model.kinds.values()
        }

    def frame(self) -> Frame:
        for index, kind in enumerate(self.model.kinds.values()):
            self.read_kind(index, kind)
        classes = self.state_classes()
        ops: list[FrameOp] = []
        for index, kind in enumerate(self.model.kinds.values()):
            for node in kind.graph.nodes:
                if (kind.name, node.name) in self.options:
                    ops.append(self.op(index, kind, node))
        counts = self.model.multiplicity()
        return Frame(
            axis=self.axis.name,
            size=self.coster.group.size,
            outer=self.outer,
            kinds=tuple(self.model.kinds),
            counts=tuple(counts[name] for name in self.model.kinds),
            values=tuple(map(self.value, self.drafts)),
            ops=tuple(ops),
            classes=classes,
            held=tuple(self.kept.tensors),
            deliveries=tuple(self.deliveries()),
        )

    def read_kind(self, index: int, kind: BlockKind) -> None:
        """Options of the ops, and the states in which values are produced and demanded."""
        options = kind_options(
            kind,
            axis=self.axis.name,
            axis_size=self.coster.group.size,
            batch=self.coster.batch,
            rules=self.facts.rules_on(self.axis, kind.name, self.coster.group.size),
        )
        placeholders = {node: number for number, node in enumerate(kind.placeholders)}
        for node in kind.graph.nodes:
            if node.op in ("output", "get_attr") or node.target is operator.getitem:
                continue
            role, state_class = None, None
            if node in placeholders:
                role = kind.roles[placeholders[node]]
                state_class = self.facts.classes.of[kind.name, "in", placeholders[node]]
            view = self.outer.view(kind, node)
            outer = view.states[len(view.operands) :]
            for result, tensor in enumerate(view.results):
                self.number[kind.name, node.name, result] = len(self.drafts)
                self.drafts.append(
                    Draft(
                        kind=index,
                        node=node.name,
                        result=result,
                        tensor=tensor,
                        role=role,
                        state_class=state_class,
                        outer=outer[result],
                    )
                )
            if node.op == "call_function":
                self.read_op(kind, node, options[node.name])
                self.read_view(index, kind, node)

    def read_op(self, kind: BlockKind, node: fx.Node, options: tuple[Option, ...]) -> None:
        view = self.outer.view(kind, node)
        tensors = (*view.operands, *view.results)
        is_loss = family_of(node) is Family.LOSS and self.axis.loss_parallel is False
        is_stream = self.axis.sequence_parallel is False and node in self.stream(kind)
        if is_loss or is_stream:
            options = tuple(option for option in options if not _shards(option))
        allowed = tuple(
            option
            for option in options
            if all(
                self.axis.allows(state, tensor) and self.divides(state, tensor, outer)
                for state, tensor, outer in zip(
                    (*option.operands, *option.results), tensors, view.states, strict=True
                )
            )
            and self.compatible(option, view, self.facts.rules[kind.name].rules[node.name])
        )
        assert allowed, f"{node.name} has no option on {self.axis.name}"
        self.options[kind.name, node.name] = allowed
        for option in allowed:
            for operand, state in zip(operands_of(node), option.operands, strict=True):
                self.drafts[self.value_of(kind, operand)].demanded[state] = None
            for result, state in enumerate(option.results):
                self.drafts[self.number[kind.name, node.name, result]].states[state] = None

    def stream(self, kind: BlockKind) -> frozenset[fx.Node]:
        """The residual stream of a kind, found once."""
        if kind.name not in self.streams:
            self.streams[kind.name] = residual_stream(kind)
        return self.streams[kind.name]

    def read_view(self, index: int, kind: BlockKind, node: fx.Node) -> None:
        """Note a view of a matrix that nothing but this view reads."""
        operands = operands_of(node)
        if len(operands) != 1 or len(node.users) != 1 or family_of(node) is not Family.VIEW:
            return
        if self.used_as_stored(self.drafts[self.value_of(kind, operands[0])]):
            self.views_of_matrices.add((index, node.name))

    def value_of(self, kind: BlockKind, node: fx.Node) -> int:
        """The value that ``node`` is; ``getitem`` is the element that it reads."""
        if node.target is operator.getitem:
            source, element = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(element, int)
            return self.number[kind.name, source.name, element]
        return self.number[kind.name, node.name, 0]

    def deliveries(self) -> list[Delivery]:
        return [
            Delivery(
                kind=index,
                value=self.value_of(kind, node),
                state_class=self.facts.classes.of[kind.name, "out", output],
            )
            for index, kind in enumerate(self.model.kinds.values())
            for output, node in enumerate(kind.outputs)
        ]

    def state_classes(self) -> tuple[FrameClass, ...]:
        """States of each class: all in which members are produced or demanded, and that divide."""
        classes = self.facts.classes
        tensors: dict[int, TensorInfo] = {}
        outer: dict[int, tuple[State, ...]] = {}
        roles: dict[int, Role] = {}
        states: dict[int, dict[State, None]] = {number: {} for number in range(classes.num)}
        for name, kind in self.model.kinds.items():
            for index, (node, role) in enumerate(zip(kind.placeholders, kind.roles, strict=True)):
                number = classes.of[name, "in", index]
                view = self.outer.view(kind, node)
                tensors[number], roles[number] = view.results[0], role
                outer[number] = view.states[0]
                states[number].update(self.drafts[self.value_of(kind, node)].demanded)
            handed_on = self.outer.view(kind, kind.graph.output_node())
            for index, node in enumerate(kind.outputs):
                number = classes.of[name, "out", index]
                value = self.drafts[self.value_of(kind, node)]
                tensors[number] = handed_on.operands[index]
                outer[number] = handed_on.states[index]
                roles[number] = Role.ACTIVATION
                states[number].update(value.states)
        made: list[FrameClass] = []
        for number in range(classes.num):
            chosen = self.class_states(
                number, roles[number], tensors[number], states[number], outer[number]
            )
            made.append(self.state_class(number, roles[number], tensors[number], chosen))
        for draft in self.drafts:
            if draft.state_class is not None:
                draft.states = dict.fromkeys(made[draft.state_class].states)
        for delivery in self.deliveries():
            draft = self.drafts[delivery.value]
            draft.demanded.update(dict.fromkeys(made[delivery.state_class].states))
        return tuple(made)

    def class_states(
        self,
        number: int,
        role: Role,
        tensor: TensorInfo,
        seen: Mapping[State, None],
        outer: tuple[State, ...],
    ) -> tuple[State, ...]:
        if number in (self.facts.classes.loss, self.facts.classes.weight):
            return self.axis.loss_states(requires_grad=tensor.requires_grad)
        pinned = self.axis.pinned(role, tensor, is_expert=number in self.facts.experts)
        if pinned is not None:
            return pinned
        whole = dict.fromkeys((normal_state(INVARIANT, tensor), normal_state(REPLICATED, tensor)))
        found = [
            state
            for state in {**whole, **seen}
            if self.axis.allows(state, tensor) and self.divides(state, tensor, outer)
        ]
        if role is Role.PARAMETER:
            found = [state for state in found if str(state) != "P"]
        if number in self.facts.matrices or self.axis.shards_activations:
            found = [state for state in found if state.is_sharded] or found
        if role is Role.ACTIVATION and self.axis.sequence_parallel is False:
            found = [state for state in found if state == normal_state(INVARIANT, tensor)] or found
        if role is Role.ACTIVATION and self.axis.sequence_parallel:
            found = [state for state in found if is_positions(state, tensor)] or found
        return tuple(found)

    def divides(self, state: State, tensor: TensorInfo, outer: tuple[State, ...]) -> bool:
        """Whether a tensor, sharded on typed axes already, can have ``state`` too."""
        size = self.coster.group.size
        if not state.is_sharded or size == 1:
            return True
        is_shared = any(other.is_sharded and other.dim == state.dim for other in outer)
        if is_shared and not grows(tensor.shape[state.dim]):
            padding = any(other.padded_size for other in (state, *outer) if other.is_sharded)
            if padding or len(state.blocks) > 1:
                return False  # an inner axis knows nothing of blocks or padding
        shape = self.coster.shape(tensor, INVARIANT)
        return state.shares(shape[state.dim], size) is not None

    def compatible(self, option: Option, view: NodeView, rule: Rule) -> bool:
        """Whether an option can be had beside what typed axes chose for the node: of options beyond
        its factors only one axis can have one.
        """
        if all(option.helper != extra.helper for extra in rule.extra):
            return True
        chosen = [tuple(states) for states in zip(*view.states, strict=True)]
        extras = [(*extra.operands, *extra.results) for extra in rule.extra]
        tensors = (*view.operands, *view.results)
        return not any(
            tuple(map(normal_state, extra, tensors)) == tuple(map(normal_state, states, tensors))
            for extra in extras
            for states in chosen
        )

    def state_class(
        self, number: int, role: Role, tensor: TensorInfo, states: tuple[State, ...]
    ) -> FrameClass:
        roles = {Role.PARAMETER: ClassRole.PARAMETER, Role.ACTIVATION: ClassRole.BOUNDARY}
        members = len(self.facts.classes.parameters[number]) if role is Role.PARAMETER else 0
        return FrameClass(
            role=roles.get(role, ClassRole.INPUT),
            tensor=tensor,
            states=states,
            num_members=members,
        )

    def value(self, draft: Draft) -> FrameValue:
        states, demanded = tuple(draft.states), tuple(draft.demanded)
        as_stored = self.used_as_stored(draft)
        moved = (draft.tensor, states, demanded, as_stored)
        return FrameValue(
            kind=draft.kind,
            node=draft.node,
            result=draft.result,
            tensor=draft.tensor,
            role=draft.role,
            states=states,
            demanded=demanded,
            moves=tuple(
                (i, j)
                for i, source in enumerate(states)
                for j, target in enumerate(demanded)
                if not as_stored or source == target
            ),
            state_class=draft.state_class,
            alike=self.facts.number_of(moved),
        )

    def used_as_stored(self, draft: Draft) -> bool:
        """True for matrices with one use, and views of them: the schedule moves them."""
        if draft.state_class is None:
            return (draft.kind, draft.node) in self.views_of_matrices
        return draft.state_class in self.facts.matrices and self.facts.uses[draft.state_class] == 1

    def op(self, index: int, kind: BlockKind, node: fx.Node) -> FrameOp:
        operands = tuple(self.value_of(kind, operand) for operand in operands_of(node))
        results = tuple(
            self.number[kind.name, node.name, result] for result in range(len(info(node).tensors))
        )
        view = self.outer.view(kind, node)
        is_view = family_of(node) is Family.VIEW
        is_again = node in self.coster.again and not is_view
        if is_again:
            self.kept.note_made_again(results)
        held = []
        for option in self.options[kind.name, node.name]:
            if is_view and len(operands) == 1:
                for result, state in zip(results, option.results, strict=True):
                    self.kept.note_view(
                        result, state, operands[0], option.operands[0], view.states[0]
                    )
            held.append(self.kept.by(node, view, option, operands, results))
        return FrameOp(
            kind=index,
            node=node,
            view=view,
            operands=operands,
            results=results,
            options=self.options[kind.name, node.name],
            held=tuple(held),
            is_again=is_again,
            is_rebuilt=node in self.rebuilt[kind.name],
            weights=self.facts.weights[kind.name].get(node, ()),
            alike=self.facts.number_of(self.signature(kind, node, view)),
            sends=self.traffic.sends(kind.name, node.name, len(results)),
        )

    def signature(self, kind: BlockKind, node: fx.Node, view: NodeView) -> Hashable:
        """Equal for ops that cost the same in every option: all that costs are made of."""
        arguments = fx.map_arg((node.args, node.kwargs), lambda operand: str(info(operand).tensors))
        return (
            node.target,
            str(arguments),
            info(node).tensors,
            view.operands,
            view.results,
            view.states,
            view.imbalance,
            view.dispatch,
            self.traffic.of_op(kind.name, node.name, len(view.results)),
            copies(node),
            self.coster.style(node),
            node in self.coster.again,
            node in self.rebuilt[kind.name],
            self.facts.weights[kind.name].get(node, ()),
            self.options[kind.name, node.name],
        )


def _shards(option: Option) -> bool:
    return any(state.is_sharded for state in (*option.operands, *option.results))
