"""A schedule is data: for each pipeline rank, the list of its actions over (segment, micro-batch).

Text form: ``F2.0`` is the forward of micro-batch 0 through segment 2, ``G2`` the gather of segment
2's parameters. The simulator runs this list with costs, the runtime with tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """What an action does. The segment of an action is the one whose tensors it concerns."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_ACTIVATIONS = "SA"  # the results of the segment, to the next segment's stage
    RECEIVE_ACTIVATIONS = (
        "RA"  # post the receive of the segment's activations; its forward waits for them
    )
    SEND_GRADIENTS = "SG"  # gradients of the segment's activations, to the previous segment's stage
    RECEIVE_GRADIENTS = "RG"  # post the receive of the gradients of the segment's results
    GATHER_PARAMETERS = "G"  # start it; the next use of the segment waits for it
    FREE_PARAMETERS = "X"
    REDUCE_GRADIENTS = "R"  # start it; the optimizer waits for it
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
