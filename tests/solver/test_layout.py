"""The placement problem of an axis: optimal by enumeration, re-costed, and blind to names."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.layout.check import kind_costs, objective
from autopar.solver.layout.problem import MemoryLimit
from autopar.solver.layout.solve import solve_problem
from tests.solver.graphs import block_model, brute_force, tensor_problem, time_weights

STEPS = st.lists(
    st.tuples(st.sampled_from(["linear", "relu", "add", "mul"]), st.integers(0, 3)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=20)
@given(steps=STEPS, tp=st.sampled_from([2, 4]), price=st.sampled_from([0.0, 1e-8]))
def test_ilp_equals_brute_force(steps, tp, price):
    problem = tensor_problem(block_model(steps), tp)
    weights = time_weights(problem, held=price)
    solution = solve_problem(problem, weights)
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(brute_force(problem, weights), rel=1e-6)
    assert objective(problem, solution, weights) == pytest.approx(solution.objective, rel=1e-6)


def test_branched_block_equals_brute_force():
    steps = [("linear", 0), ("mul", 0), ("linear", 0), ("add", 0)]  # x + W(x · Vx)
    problem = tensor_problem(block_model(steps), 4, batch=64)
    weights = time_weights(problem, step=0.0)
    solution = solve_problem(problem, weights)
    assert solution.objective == pytest.approx(brute_force(problem, weights), rel=1e-6)


def test_memory_limit_is_kept_and_costs_no_less():
    problem = tensor_problem(block_model([("linear", 0), ("relu", 0), ("linear", 0)]), 4)
    weights = time_weights(problem)
    free = solve_problem(problem, weights)
    kept = [cost.held_bytes for cost in kind_costs(problem, free)]
    counts = tuple(map(float, problem.counts))
    total = sum(count * held for count, held in zip(counts, kept, strict=True))
    objectives = [free.objective]
    for share in (1.0, 0.7, 0.5, 0.3):
        limit = MemoryLimit(
            name="all",
            num_bytes=int(share * total),
            copies=counts,
            parameter_bytes=(0.0,) * len(problem.classes),
        )
        limited = solve_problem(problem, weights, [limit])
        if limited.status == "infeasible":
            objectives.append(math.inf)
            continue
        held = [cost.held_bytes for cost in kind_costs(problem, limited)]
        assert sum(c * h for c, h in zip(counts, held, strict=True)) <= share * total * (1 + 1e-9)
        objectives.append(limited.objective)
    assert objectives == sorted(objectives)


def test_same_problem_gives_the_same_solution():
    problem = tensor_problem(block_model([("linear", 0), ("add", 0)]), 4)
    weights = time_weights(problem)
    first, second = (solve_problem(problem, weights) for _ in range(2))
    assert (first.choices, first.states) == (second.choices, second.states)


def test_nothing_is_paid_for_moves_on_one_rank():
    problem = tensor_problem(block_model([("linear", 0), ("add", 0)]), 1)
    solution = solve_problem(problem, time_weights(problem))
    assert all(cost.forward_comm_s == 0.0 for cost in kind_costs(problem, solution))
