"""A program as one rank runs it: the segments of its stage, with its part of inputs and constants.

A program is written for one size of micro-batch. A stage has two forms where the last micro-batch
of a step is shorter.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopar.ir.graph import ModelGraph, Role, ValueId
from autopar.ir.mesh import PIPELINE_AXIS
from autopar.ir.plan import Plan
from autopar.ir.program import LocalTensor, Program, Segment
from autopar.runtime.batches import BatchSlicer
from autopar.runtime.communicator import Communicator
from autopar.runtime.segment_runner import SegmentRunner


class StageForm:
    """See the module.

    Args:
        program: With the rank's axis groups bound.
        model: The captured model.
        plan: Whose sizes the program has, and whose recomputation holds where gradients flow.
        communicator: Of the rank.
        constants: The rank's parts of constants, where another form has them already.
        in_parts: Whether backwards are in two parts.
    """

    def __init__(
        self,
        program: Program,
        model: ModelGraph,
        plan: Plan,
        communicator: Communicator,
        *,
        constants: Mapping[str, Tensor] | None = None,
        in_parts: bool = False,
    ) -> None:
        self.program = program
        self.slicer = BatchSlicer(program, model, plan, communicator.rank, communicator.device)
        stage = communicator.mesh.coordinates(communicator.rank)[PIPELINE_AXIS]
        self.runners = {
            segment.index: SegmentRunner(segment, model, plan.schedule, in_parts=in_parts)
            for segment in program.segments
            if segment.stage == stage
        }
        names = {
            value.name
            for runner in self.runners.values()
            for value in runner.segment.arguments
            if value.role is Role.CONSTANT
        }
        known = {} if constants is None else constants
        self.constants = {
            name: known[name] if name in known else self.slicer.constant(name)
            for name in sorted(names)
        }

    def segment(self, index: int) -> Segment:
        """A segment of this stage."""
        return self.runners[index].segment

    def value(self, value: ValueId) -> LocalTensor:
        """What a rank holds of a value."""
        return self.program.values[value]

    def differentiated(self, values: tuple[ValueId, ...]) -> tuple[ValueId, ...]:
        """Those through which gradients flow."""
        return tuple(value for value in values if self.value(value).requires_grad)
