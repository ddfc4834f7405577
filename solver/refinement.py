"""How candidates of one sort are refined: a bound for each step of the search, and their plans.

A candidate is refined in five steps, each when its bound is the lowest of all:

0. a bound from rooflines (every op at its fastest, work spread evenly over stages) that all
   candidates with its degrees and micro-batches share;
1. the same at the fastest layout of each kind, for its schedule and virtual stages;
2. the bound of ``bounds`` at the fastest layout of each kind, over all stage cuts by dynamic
   programming, runs that provably exceed memory left out;
3. virtual stages, which have only one layout: the bound of that, with what it computes again; of
   others: the bound over what a layout can trade of time for memory, or over the chunks of the loss
   where tensor ranks have no layouts to choose from;
4. virtual stages: the bound of cuts with what fits them.

Then it is solved: the fastest layout, the best cuts for it, and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from autopar.solver.candidates import Candidate
from autopar.solver.layout.problem import Solution
from autopar.solver.solved import Solved

Bound = Callable[[Candidate, float], float]
"""Seconds that no plan of a candidate is below; infinite where none fits. What is above the second
argument need not be exact.
"""


class Solver(Protocol):
    """Finds plans of candidates."""

    def solve(self, candidate: Candidate) -> Solved | None:
        """The fastest plan that was found of those that fit; None where none was."""
        ...

    def solve_anyway(self, candidate: Candidate) -> Solved:
        """With the fastest layout, whether or not it fits into memory."""
        ...

    def made_again(self, candidate: Candidate, solution: Solution, cuts: tuple[int, ...]) -> Solved:
        """What was solved elsewhere, of which these are known."""
        ...

    def is_best(self, candidate: Candidate, solved: Solved) -> bool:
        """Whether no plan of the candidate is faster."""
        ...

    def improved(self, candidate: Candidate, solved: Solved) -> Solved:
        """A solved candidate, or one like it that is faster."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Refinement:
    """The bounds of the steps (see there), and what solves."""

    rough: Callable[[Candidate], float]
    scalar: Bound
    stages: Bound
    layouts: Bound
    fitted: Bound
    solver: Solver


def nothing_left(candidate: Candidate, solved: Solved) -> bool:
    """Whether a plan has all that a candidate leaves open as it is fastest: on a single stage and
    tensor rank there are neither cuts nor layouts, only blocks that may be computed again.
    """
    found = solved.candidate
    if candidate.pp > 1 or candidate.tp > 1 or found.recomputes or found.zero_stages:
        return False
    if candidate.zero_open and found.zero_stage > 1:
        return False
    return found.loss_chunks == candidate.loss_chunks
