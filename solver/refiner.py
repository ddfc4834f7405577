"""Bounds and plans of candidates, whichever sort of them they are of."""

from __future__ import annotations

import math

from autopar.solver.candidates import Candidate
from autopar.solver.costs.memory import Itemsizes
from autopar.solver.equal_shares import equal_refinement
from autopar.solver.hardware import Cluster
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.problem import Solution
from autopar.solver.pricer import Pricer
from autopar.solver.refinement import Refinement
from autopar.solver.solved import Solved
from autopar.solver.unequal_shares import unequal_refinement


class Refiner:
    """Refines candidates of a model on a cluster; ``pricer`` has what they cost.

    Bounds are those of the steps of ``refinement``: seconds that no plan of a candidate is below,
    infinite where none fits; what is above ``enough_s`` need not be exact.
    """

    def __init__(self, facts: ModelFacts, cluster: Cluster, sizes: Itemsizes) -> None:
        self.pricer = Pricer(facts, cluster, sizes)
        self._equal = equal_refinement(self.pricer)
        self._unequal = unequal_refinement(self.pricer)

    def _of(self, candidate: Candidate) -> Refinement:
        return self._unequal if candidate.shares else self._equal

    def rough(self, candidate: Candidate) -> float:
        """Step 0."""
        return self._of(candidate).rough(candidate)

    def scalar(self, candidate: Candidate, enough_s: float = math.inf) -> float:
        """Step 1."""
        return self._of(candidate).scalar(candidate, enough_s)

    def stages(self, candidate: Candidate, enough_s: float = math.inf) -> float:
        """Step 2."""
        return self._of(candidate).stages(candidate, enough_s)

    def layouts(self, candidate: Candidate, enough_s: float = math.inf) -> float:
        """Step 3."""
        return self._of(candidate).layouts(candidate, enough_s)

    def fitted(self, candidate: Candidate, enough_s: float = math.inf) -> float:
        """Step 4."""
        return self._of(candidate).fitted(candidate, enough_s)

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether something of it may fit into memory."""
        return math.isfinite(self.rough(candidate)) and math.isfinite(self.stages(candidate))

    def solve(self, candidate: Candidate) -> Solved | None:
        """See ``Solver``; of what stands for several, that with the lowest bound."""
        if candidate.stands_for_several:
            candidate = min(candidate.members(), key=self.stages)
        return self._of(candidate).solver.solve(candidate)

    def solve_anyway(self, candidate: Candidate) -> Solved:
        """See ``Solver``."""
        return self._of(candidate).solver.solve_anyway(candidate)

    def made_again(self, candidate: Candidate, solution: Solution, cuts: tuple[int, ...]) -> Solved:
        """See ``Solver``."""
        return self._of(candidate).solver.made_again(candidate, solution, cuts)

    def is_best(self, candidate: Candidate, solved: Solved) -> bool:
        """See ``Solver``."""
        return self._of(candidate).solver.is_best(candidate, solved)

    def improved(self, candidate: Candidate, solved: Solved) -> Solved:
        """See ``Solver``."""
        return self._of(candidate).solver.improved(candidate, solved)
