"""Solving a problem with MathOpt and HiGHS, and reading the answer back."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence

from ortools.math_opt.python import mathopt

from autopar.solver.layout.build import MICROSECONDS, Model, build, set_objective
from autopar.solver.layout.problem import MemoryLimit, Problem, Solution, Weights

_LIMIT_S = 120.0


def solve_problem(
    problem: Problem, weights: Weights, limits: Sequence[MemoryLimit] = ()
) -> Solution:
    """An optimal solution of ``problem``, or one with status ``infeasible``."""
    return solve_model(build(problem, limits), weights)


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
        return Solution(
            status="infeasible",
            objective=math.inf,
            bound=math.inf,
            seconds=seconds,
            choices=(),
            states=(),
        )
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


def _chosen(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda index: values[index]) if values else -1
