"""Cuts into virtual stages, and a bound on all of them.

With several virtual stages on a stage no cost of a run of blocks stands by itself, so that the
dynamic program over stages (``cuts``) does not apply. A few cuts are made that are even in one
sense each; what is chosen among them is measured by the simulator and by the account of memory.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.bounds import StageTimes
from autopar.solver.costs.memory import StageContents
from autopar.solver.facts import Floats
from autopar.solver.stages import Stager


def virtual_cuts(stager: Stager) -> tuple[tuple[int, ...], ...]:
    """Cuts into p·v virtual stages: even in seconds, in kept bytes, in parameters, in blocks."""
    candidate, costs = stager.candidate, stager.costs
    num = candidate.pp * candidate.virtual_stages
    weights = (
        costs.forward_s + stager.backward_s(),
        stager.kept_bytes(),
        costs.shared_numel,
        np.ones(costs.num_blocks),
    )
    return tuple(dict.fromkeys(even_cuts(weight, num) for weight in weights))


def even_cuts(weights: Floats, num_runs: int) -> tuple[int, ...]:
    """The cuts into runs, none empty, that minimize the sum of the squares of the runs' sums.

    Returns:
        The first block of every run, then the number of blocks.
    """
    num = len(weights)
    prefix = np.concatenate([[0.0], np.cumsum(weights)])
    squares = (prefix[None, :] - prefix[:, None]) ** 2
    squares[np.tril_indices(num + 1)] = np.inf
    best = squares[0]
    choices = []
    for _ in range(num_runs - 1):
        sums = best[:, None] + squares
        choices.append(np.argmin(sums, axis=0))
        best = np.min(sums, axis=0)
    cuts = [num]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return (0, *reversed(cuts))


def even_bound_s(stager: Stager, times: StageTimes) -> float:
    """No cuts are faster: some stage has at least the mean of the stages' work."""
    once = float((stager.optimizer_s() + stager.costs.step_s).sum())
    work = stager.candidate.num_micro_batches * float(times.both.sum())
    return (work + once) / stager.candidate.pp


def even_bytes(stager: Stager) -> int:
    """No cuts have a fullest rank with less: some stage has the mean of the stages' parameters."""
    costs, pp = stager.costs, stager.candidate.pp
    least = StageContents(
        numel=float(costs.numel.sum()) / pp,
        expert_numel=float(costs.expert_numel.sum()) / pp,
        segment_numel=0.0,
        num_segments=1,
        activation_bytes=0.0,
        recompute_bytes=0.0,
        temporary_bytes=0.0,
        message_bytes=0.0,
    )
    return sum(stager.bytes_by_cause(least).values())
