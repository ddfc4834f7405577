"""Cuts into virtual stages, and bounds on them.

With several virtual stages on a stage no cost of a run of blocks stands by itself, so that the
dynamic program over stages (``cuts``) does not apply. A few cuts are searched that are even in one
sense each, by what no layout is below; each has a bound, and the simulator decides.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from autopar.solver.bounds import StageTimes
from autopar.solver.facts import Floats
from autopar.solver.in_flight import most_virtual_in_flight
from autopar.solver.recomputing import least_cut_again_s
from autopar.solver.runs import Ints, Rounds, Runs, rounds_of
from autopar.solver.stages import Stager

_NEAR = 4
"""Blocks by which a cut may be off its share of the whole."""


def virtual_cuts(stager: Stager) -> tuple[tuple[int, ...], ...]:
    """Cuts into p·v virtual stages: even in seconds, in kept bytes, in parameters, in blocks.

    ``stager`` has the least costs, so that cuts depend on no layout.
    """
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
    """The cuts into runs, none empty, that minimize the sum of the squares of the runs' sums, each
    within ``_NEAR`` blocks of its share of the whole.

    Returns:
        The first block of every run, then the number of blocks.
    """
    return _even_cuts(weights.tobytes(), num_runs)


@functools.lru_cache(maxsize=1024)  # candidates that differ in ZeRO only ask for the same
def _even_cuts(data: bytes, num_runs: int) -> tuple[int, ...]:
    weights = np.frombuffer(data)
    num = len(weights)
    prefix = np.concatenate([[0.0], np.cumsum(weights)])
    numbers = np.arange(1, num_runs)
    wanted = np.searchsorted(prefix, prefix[-1] * numbers / num_runs)
    wanted = np.maximum.accumulate(wanted - numbers) + numbers  # no run is empty
    wanted = np.clip(wanted, numbers, num - numbers[::-1])
    places = np.clip(
        wanted[:, None] + np.arange(-_NEAR, _NEAR + 1),
        numbers[:, None],
        num - numbers[::-1, None],
    )
    best, last = np.zeros(1), np.zeros(1, dtype=np.intp)
    choices: list[Ints] = []
    for ends in (*places, np.array([num])):
        sums = best[:, None] + (prefix[ends][None, :] - prefix[last][:, None]) ** 2
        sums[last[:, None] >= ends[None, :]] = np.inf
        choices.append(last[np.argmin(sums, axis=0)])
        best, last = sums.min(axis=0), ends
    cuts = [num]
    for ends, choice in zip((*places, np.array([num]))[::-1], choices[::-1], strict=True):
        cuts.append(int(choice[np.flatnonzero(ends == cuts[-1])[0]]))
    return tuple(reversed(cuts))


def least_cut_bound_s(
    stager: Stager, times: StageTimes, cuts: Sequence[tuple[int, ...]], *, memory: bool = True
) -> float:
    """The least ``cut_bounds_s`` of several cuts; inf where none fits."""
    return float(cut_bounds_s(stager, times, cuts, memory=memory).min())


def compute_bound_s(stager: Stager, times: StageTimes, cuts: Sequence[tuple[int, ...]]) -> float:
    """The least of ``cut_bounds_s`` without what is computed again and without gathers, reductions
    and optimizer: the same for all ZeRO stages, and all divisions of the data ranks.
    """
    rounds = rounds_of(cuts, stager.candidate.pp)
    nothing: Floats = np.zeros((len(cuts), stager.candidate.pp))
    work = stager.candidate.num_micro_batches * rounds.sums(times.both)
    busy = _busy_s(stager, times, cuts, rounds, work=work, once=nothing, traffic=False)
    turning = _turning_s(stager, times, cuts, rounds)
    return float(np.maximum(busy, turning).max(axis=1).min())


def cut_bounds_s(
    stager: Stager, times: StageTimes, cuts: Sequence[tuple[int, ...]], *, memory: bool = True
) -> Floats:
    """No layout is faster with each of ``cuts``; inf where none fits, unless ``memory`` is left
    out.

    Every stage waits for the first micro-batch to pass the virtual stages before its first one, and
    to come back through them, and has its work in between; before it comes the gather of what is
    used first, after it the reduction of the same. Its other gathers and reductions between the
    first forward and the last backward run beside its work, which they slow down, or make it wait
    once more; by themselves they take as long as they take. For backwards in two parts see
    ``_parts_s``; for what is waited for because only so much is in flight ``_turning_s``.
    """
    candidate, pp = stager.candidate, stager.candidate.pp
    rounds = rounds_of(cuts, pp)
    again: Floats = np.zeros((len(cuts), pp))
    if memory:
        again = least_cut_again_s(stager, rounds)
        if np.isinf(again).any(axis=1).all():
            return np.full(len(cuts), np.inf)
    beside, stream = _traffic_s(stager, rounds)
    work = candidate.num_micro_batches * (rounds.sums(times.both) + again) + beside
    once = rounds.sums(stager.once_s()) + stager.sites.step_s
    busy = _busy_s(stager, times, cuts, rounds, work=work, once=once, traffic=True)
    busy = np.maximum(busy, _turning_s(stager, times, cuts, rounds))
    found: Floats = np.maximum(busy, stream + once).max(axis=1)
    return found


def _turning_s(
    stager: Stager, times: StageTimes, cuts: Sequence[tuple[int, ...]], rounds: Rounds
) -> Floats:
    """Of each choice of cuts and stage: the first micro-batch's way to it and back, and between
    them what it takes until all have turned round.

    A forward of a virtual stage is in flight until its backward, or its input part, is done: that
    is after all virtual stages behind it, and the messages to the last one and back. At most n of a
    stage are at a time, so that Σ of these times over all its virtual stages and micro-batches is
    at most n times as long as the stage takes from its first forward to its last backward.
    """
    candidate = stager.candidate
    pp, num = candidate.pp, candidate.num_micro_batches
    if candidate.schedule == "layered":
        return np.zeros((len(cuts), pp))
    own = times.early if candidate.has_parts else times.both
    hops = 2 * stager.borders_s(np.array(cuts)[:, 1:-1])
    passing = rounds.each.sums(own).reshape(len(cuts), -1)
    passing[:, :-1] += hops
    behind = np.cumsum(passing[:, ::-1], axis=1)[:, ::-1].reshape(len(cuts), -1, pp).sum(axis=1)
    deepest = candidate.deepest
    flying = np.array([most_virtual_in_flight(deepest, stage) for stage in range(pp)])
    first = Runs(stage=rounds.stage, first=rounds.each.first[:, 0], end=rounds.each.end[:, 0])
    passed = _passed_s(first.sums(own), hops[:, : pp - 1])
    turned: Floats = passed + num * behind / flying
    return turned


def _busy_s(
    stager: Stager,
    times: StageTimes,
    cuts: Sequence[tuple[int, ...]],
    rounds: Rounds,
    *,
    work: Floats,
    once: Floats,
    traffic: bool,
) -> Floats:
    """Of each choice of cuts and stage: ``work`` between the first micro-batch's way to it and
    back, and ``once`` after it; ``traffic``: with gathers and reductions.
    """
    hops = 2 * stager.borders_s(np.array(cuts)[:, 1 : stager.candidate.pp])
    each = rounds.each
    first = Runs(stage=rounds.stage, first=each.first[:, 0], end=each.end[:, 0])
    if stager.candidate.has_parts:
        return _parts_s(stager, times, first, hops, work=work, once=once, traffic=traffic)
    passed = _passed_s(first.sums(times.both), hops)
    returned = _passed_s(first.sums(times.backward), hops)
    if not traffic:
        return passed + work + np.maximum(0.0, once - returned)
    once = once + _at_first(stager, first, stager.reduce_s())
    gathered = _at_first(stager, first, stager.gather_s())
    left = _passed_s(first.sums(np.maximum(0.0, times.both - times.forward)), hops / 2)
    found: Floats = passed + work + np.maximum(0.0, once - returned)
    return np.maximum(found, gathered + work + np.maximum(left, once))


def _at_first(stager: Stager, first: Runs, seconds: Floats) -> Floats:
    """Of what each stage gathers before its first forward, and reduces after its last backward: the
    first block of its first virtual stage, or all of that.
    """
    return first.at_first(seconds) if stager.candidate.per_block else first.sums(seconds)


def _parts_s(
    stager: Stager,
    times: StageTimes,
    first: Runs,
    hops: Floats,
    *,
    work: Floats,
    once: Floats,
    traffic: bool,
) -> Floats:
    """(A) and (Q) of ``zero_bubble``, of stages with ``work`` in all and ``once`` after it: of the
    virtual stages before theirs only those of the first round come before it, and their input parts
    after it.
    """
    num, pp = stager.candidate.num_micro_batches, stager.candidate.pp
    forward = first.sums(np.maximum(0.0, times.both - times.backward))
    one_way = _passed_s(np.zeros(forward.shape), hops) / 2
    arrived = _passed_s(forward, hops) - one_way
    if traffic:
        arrived = np.maximum(arrived, _at_first(stager, first, stager.gather_s()))
    ended = arrived + work + once
    if num < pp:  # then weight parts of other rounds are left at the end, too
        return ended
    left, end = 1 + first.stage, first.sums(times.weight)[:, :1]
    if traffic:
        end = np.maximum(end, first.sums(stager.reduce_s())[:, :1])
    end = end + once[:, :1]
    back = _passed_s(first.sums(times.input), hops) - one_way + end
    waits = left * np.maximum(0.0, first.sums(times.both) - first.sums(times.early))
    slowed = stager.sites.slowdown * back  # by what comes after the last part
    returned = _passed_s(first.sums(times.early), hops) + work - waits - slowed + end
    return np.maximum(ended, returned)


def _passed_s(seconds: Floats, hops: Floats) -> Floats:
    """For each stage, seconds and messages of the stages before it."""
    each = seconds[:, :-1] + hops
    return np.concatenate([np.zeros((len(seconds), 1)), np.cumsum(each, axis=1)], axis=1)


def _traffic_s(stager: Stager, rounds: Rounds) -> tuple[Floats, Floats]:
    """What gathers and reductions add at least to the work of stages, and their own seconds."""
    num, slowdown = stager.candidate.num_micro_batches, stager.sites.slowdown
    gather, reduce = stager.gather_s(), stager.reduce_s()
    gathers, reduces = rounds.each.sums(gather), rounds.each.sums(reduce)
    once, reductions = rounds.sums(gather * (1 - stager.regathered)), reduces.sum(axis=-2)
    each = gather * stager.regathered  # for a forward and a backward, the last one kept in between
    again = 2 * (rounds.each.sums(each) - rounds.each.maxima(each)).sum(axis=-2)
    if stager.candidate.schedule == "layered":
        num = 1
    stream = once + num * again + reductions
    if num == 1 or not (stager.regathered.any() or stager.reduced_each.any()):
        at_ends = gathers[:, 0] + reduces[:, 0]  # before the first forward, after the last backward
        hidden = gathers.sum(axis=-2) + reductions - at_ends
        return slowdown * np.maximum(0.0, hidden), stream
    more = (num - 1) * rounds.sums(reduce * stager.reduced_each)
    return slowdown * (more + max(0, num - 2) * again), stream + more
