"""What stages compute again: as few seconds of it as make them fit into memory.

A candidate that recomputes "blocks" leaves open which, and whether whole or which parts of them
(``again_steps``). Blocks of a kind are alike, so that only how many of each are computed again, and
how, matters: those that give the most memory for a second come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.solver.again_steps import Alike, Offer, best_steps, least_whole_s
from autopar.solver.facts import BlockCosts, Floats
from autopar.solver.in_flight import in_flight
from autopar.solver.reach import Floor
from autopar.solver.runs import Ints, Rounds, Runs, distinct_rows, prefixes
from autopar.solver.stages import ROUNDED_BYTES, Stager

_BYTE = 1.0
_NONE = 1e-9

_ABOVE = 1 + 1e-9
"""Rounding takes nothing out of what fits."""

_MOST_PRICES = 6
"""Prices of a byte at which stages are bounded: of as many kinds of blocks."""


def again_s(stager: Stager, runs: Runs, *, exact: bool = True) -> Floats:
    """Seconds per micro-batch of what runs compute again so that they fit; inf where they cannot.
    Where the candidate says what is recomputed they are 0, or inf.

    With ``exact=False`` no choice of blocks takes less: of blocks that differ the last one counts
    in part.
    """
    if not stager.candidate.leaves_again_open:
        usable = stager.sites.usable_bytes[runs.stage] + (0 if exact else ROUNDED_BYTES)
        return np.where(stager.run_peaks(runs) <= usable, 0.0, np.inf)
    room = stager.run_room(runs, exact=exact)
    seconds = np.zeros(room.shape)
    for kept, flying in stager.run_moments(runs):
        if (kept > room).any():
            found = _again_at_s(stager, runs, kept - room, flying, exact=exact)
            seconds = np.maximum(seconds, found)
    return seconds


def _again_at_s(stager: Stager, runs: Runs, need: Floats, flying: Floats, *, exact: bool) -> Floats:
    """``again_s`` at a moment when runs ``need`` so many bytes, of so many micro-batches."""
    costs, candidate = stager.costs, stager.candidate
    whole = whole_saved_bytes(stager) if exact else costs.held_bytes * costs.again("full")
    flying = np.maximum(flying, _NONE)  # where none are in flight, nothing is saved
    rows, of_stage = _rows(costs)
    least = np.full(need.shape, np.inf)
    for freed, rebuilt in _ways(costs, whole):
        # one at a time they are there again: the largest, or the smallest at least
        able = freed > 0
        again = runs.maxima((rebuilt * able).max(axis=0)) if exact else _smallest(rebuilt[able])
        left = np.where(need > 0, need + again, 0.0)
        if exact and not candidate.per_block:  # the first block keeps its input in any case
            inputs = np.where(freed[-1] > 0, costs.input_bytes, 0.0)
            left = np.maximum(left - inputs[runs.first] * flying, np.minimum(left, 2 * _BYTE))
        found = [
            _seconds_of(runs, Offer(freed=freed, seconds=row), left, flying, exact=exact)
            for row in rows
        ]
        of_runs = found[0] if len(found) == 1 else np.choose(of_stage[runs.stage], found)
        least = np.minimum(least, of_runs)
    return least


def _ways(costs: BlockCosts, whole: Floats) -> Iterator[tuple[Floats, Floats]]:
    """What blocks give at each level, and what of them is there again: with blocks that are
    computed again whole, which give ``whole``, and with none, as parts by themselves are less.
    """
    parts, num = costs.part_saved_bytes, len(costs.parts) + 1
    yield np.vstack([parts, whole]), np.tile(costs.held_bytes, (num, 1))
    if parts.any():
        rebuilt = [part.rebuilt_bytes for part in costs.parts]
        yield np.vstack([parts, np.zeros(whole.shape)]), np.vstack([*rebuilt, costs.held_bytes])


def _rows(costs: BlockCosts) -> tuple[Floats, Ints]:
    """Seconds of blocks at each level as stages have them that differ, and which each stage has."""
    seconds = costs.part_seconds
    flat = seconds.reshape(*seconds.shape[:-2], -1)
    rows, of_stage = distinct_rows(flat)
    return rows.reshape(len(rows), *seconds.shape[-2:]), of_stage


def _seconds_of(runs: Runs, offer: Offer, left: Floats, flying: Floats, *, exact: bool) -> Floats:
    """Seconds of the blocks of each run that give ``left`` bytes, of so many micro-batches."""
    kinds = offer.kinds()
    seconds, still = np.zeros(left.shape), left
    for step, blocks in best_steps(kinds):
        wanted = still / (step.freed * flying)
        number = np.minimum(runs.sums(blocks), np.ceil(wanted) if exact else wanted)
        seconds += number * step.seconds
        still = np.maximum(still - number * step.freed * flying, 0.0)
    if exact and len(kinds) == 1 and kinds[0].num_partly <= 1:
        seconds = _whole_s(runs, kinds, left, flying)
    elif not exact:
        seconds = np.maximum(seconds, _whole_s(runs, kinds, left, flying))
    return np.where(still <= _BYTE, seconds, np.inf)


def _whole_s(runs: Runs, kinds: Sequence[Alike], left: Floats, flying: Floats) -> Floats:
    """Seconds at the least, as none is done again in part: of kinds of which there are several, the
    others for nothing.
    """
    several = [kind for kind in kinds if kind.blocks.sum() > 1] or kinds
    single = [kind for kind in kinds if not any(kind is other for other in several)]
    wanted = (left - _BYTE) / flying
    for kind in single:
        wanted = wanted - runs.sums(kind.blocks) * max(kind.freed)
    number = sum((runs.sums(kind.blocks) for kind in several), np.zeros(left.shape))
    return least_whole_s(several, wanted, number)


def priced_again_s(stager: Stager, runs: Runs, beyond: Mapping[float, Floats]) -> Floats:
    """As ``again_s``, under any layout: what is fast may keep more than what keeps least.

    With λ seconds for each byte that a stage keeps, and n micro-batches in flight, nothing takes
    less than Σ min(t + f, t + λ·n·h) − λ·room: where blocks are not computed again, they keep h.

    Args:
        beyond: The sum's terms at some prices λ·n, which no layout is below (``Setting.priced``),
            beyond the seconds of blocks.
    """
    candidate, inputs = stager.candidate, runs.sums(stager.input_kept_bytes())
    if candidate.offload_activations:
        return np.zeros(runs.length.shape)  # they may keep nothing
    room = stager.run_room(runs, exact=False) / stager.flying[runs.stage] - inputs
    found = np.zeros(room.shape)
    for price, values in beyond.items():
        found = np.maximum(found, runs.sums(values) - price * room)
    if candidate.schedule == "layered" and not candidate.per_block:
        # the last run keeps one micro-batch at a time
        found = np.where(runs.end == stager.costs.num_blocks, 0.0, found)
    return found


def least_with_again(stager: Stager, both: Floats, before: Floats) -> tuple[Floor, ...]:
    """Seconds of stages, all micro-batches after what comes before them, with what they compute
    again to fit: at some prices of a byte, a block costs the less of what it keeps and of its
    forward, or its ops, again, and the room of a stage is sold.

    Args:
        stager: What is recomputed has to be left open; there is nothing otherwise.
        both: Seconds of blocks, per micro-batch.
        before: Seconds before a stage that begins with a block.
    """
    costs, candidate = stager.costs, stager.candidate
    if not candidate.leaves_again_open:
        return ()
    least = stager.least_run_bytes()
    saved = least.kept - least.again
    able = saved > 0
    freed = np.vstack([costs.part_saved_bytes, np.maximum(saved, 0.0)])
    offers = [Offer(freed=freed, seconds=row) for row in _rows(costs)[0]]
    steps = [step for offer in offers for step, _ in best_steps(offer.kinds())]
    rates = sorted({step.rate for step in steps})
    found, num = [], candidate.num_micro_batches
    numbers = least.numbers[:, None]
    for rate in rates[:: math.ceil(len(rates) / _MOST_PRICES) or 1]:
        prices = rate / numbers  # at which blocks of this rate may be recomputed or not
        again = np.where(able, costs.forward_s + rate * least.again, np.inf)
        dearer = np.minimum(rate * least.kept, again)
        for part, kept in zip(costs.parts, least.parts, strict=True):
            dearer = np.minimum(dearer, np.where(able, part.again_s + rate * kept, np.inf))
        blocks = both + dearer + prices * least.fixed
        work = num * prefixes(blocks)
        sold = num * prices * least.room[:, None] * _ABOVE
        found.append(Floor(first=work - before, end=work - sold))
    return tuple(found)


def least_cut_again_s(stager: Stager, rounds: Rounds) -> Floats:
    """Seconds per micro-batch of what each stage computes again, under any choice of blocks; inf
    where none fits: a row for each choice of cuts. Of blocks that differ the last one counts in
    part.
    """
    candidate = stager.candidate
    needed = stager.cut_peaks(rounds) - stager.sites.usable_bytes - ROUNDED_BYTES
    if candidate.recompute != "blocks":
        return np.where(needed > 0, np.inf, 0.0)
    if not (needed > 0).any():
        return np.zeros(needed.shape)
    costs = stager.costs
    usable = stager.sites.usable_bytes + ROUNDED_BYTES
    lost = 1 + np.array([memory.lost_share(overlap=True) for memory in stager.sites.memory])
    flying = [in_flight(candidate, stage).max(axis=0) for stage in range(candidate.pp)]
    each = np.stack(flying, axis=-1) * lost
    rows, of_stage = _rows(costs)
    least = np.full(needed.shape, np.inf)
    for freed, rebuilt in _ways(costs, costs.held_bytes * costs.again("full")):
        able = freed > 0
        left = needed + lost * _smallest(rebuilt[able])  # one is there again
        found = [
            _cut_seconds(rounds, Offer(freed=freed, seconds=row).kinds(), left, each)
            for row in rows
        ]
        of_stages = found[0] if len(found) == 1 else np.choose(of_stage[rounds.stage], found)
        least = np.minimum(least, of_stages)
    least[stager.least_cut_peaks(rounds) > usable] = np.inf
    return np.where(needed > 0, least, 0.0)


def _smallest(values: Floats) -> Floats:
    return values.min(keepdims=True) if len(values) else np.zeros(1)


def _cut_seconds(rounds: Rounds, kinds: Sequence[Alike], left: Floats, each: Floats) -> Floats:
    """Seconds in which stages have ``left`` bytes less, where a byte of a virtual stage (row) on a
    stage (column) is kept ``each`` times; inf where all is too little.
    """
    if not kinds:
        return np.where(left > 0, np.inf, 0.0)
    freed, rates = list[Floats](), list[Floats]()
    for kind in kinds:
        number = rounds.each.sums(kind.blocks)
        for step in kind.steps:
            freed.append(number * step.freed * each)
            rates.append(np.broadcast_to(step.seconds / (step.freed * each), number.shape))
    all_freed, all_rates = np.concatenate(freed, axis=-2), np.concatenate(rates, axis=-2)
    order = np.argsort(all_rates, axis=-2)
    all_freed = np.take_along_axis(all_freed, order, axis=-2)
    all_rates = np.take_along_axis(all_rates, order, axis=-2)
    before = np.cumsum(all_freed, axis=-2) - all_freed
    taken = np.clip(left[..., None, :] - before, 0.0, all_freed)
    seconds = (taken * all_rates).sum(axis=-2)
    number = sum((rounds.sums(kind.blocks) for kind in kinds), np.zeros(left.shape))
    whole_s = least_whole_s(kinds, (left - _BYTE) / each.max(axis=0), number)
    fits = left <= all_freed.sum(axis=-2)
    return np.where(fits, np.maximum(seconds, whole_s), np.inf)


def whole_saved_bytes(stager: Stager) -> Floats:
    """What a micro-batch keeps less of each block if it is recomputed whole; 0 where it cannot be.

    A block in the middle of a segment keeps its input only if it is recomputed.
    """
    costs = stager.costs
    saved = costs.held_bytes - (0.0 if stager.candidate.per_block else costs.input_bytes)
    return np.maximum(saved, 0.0) * costs.again("full")
