"""Stage cuts: the dynamic program finds what enumeration finds."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.solver.cuts import best_cuts
from autopar.solver.stages import run_maxima, run_sums


@given(
    blocks=st.lists(st.floats(0.1, 9.0), min_size=1, max_size=8),
    stages=st.integers(1, 5),
    limit=st.floats(1.0, 40.0),
)
def test_cuts_equal_brute_force(blocks, stages, limit):
    num = len(blocks)
    sums = run_sums(np.array(blocks))
    costs = [np.where(sums <= limit, sums * (1 + 0.1 * s), math.inf) for s in range(stages)]
    best, cuts = best_cuts(num, stages, lambda stage: costs[stage])
    expected = math.inf
    for inner in itertools.combinations(range(1, num), stages - 1):
        ends = (0, *inner, num)
        worst = max(costs[s][ends[s], ends[s + 1]] for s in range(stages)) if stages <= num else 0
        expected = min(expected, worst)
    if stages > num:
        expected = math.inf
    assert math.isclose(best, expected) or best == expected
    if cuts:
        assert max(costs[s][cuts[s], cuts[s + 1]] for s in range(stages)) == best


@given(values=st.lists(st.floats(0, 10), min_size=1, max_size=6))
def test_runs_are_sums_and_maxima(values):
    sums, maxima = run_sums(np.array(values)), run_maxima(np.array(values))
    for i in range(len(values)):
        for j in range(i + 1, len(values) + 1):
            assert math.isclose(sums[i, j], sum(values[i:j]), abs_tol=1e-9)
            assert maxima[i, j] == max(values[i:j])
