"""What computing a block again gives: bytes that are not kept, for seconds; by its ops, or whole.

A block may be computed again by its ops or whole. Of both only what lies on the lower hull of
seconds over bytes matters to sums of parts: the *steps* of a block, each of which gives less bytes
for a second than the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.facts import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Bytes that are kept no longer, for ``seconds`` more; ``whole``: then all of the block is
    computed again.
    """

    freed: float
    seconds: float
    whole: bool

    @property
    def rate(self) -> float:
        """Seconds for a byte."""
        return self.seconds / self.freed


def steps_of(op_freed: float, op_s: float, whole_freed: float, whole_s: float) -> tuple[Step, ...]:
    """The steps of a block, best first, from what it gives by its ops and whole."""
    whole = Step(freed=whole_freed, seconds=whole_s, whole=True)
    if op_freed <= 0 or op_s * whole_freed >= whole_s * op_freed:
        return (whole,) if whole_freed > 0 else ()
    by_op = Step(freed=op_freed, seconds=op_s, whole=False)
    if whole_freed <= op_freed:
        return (by_op,)
    rest = Step(freed=whole_freed - op_freed, seconds=max(whole_s - op_s, 0.0), whole=True)
    return (by_op, rest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """What each block gives of what a micro-batch keeps, by its ops and whole, in bytes (0 where it
    gives nothing) and seconds.
    """

    op_freed: Floats
    op_s: Floats
    whole_freed: Floats
    whole_s: Floats

    def without_whole(self) -> Offer:
        """By ops only."""
        return Offer(
            op_freed=self.op_freed,
            op_s=self.op_s,
            whole_freed=np.zeros(self.whole_freed.shape),
            whole_s=self.whole_s,
        )

    def kinds(self) -> list[Alike]:
        """The blocks that give something, those that give the same together."""
        rows = np.stack([self.op_freed, self.op_s, self.whole_freed, self.whole_s])
        found: dict[tuple[float, ...], list[int]] = {}
        for block, gives in enumerate(zip(*rows.tolist(), strict=True)):
            if gives[0] > 0 or gives[2] > 0:
                found.setdefault(gives, []).append(block)
        kinds = []
        for (op_freed, op_s, whole_freed, whole_s), blocks in sorted(found.items()):
            alike = np.zeros(rows.shape[1])
            alike[blocks] = 1.0
            kinds.append(
                Alike(
                    blocks=alike,
                    op_freed=op_freed,
                    op_s=op_s,
                    whole_freed=whole_freed,
                    whole_s=whole_s,
                )
            )
        return kinds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alike:
    """``blocks`` (1 for these) that give the same."""

    blocks: Floats
    op_freed: float
    op_s: float
    whole_freed: float
    whole_s: float

    @property
    def steps(self) -> tuple[Step, ...]:
        """Of one of them."""
        return steps_of(self.op_freed, self.op_s, self.whole_freed, self.whole_s)


def best_steps(kinds: Sequence[Alike]) -> list[tuple[Step, Floats]]:
    """The steps of all kinds, with the blocks that have each, best first."""
    found = [(step, kind.blocks) for kind in kinds for step in kind.steps]
    return sorted(found, key=lambda pair: (pair[0].rate, pair[0].whole, pair[0].freed))


def least_whole_s(kinds: Sequence[Alike], left: Floats, number: Floats) -> Floats:
    """Seconds at the least in which ``number`` blocks give ``left`` bytes, as none is computed
    again in part: each is taken for the best of ``kinds``, of which there may be fewer.

    That is w blocks whole and, by their ops, as many others as still are needed; w is at the least
    what all others by their ops leave over. If one more whole takes longer than all that it saves,
    no other number is better.
    """
    by_op = [kind for kind in kinds if kind.op_freed > 0]
    whole = [kind for kind in kinds if kind.whole_freed > 0]
    if not by_op and not whole:
        return np.zeros(left.shape)
    whole_freed = max((kind.whole_freed for kind in whole), default=0.0)
    whole_s = min((kind.whole_s for kind in whole), default=np.inf)
    op_freed = max((kind.op_freed for kind in by_op), default=0.0)
    op_s = min((kind.op_s for kind in by_op), default=np.inf)
    left = np.maximum(left, 0.0)
    if not by_op:
        return np.ceil(left / whole_freed) * whole_s
    if op_freed >= whole_freed:
        return np.ceil(left / op_freed) * min(op_s, whole_s)
    wholes = np.ceil(np.maximum(0.0, left - number * op_freed) / (whole_freed - op_freed))
    rest = np.maximum(0.0, left - wholes * whole_freed)
    if whole_s >= np.ceil(whole_freed / op_freed) * op_s:
        return wholes * whole_s + np.ceil(rest / op_freed) * op_s
    rate = min(op_s / op_freed, whole_s / whole_freed)
    least = np.maximum(rate * rest, np.ceil(rest / whole_freed) * min(op_s, whole_s))
    found: Floats = wholes * whole_s + least
    return found
