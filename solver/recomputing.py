"""Which blocks of a stage are computed again: as few seconds of them as make it fit into memory.

A candidate that recomputes "blocks" leaves open which. Blocks of a kind are alike, so that only how
many of each kind are recomputed matters: those that give the most memory for a second come first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.solver.candidates import Candidate
from autopar.solver.facts import Floats
from autopar.solver.in_flight import in_flight
from autopar.solver.reach import Floor
from autopar.solver.runs import Ints, Rounds, Runs, distinct_rows, on_stage, prefixes
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
    candidate = stager.candidate
    if candidate.recompute != "blocks" or candidate.recomputed_blocks:
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
    saved = _saved_bytes(stager) if exact else costs.held_bytes * costs.again("full")
    # one at a time they are there again: the largest, or the smallest at least
    able = costs.held_bytes[saved > 0]
    again = runs.maxima(costs.held_bytes * (saved > 0)) if exact else min(able, default=0.0)
    left = np.where(need > 0, need + again, 0.0)
    flying = np.maximum(flying, _NONE)  # where none are in flight, nothing is saved
    if exact and not candidate.per_block:  # the first block keeps its input in any case
        inputs = np.where(costs.again("full") > 0, costs.input_bytes, 0.0)
        left = np.maximum(left - inputs[runs.first] * flying, np.minimum(left, 2 * _BYTE))
    rows, of_stage = distinct_rows(costs.forward_s)
    found = [
        _seconds_of(runs, _kinds(saved, forward), left, flying, exact=exact) for forward in rows
    ]
    return found[0] if len(found) == 1 else np.choose(of_stage[runs.stage], found)


def _seconds_of(
    runs: Runs,
    kinds: Sequence[tuple[float, float, Floats]],
    left: Floats,
    flying: Floats,
    *,
    exact: bool,
) -> Floats:
    """Seconds of the blocks of each run that give ``left`` bytes, of so many micro-batches."""
    seconds, whole = np.zeros(left.shape), np.zeros(left.shape)
    if not exact and kinds:  # so many blocks at least, of those that take least
        most, least = max(kind[0] for kind in kinds), min(kind[1] for kind in kinds)
        whole = np.ceil((left - _BYTE) / (most * flying)) * least
    for gain, forward, alike in kinds:
        wanted = left / (gain * flying)
        number = np.minimum(runs.sums(alike), np.ceil(wanted) if exact else wanted)
        seconds += number * forward
        left = np.maximum(left - number * gain * flying, 0.0)
    if not exact:
        seconds = np.maximum(seconds, whole)
    return np.where(left <= _BYTE, seconds, np.inf)


def priced_again_s(
    stager: Stager, runs: Runs, priced: Mapping[float, Floats], both: Floats
) -> Floats:
    """As ``again_s``, beyond ``both`` seconds, under any layout: what is fast may keep more than
    what keeps least.

    With λ seconds for each byte that a stage keeps, and n micro-batches in flight, nothing takes
    less than Σ min(t + f, t + λ·n·h) − λ·room: where blocks are not computed again, they keep h.

    Args:
        priced: The sum's terms at some prices λ·n, which no layout is below (``Setting.priced``).
        both: Seconds of blocks, per micro-batch.
    """
    candidate = stager.candidate
    kept = stager.costs.input_bytes.copy()
    if candidate.schedule == "layered":
        kept[-1] /= candidate.num_micro_batches  # the last segment keeps one micro-batch at a time
    inputs = runs.sums(kept) if candidate.per_block else 0.0
    room = stager.run_room(runs, exact=False) / stager.flying[runs.stage] - inputs
    found = np.zeros(room.shape)
    for price, values in priced.items():
        found = np.maximum(found, runs.sums(values - both) - price * room)
    if candidate.schedule == "layered" and not candidate.per_block:
        # the last run keeps one micro-batch at a time
        found = np.where(runs.end == stager.costs.num_blocks, 0.0, found)
    return found


def least_with_again(stager: Stager, both: Floats, before: Floats) -> tuple[Floor, ...]:
    """Seconds of stages, all micro-batches after what comes before them, with what they compute
    again to fit: at some prices of a byte, a block costs the less of what it keeps and of its
    forward again, and the room of a stage is sold.

    Args:
        stager: What is recomputed has to be left open; there is nothing otherwise.
        both: Seconds of blocks, per micro-batch.
        before: Seconds before a stage that begins with a block.
    """
    costs, candidate = stager.costs, stager.candidate
    if candidate.recompute != "blocks" or candidate.recomputed_blocks:
        return ()
    least = stager.least_run_bytes()
    saved = least.kept - least.again
    able = saved > 0
    rates = sorted(set(np.ravel(costs.forward_s[..., able] / saved[able]).tolist()))
    found, num = [], candidate.num_micro_batches
    numbers = least.numbers[:, None]
    for rate in rates[:: math.ceil(len(rates) / _MOST_PRICES) or 1]:
        prices = rate / numbers  # at which blocks of this rate may be recomputed or not
        again = np.where(able, costs.forward_s + rate * least.again, np.inf)
        blocks = both + np.minimum(rate * least.kept, again) + prices * least.fixed
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
    usable = stager.sites.usable_bytes + ROUNDED_BYTES
    found = np.where((needed > 0) & (stager.least_cut_peaks(rounds) > usable), np.inf, 0.0)
    for cut, stage in np.argwhere((needed > 0) & (found == 0)).tolist():
        first, end = rounds.each.first[cut, :, stage], rounds.each.end[cut, :, stage]
        runs = zip(first.tolist(), end.tolist(), strict=True)
        flying = in_flight(candidate, stage).max(axis=0)
        own = [np.arange(first, end) for first, end in runs]
        numbers = np.repeat(flying, [len(blocks) for blocks in own])
        blocks = np.concatenate(own)
        found[cut, stage] = _least_cut_again_s(stager, stage, needed[cut, stage], blocks, numbers)
    return found


def _least_cut_again_s(
    stager: Stager, stage: int, needed: float, blocks: Ints, numbers: Floats
) -> float:
    """Seconds of which ``needed`` bytes more are there on a stage, of ``blocks`` that keep
    ``numbers`` of micro-batches.
    """
    costs = stager.costs
    lost = 1 + stager.sites.memory[stage].lost_share(overlap=True)
    saved = costs.held_bytes[blocks] * costs.again("full")[blocks]
    able = saved > 0
    if not able.any():
        return math.inf
    gains, seconds = (saved * numbers * lost)[able], on_stage(costs.forward_s, stage)[blocks][able]
    every = costs.held_bytes * costs.again("full")
    needed += lost * float(every[every > 0].min())  # one is there again
    if needed > gains.sum():
        return math.inf
    whole = math.ceil((needed - _BYTE) / gains.max()) * float(seconds.min())
    order = np.argsort(seconds / gains)
    before = np.concatenate([[0.0], np.cumsum(gains[order])])
    after = np.concatenate([[0.0], np.cumsum(seconds[order])])
    return max(whole, float(np.interp(needed, before, after)))


def choose_blocks(stager: Stager, cuts: Sequence[int]) -> Stager | None:
    """The stager of a candidate whose recomputed blocks are chosen; None where it cannot fit.

    ``cuts`` has the first block of every virtual stage, then the number of blocks.
    """
    nothing = _with(stager, recompute="none")
    if nothing.fits(cuts):
        return nothing
    saved = _saved_bytes(stager)
    chosen: list[int] = []
    for stage in range(stager.candidate.pp):
        found = _choose_on(stager, stage, cuts, saved)
        if found is None:
            return None
        chosen += found
    if not chosen:  # it fits because blocks are segments of their own then
        chosen = np.flatnonzero(saved)[:1].tolist()
    return _recomputing(stager, tuple(sorted(chosen))) if chosen else None


def again_on(stager: Stager, stage: int, cuts: Sequence[int]) -> tuple[int, ...] | None:
    """Blocks of one stage that ``choose_blocks`` would choose; None where it cannot fit."""
    return _choose_on(stager, stage, cuts, _saved_bytes(stager))


def _choose_on(
    stager: Stager, stage: int, cuts: Sequence[int], saved: Floats
) -> tuple[int, ...] | None:
    """The recomputed blocks of one stage: the least number, in order of what they give."""
    runs = stager.virtual_stages(stage, cuts)
    flying = in_flight(stager.candidate, stage).max(axis=0)
    if not stager.candidate.per_block:  # the first block keeps its input in any case
        saved, firsts = saved.copy(), [first for first, _ in runs]
        saved[firsts] = (stager.costs.held_bytes * stager.costs.again("full"))[firsts]
    forward = on_stage(stager.costs.forward_s, stage)
    gains = {
        block: saved[block] * number / forward[block]
        for (first, last), number in zip(runs, flying.tolist(), strict=True)
        for block in range(first, last + 1)
        if saved[block] > 0
    }
    able = sorted(gains, key=lambda block: (-gains[block], block))
    usable = int(stager.sites.usable_bytes[stage])

    def missing(number: int) -> int:
        tried = _recomputing(stager, tuple(able[:number]))
        return tried.stage_bytes(stage, cuts) - usable

    low, high, least = 0, len(able), missing(0)  # so many are too few, so many enough
    if least <= 0:
        return ()
    most = missing(high)
    if most > 0:
        return None
    while high - low > 1:  # about so many, as blocks give alike
        share = least / (least - most) if least > most else 0.5
        number = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        found = missing(number)
        if found > 0:
            low, least = number, found
        else:
            high, most = number, found
    return tuple(able[:high])


def _saved_bytes(stager: Stager) -> Floats:
    """What a micro-batch keeps less of each block if it is recomputed; 0 where it cannot be.

    A block in the middle of a segment keeps its input only if it is recomputed.
    """
    costs = stager.costs
    saved = costs.held_bytes - (0.0 if stager.candidate.per_block else costs.input_bytes)
    return np.maximum(saved, 0.0) * costs.again("full")


def _kinds(saved: Floats, forward: Floats) -> list[tuple[float, float, Floats]]:
    """Saved bytes and seconds of blocks that are alike, and 1 for these; best ratio first."""
    pairs = {pair for pair in zip(saved.tolist(), forward.tolist(), strict=True) if pair[0] > 0}
    return [
        (gain, seconds, ((saved == gain) & (forward == seconds)).astype(np.float64))
        for gain, seconds in sorted(pairs, key=lambda pair: (pair[1] / pair[0], pair))
    ]


def _recomputing(stager: Stager, blocks: tuple[int, ...]) -> Stager:
    return _with(stager, recomputed_blocks=blocks)


def _with(stager: Stager, **changes: object) -> Stager:
    candidate: Candidate = dataclasses.replace(stager.candidate, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(stager, candidate=candidate)
