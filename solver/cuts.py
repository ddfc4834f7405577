"""Where to cut the blocks into stages: an exact dynamic program over the cuts that may be best.

Whatever a stage costs, it is not below some sums over its blocks (``reach``). What is within a
threshold by these is within a window for each cut, which grows narrow as the threshold comes down
to the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.ir.graph import ModelGraph
from autopar.solver.facts import Floats
from autopar.solver.reach import Reach
from autopar.solver.windows import Windows, make_windows, num_runs

_SLACK = 0.03
"""How far the first threshold is above the least step; the next ones are twice as far."""

_BEYOND = 1 + 1e-12
"""What is in no window of a threshold is beyond it."""


def best_cuts(
    cost: Callable[[Windows], Floats],
    reach: Reach,
    *,
    guess_s: float = 0.0,
    enough_s: float = math.inf,
    most_runs: float = math.inf,
) -> tuple[float, tuple[int, ...]]:
    """The cuts that minimize the largest cost of a stage.

    Args:
        cost: Costs of the runs of windows, none below what ``reach`` says; inf: does not fit.
        reach: Of the stages.
        guess_s: About what the best may cost.
        enough_s: Costs above it need not be known.
        most_runs: Work limit: windows with more runs are not looked at.

    Returns:
        The largest cost of a stage, and the first block of every stage followed by the number of
        blocks; (inf, ()) when there is no way. Without cuts: no way costs less.
    """
    widest = reach.borders(math.inf)
    if widest is None:
        return math.inf, ()
    proved_s = reach.least_s()
    slack, least_s = _SLACK, max(proved_s, guess_s)
    threshold_s = least_s * (1 + slack)
    while True:
        threshold_s = min(threshold_s, max(enough_s, least_s))
        borders = reach.borders(threshold_s)
        if borders is not None:
            if num_runs(*borders) > most_runs:
                return proved_s, ()
            windows = make_windows(*borders)
            value, cuts = windows.least_largest(cost(windows))
            if value <= threshold_s or borders == widest:
                return value, cuts
            if threshold_s >= enough_s:
                return threshold_s * _BEYOND, ()
            if math.isfinite(value):
                proved_s, threshold_s = threshold_s * _BEYOND, value
                continue
        elif threshold_s >= enough_s:
            return threshold_s * _BEYOND, ()
        proved_s = max(proved_s, threshold_s * _BEYOND)
        slack *= 2
        threshold_s = least_s * (1 + slack)


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
