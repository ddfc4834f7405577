"""What ZeRO stages that are open cost a stage at the least, in its memory and beside what it
computes again.

Let a block have ZeRO stage z ∈ {1, 2, 3} and be computed again (r = 1) or not: it takes
q(z) + M·r·f seconds and b(z) + n·h(r) bytes, n micro-batches being in flight. With λ seconds for a
byte no choice on a stage takes less than Σ min (q + λ·b) + Σ min (M·r·f + λ·n·h) − λ·room. The
largest over some λ is taken, those at which the choice of a block changes. Segments that are
gathered for each use need buffers: where there are some, at least the smallest has its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from autopar.solver.facts import Floats
from autopar.solver.runs import Ints, Runs
from autopar.solver.stages import ROUNDED_BYTES, Stager
from autopar.solver.turns import LOOKED_AT

_OTHERS = 3
"""None of the other blocks is gathered for each use, or one, or more."""

_MOST_PRICES = 8
"""Prices of each sort that are tried."""


class OpenStages:
    """Of a candidate that leaves ZeRO stages open.

    Args:
        stager: With costs that no layout is below.
        priced: At some prices of a byte and micro-batch, what no layout is below beyond ``both``,
            with its blocks computed again or not; none: what ``stager`` keeps and computes again.
    """

    def __init__(self, stager: Stager, priced: Mapping[float, Floats] | None = None) -> None:
        self.stager, self.priced = stager, priced or {}
        costs, candidate, sizes = stager.costs, stager.candidate, stager.sizes
        sharded = stager.sharded_numel()
        whole = costs.shared_numel - sharded
        beside = 0.0 if sizes.master and not candidate.offload_optimizer else sharded
        is_first = costs.numel > 0  # a shared parameter counts where it is used first
        self.kept = np.where(is_first, (whole + beside) * sizes.compute, 0.0)
        self.summed = np.where(is_first, whole * sizes.gradient, 0.0)
        if costs.shares_parameters:
            share = np.divide(
                costs.numel, costs.shared_numel, out=np.zeros(len(whole)), where=is_first
            )
            self.kept, self.summed = self.kept * share, self.summed * share
        self.least = stager.least_run_bytes()
        self.lost = 1 + stager.lost_shares
        self.inputs = stager.input_kept_bytes()
        able = candidate.leaves_again_open & (self.least.again < self.least.kept)
        partly = candidate.leaves_again_open & (self.least.parts < self.least.kept)
        parts = [costs.held_bytes[able]]
        parts += [part.rebuilt_bytes[own] for part, own in zip(costs.parts, partly, strict=True)]
        self.rebuilt = float(np.concatenate(parts).min(initial=math.inf)) if able.any() else 0.0
        self.is_able = able, partly  # blocks that can be computed again, and parts of them

    def least_s(
        self, runs: Runs, gathers: Floats, reductions: Floats, *, computes: bool = True
    ) -> Floats:
        """Seconds per step of what runs compute again, and of communication beyond ZeRO 1's.

        Args:
            runs: Stages.
            gathers: What gathers of each block for each use take beyond one, a row for each stage.
            reductions: The same of reductions.
            computes: Whether what is computed again takes time.
        """
        room = self.stager.run_room(runs, exact=False)
        kept = self.stager.run_kept(runs)
        found = np.full(room.shape, np.inf)
        for highest in (1, 2, 3):
            left = room - self._buffer_bytes(runs, highest)
            whole, again = np.zeros(room.shape), np.zeros(room.shape)
            for price, without, cost in self._prices(gathers, reductions, computes=computes):
                traffic = self._traffic(highest, price, gathers, reductions)
                rates = price[runs.stage]
                value = runs.sums(traffic + without) - rates * left
                whole = np.maximum(whole, value)
                value = runs.sums(traffic + np.minimum(without, cost)) - rates * left
                again = np.maximum(again, value + rates * self.rebuilt)
            whole = np.where(kept <= left + ROUNDED_BYTES, whole, np.inf)
            found = np.minimum(found, np.minimum(whole, again))
        return found

    def single_s(
        self,
        runs: Runs,
        gathers: Floats,
        reductions: Floats,
        turn: Callable[[Sequence[int]], float],
    ) -> Floats:
        """The same of a single stage, with what it waits for at a turn: by the ZeRO stages of its
        first blocks, and those of the last one, which may have the largest buffers.
        """
        num = gathers.shape[1]
        chosen = sorted({*range(min(LOOKED_AT, num)), num - 1})
        others = np.setdiff1d(np.arange(num), chosen)
        room = float(np.ravel(self.stager.run_room(runs, exact=False))[-1])
        patterns = np.array(list(itertools.product((1, 2, 3), repeat=len(chosen))))
        turns = {first: turn(first) for first in {tuple(p[:LOOKED_AT]) for p in patterns.tolist()}}
        whole, again = (np.zeros((_OTHERS, len(patterns))) for _ in range(2))
        left = room - self._pattern_bytes(chosen, patterns, others)
        for price, without, cost in self._prices(gathers, reductions, computes=True):
            levels = self._levels(price, gathers, reductions)[:, 0]
            traffic = levels[patterns - 1, chosen].sum(axis=1) - price[0] * left
            traffic = traffic + _least_others(levels[:, others])[:, None]
            whole = np.maximum(whole, traffic + without[0].sum())
            least = np.minimum(without, cost)[0]
            forced = float(np.min(cost[0] - least, initial=np.inf))
            value = traffic + least.sum() + forced + price[0] * self.rebuilt
            again = np.maximum(again, value)
        own = self._whole_s(chosen, patterns, others, left, gathers[0], reductions[0])
        fits = float(self.stager.run_kept(runs).max()) <= left + ROUNDED_BYTES
        found = np.minimum(np.where(fits, np.maximum(whole, own), np.inf), again)
        found += [turns[tuple(pattern[:LOOKED_AT])] for pattern in patterns.tolist()]
        return np.full(np.broadcast_shapes(runs.first.shape, runs.end.shape), found.min())

    def _whole_s(
        self,
        chosen: Sequence[int],
        patterns: Ints,
        others: Ints,
        left: Floats,
        gathers: Floats,
        reductions: Floats,
    ) -> Floats:
        """Seconds of communication if nothing is computed again, and other blocks are alike: they
        have their stages as a whole. 0 where that is not so.
        """
        parts = [self.kept, self.summed, gathers, reductions]
        if self.priced or not len(others) or any(np.ptp(part[others]) > 0 for part in parts):
            return np.zeros(left.shape)
        kept, summed, gather, reduce = (float(part[others[0]]) for part in parts)
        levels = np.array([self.kept + self.summed, self.kept, np.zeros(len(self.kept))])
        seconds = np.array([np.zeros(len(self.kept)), reductions, gathers + reductions])
        flying, lost = float(self.stager.flying[0]), float(self.lost[0])
        room = (left - flying * float(self.least.kept.sum())) * lost
        room = room - levels[patterns - 1, chosen].sum(axis=1)
        num = len(others)
        best = np.full(left.shape, np.inf)
        for at_three in range(num + 1):  # so many of the others are gathered for each use
            row = min(at_three, _OTHERS - 1)
            spare = room[row] - (num - at_three) * kept
            at_one = np.full(spare.shape, float(num - at_three))
            if summed > 0:
                at_one = np.minimum(at_one, np.floor((spare + ROUNDED_BYTES) / summed))
            own = at_three * gather + (num - np.maximum(at_one, 0.0)) * reduce
            fits = spare >= -ROUNDED_BYTES
            best[row] = np.minimum(best[row], np.where(fits, own, np.inf))
        return best + seconds[patterns - 1, chosen].sum(axis=1)

    def _pattern_bytes(self, chosen: Sequence[int], patterns: Ints, others: Ints) -> Floats:
        """Of gathered segments, where some blocks have the stages of each pattern, by how many of
        the others are at ZeRO 3.
        """
        every = self.stager.costs.shared_numel
        smallest = float(every[others].min()) if len(others) else 0.0
        rows = []
        for more in range(_OTHERS):
            gathered = np.where(patterns == 3, every[chosen], 0.0)
            largest = np.maximum(gathered.max(axis=1), smallest * (more > 0))
            number = np.minimum(2, (gathered > 0).sum(axis=1) + more)
            scattered = np.where(patterns >= 2, every[chosen], 0.0).max(axis=1)
            scattered = np.maximum(scattered, smallest * (more > 0))
            buffers = self._more_bytes(
                self.stager.costs.temporary_bytes.max(), every.max(), scattered
            )
            rows.append(number * largest * self.stager.sizes.compute + buffers)
        return np.array(rows)

    def _more_bytes(self, temporary: Floats, largest: Floats, scattered: Floats) -> Floats:
        """Bytes that gradients to be reduced take beside temporaries, or gradients as they come."""
        sizes = self.stager.sizes
        before = np.maximum(temporary, largest * sizes.compute)
        after = np.maximum(temporary, largest * sizes.compute + scattered * sizes.gradient)
        found: Floats = after - before
        return found

    def _traffic(self, highest: int, price: Floats, gathers: Floats, reductions: Floats) -> Floats:
        """Of each stage and block, the least that traffic and bytes cost."""
        found: Floats = self._levels(price, gathers, reductions)[:highest].min(axis=0)
        return found

    def _levels(self, price: Floats, gathers: Floats, reductions: Floats) -> Floats:
        """What each block costs on each stage, at ZeRO 1 to 3."""
        of_fixed = (price / self.lost)[:, None]  # nothing is lost of what stays
        kept = of_fixed * self.kept
        return np.stack([kept + of_fixed * self.summed, kept + reductions, gathers + reductions])

    def _prices(
        self, gathers: Floats, reductions: Floats, *, computes: bool
    ) -> Iterator[tuple[Floats, Floats, Floats]]:
        """Prices of a kept byte on each stage, what blocks cost at them, and if they are computed
        again; inf where they cannot be.
        """
        candidate = self.stager.candidate
        num, flying = candidate.num_micro_batches, np.maximum(self.stager.flying, 1e-9)
        forward, parts = self._again_s(computes=computes)
        least, (able, partly) = self.least, self.is_able
        for rate, values in self.priced.items() if computes else ():
            found = np.broadcast_to(num * (values + rate * self.inputs), gathers.shape)
            yield num * rate / flying, found, found
        for price in self._rates(gathers, reductions, forward, parts):
            of_kept = (price * flying)[:, None]
            again = np.where(able, of_kept * least.again + forward, np.inf)
            for own, kept, seconds in zip(partly, least.parts, parts, strict=True):
                again = np.minimum(again, np.where(own, of_kept * kept + seconds, np.inf))
            yield price, of_kept * least.kept, again

    def _again_s(self, *, computes: bool) -> tuple[Floats, list[Floats]]:
        """Seconds of a step in which blocks are computed again, and parts of them are."""
        costs = self.stager.costs
        num = self.stager.candidate.num_micro_batches if computes else 0
        return costs.forward_s * num, [part.again_s * num for part in costs.parts]

    def _rates(
        self, gathers: Floats, reductions: Floats, forward: Floats, parts: Sequence[Floats]
    ) -> Iterator[Floats]:
        """Prices at which the choice of a block changes."""
        least, (able, partly) = self.least, self.is_able
        rows = [gathers * self.lost[:, None], reductions * self.lost[:, None]]
        every = [_distinct(rows[0], self.kept), _distinct(rows[1], self.summed)]
        flying = np.maximum(self.stager.flying, 1e-9)[:, None]
        again = [(forward, (least.kept - least.again) * able)]
        for own, kept, seconds in zip(partly, least.parts, parts, strict=True):
            again.append((seconds, (least.kept - kept) * own))
            again.append((forward - seconds, (kept - least.again) * able * own))
        for seconds, saved in again:
            if seconds.any():
                every.append(_distinct(np.broadcast_to(seconds, gathers.shape) / flying, saved))
        for rates in every:
            yield from rates

    def _buffer_bytes(self, runs: Runs, highest: int) -> Floats:
        """Of the segment that is gathered, and the one that is reduced, if some block has this
        stage and none a higher one.
        """
        numel = self.stager.costs.shared_numel
        smallest = float(min(numel[numel > 0], default=0.0))
        if highest == 1:
            return np.zeros(runs.length.shape)
        temporary = runs.maxima(self.stager.costs.temporary_bytes)
        found = self._more_bytes(temporary, runs.maxima(numel), np.array(smallest))
        return found + smallest * self.stager.sizes.compute * (highest == 3)


def _least_others(levels: Floats) -> Floats:
    """The least sum where no block, one, or more are at ZeRO 3: ``levels`` are those of ZeRO 1 to 3
    of each.
    """
    if not levels.shape[1]:
        return np.array([0.0, np.inf, np.inf])
    below = levels[:2].min(axis=0)
    lowest = float(below.sum())
    one = lowest + float((levels[2] - below).min())
    return np.array([lowest, one, float(np.minimum(below, levels[2]).sum())])


def _distinct(seconds: Floats, num_bytes: Floats) -> list[Floats]:
    """Seconds for a byte on each stage, of blocks that differ in that."""
    able = num_bytes > 0
    if not able.any():
        return []
    rates = seconds[:, able] / num_bytes[able]
    rows = np.unique(rates.T, axis=0)
    rows = rows[(rows > 0).any(axis=1)]
    return list(rows[:: math.ceil(len(rows) / _MOST_PRICES) or 1])
