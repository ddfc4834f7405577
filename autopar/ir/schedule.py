"""A schedule is data: for each pipeline rank, the list of its actions over (segment, micro-batch).

Text form: ``F2.0`` is the forward of micro-batch 0 through segment 2, ``G2`` the gather of segment
2's parameters. The simulator runs this list with costs, the runtime with tensors.

A large schedule has a hundred thousand actions that differ in their micro-batch only. Its compact
form writes computing actions in a row as one ``Run``; ``CompactSchedule.expand`` gives the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class ActionKind(Enum):
    """What an action does. The segment of an action is the one whose tensors it concerns."""

    FORWARD = "F"
    BACKWARD = "B"  # both parts at once
    BACKWARD_INPUT = "I"  # gradients of the segment's activations: what the stage before waits for
    BACKWARD_WEIGHT = "W"  # gradients of its parameters, later; nobody else waits for them
    SEND_ACTIVATIONS = "SA"  # the results of the segment, to the next segment's stage
    RECEIVE_ACTIVATIONS = (
        "RA"  # post the receive of the segment's activations; its forward waits for them
    )
    SEND_GRADIENTS = "SG"  # gradients of the segment's activations, to the previous segment's stage
    RECEIVE_GRADIENTS = "RG"  # post the receive of the gradients of the segment's results
    GATHER_PARAMETERS = "G"  # start it; the next use of the segment waits for it
    FREE_PARAMETERS = "X"
    REDUCE_GRADIENTS = "R"  # start it; the optimizer waits for it
    OFFLOAD_ACTIVATIONS = "OA"  # start to copy what a forward keeps, once the copy before is done
    FETCH_ACTIVATIONS = "FA"  # start to bring it back; the backward waits for it
    OPTIMIZER = "O"


@dataclass(frozen=True, slots=True)
class Action:
    """One action. ``micro_batch`` is -1 for those of a whole segment, ``segment`` is -1 for the
    optimizer.
    """

    kind: ActionKind
    segment: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        segment = "" if self.segment < 0 else str(self.segment)
        micro_batch = "" if self.micro_batch < 0 else f".{self.micro_batch}"
        return f"{self.kind.value}{segment}{micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Actions of every pipeline rank. ``stage_of_segment[k]`` is the pipeline rank that holds
    segment k.
    """

    name: str
    num_micro_batches: int
    stage_of_segment: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.actions)

    @property
    def num_segments(self) -> int:
        return len(self.stage_of_segment)

    def segments_of(self, stage: int) -> tuple[int, ...]:
        """Segments of a pipeline rank, in model order."""
        return tuple(k for k, holder in enumerate(self.stage_of_segment) if holder == stage)

    def __str__(self) -> str:
        return "\n".join(
            f"{stage}: " + " ".join(map(str, actions)) for stage, actions in enumerate(self.actions)
        )


COMPUTING = frozenset(
    {
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
        ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT,
    }
)
"""What a stage computes with a micro-batch: the kinds of a run."""

RETURNING = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
"""What makes the gradients that go to the segment before."""

COPYING = (ActionKind.OFFLOAD_ACTIVATIONS, ActionKind.FETCH_ACTIVATIONS)
"""Copies between a device and its host, of what a forward keeps for its backward."""

FINISHING = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
"""After which all gradients of a micro-batch are there, and nothing of it is kept."""


class Run(NamedTuple):
    """Computing actions in a row: for each micro-batch, the segments in this order.

    Either several segments of one micro-batch, which hand on to each other on the stage, or several
    micro-batches through one segment. A tuple, because schedules have tens of thousands of them.
    """

    kind: ActionKind  # one of COMPUTING
    segments: tuple[int, ...]
    micro_batch: int
    num_micro_batches: int = 1
    receives: bool = False  # the first action waits for a message
    sends: bool = False  # the last action is followed by a message

    def actions(self) -> Iterator[Action]:
        """The computing actions, in order."""
        for micro_batch in range(self.micro_batch, self.micro_batch + self.num_micro_batches):
            for segment in self.segments:
                yield Action(self.kind, segment, micro_batch)

    @property
    def receive(self) -> Action:
        """The receive for which the first action waits, where it waits for one."""
        return Action(_RECEIVES[self.kind], self.segments[0], self.micro_batch)

    @property
    def send(self) -> Action:
        """The send that follows the last action, where one does."""
        return Action(_SENDS[self.kind], self.segments[-1], self.micro_batch)


_RECEIVES = {
    ActionKind.FORWARD: ActionKind.RECEIVE_ACTIVATIONS,
    ActionKind.BACKWARD: ActionKind.RECEIVE_GRADIENTS,
    ActionKind.BACKWARD_INPUT: ActionKind.RECEIVE_GRADIENTS,
}
_SENDS = {
    ActionKind.FORWARD: ActionKind.SEND_ACTIVATIONS,
    ActionKind.BACKWARD: ActionKind.SEND_GRADIENTS,
    ActionKind.BACKWARD_INPUT: ActionKind.SEND_GRADIENTS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactSchedule:
    """A schedule whose computing actions and messages are runs; ``items`` has those of each stage.

    The actions among the items are gathers, frees, reductions, copies of activations and the
    optimizer.
    """

    name: str
    num_micro_batches: int
    stage_of_segment: tuple[int, ...]
    items: tuple[tuple[Run | Action, ...], ...]

    def expand(self) -> Schedule:
        """All actions. The receive of a run is posted one computing action ahead."""
        return Schedule(
            name=self.name,
            num_micro_batches=self.num_micro_batches,
            stage_of_segment=self.stage_of_segment,
            actions=tuple(tuple(_expanded(items)) for items in self.items),
        )


def _expanded(items: tuple[Run | Action, ...]) -> Iterator[Action]:
    runs = [item for item in items if isinstance(item, Run)]
    if runs and runs[0].receives:
        yield runs[0].receive
    position = 0
    for item in items:
        if isinstance(item, Action):
            yield item
            continue
        *others, last = item.actions()
        yield from others
        position += 1
        if position < len(runs) and runs[position].receives:
            yield runs[position].receive
        yield last
        if item.sends:
            yield item.send
