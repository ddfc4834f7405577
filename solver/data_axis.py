"""The typing of the data axis: inputs enter sharded by sequence, weights are used whole, and the
rest follows, by the same problem that places tensors on the tensor axis.

It is the same for every number of data ranks: dims that grow with the batch are sharded, and
nothing else is.
"""

from __future__ import annotations

from autopar.ir.errors import AutoparError
from autopar.ir.mesh import DATA_AXIS
from autopar.solver.costs.comm import Links, group_of
from autopar.solver.costs.kernels import Kernels
from autopar.solver.hardware import Cluster
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.decode import AxisTyping, axis_typing
from autopar.solver.layout.make import make_problem
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.problem import Weights
from autopar.solver.layout.solve import solve_problem
from autopar.solver.layout.state import AxisRule

_RANKS = 2


def data_typing(facts: ModelFacts, cluster: Cluster) -> AxisTyping:
    """States of every node on the data axis: the least traffic, then the least work."""
    coster = Coster(
        Kernels(cluster.hardware),
        Links(cluster),
        group_of(cluster, size=_RANKS, stride=1),
        _RANKS,
    )
    problem = make_problem(facts, AxisRule(name=DATA_AXIS, shards_batch=True), coster)
    counts = tuple(map(float, problem.counts))
    weights = Weights(
        forward=counts,
        backward=counts,
        step=0.0,
        held=(0.0,) * len(counts),
        parameters=(0.0,) * len(problem.classes),
    )
    solution = solve_problem(problem, weights)
    if solution.status == "infeasible":
        raise AutoparError("the model has no data-parallel typing: some op mixes its sequences")
    return axis_typing(facts.model, facts.classes, problem, solution)
