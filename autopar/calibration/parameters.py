"""What the runtime does with parameters, on parameters of no model: takes their gradients, updates.

Many small ones show what each costs the host, few large ones what their elements cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from autopar.calibration.samples import Timing
from autopar.ir.mesh import LAYOUT_AXES
from autopar.ir.placement import INVARIANT
from autopar.ir.plan import TrainingPlan
from autopar.runtime.distributed_group import DistributedGroup
from autopar.runtime.optimizers import optimizer_factory
from autopar.runtime.parameter_layout import ParameterLayout
from autopar.runtime.parameter_unit import ParameterUnit, UnitGroups
from autopar.solver.costs.memory import Itemsizes
from autopar.solver.costs.parameters import ParameterCosts
from autopar.solver.hardware import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSizes:
    """``num`` square parameters of ``rows`` rows."""

    num: int
    rows: int

    @property
    def numel(self) -> int:
        return self.num * self.rows**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSample:
    """Gradients of all parameters taken and added up, or the end of a step: in fp32, by AdamW."""

    what: Literal["gradients", "update"]
    sizes: ParameterSizes
    timing: Timing

    @property
    def kind(self) -> str:
        return f"{self.what} of parameters"

    @property
    def measured_s(self) -> float:
        return self.timing.compute_s

    def predicted_s(self, cluster: Cluster) -> float:
        costs = ParameterCosts(cluster.hardware, _FP32)
        num, numel = float(self.sizes.num), float(self.sizes.numel)
        if self.what == "gradients":
            return costs.adding_s(num, numel, num_micro_batches=2)
        return costs.update_s(num, numel)


_FP32 = Itemsizes(compute=4, master=0, moments=8, gradient=4, reduce=4)
_TRAINING = TrainingPlan(
    precision="fp32",
    optimizer="adamw",
    learning_rate=1e-3,
    weight_decay=0.01,
    betas=(0.9, 0.999),
    eps=1e-8,
    max_grad_norm=1.0,
    seed=0,
)


class Parameters:
    """Trained parameters of a rank by itself, which calls handle as the runtime does in a step.

    Attributes:
        unit: The runtime's.
    """

    def __init__(self, sizes: ParameterSizes, device: torch.device) -> None:
        alone = DistributedGroup(name="alone", rank=0, size=1, handle=None)
        self.unit = ParameterUnit(
            [_layout(f"parameter{number}", sizes.rows) for number in range(sizes.num)],
            trainable=True,
            compute_dtype=torch.float32,
            is_partial=False,
            counts=True,
            gradient_dtype=torch.float32,
            reduce_dtype=torch.float32,
            groups=UnitGroups(shard=None, replicate=alone, tensor=alone),
            device=device,
        )
        self._optimizer = optimizer_factory(_TRAINING)(list(self.unit.parameters.values()))
        self._gradient = torch.ones(sizes.rows, sizes.rows, device=device)

    def take_gradients(self) -> None:
        """As after a backward, which leaves a gradient at each parameter."""
        unit = self.unit
        for index, layout in enumerate(unit.layouts):
            leaf: Tensor = unit.tensors[layout.name]
            leaf.grad = self._gradient
            unit.accumulate(layout, index, leaf)

    def update(self) -> None:
        """The end of a step: gradients are reduced, their norm is taken, they are clipped."""
        unit = self.unit
        for work in unit.start_reduce(is_last=True):
            work.wait()
        unit.attach_gradients()
        unit.sum_of_squares(only_tensor_sharded=False).item()
        assert unit.gradient is not None
        unit.gradient.mul_(0.5)
        unit.gradient.mul_(0.5)
        self._optimizer.step()
        unit.drop_gradients()


def _layout(name: str, rows: int) -> ParameterLayout:
    shape = (rows, rows)
    return ParameterLayout(
        name=name,
        names=(name,),
        shape=shape,
        placement=(INVARIANT,) * len(LAYOUT_AXES),
        local_shape=shape,
        stages=(0,),
        shard_axis="",
        num_shards=1,
        shard=0,
    )
