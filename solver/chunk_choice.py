"""In how many chunks a layout computes its loss, beside which blocks it computes again.

The loss is whole where nothing has to be computed again on its stage. Otherwise it is in as many
chunks as leave its stage least to do: they cost a little time, and blocks that are computed again
cost more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.solver.choose_again import again_on, choose_blocks
from autopar.solver.facts import BlockCosts, Floats
from autopar.solver.loss_chunks import NUMBERS
from autopar.solver.runs import on_stage
from autopar.solver.stages import Stager


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkChoice:
    """The chunks of a layout of a candidate.

    Attributes:
        whole: Its stager with the loss in one chunk.
        costs: Of its blocks with the loss in so many chunks; None where that cannot be.
        block: The block that makes the loss.
    """

    whole: Stager
    costs: Callable[[int], BlockCosts | None]
    block: int
    _known: dict[int, BlockCosts | None] = field(default_factory=dict)

    def stager(self, num_chunks: int) -> Stager | None:
        """With the loss in so many chunks; None where that cannot be."""
        if num_chunks == 1:
            return self.whole
        if num_chunks not in self._known:
            self._known[num_chunks] = self.costs(num_chunks)
        costs = self._known[num_chunks]
        if costs is None:
            return None
        candidate = replace(self.whole.candidate, loss_chunks=num_chunks)
        return replace(self.whole, costs=costs, candidate=candidate)

    def pinned(self) -> Stager | None:
        """With the chunks that the candidate says; None where they cannot be."""
        return self.stager(self.whole.candidate.loss_chunks)

    def within(self, cuts: tuple[int, ...]) -> Stager | None:
        """What fits into memory, with its recomputed blocks and the chunks of its loss chosen; None
        where nothing does.
        """
        candidate = self.whole.candidate
        if not candidate.chunks_open:
            pinned = self.pinned()
            return None if pinned is None else fitting(pinned, cuts)
        whole, last = fitting(self.whole, cuts), candidate.pp - 1
        if whole is not None and not _again_s(whole, cuts):
            return whole
        deepest = self._deepest()
        if deepest is self.whole:
            return whole
        if candidate.recompute != "blocks":
            return whole or self._fewest(cuts)
        least = again_on(deepest, last, cuts)
        if least is None:
            return whole
        least_again_s = least.seconds(deepest, last)
        if whole is not None and _again_s(whole, cuts) <= least_again_s:
            return whole
        best, least_s = whole, math.inf if whole is None else _stage_s(whole, cuts)
        for number in NUMBERS:
            stager = self.stager(number)
            again = None if stager is None else again_on(stager, last, cuts)
            if stager is None or again is None:
                continue
            again_s = again.seconds(stager, last)
            seconds = _stage_s(stager, cuts) + again_s
            if seconds < least_s:
                best, least_s = stager, seconds
            if again_s <= least_again_s:
                break
        return best if best is None or best is whole else fitting(best, cuts)

    def is_roomy(self, cuts: Sequence[tuple[int, ...]]) -> bool:
        """Whether all fits with some cuts, the loss whole and nothing open computed again."""
        whole = self.whole
        if whole.candidate.recompute == "blocks":
            whole = replace(whole, candidate=replace(whole.candidate, recompute="none"))
        return any(map(whole.fits, cuts))

    def _fewest(self, cuts: tuple[int, ...]) -> Stager | None:
        """With as few chunks as make it fit."""
        stagers = filter(None, map(self.stager, NUMBERS))
        return next(filter(None, (fitting(stager, cuts) for stager in stagers)), None)

    def _deepest(self) -> Stager:
        """With as many chunks as are searched and can be had."""
        stagers = filter(None, map(self.stager, reversed(NUMBERS)))
        return next(stagers, self.whole)

    def roomiest(self) -> Stager:
        """No choice of chunks takes less time or memory."""
        whole = self.whole
        if not whole.candidate.chunks_open:
            return self.pinned() or whole
        deepest = self._deepest().costs
        held, temporary = whole.costs.held_bytes.copy(), whole.costs.temporary_bytes.copy()
        held[self.block] = min(held[self.block], deepest.held_bytes[self.block])
        temporary[self.block] = min(temporary[self.block], deepest.temporary_bytes[self.block])
        costs = replace(whole.costs, held_bytes=held, temporary_bytes=temporary)
        return replace(whole, costs=costs)


def fitting(stager: Stager, cuts: tuple[int, ...]) -> Stager | None:
    """With its offloaded and recomputed blocks chosen, or as it is; None where it does not fit."""
    stager = stager.decided(cuts)
    if stager.candidate.recompute == "blocks":
        return choose_blocks(stager, cuts)
    return stager if stager.fits(cuts) else None


def _again_s(stager: Stager, cuts: tuple[int, ...]) -> float:
    """Seconds of what blocks of the last stage compute again."""
    return _sum(stager.again_s(), stager, cuts)


def _stage_s(stager: Stager, cuts: tuple[int, ...]) -> float:
    """Seconds of a forward and a backward of the blocks of the last stage."""
    return _sum(stager.costs.forward_s + stager.backward_s(), stager, cuts)


def _sum(values: Floats, stager: Stager, cuts: tuple[int, ...]) -> float:
    last = stager.candidate.pp - 1
    own = on_stage(values, last)
    return sum(float(own[i : j + 1].sum()) for i, j in stager.virtual_stages(last, cuts))
