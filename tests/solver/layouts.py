"""All layouts of a small problem, by enumeration: those that no other one is at least as good as.

Nothing here knows the solver: costs are summed over the grid of all options of the ops of a kind
and all states of the classes that it touches, one dim of the grid for each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.solver.facts import Floats
from autopar.solver.layout.frame import ClassRole
from autopar.solver.layout.problem import Problem, Solution

_ROUNDING = 1e-12
"""Of two sums of the same numbers, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindLayouts:
    """Layouts of a kind of block, row by row.

    Attributes:
        ops, classes: Indices in the problem; columns of ``choices`` and of ``states``.
        seconds: Forward and backward, and what the host needs to launch their kernels.
        num_bytes: Kept for backward, and of the op that needs most beside.
    """

    ops: tuple[int, ...]
    classes: tuple[int, ...]
    choices: NDArray[np.int64]
    states: NDArray[np.int64]
    seconds: Floats
    num_bytes: Floats

    def rows(self, chosen: NDArray[np.int64]) -> KindLayouts:
        """Some of the rows."""
        return KindLayouts(
            ops=self.ops,
            classes=self.classes,
            choices=self.choices[chosen],
            states=self.states[chosen],
            seconds=self.seconds[chosen],
            num_bytes=self.num_bytes[chosen],
        )


def all_layouts(problem: Problem, *others: Problem) -> Iterator[Solution]:
    """Every layout, but those that another one makes useless: the same states between blocks, and
    in each kind no more seconds, bytes and elements of parameters; no more seconds in any of
    ``others``, either, which are ``problem`` on other hardware.
    """
    kinds = [
        _useful((problem, *others), [kind_layouts(one, kind) for one in (problem, *others)])
        for kind in range(len(problem.kinds))
    ]
    shared = sorted(_shared(problem))
    by_states: list[dict[tuple[int, ...], list[int]]] = []
    for found in kinds:
        own = [found.classes.index(number) for number in shared if number in found.classes]
        rows: dict[tuple[int, ...], list[int]] = {}
        for row, states in enumerate(found.states[:, own].tolist()):
            rows.setdefault(tuple(states), []).append(row)
        by_states.append(rows)
    for states in itertools.product(*(range(len(problem.classes[n].states)) for n in shared)):
        state_of = dict(zip(shared, states, strict=True))
        own_rows = [
            rows.get(tuple(state_of[n] for n in shared if n in found.classes), [])
            for found, rows in zip(kinds, by_states, strict=True)
        ]
        for chosen in itertools.product(*own_rows):
            yield _solution(problem, kinds, chosen)


def kind_layouts(problem: Problem, kind: int) -> KindLayouts:
    """Every layout of one kind that has the moves that it needs."""
    return _Grid(problem, kind).layouts()


def classes_of(problem: Problem, kind: int) -> set[int]:
    """The classes that a kind's placeholders and results belong to."""
    found = {v.state_class for v in problem.values if v.kind == kind and v.state_class is not None}
    return found | {d.state_class for d in problem.deliveries if d.kind == kind}


def useful_rows(costs: Floats) -> NDArray[np.int64]:
    """Rows that no other row is at most as large as in all columns; one of those that are alike."""
    order = np.lexsort(costs.T[::-1])
    order = order[np.argsort(costs[order].sum(axis=1), kind="stable")]
    found = []
    while len(order):
        first = order[0]
        found.append(first)
        better = (costs[order] < costs[first] * (1 - _ROUNDING)).any(axis=1)
        order = order[better]
    return np.array(found, dtype=np.int64)


