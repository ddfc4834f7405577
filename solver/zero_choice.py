"""Which blocks stay gathered, and whose gradients are accumulated whole: as many as have room.

A candidate that leaves ZeRO stages open has them alike, or it begins with the highest one and buys
lower ones with what a stage has left of its memory, for those segments first that save most
communication for a byte. Some may be bought before blocks are kept from being computed again, which
then takes more of these: how many, the simulator says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.choose_again import again_on
from autopar.solver.chunk_choice import ChunkChoice, fitting
from autopar.solver.loss_chunks import NUMBERS
from autopar.solver.runs import on_stage
from autopar.solver.stages import Stager

_AT_TURN = 3
"""Blocks from the first one on, around which little is computed between two micro-batches."""

_MORE = (1, 4, 16, 1024)
"""So many purchases more than have room come before blocks are kept from being computed again,
where that may pay.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """A lower ZeRO stage for the blocks of a segment: seconds of a step's communication that it
    saves, and bytes of a rank that it takes.
    """

    blocks: tuple[int, ...]
    zero_stage: int
    seconds: float
    num_bytes: float

    @property
    def rate(self) -> float:
        """Seconds for a byte."""
        return self.seconds / max(self.num_bytes, 1.0)


def with_stages_chosen(choice: ChunkChoice, cuts: tuple[int, ...]) -> Iterator[Stager]:
    """What fits into memory with these cuts, its ZeRO stages chosen in a few ways; nothing where it
    does not fit. A candidate that leaves no stages open has one way.
    """
    if choice.whole.candidate.zero_open:
        yield from {found.candidate: found for found in _ways(choice, cuts)}.values()
        return
    found = choice.within(cuts)
    if found is not None:
        yield found


def _ways(choice: ChunkChoice, cuts: tuple[int, ...]) -> Iterator[Stager]:
    """With one stage for all blocks, and with what is left of the memory spent on lower ones."""
    candidate = choice.whole.candidate
    highest: Stager | None = None
    for zero_stage in range(1, candidate.zero_stage + 1):
        found = with_stage(choice, zero_stage).within(cuts)
        if found is None:
            continue
        yield found
        if zero_stage == 1 and is_free(found):
            return  # nothing has less to do
        highest = found
    if highest is None or highest.candidate.zero_stage == 1:
        return
    is_open = candidate.leaves_again_open
    yield from _unlike(highest, is_open, cuts)
    if candidate.virtual_stages == 1:
        for found in _in_more_chunks(choice, highest, cuts):
            yield from _unlike(found, is_open, cuts)


def _in_more_chunks(choice: ChunkChoice, found: Stager, cuts: tuple[int, ...]) -> Iterator[Stager]:
    """With the loss in more chunks than is fastest by itself, as long as that leaves more room."""
    if not found.candidate.chunks_open:
        return
    last, least = found.candidate.pp - 1, math.inf
    for number in NUMBERS:
        whole = with_stage(choice, found.candidate.zero_stage).stager(number)
        if number < found.candidate.loss_chunks or whole is None:
            continue
        stager = fitting(whole, cuts)
        if stager is None:
            continue
        filled = stager.stage_bytes(last, cuts)
        if filled >= least:
            return
        least = filled
        if number > found.candidate.loss_chunks:
            yield stager


def with_stage(choice: ChunkChoice, zero_stage: int) -> ChunkChoice:
    """With one ZeRO stage for all blocks."""
    candidate = replace(choice.whole.candidate, zero_stage=zero_stage, zero_open=False)
    return replace(choice, whole=replace(choice.whole, candidate=candidate))


def is_free(stager: Stager) -> bool:
    """Whether nothing is computed again, and the loss is whole."""
    candidate = stager.candidate
    open_chunks = candidate.chunks_open and candidate.loss_chunks > 1
    return not candidate.recomputes and not open_chunks


def _unlike(stager: Stager, is_open: bool, cuts: tuple[int, ...]) -> Iterator[Stager]:
    """With lower stages for some blocks; ``is_open``: what is computed again may change, too."""
    lists = [purchases(stager, stage, cuts) for stage in range(stager.candidate.pp)]
    counts = [_bought_after(stager, stage, cuts, own, 0) for stage, own in enumerate(lists)]
    yield from _decided(stager, lists, counts, cuts)
    if not (is_open and _may_pay(stager, lists)):
        return
    open_again = replace(
        stager.candidate,
        recompute="blocks",
        recomputed_blocks=(),
        recomputed_by_op=(),
        gathered_again=(),
    )
    able = replace(stager, candidate=open_again)
    room = counts
    for more in _MORE:
        counts = [
            _bought_before(able, stage, cuts, own[: room[stage] + more])
            for stage, own in enumerate(lists)
        ]
        fitted = fitting(_with(able, lists, counts), cuts)
        if fitted is not None:
            counts = [
                _bought_after(fitted, stage, cuts, own, counts[stage])
                for stage, own in enumerate(lists)
            ]
            yield from _decided(fitted, lists, counts, cuts)


def _may_pay(stager: Stager, lists: Sequence[Sequence[Purchase]]) -> bool:
    """Whether a byte may save more communication than computing again, were none of it hidden."""
    costs = stager.costs
    saved = costs.held_bytes * costs.again("full") * float(stager.flying.max())
    seconds = stager.candidate.num_micro_batches * np.atleast_2d(costs.forward_s).min(axis=0)
    rates = [purchase.rate for own in lists for purchase in own]
    again = (seconds[saved > 0] / saved[saved > 0]).min(initial=math.inf)
    return max(rates, default=0.0) > float(again)


