"""From the problem to an integer program. The formulation, with the symbols of ``problem``:

(0) minimize  Σ_o Σ_k (w_f f[o,k] + w_g g[o,k]) u[o,k]
              + Σ_v Σ_s Σ_t (w_f f[v,s,t] + w_g g[v,s,t]) z[v,s,t]
              + Σ_c Σ_s w_c[s] y[c,s] + Σ_q w_q h[q]
(1) Σ_k u[o,k] = 1                           every op takes one option
(2) x[v,s] = Σ_{k gives v in s} u[o,k]       a value is in the state that its op gives it
    x[v,s] = y[class of v, s]                a placeholder is in the state of its class
(3) Σ_s y[c,s] = 1                           a class has one state
(4) Σ_s w[c,s,t] = Σ_{k demands t} u[o,k]    consumer c, an operand of op o, gets what it demands;
    Σ_s w[c,s,t] = y[class, t]               a block hands v on in the state of the class
(5) Σ_t w[c,s,t] = x[v,s]                    … from the state in which the value is
(6) z[v,s,t] ≥ w[c,s,t]                      a move is paid once, whoever shares it
(7) h[q] ≥ Σ_{k keeps q} u[o,k]              for each op o; less x[v,s] for the states in which a
                                             value is made so that q costs nothing
(8) Σ_q copies · bytes[q] h[q] + Σ_c Σ_s bytes[c,s] y[c,s] ≤ limit     for each memory limit

``w[c,s,t]`` says that consumer c takes v, which is in s, in t. Without it, one relaxed value could
serve each consumer from another share of itself, and the relaxation is weaker by 2 to 9 %.

u and y are binary; all others are continuous and integral at an optimum. Seconds are written in µs
and bytes in MB, so that coefficients are near 1.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.math_opt import model_pb2

from autopar.solver.layout.choices import Chooser, keepers, makers, takers
from autopar.solver.layout.eliminate import Floats
from autopar.solver.layout.frame import Frame
from autopar.solver.layout.problem import MemoryLimit, Problem
from autopar.solver.layout.tables import costs_of

MICROSECONDS = 1e6
MEGABYTES = 1e-6

Terms = Sequence[tuple[int, float]]
"""Columns and their coefficients in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An integer program without its objective. Columns are, in this order, u by op, z by value, h
    and y by class, each as in the problem, then w.

    Attributes:
        u, y: First column of each op and of each class; the columns of one are side by side.
    """

    model: model_pb2.ModelProto
    u: tuple[int, ...]
    y: tuple[int, ...]


def build(problem: Problem, limits: Sequence[MemoryLimit] = ()) -> Program:
    """The program of ``problem`` with memory limits."""
    if problem.frame not in _known:
        _known[problem.frame] = _Builder(problem.frame).program()
    base = _known[problem.frame]
    model = model_pb2.ModelProto()
    model.CopyFrom(base.model)
    for limit in limits:
        add_row(model, _limited_bytes(problem, limit, base), -np.inf, limit.num_bytes * MEGABYTES)
    return Program(model=model, u=base.u, y=base.y)


_known: weakref.WeakKeyDictionary[Frame, Program] = weakref.WeakKeyDictionary()


def set_objective(program: Program, cost_vector: Floats) -> None:
    """(0), in seconds: what ``tables.cost_vector`` says of a problem and weights."""
    columns = np.flatnonzero(cost_vector)
    objective = program.model.objective.linear_coefficients
    objective.ids[:] = columns.tolist()
    objective.values[:] = (MICROSECONDS * cost_vector[columns]).tolist()


def add_row(model: model_pb2.ModelProto, terms: Terms, lower: float, upper: float) -> None:
    """Add lower ≤ Σ terms ≤ upper."""
    row = len(model.linear_constraints.ids)
    model.linear_constraints.ids.append(row)
    model.linear_constraints.lower_bounds.append(lower)
    model.linear_constraints.upper_bounds.append(upper)
    summed: dict[int, float] = {}
    for column, coefficient in terms:
        summed[column] = summed.get(column, 0.0) + coefficient
    columns = sorted(column for column, coefficient in summed.items() if coefficient)
    model.linear_constraint_matrix.row_ids.extend([row] * len(columns))
    model.linear_constraint_matrix.column_ids.extend(columns)
    model.linear_constraint_matrix.coefficients.extend(summed[column] for column in columns)


def _limited_bytes(problem: Problem, limit: MemoryLimit, program: Program) -> Terms:
    """(8)."""
    costs = costs_of(problem)
    first_held = len(costs.kind)
    copies = np.array(limit.copies)[costs.held_kind]
    held = MEGABYTES * copies * costs.held_bytes
    states = MEGABYTES * np.array(limit.parameter_bytes)[costs.state_class] * costs.numel
    terms = np.concatenate([held, states])
    return list(enumerate(terms.tolist(), start=first_held))


@dataclass(slots=True)
class _Builder:
    frame: Frame
    model: model_pb2.ModelProto = field(default_factory=model_pb2.ModelProto)
    num: int = 0

    def program(self) -> Program:
        frame = self.frame
        u = self.add_columns([len(op.options) for op in frame.ops], integer=True)
        z = self.add_columns([len(value.moves) for value in frame.values])
        (h,) = self.add_columns([len(frame.held)])
        y = self.add_columns([len(found.states) for found in frame.classes], integer=True)
        for first, op in zip(u, frame.ops, strict=True):  # (1)
            self.add_row([(first + k, 1.0) for k in range(len(op.options))], 1.0, 1.0)
        for first, found in zip(y, frame.classes, strict=True):  # (3)
            if found.states:
                self.add_row([(first + s, 1.0) for s in range(len(found.states))], 1.0, 1.0)
        choices = (*u, *y)
        made_by = makers(frame)
        for number, (maker, taken_by) in enumerate(zip(made_by, takers(frame), strict=True)):
            self.move_value(number, choices, maker, taken_by, z[number])
        for number, kept_by in enumerate(keepers(frame)):
            self.hold(number, h + number, choices, kept_by, made_by)
        self.model.variables.ids.extend(range(self.num))
        return Program(model=self.model, u=u, y=y)

    def add_columns(self, sizes: Sequence[int], *, integer: bool = False) -> tuple[int, ...]:
        """Columns in groups of these sizes; the first of each."""
        firsts = tuple(itertools.accumulate(sizes, initial=self.num))
        more = firsts[-1] - self.num
        self.model.variables.lower_bounds.extend([0.0] * more)
        self.model.variables.upper_bounds.extend([1.0] * more)
        self.model.variables.integers.extend([integer] * more)
        self.num = firsts[-1]
        return firsts[:-1]

    def add_row(self, terms: Terms, lower: float, upper: float) -> None:
        add_row(self.model, terms, lower, upper)

    def move_value(
        self,
        number: int,
        choices: Sequence[int],
        maker: Chooser,
        taken_by: Sequence[Chooser],
        first: int,
    ) -> None:
        """(4), (5) and (6). A value with one taker needs no ``w``: it is ``z``."""
        value = self.frame.values[number]
        z = {pair: first + index for index, pair in enumerate(value.moves)}
        for taker in taken_by:
            taken = z
            if len(taken_by) > 1:
                pairs = [pair for pair in value.moves if pair[1] in taker.states]
                (start,) = self.add_columns([len(pairs)])
                taken = {pair: start + index for index, pair in enumerate(pairs)}
                for pair, column in taken.items():
                    self.add_row([(z[pair], 1.0), (column, -1.0)], 0.0, np.inf)
            for target in range(len(value.demanded)):
                flow = [(column, 1.0) for (_, to), column in taken.items() if to == target]
                self.equate(flow, _columns(choices, taker, target))
            for source in range(len(value.states)):
                flow = [(column, 1.0) for (at, _), column in taken.items() if at == source]
                self.equate(flow, _columns(choices, maker, source))

    def equate(self, flow: Terms, chosen: Sequence[int]) -> None:
        if flow or chosen:
            self.add_row([*flow, *((column, -1.0) for column in chosen)], 0.0, 0.0)

    def hold(
        self,
        number: int,
        column: int,
        choices: Sequence[int],
        kept_by: Mapping[int, Sequence[int]],
        made_by: Sequence[Chooser],
    ) -> None:
        """(7)."""
        stored: list[tuple[int, float]] = []
        held = self.frame.held[number]
        if held.made is not None:
            free = [_columns(choices, made_by[held.made], state) for state in sorted(held.free)]
            stored = [(column, 1.0) for columns in free for column in columns]
        for op, options in kept_by.items():
            kept = [(choices[op] + option, -1.0) for option in options]
            self.add_row([(column, 1.0), *kept, *stored], 0.0, np.inf)


def _columns(choices: Sequence[int], chooser: Chooser, state: int) -> list[int]:
    """Columns of the options that mean ``state``."""
    first = choices[chooser.choice]
    return [first + option for option, means in enumerate(chooser.states) if means == state]
