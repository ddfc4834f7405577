"""Stage cuts: the dynamic program in its windows finds what enumeration finds."""

import itertools
import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.solver.cuts import best_cuts
from autopar.solver.facts import Floats
from autopar.solver.passing import least_prefix
from autopar.solver.reach import Floor, Reach
from autopar.solver.runs import Runs, all_runs, prefixes
from autopar.solver.virtual_cuts import even_cuts
from autopar.solver.windows import Windows, all_windows

values = st.floats(0.1, 9.0)


@st.composite
def stage_costs(draw: Any) -> tuple[Reach, list[Floats]]:
    """Costs of all runs as each stage, inf for some, none below what the reach says."""
    blocks = np.array(draw(st.lists(values, min_size=1, max_size=9)))
    stages, num, num_blocks = draw(st.integers(1, 5)), draw(st.integers(1, 5)), len(blocks)
    are_alike = draw(st.booleans())
    rows = np.array([blocks * (1.0 if are_alike else draw(values)) for _ in range(stages)])
    sizes = [draw(st.lists(values, min_size=num_blocks, max_size=num_blocks))] * stages
    room = draw(st.sampled_from([10.0, 20.0, math.inf]))
    waiting = [draw(st.lists(values, min_size=num_blocks, max_size=num_blocks))] * stages
    costs, all_s = [], draw(st.floats(0, 20))
    for stage in range(stages):
        runs = all_runs(num_blocks, stage)
        before = least_prefix(rows)[runs.first]
        more = [draw(st.floats(0, 5)) for _ in range(3)]
        cost = before + num * runs.sums(rows[stage]) + np.resize(more, (num_blocks, num_blocks + 1))
        fits = runs.sums(np.array(sizes[stage])) <= room
        cost = np.maximum(cost, all_s + runs.sums(np.array(waiting[stage])))
        costs.append(np.where(fits, cost, math.inf))
    work, before = num * prefixes(rows), least_prefix(rows)
    later, num_bytes = prefixes(np.array(waiting)), prefixes(np.array(sizes))
    reach = Reach(
        seconds=(Floor(first=work - before, end=work), Floor(first=later, end=later + all_s)),
        priced=(),
        memory=(Floor(first=num_bytes, end=num_bytes - room),) if math.isfinite(room) else (),
    )
    return reach, costs


def enumerated(costs: list[Floats], combine: Any) -> float:
    num, stages = len(costs[0]), len(costs)
    least = math.inf
    for inner in itertools.combinations(range(1, num), stages - 1):
        ends = (0, *inner, num)
        if len(ends) == stages + 1 and stages <= num:
            least = min(least, combine(costs[s][ends[s], ends[s + 1]] for s in range(stages)))
    return least


def within(costs: list[Floats], windows: Windows) -> Floats:
    """The costs of the runs of windows."""
    runs = windows.runs
    first = np.minimum(runs.first, len(costs[0]) - 1)
    return np.stack(costs)[runs.stage, first, runs.end]


@given(stage_costs(), st.floats(0, 100))
def test_cuts_equal_brute_force(drawn: tuple[Reach, list[Floats]], guess_s: float) -> None:
    reach, costs = drawn
    best, cuts = best_cuts(lambda windows: within(costs, windows), reach, guess_s=guess_s)
    expected = enumerated(costs, max)
    assert best == expected or math.isclose(best, expected)
    if cuts:
        assert max(costs[s][cuts[s], cuts[s + 1]] for s in range(len(costs))) == best


@given(stage_costs())
def test_the_least_sum_equals_brute_force(drawn: tuple[Reach, list[Floats]]) -> None:
    _, costs = drawn
    windows = all_windows(len(costs[0]), len(costs))
    if windows is None:
        assert len(costs[0]) < len(costs)
    else:
        least, expected = windows.least_sum(within(costs, windows)), enumerated(costs, sum)
        assert least == expected or math.isclose(least, expected)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9))
def test_runs_are_sums_and_maxima(drawn: list[float]) -> None:
    runs, num = all_runs(len(drawn), 0), len(drawn)
    sums, maxima = runs.sums(np.array(drawn)), runs.maxima(np.array(drawn))
    for i, j in itertools.combinations(range(num + 1), 2):
        assert math.isclose(sums[i, j], sum(drawn[i:j]), abs_tol=1e-9)
        assert maxima[i, j] == max(drawn[i:j])
        assert runs.length[i, j] == j - i
    whole = Runs(stage=np.array([0]), first=np.array([0]), end=np.array([num]))
    assert whole.maxima(np.array(drawn)).tolist() == [max(drawn)]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.data())
def test_even_cuts_are_runs_of_blocks(drawn: list[float], data: Any) -> None:
    """Also where a few blocks have all of the weight."""
    num_runs = data.draw(st.integers(1, len(drawn)))
    cuts = even_cuts(np.array(drawn), num_runs)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(drawn), num_runs + 1)
    assert all(first < end for first, end in itertools.pairwise(cuts))
    if len(drawn) <= 5:  # everything is near
        prefix = np.concatenate([[0.0], np.cumsum(drawn)])

        def squares(ends: tuple[int, ...]) -> float:
            return sum((prefix[j] - prefix[i]) ** 2 for i, j in itertools.pairwise(ends))

        every = itertools.combinations(range(1, len(drawn)), num_runs - 1)
        least = min(squares((0, *inner, len(drawn))) for inner in every)
        assert squares(cuts) <= least * (1 + 1e-9)
