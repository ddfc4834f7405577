"""Where to cut the blocks into stages: an exact dynamic program over contiguous runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.ir.graph import ModelGraph
from autopar.solver.facts import Floats

StageCosts = Callable[[int], Floats]
"""Cost matrix of a stage: ``[i, j]`` is that of the blocks ``i … j − 1``, inf where impossible."""


def best_cuts(num_blocks: int, num_stages: int, cost: StageCosts) -> tuple[float, tuple[int, ...]]:
    """The cuts that minimize the largest cost of a stage.

    Args:
        num_blocks: Blocks; every stage gets at least one.
        num_stages: Stages.
        cost: Cost of every run as each stage.

    Returns:
        The largest cost of a stage, and the first block of every stage followed by ``num_blocks``;
        (inf, ()) when there is no way.
    """
    best = np.full(num_blocks + 1, math.inf)
    best[0] = 0.0
    choices: list[Sequence[int]] = []
    lengths = np.arange(num_blocks + 1)[None, :] - np.arange(num_blocks)[:, None]
    for stage in range(num_stages):
        matrix = np.where(lengths > 0, cost(stage), math.inf)
        worst = np.maximum(best[:num_blocks, None], matrix)
        choice = np.argmin(worst, axis=0)
        best = worst[choice, np.arange(num_blocks + 1)]
        choices.append(choice.tolist())
    if not math.isfinite(best[num_blocks]):
        return math.inf, ()
    cuts = [num_blocks]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return float(best[num_blocks]), tuple(reversed(cuts))


def least_sum(num_blocks: int, costs: Sequence[Floats]) -> float:
    """The least sum of costs of stages over all cuts; inf when there is no way."""
    best = np.full(num_blocks + 1, math.inf)
    best[0] = 0.0
    lengths = np.arange(num_blocks + 1)[None, :] - np.arange(num_blocks)[:, None]
    for cost in costs:
        sums = best[:num_blocks, None] + np.where(lengths > 0, cost, math.inf)
        best = sums.min(axis=0)
    return float(best[num_blocks])


def layer_cuts(model: ModelGraph, num_runs: int) -> tuple[int, ...]:
    """Cuts that spread layers evenly, as Megatron-LM does: blocks of the kind that repeats most.

    What comes before the first layer goes with the first run, what comes after the last with the
    last. Where the runs do not divide the layers, all blocks are spread, the first runs longer.
    """
    counts = model.multiplicity()
    kind = max(counts, key=lambda name: counts[name])
    layers = [block.index for block in model.blocks if block.kind == kind]
    num = len(model.blocks)
    if len(layers) % num_runs == 0:
        return (0, *layers[:: len(layers) // num_runs][1:], num)
    short, longer = divmod(num, num_runs)
    cuts = [0]
    for run in range(num_runs):
        cuts.append(cuts[-1] + short + (run < longer))
    return tuple(cuts)
