"""The cheapest legal sequence of one-axis moves between two placements of a tensor.

A dim that several axes shard stores them outermost first, so only its innermost sharding can be
released, changed or acquired. A change of placement on several axes is therefore a path: inner
shardings are released before outer ones, outer ones acquired before inner ones. Some changes need a
detour (``(S(0), S(0)) → (R, S(0))`` gathers both axes and slices again); releasing everything and
acquiring the target always works, so a path always exists.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.moves import Collective, backward_of, collective_of
from autopar.ir.placement import INVARIANT, REPLICATED, Placement, State

_LATENCY = 1e-3  # of one collective, in units of the time to send the whole tensor once
_COPY = 1e-5  # of one step that only slices, pads or masks


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStep:
    """A move on one axis (an index into the layout axes), and the placement that it leads to."""

    axis: int
    source: State
    target: State
    reached: Placement


@functools.cache
def move_path(
    source: Placement, target: Placement, axis_sizes: tuple[int, ...], *, requires_grad: bool
) -> tuple[MoveStep, ...]:
    """Steps from ``source`` to ``target`` that are fewest bytes forward and, with a gradient,
    backward.

    Args:
        axis_sizes: Ranks on each axis, in the order of the placements, the outermost axis first.
        requires_grad: Whether the duals of the steps run too.
    """
    counter = itertools.count()  # breaks ties by age: the same input gives the same path
    queue: list[tuple[float, int, Placement, tuple[MoveStep, ...]]] = []
    heapq.heappush(queue, (0.0, next(counter), source, ()))
    done: set[Placement] = set()
    while queue:
        cost, _, placement, steps = heapq.heappop(queue)
        if placement == target:
            return steps
        if placement in done:
            continue
        done.add(placement)
        for step in _legal_steps(placement, source, target, axis_sizes):
            if step.reached not in done:
                total = cost + _cost(step, placement, axis_sizes, requires_grad=requires_grad)
                heapq.heappush(queue, (total, next(counter), step.reached, (*steps, step)))
    raise AssertionError(f"no path from {source} to {target}")


def is_legal_step(source: Placement, axis: int, target: State) -> bool:
    """Whether the state on ``axis`` may change to ``target``: no axis further in shards a dim that
    changes.
    """
    changed = {state.dim for state in (source[axis], target) if state.is_sharded}
    return not any(state.is_sharded and state.dim in changed for state in source[axis + 1 :])


def _legal_steps(
    placement: Placement, source: Placement, target: Placement, axis_sizes: tuple[int, ...]
) -> Iterator[MoveStep]:
    for axis, state in enumerate(placement):
        detours = () if axis_sizes[axis] == 1 else (source[axis], REPLICATED, INVARIANT)
        for candidate in dict.fromkeys((target[axis], *detours)):
            if candidate == state or not is_legal_step(placement, axis, candidate):
                continue
            reached = (*placement[:axis], candidate, *placement[axis + 1 :])
            if _divides(reached, source, target):
                yield MoveStep(axis=axis, source=state, target=candidate, reached=reached)


def _divides(placement: Placement, source: Placement, target: Placement) -> bool:
    """Whether each dim divides: its shardings are some of those that it has at one end."""
    ends = [set(enumerate(source)), set(enumerate(target))]
    for dim in {state.dim for state in placement if state.is_sharded}:
        shardings = {(axis, state) for axis, state in enumerate(placement) if state.dim == dim}
        if not any(shardings <= end for end in ends):
            return False
    return True


def _cost(
    step: MoveStep, placement: Placement, axis_sizes: tuple[int, ...], *, requires_grad: bool
) -> float:
    size = axis_sizes[step.axis]
    if size == 1:
        return 0.0
    before, after = _share(placement, axis_sizes), _share(step.reached, axis_sizes)
    cost = _traffic(step.source, step.target, before, size)
    if requires_grad:
        cost += _traffic(*backward_of(step.source, step.target), after, size)
    return cost


def _share(placement: Placement, axis_sizes: tuple[int, ...]) -> float:
    """The part of the tensor that one rank holds."""
    share = 1.0
    for state, size in zip(placement, axis_sizes, strict=True):
        if state.is_sharded:
            share /= size
    return share


def _traffic(source: State, target: State, held: float, size: int) -> float:
    """Bytes that a rank sends, in units of the whole tensor, plus latency; ``held`` is what it
    holds before.
    """
    others = size - 1
    match collective_of(source, target):
        case Collective.ALL_REDUCE:
            return 2 * others / size * held + _LATENCY
        case Collective.ALL_GATHER:
            return others * held + _LATENCY
        case Collective.REDUCE_SCATTER | Collective.ALL_TO_ALL:
            return others / size * held + _LATENCY
        case Collective.NONE:
            return 0.0 if source.is_whole and target.is_whole else _COPY
