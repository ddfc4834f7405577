"""Layouts by elimination, as integer programs and by enumeration: all the same, on tiny models.

Models have 2 to 4 blocks of one or two kinds between a first and a last one, of up to 4 ops each,
and hand states on at every border.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.layout import tables
from autopar.solver.layout.check import kind_costs, objective
from autopar.solver.layout.eliminate import minimize, plan_elimination
from autopar.solver.layout.problem import MemoryLimit, Weights
from autopar.solver.layout.solve import ProblemSolver, solve_problem
from tests.solver import drawn
from tests.solver.graphs import block_model, brute_force, cheapest, tensor_problem, time_weights
from tests.solver.layouts import all_layouts, kind_layouts

BODIES = drawn.bodies()


@settings(max_examples=12)
@given(
    bodies=BODIES,
    num_blocks=st.integers(2, 4),
    tp=st.sampled_from([2, 4]),
    price=st.sampled_from([0.0, 1e-8]),
    again=st.sampled_from([1.0, 2.0]),
)
def test_elimination_equals_brute_force_and_the_integer_program(
    bodies, num_blocks, tp, price, again
):
    problem = tensor_problem(block_model(*bodies, num_blocks=num_blocks), tp)
    weights = time_weights(problem, held=price)
    weights = Weights(
        forward=tuple(again * seconds for seconds in weights.forward),
        backward=weights.backward,
        step=weights.step,
        held=weights.held,
        parameters=weights.parameters,
    )
    found = solve_problem(problem, weights)
    assert found.status == "optimal"
    assert found.objective == pytest.approx(brute_force(problem, weights), rel=1e-12)
    assert objective(problem, found, weights) == pytest.approx(found.objective, rel=1e-12)
    loose = MemoryLimit(
        name="loose",
        num_bytes=2**60,
        copies=tuple(map(float, problem.counts)),
        parameter_bytes=(0.0,) * len(problem.classes),
    )
    program = solve_problem(problem, weights, [loose])
    assert program.objective == pytest.approx(found.objective, rel=1e-6)


@settings(max_examples=15)
@given(bodies=BODIES, tp=st.sampled_from([2, 4]))
def test_least_of_a_kind_is_its_least_over_all_border_states(bodies, tp):
    problem = tensor_problem(block_model(*bodies), tp)
    weights = time_weights(problem, step=0.0)
    solver = ProblemSolver(problem=problem)
    for kind in range(len(problem.kinds)):
        least = cheapest(kind_layouts(problem, kind), weights, kind)
        assert solver.least(weights, [kind]) == pytest.approx(least, rel=1e-12)


@settings(max_examples=8)
@given(bodies=BODIES, tp=st.sampled_from([2, 3]), seed=st.integers(0, 2**16))
def test_sums_over_the_grid_are_what_a_layout_costs(bodies, tp, seed):
    problem = tensor_problem(block_model(*bodies), tp)
    found = list(itertools.islice(all_layouts(problem), 500))
    for solution in np.random.default_rng(seed).permutation(len(found))[:20]:
        costs = kind_costs(problem, found[solution])
        for kind, cost in enumerate(costs):
            layouts = kind_layouts(problem, kind)
            choices = [found[solution].choices[number] for number in layouts.ops]
            states = [max(0, found[solution].states[number]) for number in layouts.classes]
            same = (layouts.choices == choices).all(axis=1) & (layouts.states == states).all(axis=1)
            (row,) = np.flatnonzero(same)
            assert layouts.seconds[row] == pytest.approx(
                (cost.forward_s, cost.backward_s, cost.forward_launch_s, cost.backward_launch_s)
            )
            assert layouts.num_bytes[row].tolist() == [cost.held_bytes, cost.transient_bytes]


@settings(max_examples=15)
@given(bodies=BODIES, share=st.sampled_from([0.9, 0.7, 0.5]))
def test_a_memory_limit_is_kept_by_the_fastest_that_keeps_it(bodies, share):
    """Held against elimination at many prices of a byte: none that fits is faster."""
    problem = tensor_problem(block_model(*bodies), 2)
    counts = tuple(map(float, problem.counts))
    solver = ProblemSolver(problem=problem)

    def held(solution) -> float:
        costs = kind_costs(problem, solution)
        return sum(count * cost.held_bytes for count, cost in zip(counts, costs, strict=True))

    free = solver.solve(time_weights(problem))
    limit = MemoryLimit(
        name="all",
        num_bytes=int(share * held(free)),
        copies=counts,
        parameter_bytes=(0.0,) * len(problem.classes),
    )
    limited = solver.solve(time_weights(problem), [limit])
    if limited.status == "optimal":
        assert held(limited) <= limit.num_bytes * (1 + 1e-9)
        assert limited.objective >= free.objective * (1 - 1e-9)
    for price in (0.0, *np.logspace(-12, -6, 13)):
        priced = solver.solve(time_weights(problem, held=price))
        if held(priced) <= limit.num_bytes:
            fitting = objective(problem, priced, time_weights(problem))
            assert limited.objective <= fitting * (1 + 1e-6)
        bound = priced.objective - price * limit.num_bytes
        assert limited.objective >= bound * (1 - 1e-6)


@settings(max_examples=15)
@given(bodies=BODIES)
def test_what_cannot_be_eliminated_is_solved_as_a_program(bodies):
    problem = tensor_problem(block_model(*bodies), 2)
    weights = time_weights(problem)
    expected = solve_problem(problem, weights).objective
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "plan_elimination", lambda *_: None)
        problem = tensor_problem(block_model(*bodies), 2)
        assert tables.tables_of(problem.frame).elimination is None
        assert solve_problem(problem, weights).objective == pytest.approx(expected, rel=1e-6)


@settings(max_examples=50)
@given(data=st.data())
def test_sums_of_tables_are_minimized_exactly(data):
    domains = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    variables = range(len(domains))
    scopes = data.draw(
        st.lists(
            st.lists(st.sampled_from(variables), min_size=1, max_size=3, unique=True).map(
                lambda scope: tuple(sorted(scope))
            ),
            max_size=6,
        )
    )
    seed = data.draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    made = [random.random([domains[variable] for variable in scope]) for scope in scopes]
    for table in made:
        table[random.random(table.shape) < 0.2] = math.inf
    plan = plan_elimination(domains, scopes)
    assert plan is not None
    total, values = minimize(plan, made)

    def value_of(chosen) -> float:
        return sum(
            float(table[tuple(chosen[variable] for variable in scope)])
            for scope, table in zip(scopes, made, strict=True)
        )

    least = min(map(value_of, itertools.product(*map(range, domains))))
    assert total == pytest.approx(least, rel=1e-12)
    if math.isfinite(total):
        assert value_of(values) == pytest.approx(total, rel=1e-12)


def test_tables_that_would_be_too_large_are_refused():
    variables = tuple(range(30))
    scopes = [(one, other) for one in variables for other in variables if one < other]
    assert plan_elimination([6] * 30, scopes) is None
