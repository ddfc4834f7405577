"""The frontier of seconds and bytes of a kind is below every layout, and some reach it."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.layout import frontier
from autopar.solver.layout.frontier import FrontierPoint, kind_frontier
from autopar.solver.layout.tables import costs_of
from tests.solver.graphs import block_model, tensor_problem
from tests.solver.layouts import kind_layouts

OPS = ("linear", "relu", "add", "mul")


@st.composite
def bodies(draw: Any) -> list[tuple[str, int]]:
    """Up to four ops, each on an earlier value."""
    num = draw(st.integers(1, 4))
    return [(draw(st.sampled_from(OPS)), draw(st.integers(0, place))) for place in range(num)]


def dominated(points: tuple[FrontierPoint, ...], num_bytes: float, seconds: float) -> bool:
    return any(
        point.num_bytes <= num_bytes + 1e-6 and point.seconds <= seconds * (1 + 1e-9)
        for point in points
    )


@settings(max_examples=40)
@given(bodies(), st.sampled_from([2, 4]), st.integers(1, 8), st.integers(2, 6))
def test_no_layout_is_outside_the_frontier(
    body: list[tuple[str, int]], tp: int, batch: int, most: int
) -> None:
    problem = tensor_problem(block_model(body), tp=tp, batch=batch)
    known, frontier.MOST_POINTS = frontier.MOST_POINTS, most
    try:
        for kind in range(len(problem.kinds)):
            points = kind_frontier(problem, costs_of(problem), kind)
            assert points is not None
            layouts = kind_layouts(problem, kind)
            both = layouts.seconds[:, 0] + layouts.seconds[:, 1]
            held = layouts.num_bytes[:, 0]
            pairs = zip(held.tolist(), both.tolist(), strict=True)
            assert all(dominated(points, *pair) for pair in pairs)
            # each is as fast as some layout that keeps no more than the one before leaves out
            limits = [np.inf, *(point.num_bytes for point in points)]
            for limit, point in zip(limits, points, strict=False):
                fastest = both[held <= limit].min()
                assert point.seconds >= fastest * (1 - 2e-3), "what bounds is near"
    finally:
        frontier.MOST_POINTS = known
