"""The objective of a problem as a sum of tables, for ``eliminate``.

The variables are those of the formulation in ``build`` that choose: the option of each op, then
the state of each class. Values, moves and kept tensors follow from them: what is moved and kept is
a table over the op or class that makes a value and those that take it. Which costs are in which
cell is the same for every problem of a frame, so that the tables of a problem are one product of a
sparse 0/1 matrix with its costs.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.solver.layout.choices import Chooser, keepers, makers, takers
from autopar.solver.layout.eliminate import Elimination, Floats, Scope, plan_elimination
from autopar.solver.layout.frame import Frame
from autopar.solver.layout.problem import Op, Problem, Weights

Bools = NDArray[np.bool_]

_MOST_CELLS = 1_000_000
"""Cells of the largest table that is made at the start."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """Where the costs of a frame's problems go.

    Attributes:
        scopes, shapes: Of the tables, which lie one after the other.
        cells, costs: Cell ``cells[i]`` has cost number ``costs[i]``, for every i.
        impossible: Cells in which a value would be moved in a way that there is not.
        elimination: None where it takes too much.
        offsets: First cell of each table, then the number of cells.
    """

    scopes: tuple[Scope, ...]
    shapes: tuple[tuple[int, ...], ...]
    cells: NDArray[np.intp]
    costs: NDArray[np.intp]
    impossible: NDArray[np.intp]
    elimination: Elimination | None
    offsets: NDArray[np.intp]

    def chosen_costs(self, values: Sequence[int]) -> NDArray[np.intp]:
        """Numbers of the costs that are paid where each variable has its value."""
        paid = np.zeros(int(self.offsets[-1]), dtype=np.bool_)
        for scope, shape, cell in zip(
            self.scopes, self.shapes, self.offsets.tolist(), strict=False
        ):
            within = 0
            for variable, size in zip(scope, shape, strict=True):
                within = within * size + values[variable]
            paid[cell + within] = True
        return self.costs[paid[self.cells]]


_known: weakref.WeakKeyDictionary[Frame, dict[frozenset[int], Tables]] = weakref.WeakKeyDictionary()


def tables_of(frame: Frame, kinds: Iterable[int] | None = None) -> Tables:
    """The tables of some kinds, by default of all; made once."""
    chosen = frozenset(range(len(frame.kinds)) if kinds is None else kinds)
    known = _known.setdefault(frame, {})
    if chosen not in known:
        known[chosen] = _Maker(frame, chosen).tables()
    return known[chosen]


def fill(tables: Tables, costs: Floats) -> list[Floats]:
    """The tables with these costs (``cost_vector``)."""
    cuts = tables.offsets.tolist()
    summed = np.bincount(tables.cells, weights=costs[tables.costs], minlength=cuts[-1])
    flat = summed.astype(np.float64)
    flat[tables.impossible] = np.inf
    return [
        flat[first:end].reshape(shape)
        for (first, end), shape in zip(itertools.pairwise(cuts), tables.shapes, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """The numbers of a problem, in the order of its options, moves, kept tensors and classes."""

    kind: NDArray[np.intp]  # of options and moves
    forward_s: Floats
    backward_s: Floats
    input_s: Floats
    waiting_bytes: Floats
    held_kind: NDArray[np.intp]
    held_bytes: Floats
    held_again_s: Floats
    held_gather_s: Floats
    step_s: Floats
    numel: Floats
    state_class: NDArray[np.intp]
    outer_forward_s: Floats  # of states: a row for each kind
    outer_backward_s: Floats


def costs_of(problem: Problem) -> Costs:
    """The numbers of a problem as vectors."""
    users = Counter(value for op in problem.ops for value in _awaited(op))
    waiting = [
        o.waiting_bytes + sum(size / users[op.operands[place]] for place, size in o.waiting)
        for op in problem.ops
        for o in op.options
    ]
    seconds = [
        (op.kind, o.forward_s, o.backward_s, o.backward_s - o.weight_s)
        for op in problem.ops
        for o in op.options
    ]
    seconds += [
        (value.kind, move.forward_s, move.backward_s, move.backward_s)
        for value in problem.values
        for move in value.moves.values()
    ]
    outer_forward_s = np.zeros((len(problem.kinds), sum(len(c.states) for c in problem.classes)))
    outer_backward_s, first = np.zeros(outer_forward_s.shape), 0
    for found in problem.classes:
        for kind, moves in found.outer.items():
            own = slice(first, first + len(moves))
            outer_forward_s[kind, own] = [move.forward_s for move in moves]
            outer_backward_s[kind, own] = [move.backward_s for move in moves]
        first += len(found.states)
    return Costs(
        kind=np.array([kind for kind, *_ in seconds], dtype=np.intp),
        forward_s=np.array([forward for _, forward, _, _ in seconds]),
        backward_s=np.array([backward for _, _, backward, _ in seconds]),
        input_s=np.array([part for *_, part in seconds]),
        waiting_bytes=np.pad(np.array(waiting), (0, len(seconds) - len(waiting))),
        held_kind=np.array([held.kind for held in problem.held], dtype=np.intp),
        held_bytes=np.array([float(held.num_bytes) for held in problem.held]),
        held_again_s=np.array([held.again_s for held in problem.held]),
        held_gather_s=np.array([held.gather_s for held in problem.held]),
        step_s=np.array([seconds for found in problem.classes for seconds in found.step_s]),
        numel=np.array([float(numel) for found in problem.classes for numel in found.numel]),
        state_class=np.array(
            [index for index, found in enumerate(problem.classes) for _ in found.states],
            dtype=np.intp,
        ),
        outer_forward_s=outer_forward_s,
        outer_backward_s=outer_backward_s,
    )


def _awaited(op: Op) -> set[int]:
    """Operands that an option of an op keeps for the gradients of weights."""
    return {op.operands[place] for option in op.options for place, _ in option.waiting}


def cost_vector(costs: Costs, weights: Weights, *, may_gather: bool = False) -> Floats:
    """What each option, move, kept tensor and state of a class adds to the objective; with
    ``may_gather`` at the least, if what is kept may be gathered again from shards instead.
    """
    forward, backward = np.array(weights.forward), np.array(weights.backward)
    inputs = np.array(weights.input or (0.0,) * len(backward))
    waiting = np.array(weights.waiting or (0.0,) * len(backward))
    parameters = np.array(weights.parameters)
    seconds = forward[costs.kind] * costs.forward_s + backward[costs.kind] * costs.backward_s
    seconds += inputs[costs.kind] * costs.input_s + waiting[costs.kind] * costs.waiting_bytes
    again = (backward + inputs)[costs.held_kind]
    held = np.array(weights.held)[costs.held_kind] * costs.held_bytes
    if may_gather:
        able = np.isfinite(costs.held_gather_s)
        held[able] = np.minimum(held[able], again[able] * costs.held_gather_s[able])
    return np.concatenate(
        [
            seconds,
            held + again * costs.held_again_s,
            weights.step * costs.step_s
            + parameters[costs.state_class] * costs.numel
            + forward @ costs.outer_forward_s
            + (backward + inputs) @ costs.outer_backward_s,
        ]
    )


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A table in the making."""

    shape: tuple[int, ...]
    cells: list[NDArray[np.intp]] = field(default_factory=list)
    costs: list[NDArray[np.intp]] = field(default_factory=list)
    impossible: list[NDArray[np.intp]] = field(default_factory=list)

    def add(self, where: Bools, cost: int) -> None:
        """``cost`` in all cells where ``where``, which is broadcast, is true."""
        cells = np.flatnonzero(np.broadcast_to(where, self.shape))
        self.cells.append(cells)
        self.costs.append(np.full(len(cells), cost, dtype=np.intp))


