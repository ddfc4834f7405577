"""Copies of offloaded activations in a schedule: out after a forward, back before its backward.

Each copy out waits for the one before it, and a copy back starts with the computing action before
its backward, but not before the copy out. So a stage has on its device what at most
``ACTIVATION_BUFFERS`` offloaded forwards keep: one that is computed, one on its way out, one that
came back ahead of its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from autopar.ir.schedule import RETURNING, Action, ActionKind, Run

Item = Run | Action


def with_copies(items: Sequence[Item], offloaded: Collection[int]) -> tuple[Item, ...]:
    """``items`` of a stage, with the copies of what its ``offloaded`` segments keep; their
    forwards and backwards are runs of their own.
    """
    found: list[Item] = []
    last = -1  # the place of the last computing run
    for item in items:
        if isinstance(item, Action):
            found.append(item)
            continue
        for run in _apart(item, frozenset(offloaded)):
            is_offloaded = run.segments[0] in offloaded
            cell = run.segments[0], run.micro_batch
            if is_offloaded and run.kind in RETURNING:
                out = Action(ActionKind.OFFLOAD_ACTIVATIONS, *cell)
                place = len(found) if out in found[last:] else last
                found.insert(place, Action(ActionKind.FETCH_ACTIVATIONS, *cell))
            last = len(found)
            found.append(run)
            if is_offloaded and run.kind is ActionKind.FORWARD:
                found.append(Action(ActionKind.OFFLOAD_ACTIVATIONS, *cell))
    return tuple(found)


def _apart(run: Run, offloaded: frozenset[int]) -> Iterator[Run]:
    """The run in parts: those of offloaded segments have one action each."""
    if run.kind is ActionKind.BACKWARD_WEIGHT or offloaded.isdisjoint(run.segments):
        yield run
    elif len(run.segments) == 1:
        ends = run.receives or run.sends
        assert run.num_micro_batches == 1 or not ends
        for micro_batch in range(run.micro_batch, run.micro_batch + run.num_micro_batches):
            yield run._replace(micro_batch=micro_batch, num_micro_batches=1)
    else:
        parts: list[list[int]] = []
        for segment in run.segments:
            if not parts or segment in offloaded or parts[-1][-1] in offloaded:
                parts.append([])
            parts[-1].append(segment)
        for number, part in enumerate(parts):
            yield run._replace(
                segments=tuple(part),
                receives=run.receives and number == 0,
                sends=run.sends and number == len(parts) - 1,
            )
