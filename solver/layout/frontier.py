"""How fast a block of one kind can be if it keeps little: the trade of seconds for bytes.

The least seconds within a limit of bytes are bounded by a price on bytes (Lagrange), for which
elimination finds the best layout at once. Where the layouts on both sides of the limit leave a gap
between bound and layout, the largest tensor that only the faster one keeps is forbidden on one
branch, and on the other its bytes are paid whether or not it is kept.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.layout.eliminate import Elimination, Floats, minimize
from autopar.solver.layout.problem import Problem, Weights
from autopar.solver.layout.tables import Costs, Tables, cost_vector, fill, tables_of

MOST_POINTS = 5
"""Points of a frontier; layouts beyond the last one count as fast as it is."""

_STEP = 2e-3
"""Layouts whose bytes are nearer than this share are one point."""

_EXACT = 1e-4
"""Share of its seconds to which a point is known."""

_MOST_NODES = 16
"""Branches for a point; with more, its bound is that of those left open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """Of all layouts none keeps less than ``num_bytes`` and takes less than ``seconds`` but those
    of points that take longer.
    """

    num_bytes: float
    seconds: float


def kind_frontier(problem: Problem, costs: Costs, kind: int) -> tuple[FrontierPoint, ...] | None:
    """Points such that every layout of a block of ``kind`` keeps no less *and* takes no less, in a
    forward and a backward, than one of them, the fastest first; None for a kind whose graph is too
    dense to eliminate.
    """
    tables = tables_of(problem.frame, [kind])
    if tables.elimination is None:
        return None
    trade = _Trade(problem, costs, tables, tables.elimination, kind)
    points: list[FrontierPoint] = []
    limit, least = math.inf, trade.least_bytes()
    while True:
        seconds, num_bytes = trade.within(limit)
        if math.isinf(seconds):  # nothing keeps so little
            return tuple(points)
        limit = num_bytes * (1 - _STEP)
        if limit <= least or len(points) == MOST_POINTS - 1:
            return (*points, FrontierPoint(num_bytes=least, seconds=seconds))
        points.append(FrontierPoint(num_bytes=limit, seconds=seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    seconds: float
    num_bytes: float
    kept: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A branch: tensors that may not be kept, and those that are paid for in any case."""

    forbidden: frozenset[int] = frozenset()
    paid: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Trade:
    """Layouts of one kind at prices of their bytes."""

    problem: Problem
    costs: Costs
    tables: Tables
    elimination: Elimination
    kind: int
    _seconds: Floats = field(init=False, repr=False)
    _bytes: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        num = len(self.problem.kinds)
        own = tuple(float(kind == self.kind) for kind in range(num))
        nothing = (0.0,) * num
        classes = (0.0,) * len(self.problem.classes)
        seconds = Weights(forward=own, backward=own, step=0.0, held=nothing, parameters=classes)
        kept = Weights(forward=nothing, backward=nothing, step=0.0, held=own, parameters=classes)
        object.__setattr__(self, "_seconds", cost_vector(self.costs, seconds))
        object.__setattr__(self, "_bytes", cost_vector(self.costs, kept))

    def least_bytes(self) -> float:
        """No layout keeps less."""
        return minimize(self.elimination, fill(self.tables, self._bytes))[0]

    def within(self, limit: float) -> tuple[float, float]:
        """Seconds that no layout within ``limit`` bytes is below, and the bytes of one that takes
        about so long; (inf, inf) where there are none.
        """
        if math.isinf(limit):
            fastest = self._priced(_Node(), 0.0)
            return fastest.seconds, self._least_at(fastest).num_bytes
        best: _Layout | None = None
        count = itertools.count()
        queue: list[tuple[float, int, _Node, frozenset[int]]] = []
        nodes = [_Node()]
        for step in itertools.count():
            for node in nodes:
                for bound, faster, within in self._relaxed(node, limit):
                    if best is None or within.seconds < best.seconds:
                        best = within
                    if faster is not None:
                        open_ones = faster.kept - node.paid
                        more = open_ones - within.kept or open_ones
                        heapq.heappush(queue, (bound, next(count), node, more))
            if best is None and not queue:
                return math.inf, math.inf
            if not queue or (best is not None and queue[0][0] >= best.seconds * (1 - _EXACT)):
                assert best is not None, "a queue without branches has a layout"
                return best.seconds * (1 - _EXACT), self._least_at(best).num_bytes
            if step == _MOST_NODES:
                return queue[0][0], limit if best is None else best.num_bytes
            _, _, node, more = heapq.heappop(queue)
            nodes = list(self._branches(node, more))
        raise AssertionError("the loop ends by itself")

    def _least_at(self, layout: _Layout) -> _Layout:
        """Of layouts that are as fast, the one that keeps least."""
        price = _EXACT * layout.seconds / max(layout.num_bytes, 1.0)
        cheaper = self._priced(_Node(), price)
        return min(layout, cheaper, key=lambda found: found.num_bytes)

    def _relaxed(
        self, node: _Node, limit: float
    ) -> Iterator[tuple[float, _Layout | None, _Layout]]:
        """The best bound of a branch by prices, with the layout above the limit (None: the branch
        needs no more branches) and the one within it; nothing where none is within it.
        """
        faster = self._priced(node, 0.0)
        if math.isinf(faster.seconds):
            return
        if faster.num_bytes <= limit:
            yield faster.seconds, None, faster
            return
        smallest = self._priced(node, math.inf)
        if smallest.num_bytes > limit:
            return
        within = smallest
        while True:
            price = (within.seconds - faster.seconds) / (faster.num_bytes - within.num_bytes)
            found = self._priced(node, price)
            line = faster.seconds + price * faster.num_bytes
            if found.seconds + price * found.num_bytes >= line * (1 - 1e-9):
                yield line - price * limit, faster, within
                return
            if found.num_bytes > limit:
                faster = found
            else:
                within = found

    def _branches(self, node: _Node, more: frozenset[int]) -> Iterator[_Node]:
        """Without and with the largest of the tensors that only the faster layout keeps."""
        choice = max(more, key=lambda cost: (self._bytes[cost], cost))
        yield _Node(forbidden=node.forbidden | {choice}, paid=node.paid)
        yield _Node(forbidden=node.forbidden, paid=node.paid | {choice})

    def _priced(self, node: _Node, price: float) -> _Layout:
        """The layout with the least seconds and ``price`` for each byte; at infinity the one that
        keeps least.
        """
        num_bytes = self._bytes.copy()
        num_bytes[list(node.paid)] = 0.0
        vector = num_bytes if math.isinf(price) else self._seconds + price * num_bytes
        vector = vector.copy()
        vector[list(node.forbidden)] = np.inf
        total, values = minimize(self.elimination, fill(self.tables, vector))
        if math.isinf(total):
            return _Layout(seconds=math.inf, num_bytes=math.inf, kept=frozenset())
        chosen = self.tables.chosen_costs(values)
        paid = float(self._bytes[list(node.paid)].sum())
        return _Layout(
            seconds=float(self._seconds[chosen].sum()),
            num_bytes=float(num_bytes[chosen].sum()) + paid,
            kept=frozenset(chosen[self._bytes[chosen] > 0].tolist()),
        )