def purchases(stager: Stager, stage: int, cuts: Sequence[int]) -> list[Purchase]:
    """What a stage may buy, most seconds for a byte first, segments that are alike spread evenly: a
    gather then has the time of several blocks to come. Before them come segments whose buffers are
    larger than others', if there is room for them.
    """
    costs, candidate, sizes = stager.costs, stager.candidate, stager.sizes
    num = 1 if candidate.schedule == "layered" else candidate.num_micro_batches
    sharded = stager.sharded_numel()
    whole = costs.shared_numel - sharded
    beside = 0.0 if sizes.master and not candidate.offload_optimizer else sharded
    levels = (
        (2, (2 * num - 1) * stager.gather_s(), (whole + beside) * sizes.compute),
        (1, (num - 1) * stager.reduce_s(), whole * sizes.gradient),
    )
    alike: dict[tuple[float, int], list[Purchase]] = {}
    for blocks in _segments(stager, stage, cuts):
        own = list(blocks)
        for zero_stage, seconds, num_bytes in levels:
            saved = on_stage(seconds, stage)[own].sum()
            if saved > 0 and zero_stage < candidate.zero_stage:
                purchase = Purchase(
                    blocks=blocks,
                    zero_stage=zero_stage,
                    seconds=float(saved),
                    num_bytes=float(num_bytes[own].sum()),
                )
                alike.setdefault((-purchase.rate, -zero_stage), []).append(purchase)
    found = [purchase for key in sorted(alike) for purchase in _spread(alike[key])]
    large = _largest_first(stager, found)
    return large if _have_room(stager, stage, cuts, large, found) else found


def _have_room(
    stager: Stager,
    stage: int,
    cuts: Sequence[int],
    large: Sequence[Purchase],
    usual: Sequence[Purchase],
) -> bool:
    """Whether those that come before the usual ones fit beside what there is."""
    if large == usual:
        return False
    first = next(number for number, one in enumerate(large) if one is usual[0])
    filled = _lowered(stager, large[:first]).stage_bytes(stage, cuts)
    return filled <= int(stager.sites.usable_bytes[stage])


def _largest_first(stager: Stager, own: Sequence[Purchase]) -> list[Purchase]:
    """Those first that let the segments stay whose buffers are larger than others'."""
    numel = stager.costs.shared_numel
    sizes = [float(numel[list(one.blocks)].sum()) for one in own]
    usual = float(np.median(sizes)) if sizes else 0.0
    pairs = list(zip(own, sizes, strict=True))
    return [one for one, size in pairs if size > usual and one.zero_stage == 2] + [
        one for one, size in pairs if size <= usual or one.zero_stage != 2
    ]


def _segments(stager: Stager, stage: int, cuts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for first, last in stager.virtual_stages(stage, cuts):
        if stager.candidate.per_block:
            yield from ((block,) for block in range(first, last + 1))
        else:
            yield tuple(range(first, last + 1))


def _spread(alike: list[Purchase]) -> list[Purchase]:
    """The first ones, around which little is computed from a micro-batch to the next; then others
    in an order of which the first are spread evenly, however many they are.
    """
    rest = range(_AT_TURN, len(alike))
    width = len(rest).bit_length()
    order = sorted(rest, key=lambda number: int(f"{number - _AT_TURN:0{width}b}"[::-1], 2))
    return [*alike[:_AT_TURN], *(alike[number] for number in order)]


def _bought_before(
    stager: Stager, stage: int, cuts: tuple[int, ...], own: Sequence[Purchase]
) -> int:
    """How many purchases leave room enough if all that can be is computed again."""

    def fits(number: int) -> bool:
        return again_on(_lowered(stager, own[:number]), stage, cuts) is not None

    return _most(fits, 0, len(own))


def _bought_after(
    stager: Stager, stage: int, cuts: tuple[int, ...], own: Sequence[Purchase], least: int
) -> int:
    """How many purchases have room beside all else; ``least`` have."""
    usable = int(stager.sites.usable_bytes[stage])

    def fits(number: int) -> bool:
        return _lowered(stager, own[:number]).stage_bytes(stage, cuts) <= usable

    return _most(fits, least, len(own))


def _most(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number up to ``high`` that fits; ``low`` does."""
    if low == high or fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _with(stager: Stager, lists: Sequence[Sequence[Purchase]], counts: Sequence[int]) -> Stager:
    """With the first purchases of each stage."""
    bought = [
        purchase for own, count in zip(lists, counts, strict=True) for purchase in own[:count]
    ]
    return _lowered(stager, bought)


def _lowered(stager: Stager, bought: Sequence[Purchase]) -> Stager:
    candidate = stager.candidate
    stages = list(candidate.zero_stages or [candidate.zero_stage] * stager.costs.num_blocks)
    for purchase in bought:
        for block in purchase.blocks:
            stages[block] = min(stages[block], purchase.zero_stage)
    return replace(stager, candidate=replace(candidate, zero_stages=tuple(stages)))


def _decided(
    stager: Stager,
    lists: Sequence[Sequence[Purchase]],
    counts: Sequence[int],
    cuts: tuple[int, ...],
) -> Iterator[Stager]:
    """With the first purchases of each stage, if there are any. The stage that most blocks have is
    that of all; others are exceptions.
    """
    if not any(counts):
        return
    bought = _with(stager, lists, counts)
    stages = bought.candidate.zero_stages
    most = max(sorted(set(stages)), key=stages.count)
    own = stages if len(set(stages)) > 1 else ()
    found = replace(bought, candidate=replace(bought.candidate, zero_stage=most, zero_stages=own))
    if found.fits(cuts):  # those of one stage may share a segment again
        yield found
