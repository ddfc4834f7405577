"""What doing parts of a block again gives: bytes that are not kept, for seconds.

A block may gather again, have its ops computed again, both, or be computed again whole: its
*levels*, the whole one last. Of these only what lies on the lower hull of seconds over bytes
matters to sums of parts: the *steps* of a block, each of which gives less bytes for a second than
the one before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.facts import Floats

NOT_AGAIN = -1
"""Before the first level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Bytes that are kept no longer, for ``seconds`` more, from one level to another."""

    freed: float
    seconds: float
    before: int
    level: int

    @property
    def rate(self) -> float:
        """Seconds for a byte."""
        return self.seconds / self.freed


@functools.lru_cache(maxsize=4096)
def steps_of(freed: tuple[float, ...], seconds: tuple[float, ...]) -> tuple[Step, ...]:
    """The steps of a block, best first, from what it gives at each level."""
    found: list[Step] = []
    own_freed, own_s, before = 0.0, 0.0, NOT_AGAIN
    while True:
        more = [
            Step(
                freed=freed[level] - own_freed,
                seconds=max(seconds[level] - own_s, 0.0),
                before=before,
                level=level,
            )
            for level in range(len(freed))
            if freed[level] > own_freed
        ]
        if not more:
            return tuple(found)
        step = min(more, key=lambda step: (step.rate, -step.freed))
        found.append(step)
        own_freed, own_s, before = freed[step.level], own_s + step.seconds, step.level


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """What each block gives of what a micro-batch keeps, a row for each level: in bytes (0 where it
    gives nothing) and seconds.
    """

    freed: Floats
    seconds: Floats

    def kinds(self) -> list[Alike]:
        """The blocks that give something, those that give the same together."""
        rows = np.concatenate([self.freed, self.seconds])
        num = len(self.freed)
        found: dict[tuple[float, ...], list[int]] = {}
        for block, gives in enumerate(zip(*rows.tolist(), strict=True)):
            if max(gives[:num]) > 0:
                found.setdefault(gives, []).append(block)
        kinds = []
        for gives, blocks in sorted(found.items()):
            alike = np.zeros(rows.shape[1])
            alike[blocks] = 1.0
            kinds.append(Alike(blocks=alike, freed=gives[:num], seconds=gives[num:]))
        return kinds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alike:
    """``blocks`` (1 for these) that give the same at each level."""

    blocks: Floats
    freed: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """Of one of them."""
        return steps_of(self.freed, self.seconds)

    @property
    def num_partly(self) -> int:
        """Levels below the whole one that give something."""
        return sum(freed > 0 for freed in self.freed[:-1])


def best_steps(kinds: Sequence[Alike]) -> list[tuple[Step, Floats]]:
    """The steps of all kinds, with the blocks that have each, best first."""
    found = [(step, kind.blocks) for kind in kinds for step in kind.steps]
    return sorted(found, key=lambda pair: (pair[0].rate, pair[0].level, pair[0].freed))


def least_whole_s(kinds: Sequence[Alike], left: Floats, number: Floats) -> Floats:
    """Seconds at the least in which ``number`` blocks give ``left`` bytes, as none is done again in
    part: each is taken for the best of ``kinds``, of which there may be fewer. 0 where there is
    more than one level below the whole one.

    That is w blocks whole and, at the other level, as many others as still are needed; w is at the
    least what all others leave over at that. If one more whole takes longer than all that it saves,
    no other number is better.
    """
    if not kinds or max(kind.num_partly for kind in kinds) > 1:
        return np.zeros(left.shape)
    whole = [(kind.freed[-1], kind.seconds[-1]) for kind in kinds if kind.freed[-1] > 0]
    partly = [
        (freed, seconds)
        for kind in kinds
        for freed, seconds in zip(kind.freed[:-1], kind.seconds[:-1], strict=True)
        if freed > 0
    ]
    whole_freed = max((freed for freed, _ in whole), default=0.0)
    whole_s = min((seconds for _, seconds in whole), default=np.inf)
    part_freed = max((freed for freed, _ in partly), default=0.0)
    part_s = min((seconds for _, seconds in partly), default=np.inf)
    left = np.maximum(left, 0.0)
    if not partly:
        return np.ceil(left / whole_freed) * whole_s
    if part_freed >= whole_freed:
        return np.ceil(left / part_freed) * min(part_s, whole_s)
    wholes = np.ceil(np.maximum(0.0, left - number * part_freed) / (whole_freed - part_freed))
    rest = np.maximum(0.0, left - wholes * whole_freed)
    if whole_s >= np.ceil(whole_freed / part_freed) * part_s:
        return wholes * whole_s + np.ceil(rest / part_freed) * part_s
    rate = min(part_s / part_freed, whole_s / whole_freed)
    least = np.maximum(rate * rest, np.ceil(rest / whole_freed) * min(part_s, whole_s))
    found: Floats = wholes * whole_s + least
    return found
