"""What a single stage waits for between two micro-batches of 1F1B, where its first blocks are
gathered for each use: little is computed around them while they are reduced and gathered.

Let m be the first block after block 0 that is gathered for each use. All such gathers of the next
forward are issued after the backward of m, which holds it until then. So from the end of the
backward of block i ≥ m to the forward of block j ≥ m that is gathered, too, the stream has

- reductions of the blocks m … i, and of those before where more than m is gathered for the forward
  and block 0, which is held from backward to forward, takes the other one of two places;
- gathers for the backwards of blocks before i, but for those that were there: the next one, and one
  more if i is not gathered itself;
- gathers for the forwards of blocks 1 … j.

The blocks before i and j are computed meanwhile, slowed down.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.solver.facts import Floats

LOOKED_AT = 4
"""Blocks around the turn from a micro-batch to the next that are looked at."""


def turn_s(
    zero_stages: Sequence[int],
    *,
    gather: Floats,
    reduce: Floats,
    forward: Floats,
    backward: Floats,
    slowdown: float,
) -> float:
    """Seconds that are waited for at the least, at each turn.

    Args:
        zero_stages: Of the first blocks; those after them count as if they were not gathered.
        gather, reduce: Seconds of each block.
        forward, backward: The same, at least.
        slowdown: Seconds by which a second of overlap lengthens compute.
    """
    gathered = [b for b, zero in enumerate(zero_stages) if zero == 3]
    later, found = [b for b in gathered if b > 0], 0.0
    for i, j in itertools.product(range(1, len(zero_stages)), later):
        if i < later[0]:
            continue
        first = 0 if j > later[0] and 0 in gathered else later[0]
        below = [b for b in gathered if b < i]
        below = below[: max(0, len(below) - (1 if i in gathered else 2))]
        stream = sum(reduce[b] for b in range(first, i + 1) if zero_stages[b] >= 2)
        stream += sum(gather[b] for b in (*below, *(b for b in later if b <= j)))
        meanwhile = backward[:i].sum() + forward[:j].sum()
        found = max(found, float(stream - (1 + slowdown) * meanwhile))
    return found
