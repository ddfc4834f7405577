"""What a search found, and what is proved of all candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.solver.candidates import Candidate
from autopar.solver.solved import Solved


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchResult:
    """The best solved candidate (None when nothing fits), and the bound of all.

    ``bounds`` are those of candidates that were tried, ``left`` has all others: bound, step of
    refinement, candidate. ``unsettled`` were tried, and neither solved nor proved not to fit.
    """

    best: Solved | None
    bound_s: float
    solved: list[Solved]
    bounds: dict[Candidate, float]
    num_candidates: int
    left: list[tuple[float, int, Candidate]] = field(default_factory=list)
    unsettled: list[Candidate] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """The step of the best; infinite when nothing fits."""
        return math.inf if self.best is None else self.best.step_s

    @property
    def open_bounds(self) -> list[tuple[float, Candidate]]:
        """Of candidates that were bounded by their stages and not tried, lowest first."""
        found = [(bound, candidate) for bound, step, candidate in self.left if step >= 2]
        return sorted(found, key=lambda pair: pair[0])

    def joined(self, other: SearchResult) -> SearchResult:
        """Of the candidates of both."""
        return SearchResult(
            best=min(self.best, other.best, key=_step_s),
            bound_s=min(self.bound_s, other.bound_s),
            solved=[*self.solved, *other.solved],
            bounds=self.bounds | other.bounds,
            num_candidates=self.num_candidates + other.num_candidates,
            left=[*self.left, *other.left],
            unsettled=[*self.unsettled, *other.unsettled],
        )


def _step_s(solved: Solved | None) -> float:
    return math.inf if solved is None else solved.step_s