class _Grid:
    """Costs of a kind over all options of its ops and all states of its classes."""

    def __init__(self, problem: Problem, kind: int) -> None:
        self.problem, self.kind = problem, kind
        self.ops = tuple(number for number, op in enumerate(problem.ops) if op.kind == kind)
        self.classes = tuple(sorted(classes_of(problem, kind)))
        sizes = [len(problem.ops[number].options) for number in self.ops]
        sizes += [max(1, len(problem.classes[number].states)) for number in self.classes]
        self.shape = tuple(sizes)
        self.produced: dict[int, NDArray[np.int64]] = {}
        self.needed: dict[tuple[int, int], NDArray[np.bool_]] = {}

    def layouts(self) -> KindLayouts:
        problem = self.problem
        self.read_states()
        seconds = np.zeros((4, *self.shape))
        beside, held = np.zeros(self.shape), np.zeros(self.shape)
        for place, number in enumerate(self.ops):
            options = problem.ops[number].options
            for row, name in enumerate(
                ("forward_s", "backward_s", "forward_launch_s", "backward_launch_s")
            ):
                seconds[row] += self.along(place, [getattr(option, name) for option in options])
            needs = self.along(place, [float(option.transient_bytes) for option in options])
            beside = np.maximum(beside, needs)
        for (value, target), needed in self.needed.items():
            for row, cost in enumerate(self.move_seconds(value, target)):
                seconds[row] += np.where(needed, cost, 0.0)
        for number, entry in enumerate(problem.held):
            if entry.kind == self.kind:
                held += self.keeps(number) * float(entry.num_bytes)
                seconds[1] += self.keeps(number) * entry.again_s
        possible = np.argwhere(np.isfinite(seconds[0]))
        at = tuple(possible.T)
        num = len(self.ops)
        return KindLayouts(
            ops=self.ops,
            classes=self.classes,
            choices=possible[:, :num],
            states=possible[:, num:],
            seconds=np.stack([row[at] for row in seconds], axis=1),
            num_bytes=np.stack([held[at], beside[at]], axis=1),
        )

    def along(self, place: int, values: Sequence[float | bool | int]) -> NDArray[Any]:
        """An array that varies along one dim of the grid."""
        shape = [1] * len(self.shape)
        shape[place] = self.shape[place]
        return np.array(values).reshape(shape)

    def read_states(self) -> None:
        """In which state each value is, and in which it is needed."""
        problem, num = self.problem, len(self.ops)
        for number, value in enumerate(problem.values):
            if value.kind == self.kind and value.state_class is not None:
                place = num + self.classes.index(value.state_class)
                self.produced[number] = self.along(place, range(self.shape[place]))
        for place, number in enumerate(self.ops):
            op = problem.ops[number]
            for index, result in enumerate(op.results):
                states = problem.values[result].states
                made = [states.index(option.option.results[index]) for option in op.options]
                self.produced[result] = self.along(place, made)
            for index, operand in enumerate(op.operands):
                wanted = [option.option.operands[index] for option in op.options]
                self.need(operand, place, wanted)
        for delivery in problem.deliveries:
            if delivery.kind == self.kind:
                place = num + self.classes.index(delivery.state_class)
                self.need(delivery.value, place, problem.classes[delivery.state_class].states)

    def need(self, value: int, place: int, wanted: Sequence[object]) -> None:
        for target, state in enumerate(self.problem.values[value].demanded):
            if state in wanted:
                here = self.along(place, [state == other for other in wanted])
                known = self.needed.get((value, target))
                self.needed[value, target] = here if known is None else known | here

    def move_seconds(self, value: int, target: int) -> tuple[Floats, Floats]:
        """Forward and backward, by the state that the value is in; infinite without a move."""
        found = self.problem.values[value]
        costs = [found.moves.get((state, target)) for state in range(len(found.states))]
        forward = np.array([math.inf if cost is None else cost.forward_s for cost in costs])
        backward = np.array([math.inf if cost is None else cost.backward_s for cost in costs])
        return forward[self.produced[value]], backward[self.produced[value]]

    def keeps(self, number: int) -> NDArray[np.bool_]:
        """Where a tensor is kept at the cost of bytes."""
        problem, entry = self.problem, self.problem.held[number]
        kept = np.zeros((1,) * len(self.shape), dtype=np.bool_)
        for place, op in enumerate(self.ops):
            kept = kept | self.along(
                place, [number in option.held for option in problem.ops[op].options]
            )
        if entry.made is not None:
            num = len(problem.values[entry.made].states)
            costs = np.array([state not in entry.free for state in range(num)])
            kept = kept & costs[self.produced[entry.made]]
        return kept


def _useful(problems: Sequence[Problem], priced: Sequence[KindLayouts]) -> KindLayouts:
    """Without the rows that another row makes useless; ``priced`` are the same on all hardware."""
    problem, found = problems[0], priced[0]
    shared = _shared(problem)
    keys = [place for place, number in enumerate(found.classes) if number in shared]
    columns = list(found.num_bytes.T)
    for own in priced:
        columns.append(np.maximum(own.seconds[:, 0], own.seconds[:, 2]))
        columns.append(np.maximum(own.seconds[:, 1], own.seconds[:, 3]))
    for place, number in enumerate(found.classes):
        of_class = problem.classes[number]
        if number not in shared and of_class.states:
            columns.append(np.array(of_class.numel, dtype=np.float64)[found.states[:, place]])
            columns += [
                np.array(one.classes[number].step_s)[found.states[:, place]] for one in problems
            ]
    costs = np.stack(columns, axis=1)
    kept: list[NDArray[np.int64]] = []
    _, group = np.unique(found.states[:, keys], axis=0, return_inverse=True)
    for number in range(int(group.max(initial=-1)) + 1):
        rows = np.flatnonzero(group.ravel() == number)
        kept.append(rows[useful_rows(costs[rows])])
    return found.rows(np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64))


def _shared(problem: Problem) -> set[int]:
    """Classes of what blocks hand on, and those that several kinds touch."""
    touched = [classes_of(problem, kind) for kind in range(len(problem.kinds))]
    return {
        number
        for number, found in enumerate(problem.classes)
        if found.role is ClassRole.BOUNDARY or sum(number in own for own in touched) > 1
    }


def _solution(problem: Problem, kinds: Sequence[KindLayouts], chosen: Sequence[int]) -> Solution:
    choices = [0] * len(problem.ops)
    states = [-1] * len(problem.classes)
    for found, row in zip(kinds, chosen, strict=True):
        for number, choice in zip(found.ops, found.choices[row].tolist(), strict=True):
            choices[number] = choice
        for number, state in zip(found.classes, found.states[row].tolist(), strict=True):
            if problem.classes[number].states:
                states[number] = state
    return Solution(
        status="optimal",
        objective=math.nan,
        bound=math.nan,
        seconds=0.0,
        choices=tuple(choices),
        states=tuple(states),
    )
