"""What each stage computes and when: the order of its forwards and backwards, schedule by schedule.

An order is a list of *passes*: a micro-batch through some segments, or some micro-batches through
one segment. What else a stage does for it (messages, gathers, reductions) is ``lower_order``'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from autopar.ir.errors import ScheduleError
from autopar.ir.schedule import ActionKind


class Pass(NamedTuple):
    """Forwards or backwards in a row: some segments of one micro-batch, or some micro-batches
    (from ``micro_batch`` on) through one segment.
    """

    kind: ActionKind  # one of COMPUTING
    segments: tuple[int, ...]
    micro_batch: int
    num_micro_batches: int = 1


Order = Callable[[tuple[int, ...], int, int], Iterator[Pass]]
"""The passes of a stage, given the stage of every segment, the stage, and the micro-batches.

Those of ``one_f_one_b_order`` and ``zero_bubble_order`` may have more micro-batches in flight.
"""


def segments_of(stages: tuple[int, ...], stage: int) -> tuple[int, ...]:
    """The segments of a stage, in model order."""
    return tuple(k for k, holder in enumerate(stages) if holder == stage)


def chunks_of(stages: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Maximal runs of segments on one stage, in model order: the virtual stages."""
    runs = itertools.groupby(range(len(stages)), key=lambda k: stages[k])
    return tuple(tuple(run) for _, run in runs)


def one_f_one_b_order(
    stages: tuple[int, ...], stage: int, num_micro_batches: int, extra_in_flight: int = 0
) -> Iterator[Pass]:
    """``most_forwards`` forwards, then a backward and a forward in turn."""
    down = segments_of(stages, stage)
    up = down[::-1]
    warm_up = most_forwards(max(stages) + 1, stage, num_micro_batches, extra_in_flight)
    for micro_batch in range(num_micro_batches + warm_up):
        if micro_batch < num_micro_batches:
            yield Pass(ActionKind.FORWARD, down, micro_batch)
        if warm_up - 1 <= micro_batch < num_micro_batches + warm_up - 1:
            yield Pass(ActionKind.BACKWARD, up, micro_batch - warm_up + 1)


def most_forwards(
    num_stages: int, stage: int, num_micro_batches: int, extra_in_flight: int = 0
) -> int:
    """Micro-batches that 1F1B has in flight on a stage: p − s (s from 0), and ``extra_in_flight``
    more to wait less for messages; at most one more for each stage behind, which is 2(p − s) − 1.
    """
    behind = num_stages - stage - 1
    return min(num_micro_batches, behind + 1 + min(extra_in_flight, behind))


def zero_bubble_order(
    stages: tuple[int, ...], stage: int, num_micro_batches: int, extra_in_flight: int = 0
) -> Iterator[Pass]:
    """ZB-H1: 1F1B whose backwards are input parts; on stage s (from 0) weight parts follow s of
    them later, so that the last ones fill the end, when the stage waits for the stages behind.

    Over v chunks it is interleaved, with (v − 1)·p forwards more before it takes turns. The model's
    last segment has its backward whole, unless it is all of its chunk: it makes the loss, of which
    gradients of logits or of the largest matrix would wait.
    """
    forwards, backwards, round_size = _rounds_of(stages, stage, num_micro_batches)
    num_stages, num_chunks = max(stages) + 1, len(forwards) // num_micro_batches
    flying = most_forwards(num_stages, stage, len(forwards), extra_in_flight)
    warm_up = flying - 1 + (num_chunks - 1) * round_size
    inputs: list[Pass] = []
    for one in _in_turns(forwards, backwards, warm_up):
        if one.kind is ActionKind.FORWARD:
            yield one
            continue
        whole, rest = _parts(one, len(stages) - 1)
        yield from whole
        yield rest
        inputs.append(rest)
        if len(inputs) > stage:
            yield inputs[-1 - stage]._replace(kind=ActionKind.BACKWARD_WEIGHT)
    for one in inputs[max(0, len(inputs) - stage) :]:
        yield one._replace(kind=ActionKind.BACKWARD_WEIGHT)


def _parts(one: Pass, last: int) -> tuple[tuple[Pass, ...], Pass]:
    """What of a backward stays whole, and the input part of the rest."""
    segments = one.segments
    num_whole = int(segments[0] == last and len(segments) > 1)
    rest = one._replace(kind=ActionKind.BACKWARD_INPUT, segments=segments[num_whole:])
    return ((one._replace(segments=segments[:1]),) if num_whole else ()), rest