class _Maker:
    def __init__(self, frame: Frame, kinds: frozenset[int]) -> None:
        self.frame, self.kinds = frame, kinds
        self.num_ops = len(frame.ops)
        self.domains = [
            *(len(op.options) for op in frame.ops),
            *(max(1, len(found.states)) for found in frame.classes),
        ]
        self.drafts: dict[Scope, _Draft] = {}
        self.too_large = False
        sizes = [sum(len(op.options) for op in frame.ops)]
        sizes.append(sum(len(value.moves) for value in frame.values))
        sizes.append(len(frame.held))
        self.first_move, self.first_held, self.first_state = itertools.accumulate(sizes)

    def tables(self) -> Tables:
        self.add_options()
        self.add_states()
        made_by = makers(self.frame)
        self.add_moves(made_by)
        self.add_held(made_by)
        scopes = list(self.drafts)
        plan = None if self.too_large else plan_elimination(self.domains, scopes)
        offset = 0
        cells: list[NDArray[np.intp]] = []
        costs: list[NDArray[np.intp]] = []
        impossible: list[NDArray[np.intp]] = []
        for draft in self.drafts.values():
            cells += [part + offset for part in draft.cells]
            costs += draft.costs
            impossible += [part + offset for part in draft.impossible]
            offset += int(np.prod(draft.shape))
        return Tables(
            scopes=tuple(scopes),
            shapes=tuple(draft.shape for draft in self.drafts.values()),
            cells=_joined(cells),
            costs=_joined(costs),
            impossible=_joined(impossible),
            elimination=plan,
            offsets=np.cumsum([0, *(math.prod(draft.shape) for draft in self.drafts.values())]),
        )

    def draft(self, variables: Iterable[int]) -> tuple[Scope, _Draft] | None:
        """The table of these variables; None if it would be too large."""
        scope = tuple(sorted(set(variables)))
        shape = tuple(self.domains[variable] for variable in scope)
        if int(np.prod(shape)) > _MOST_CELLS:
            self.too_large = True
            return None
        return scope, self.drafts.setdefault(scope, _Draft(shape=shape))

    def add_options(self) -> None:
        number = 0
        for variable, op in enumerate(self.frame.ops):
            if op.kind in self.kinds:
                found = self.draft([variable])
                assert found is not None, "an op has few options"
                for index in range(len(op.options)):
                    found[1].add(_is(index, len(op.options)), number + index)
            number += len(op.options)

    def add_states(self) -> None:
        number = self.first_state
        for index, state_class in enumerate(self.frame.classes):
            if state_class.states:
                found = self.draft([self.num_ops + index])
                assert found is not None, "a class has few states"
                for state in range(len(state_class.states)):
                    found[1].add(_is(state, len(state_class.states)), number + state)
            number += len(state_class.states)

    def add_moves(self, made_by: Sequence[Chooser]) -> None:
        """A move is paid in every cell in which somebody takes the value so."""
        number = self.first_move
        taken_by = takers(self.frame)
        for value, maker, takes in zip(self.frame.values, made_by, taken_by, strict=True):
            moves = {pair: number + index for index, pair in enumerate(value.moves)}
            number += len(value.moves)
            if value.kind not in self.kinds or not takes:
                continue
            found = self.draft([maker.choice, *(taker.choice for taker in takes)])
            if found is None:
                continue
            scope, draft = found
            for target in range(len(value.demanded)):
                taken = self.where_any(scope, takes, target)
                if not taken.any():
                    continue
                for source in range(len(value.states)):
                    where = taken & self.where(scope, maker, source)
                    if (source, target) in moves:
                        draft.add(where, moves[source, target])
                    else:
                        draft.impossible.append(np.flatnonzero(np.broadcast_to(where, draft.shape)))

    def add_held(self, made_by: Sequence[Chooser]) -> None:
        """A tensor is kept in every cell in which somebody keeps it."""
        kept_by = keepers(self.frame)
        for number, held in enumerate(self.frame.held):
            if held.kind not in self.kinds or not kept_by[number]:
                continue
            maker = None if held.made is None else made_by[held.made]
            found = self.draft([*kept_by[number], *([] if maker is None else [maker.choice])])
            if found is None:
                continue
            scope, draft = found
            where = self.where_kept(scope, kept_by[number])
            if maker is not None:
                for state in held.free:
                    where = where & ~self.where(scope, maker, state)
            draft.add(where, self.first_held + number)

    def where(self, scope: Scope, taker: Chooser, state: int) -> Bools:
        """Cells of a table, to be broadcast, in which ``taker`` means ``state``."""
        means = np.array([other == state for other in taker.states], dtype=np.bool_)
        return means.reshape([-1 if variable == taker.choice else 1 for variable in scope])

    def where_any(self, scope: Scope, takes: Iterable[Chooser], state: int) -> Bools:
        found: Bools = np.zeros((1,) * len(scope), dtype=np.bool_)
        for taker in takes:
            found = found | self.where(scope, taker, state)
        return found

    def where_kept(self, scope: Scope, kept_by: Mapping[int, Sequence[int]]) -> Bools:
        found: Bools = np.zeros((1,) * len(scope), dtype=np.bool_)
        for variable, options in kept_by.items():
            states = [int(o in options) for o in range(self.domains[variable])]
            taker = Chooser(choice=variable, states=tuple(states))
            found = found | self.where(scope, taker, 1)
        return found


def _is(index: int, size: int) -> Bools:
    return np.arange(size) == index


def _joined(parts: Sequence[NDArray[np.intp]]) -> NDArray[np.intp]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.intp)
