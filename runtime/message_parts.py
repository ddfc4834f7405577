"""Messages between stages: of what all tensor ranks have alike, each sends its part.

The next stage's tensor ranks gather the parts inside their node, so that less crosses the network
(Narayanan et al. 2021, section 4.1: scatter and gather of messages).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from autopar.ir.axis_group import AxisGroup
from autopar.ir.mesh import LAYOUT_AXES, TENSOR_AXIS
from autopar.ir.placement import INVARIANT
from autopar.ir.program import LocalTensor

_TENSOR = LAYOUT_AXES.index(TENSOR_AXIS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part of a tensor of ``shape``: as many of its elements as of any other rank."""

    shape: tuple[int, ...]
    group: AxisGroup

    @property
    def numel(self) -> int:
        return math.prod(self.shape) // self.group.size

    def of(self, tensor: Tensor) -> Tensor:
        """The part, contiguous."""
        return tensor.reshape(-1).narrow(0, self.group.rank * self.numel, self.numel)

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor, of all ranks' parts."""
        return self.group.all_gather(part).view(self.shape)


def part_of(value: LocalTensor, group: AxisGroup) -> Part | None:
    """What a tensor rank sends of ``value``, or of its gradient; None: all that it has.

    Args:
        group: The rank's tensor axis.
    """
    if group.size == 1 or value.placement[_TENSOR] != INVARIANT:
        return None
    if math.prod(value.shape) % group.size:
        return None
    return Part(shape=value.shape, group=group)
