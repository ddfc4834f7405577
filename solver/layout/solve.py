"""Solving a problem: by elimination, or as an integer program with MathOpt and HiGHS."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ortools.math_opt.python import mathopt

from autopar.solver.layout.build import MICROSECONDS, Model, build, set_objective
from autopar.solver.layout.eliminate import Floats, minimize
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
    _costs: Costs | None = None
    _model: Model | None = field(default=None, repr=False)

    def solve(self, weights: Weights, limits: Sequence[MemoryLimit] = ()) -> Solution:
        """An optimal solution, or one with status ``infeasible``."""
        started = time.perf_counter()
        tables = tables_of(self.problem.frame)
        if limits:
            return solve_model(build(self.problem, limits), weights)
        if tables.elimination is None:
            return solve_model(self._whole_model(), weights)
        total, chosen = minimize(tables.elimination, fill(tables, self._cost_vector(weights)))
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

    def least(self, weights: Weights, kinds: Iterable[int]) -> float:
        """What these kinds add to the objective at the least, whatever the others do."""
        chosen = frozenset(kinds)
        tables = tables_of(self.problem.frame, chosen)
        if tables.elimination is not None:
            vector = self._cost_vector(weights)
            return minimize(tables.elimination, fill(tables, vector))[0]

        def of_kinds(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(v if kind in chosen else 0.0 for kind, v in enumerate(values))

        only = replace(
            weights,
            forward=of_kinds(weights.forward),
            backward=of_kinds(weights.backward),
            held=of_kinds(weights.held),
        )
        return solve_model(self._whole_model(), only).bound

    def _cost_vector(self, weights: Weights) -> Floats:
        if self._costs is None:
            self._costs = costs_of(self.problem)
        return cost_vector(self._costs, weights)

    def _whole_model(self) -> Model:
        if self._model is None:
            self._model = build(self.problem)
        return self._model


def solve_model(model: Model, weights: Weights) -> Solution:
    """An optimal solution for ``weights``; the model is given their objective.

    The linear relaxation is integral as a rule, so that HiGHS ends at its root.
    """
    started = time.perf_counter()
    set_objective(model, weights)
    return decode(model, _optimize(model), time.perf_counter() - started)


def _optimize(model: Model) -> mathopt.SolveResult:
    parameters = mathopt.SolveParameters(
        relative_gap_tolerance=0.0,
        absolute_gap_tolerance=0.0,
        random_seed=1,
        time_limit=datetime.timedelta(seconds=_LIMIT_S),
    )
    binaries = [variable for row in (*model.u, *model.y) for variable in row]
    wanted = mathopt.ModelSolveParameters(
        variable_values_filter=mathopt.VariableFilter(filtered_items=binaries)
    )
    return mathopt.solve(
        model.model, mathopt.SolverType.HIGHS, params=parameters, model_params=wanted
    )


def decode(model: Model, result: mathopt.SolveResult, seconds: float) -> Solution:
    """The choices in a solver's answer."""
    if not result.has_primal_feasible_solution():
        return _infeasible(seconds)
    optimal = result.termination.reason is mathopt.TerminationReason.OPTIMAL
    objective = result.objective_value() / MICROSECONDS
    values = result.variable_values()
    return Solution(
        status="optimal" if optimal else "feasible",
        objective=objective,
        bound=objective if optimal else result.best_objective_bound() / MICROSECONDS,
        seconds=seconds,
        choices=tuple(_chosen([values[variable] for variable in row]) for row in model.u),
        states=tuple(_chosen([values[variable] for variable in row]) for row in model.y),
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


def _chosen(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda index: values[index]) if values else -1