def interleaved_order(
    stages: tuple[int, ...], stage: int, num_micro_batches: int
) -> Iterator[Pass]:
    """1F1B over virtual stages: rounds of p micro-batches go through one chunk after the other.

    Stage r (from 0) runs 2(p − r − 1) + (v − 1)·p forwards before it takes turns. Where p does not
    divide M there are ⌊M / p⌋ rounds (at least one) as equal as can be, the longer ones first.
    """
    forwards, backwards, round_size = _rounds_of(stages, stage, num_micro_batches)
    num_chunks = len(forwards) // num_micro_batches
    warm_up = 2 * (max(stages) - stage) + (num_chunks - 1) * round_size
    return _in_turns(forwards, backwards, warm_up)


def _rounds_of(
    stages: tuple[int, ...], stage: int, num_micro_batches: int
) -> tuple[list[Pass], list[Pass], int]:
    """Forwards and backwards of a stage in rounds, and micro-batches of the longest round."""
    chunks = [run for run in chunks_of(stages) if stages[run[0]] == stage]
    rounds = _rounds(num_micro_batches, max(stages) + 1)
    forwards = [
        Pass(ActionKind.FORWARD, chunk, micro_batch)
        for micro_batches in rounds
        for chunk in chunks
        for micro_batch in micro_batches
    ]
    upward = [chunk[::-1] for chunk in reversed(chunks)]
    backwards = [
        Pass(ActionKind.BACKWARD, chunk, micro_batch)
        for micro_batches in rounds
        for chunk in upward
        for micro_batch in micro_batches
    ]
    return forwards, backwards, len(rounds[0])


def _in_turns(forwards: list[Pass], backwards: list[Pass], warm_up: int) -> Iterator[Pass]:
    """Some forwards, then a forward and a backward in turn, then the other backwards."""
    warm_up = min(warm_up, len(forwards))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up :]


def layered_order(stages: tuple[int, ...], stage: int, num_micro_batches: int) -> Iterator[Pass]:
    """All micro-batches through a segment before the next; the model's last segment alternates."""
    own, last = segments_of(stages, stage), len(stages) - 1
    for segment in own:
        if segment != last:
            yield Pass(ActionKind.FORWARD, (segment,), 0, num_micro_batches)
        else:
            for micro_batch in range(num_micro_batches):
                yield Pass(ActionKind.FORWARD, (segment,), micro_batch)
                yield Pass(ActionKind.BACKWARD, (segment,), micro_batch)
    for segment in reversed(own):
        if segment != last:
            yield Pass(ActionKind.BACKWARD, (segment,), 0, num_micro_batches)


def forward_order(stages: tuple[int, ...], stage: int, num_micro_batches: int) -> Iterator[Pass]:
    """Contiguous stages pass one micro-batch after the other; otherwise all pass a segment before
    the next.
    """
    own = segments_of(stages, stage)
    if list(stages) == sorted(stages):
        for micro_batch in range(num_micro_batches):
            yield Pass(ActionKind.FORWARD, own, micro_batch)
    else:
        for segment in own:
            yield Pass(ActionKind.FORWARD, (segment,), 0, num_micro_batches)


def check_contiguous(stages: tuple[int, ...]) -> None:
    """Raise ``ScheduleError`` unless each stage has neighbouring segments, in order."""
    if list(stages) != sorted(stages):
        raise ScheduleError(
            f"1F1B needs contiguous stages, not {stages}",
            hint="use the interleaved or the layered schedule",
        )


def check_modular(stages: tuple[int, ...], name: str = "interleaved 1F1B") -> None:
    """Raise ``ScheduleError`` unless virtual stage c is on stage c mod p, as many on each stage."""
    num_stages = max(stages) + 1
    holders = [stages[chunk[0]] for chunk in chunks_of(stages)]
    expected = [number % num_stages for number in range(len(holders))]
    if holders != expected or len(holders) % num_stages:
        raise ScheduleError(
            f"{name} needs virtual stages that go round the stages, not {stages}",
            hint="virtual stage c belongs on stage c mod p, and every stage has as many",
        )


def _rounds(num_micro_batches: int, num_stages: int) -> list[range]:
    num = max(1, num_micro_batches // num_stages)
    size, longer = divmod(num_micro_batches, num)
    starts = [n * size + min(n, longer) for n in range(num + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]
