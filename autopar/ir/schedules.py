"""Generators of schedules: an order of forwards and backwards for each stage, and one lowering that
adds the rest.

An *order* (``orders``) says what a stage computes and when. Lowering (``lower_order``) adds
receives (posted one compute action ahead), sends, gathers (one run of uses ahead), frees,
reductions and the optimizer, in the same way for every order; ``offload_actions`` then adds copies
of activations.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace

from autopar.ir.errors import ScheduleError
from autopar.ir.lower_order import lower_order
from autopar.ir.offload_actions import with_copies
from autopar.ir.orders import (
    Order,
    check_contiguous,
    check_modular,
    forward_order,
    interleaved_order,
    layered_order,
    one_f_one_b_order,
    zero_bubble_order,
)
from autopar.ir.schedule import CompactSchedule, Schedule

ONE_F_ONE_B = "1f1b"
INTERLEAVED = "interleaved"
LAYERED = "layered"
ZERO_BUBBLE = "zero_bubble"
FORWARD_ONLY = "forward"

_ORDERS: dict[str, Order] = {
    ONE_F_ONE_B: one_f_one_b_order,
    INTERLEAVED: interleaved_order,
    LAYERED: layered_order,
    ZERO_BUBBLE: zero_bubble_order,
    FORWARD_ONLY: forward_order,
}

DEEPENED = (ONE_F_ONE_B, ZERO_BUBBLE)
"""Schedules that can have more micro-batches in flight."""

ZeroStages = int | Sequence[int]
"""The ZeRO stage of all segments, or that of each."""


def make_schedule(
    name: str,
    stage_of_segment: Sequence[int],
    num_micro_batches: int,
    *,
    zero_stage: ZeroStages = 0,
    extra_in_flight: int = 0,
    offloaded: Collection[int] = (),
) -> Schedule:
    """The schedule called ``name`` (``1f1b``, ``interleaved``, ``layered`` or ``zero_bubble``), in
    which what ``offloaded`` segments keep for backward goes to the host; for the other arguments
    see the generators.
    """
    return compact_schedule(
        name,
        stage_of_segment,
        num_micro_batches,
        zero_stage=zero_stage,
        extra_in_flight=extra_in_flight,
        offloaded=offloaded,
    ).expand()


def compact_schedule(
    name: str,
    stage_of_segment: Sequence[int],
    num_micro_batches: int,
    *,
    zero_stage: ZeroStages = 0,
    extra_in_flight: int = 0,
    offloaded: Collection[int] = (),
) -> CompactSchedule:
    """``make_schedule`` before it is expanded: a hundredth of the work for long schedules.

    Raises:
        ScheduleError: No schedule is called so, or as the generators.
    """
    known = [other for other in _ORDERS if other != FORWARD_ONLY]
    if name not in known:
        raise ScheduleError(f"no schedule is called {name!r}", hint=f"one of {', '.join(known)}")
    found = _make(name, tuple(stage_of_segment), num_micro_batches, zero_stage, extra_in_flight)
    if not offloaded:
        return found
    return replace(found, items=tuple(with_copies(items, offloaded) for items in found.items))


def one_f_one_b(
    stage_of_segment: Sequence[int],
    num_micro_batches: int,
    *,
    zero_stage: ZeroStages = 0,
    extra_in_flight: int = 0,
) -> Schedule:
    """1F1B (PipeDream-flush): at most p − s + 1 micro-batches are in flight on stage s (counted
    from 1).

    Args:
        stage_of_segment: Stage of each segment; stages are contiguous, in order, none empty.
        num_micro_batches: Micro-batches per step and data rank; fewer than stages are allowed.
        zero_stage: 3 gathers at each run of uses; 2 and 3 reduce after every backward. One for all
            segments, or one for each.
        extra_in_flight: So many micro-batches more are in flight, at most p − s more on stage s, so
            that messages that take time are waited for less.

    Raises:
        ScheduleError: the segments are not contiguous, or a number is out of range.
    """
    return _make(
        ONE_F_ONE_B, stage_of_segment, num_micro_batches, zero_stage, extra_in_flight
    ).expand()


def zero_bubble(
    stage_of_segment: Sequence[int],
    num_micro_batches: int,
    *,
    zero_stage: ZeroStages = 0,
    extra_in_flight: int = 0,
) -> Schedule:
    """ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): 1F1B with backwards in two parts.

    The stage before waits for the input part only, and the weight part fills what would be a
    bubble at the end: with f, b and w seconds of a stage's forward and parts that is
    (p − 1)(f + b − w), where 1F1B waits for (p − 1)(f + b + w). On every stage at most p micro-
    batches are forwarded and without their weight part: as many as on the first stage of 1F1B. The
    model's last segment has its backward whole, unless it is all of its virtual stage.

    Over v virtual stages on each stage it is interleaved: the bubble is v times shorter, and on
    each stage at most v·p micro-batches of virtual stages are without their weight part.

    Args:
        stage_of_segment: Contiguous as for ``one_f_one_b``, or going round the stages as for
            ``interleaved_1f1b``.
        num_micro_batches: As for those.
        zero_stage: 3 gathers at each run of uses; 2 and 3 reduce after every weight part.
        extra_in_flight: As for ``one_f_one_b``. With p − 1 it has as many in flight as interleaved
            1F1B has.

    Raises:
        ScheduleError: the segments are neither, or a number is out of range.
    """
    return _make(
        ZERO_BUBBLE, stage_of_segment, num_micro_batches, zero_stage, extra_in_flight
    ).expand()


def interleaved_1f1b(
    stage_of_segment: Sequence[int], num_micro_batches: int, *, zero_stage: ZeroStages = 0
) -> Schedule:
    """Interleaved 1F1B over virtual stages (Narayanan et al. 2021; Megatron-LM's order).

    A virtual stage is a run of segments on one stage; number c is on stage c mod p. At most
    min(v·M, 2(p − r − 1) + (v − 1)·p + 1) of them are in flight on stage r (from 0) where p
    divides M. Where it does not, the rounds of micro-batches are longer than p and as equal as can
    be: Megatron-LM refuses that, and so does torch unless they are equal.

    Args:
        stage_of_segment: Stage of each segment; as many virtual stages on each stage.
        num_micro_batches: Micro-batches per step and data rank; any number.
        zero_stage: As for ``one_f_one_b``.

    Raises:
        ScheduleError: the virtual stages do not go round the stages, or a number is out of range.
    """
    return _make(INTERLEAVED, stage_of_segment, num_micro_batches, zero_stage).expand()


def layered(
    stage_of_segment: Sequence[int], num_micro_batches: int, *, zero_stage: ZeroStages = 0
) -> Schedule:
    """Layered gradient accumulation: all micro-batches pass through a segment before the next one
    starts.

    The model's last segment alternates forward and backward, so that the logits of one micro-batch
    live at a time. With segment k on stage k mod p this is the modular pipeline. Concept covered by
    US patent 12585929B2.

    Args:
        stage_of_segment: Stage of each segment; any map that leaves no stage empty.
        num_micro_batches: Micro-batches per step and data rank.
        zero_stage: 3 gathers once for forward and once for backward (once for the last segment).

    Raises:
        ScheduleError: a stage has no segment, or a number is out of range.
    """
    return _make(LAYERED, stage_of_segment, num_micro_batches, zero_stage).expand()


def forward_only(
    stage_of_segment: Sequence[int], num_micro_batches: int, *, zero_stage: ZeroStages = 0
) -> Schedule:
    """Forwards without backwards, to evaluate; the optimizer's action stands for the step's end.

    Contiguous stages pass one micro-batch after the other; otherwise all pass a segment before the
    next.

    Raises:
        ScheduleError: a stage has no segment, or a number is out of range.
    """
    return _make(FORWARD_ONLY, stage_of_segment, num_micro_batches, zero_stage).expand()


def contiguous_stages(num_stages: int, segments_per_stage: int) -> tuple[int, ...]:
    """Stage of each segment when a stage holds neighbouring segments."""
    return tuple(k // segments_per_stage for k in range(num_stages * segments_per_stage))


def modular_stages(num_stages: int, segments_per_stage: int) -> tuple[int, ...]:
    """Stage of each segment when segment k sits on stage k mod p."""
    return tuple(k % num_stages for k in range(num_stages * segments_per_stage))


def _make(
    name: str,
    stage_of_segment: Sequence[int],
    num_micro_batches: int,
    zero_stage: ZeroStages,
    extra_in_flight: int = 0,
) -> CompactSchedule:
    stages = _checked(stage_of_segment, num_micro_batches)
    zero_stages = _zero_stages(zero_stage, len(stages))
    regathered = [k for k, zero in enumerate(zero_stages) if zero == 3]
    reduced_each = [k for k, zero in enumerate(zero_stages) if zero >= 2]
    if name not in (ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE):
        reduced_each = []
    if name == ONE_F_ONE_B:
        check_contiguous(stages)
    elif name == INTERLEAVED:
        check_modular(stages)
    elif name == ZERO_BUBBLE and list(stages) != sorted(stages):
        check_modular(stages, "the zero-bubble schedule")
    order = _ORDERS[name]
    if extra_in_flight:
        order = _deepened(name, extra_in_flight)
    return CompactSchedule(
        name=name,
        num_micro_batches=num_micro_batches,
        stage_of_segment=stages,
        items=tuple(
            lower_order(
                tuple(order(stages, stage, num_micro_batches)),
                stages,
                stage,
                num_micro_batches,
                regathered=regathered,
                reduced_each=reduced_each,
            )
            for stage in range(max(stages) + 1)
        ),
    )


def _deepened(name: str, extra_in_flight: int) -> Order:
    if extra_in_flight < 0 or name not in DEEPENED:
        raise ScheduleError(
            f"{extra_in_flight} extra micro-batches in flight under {name}",
            hint=f"0 or more, under {' or '.join(DEEPENED)}",
        )
    order = one_f_one_b_order if name == ONE_F_ONE_B else zero_bubble_order
    return functools.partial(order, extra_in_flight=extra_in_flight)


def _checked(stage_of_segment: Sequence[int], num_micro_batches: int) -> tuple[int, ...]:
    stages = tuple(stage_of_segment)
    if not stages or sorted(set(stages)) != list(range(max(stages) + 1)):
        raise ScheduleError(f"every stage needs a segment; the stages of the segments are {stages}")
    if num_micro_batches < 1:
        raise ScheduleError(f"a step needs at least 1 micro-batch, not {num_micro_batches}")
    return stages


def _zero_stages(zero_stage: ZeroStages, num_segments: int) -> tuple[int, ...]:
    """That of each segment."""
    found = tuple(zero_stage) if isinstance(zero_stage, Sequence) else (zero_stage,) * num_segments
    if len(found) != num_segments:
        raise ScheduleError(f"{len(found)} ZeRO stages of {num_segments} segments")
    for zero in found:
        if zero not in (0, 1, 2, 3):
            raise ScheduleError(f"ZeRO stage {zero} does not exist", hint="0, 1, 2 or 3")
    return found
