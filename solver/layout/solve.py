"""Solving a problem: by elimination, or as an integer program with MathOpt and HiGHS."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ortools.math_opt.python import mathopt

from autopar.solver.layout.build import MICROSECONDS, Program, build, set_objective
from autopar.solver.layout.eliminate import Floats, minimize
from autopar.solver.layout.frontier import FrontierPoint, kind_frontier
from autopar.solver.layout.problem import MemoryLimit, Problem, Solution, Weights
from autopar.solver.layout.tables import Costs, cost_vector, costs_of, fill, tables_of

_LIMIT_S = 120.0


def solve_problem(
    problem: Problem, weights: Weights, limits: Sequence[MemoryLimit] = ()
) -> Solution:
    """An optimal solution of ``problem``, or one with status ``infeasible``."""
    return ProblemSolver(problem=problem).solve(weights, limits)


@dataclass(slots=True, kw_only=True, eq=False)
class ProblemSolver:
    """Solves a problem for one objective after the other.

    Elimination is exact and takes milliseconds. Memory limits tie everything together, so that
    problems with limits are integer programs, as are those whose graph is too dense to eliminate.
    """

    problem: Problem
    _costs: Costs | None = field(default=None, repr=False)

    def solve(self, weights: Weights, limits: Sequence[MemoryLimit] = ()) -> Solution:
        """An optimal solution, or one with status ``infeasible``."""
        started = time.perf_counter()
        tables = tables_of(self.problem.frame)
        vector = self._cost_vector(weights)
        if limits or tables.elimination is None:
            program = build(self.problem, limits)
            set_objective(program, vector)
            return _decode(program, self.problem, _optimize(program), started)
        total, chosen = minimize(tables.elimination, fill(tables, vector))
        if not math.isfinite(total):
            return _infeasible(time.perf_counter() - started)
        num_ops = len(self.problem.ops)
        states = zip(chosen[num_ops:], self.problem.classes, strict=True)
        return Solution(
            status="optimal",
            objective=total,
            bound=total,
            seconds=time.perf_counter() - started,
            choices=chosen[:num_ops],
            states=tuple(state if found.states else -1 for state, found in states),
        )

    def least(self, weights: Weights, kinds: Iterable[int], *, may_gather: bool = False) -> float:
        """What these kinds add to the objective at the least, whatever the others do, and whatever
        they gather again if they may.
        """
        chosen = frozenset(kinds)
        tables = tables_of(self.problem.frame, chosen)

        def of_kinds(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(v if kind in chosen else 0.0 for kind, v in enumerate(values))

        only = replace(
            weights,
            forward=of_kinds(weights.forward),
            backward=of_kinds(weights.backward),
            input=of_kinds(weights.input),
            waiting=of_kinds(weights.waiting),
            held=of_kinds(weights.held),
        )
        if tables.elimination is not None:
            vector = cost_vector(self._all_costs(), only, may_gather=may_gather)
            return minimize(tables.elimination, fill(tables, vector))[0]
        held = (0.0,) * len(weights.held)
        return self.solve(replace(only, held=held) if may_gather else only).bound

    def frontier(self, kind: int) -> tuple[FrontierPoint, ...] | None:
        """``kind_frontier`` of the problem."""
        return kind_frontier(self.problem, self._all_costs(), kind)

    def _cost_vector(self, weights: Weights) -> Floats:
        return cost_vector(self._all_costs(), weights)

    def _all_costs(self) -> Costs:
        if self._costs is None:
            self._costs = costs_of(self.problem)
        return self._costs


@dataclass(frozen=True, slots=True)
class _Answer:
    """A solver's answer, and the values of the binary columns."""

    result: mathopt.SolveResult
    values: Mapping[int, float]


def _optimize(program: Program) -> _Answer:
    """The linear relaxation is integral as a rule, so that HiGHS ends at its root."""
    parameters = mathopt.SolveParameters(
        relative_gap_tolerance=0.0,
        absolute_gap_tolerance=0.0,
        random_seed=1,
        time_limit=datetime.timedelta(seconds=_LIMIT_S),
    )
    model = mathopt.Model.from_model_proto(program.model)
    binaries = [
        model.get_variable(column)
        for column, integer in enumerate(program.model.variables.integers)
        if integer
    ]
    wanted = mathopt.ModelSolveParameters(
        variable_values_filter=mathopt.VariableFilter(filtered_items=binaries)
    )
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters, model_params=wanted)
    if not result.has_primal_feasible_solution():
        return _Answer(result, {})
    return _Answer(result, {v.id: value for v, value in result.variable_values().items()})


def _decode(program: Program, problem: Problem, answer: _Answer, started: float) -> Solution:
    """The choices in a solver's answer."""
    seconds, result = time.perf_counter() - started, answer.result
    if not answer.values:
        return _infeasible(seconds)
    optimal = result.termination.reason is mathopt.TerminationReason.OPTIMAL
    objective = result.objective_value() / MICROSECONDS

    def chosen(first: int, size: int) -> int:
        return max(range(size), key=lambda k: answer.values[first + k]) if size else -1

    return Solution(
        status="optimal" if optimal else "feasible",
        objective=objective,
        bound=objective if optimal else result.best_objective_bound() / MICROSECONDS,
        seconds=seconds,
        choices=tuple(
            chosen(first, len(op.options)) for first, op in zip(program.u, problem.ops, strict=True)
        ),
        states=tuple(
            chosen(first, len(found.states))
            for first, found in zip(program.y, problem.classes, strict=True)
        ),
    )


def _infeasible(seconds: float) -> Solution:
    return Solution(
        status="infeasible",
        objective=math.inf,
        bound=math.inf,
        seconds=seconds,
        choices=(),
        states=(),
    )
