"""Any small module under a mesh, held against ``run_reference``: no model has to be listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, run_reference
from autopar.capture.sources import LossFn
from autopar.ir.graph import ModelGraph, Role, TensorInfo, ValueId
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATED, State, sharded
from autopar.ir.plan import BatchPlan, Plan, SegmentPlan, layout_text
from autopar.ir.precision import DTYPES
from autopar.passes import lower_plan
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.results import StepResult
from autopar.runtime.threads import run_mesh
from tests.passes.layouts import cheapest, choose_layout
from tests.runtime.cases import Setup, make_plan
from tests.runtime.harness import assert_close


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """A module with its graph and a plan: the batch is divided, and each tensor axis typing is the
    cheapest for whole parameters and values between blocks.
    """

    model: ModelGraph
    plan: Plan
    weights: Mapping[str, Tensor]

    def engines(self, *batches: Mapping[str, Tensor]) -> list[Engine]:
        """Engines of all ranks after a step on each batch, with their gradients kept."""
        program = lower_plan(self.model, self.plan)

        def rank(communicator: Communicator) -> Engine:
            engine = Engine(program, self.model, self.plan, communicator, keep_gradients=True)
            engine.load_parameters(self.weights)
            for batch in batches:
                engine.train_step(batch)
            return engine

        return run_mesh(self.plan.device_mesh(), rank)

    def step(
        self, batch: Mapping[str, Tensor]
    ) -> list[tuple[StepResult, dict[str, Tensor], dict[str, Tensor]]]:
        """A step on every rank: its result, all gradients, all parameters after it."""
        program = lower_plan(self.model, self.plan)

        def rank(
            communicator: Communicator,
        ) -> tuple[StepResult, dict[str, Tensor], dict[str, Tensor]]:
            engine = Engine(program, self.model, self.plan, communicator, keep_gradients=True)
            engine.load_parameters(self.weights)
            result = engine.train_step(batch)
            return result, engine.full_gradients(), engine.full_parameters()

        return run_mesh(self.plan.device_mesh(), rank)


def laid_out(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    setup: Setup,
    *,
    micro_batch_size: int,
    loss_fn: LossFn | None = None,
    stages: Sequence[int] | None = None,
) -> LaidOut:
    """``module`` under the settings of ``setup``, for batches like ``batch``.

    Args:
        stages: Stage of each block; by default equal shares.
    """
    model = capture(module, dict(batch), loss_fn=loss_fn, compute_dtype=DTYPES[setup.precision])
    size, mesh = len(next(iter(batch.values()))), setup.mesh
    own = size // mesh.batch_ranks

    def pin(value: ValueId, tensor: TensorInfo, axis: str) -> State:
        if value in (model.loss, model.weight):
            return PARTIAL if axis in BATCH_AXES else INVARIANT
        if axis not in BATCH_AXES:
            return INVARIANT
        has_batch = bool(tensor.shape) and not isinstance(tensor.shape[0], int)
        return sharded(0) if has_batch and value.role is not Role.PARAMETER else REPLICATED

    plan = make_plan(replace(setup, name="llama"))
    layout = choose_layout(
        model, mesh, batch=micro_batch_size * mesh.batch_ranks, pin=pin, choose=cheapest
    )
    num_blocks = len(model.blocks)
    if stages is None:
        stages = [block * mesh.pp // num_blocks for block in range(num_blocks)]
    plan = replace(
        plan,
        batch=BatchPlan(
            global_batch_size=size,
            micro_batch_size=micro_batch_size,
            num_micro_batches=-(-own // micro_batch_size),
        ),
        segments=tuple(
            SegmentPlan(stage=stage, first_block=block, last_block=block)
            for block, stage in enumerate(stages)
        ),
        layout=layout_text(layout, plan.layout_axes),
    )
    return LaidOut(
        model=model,
        plan=plan,
        weights={name: parameter.detach() for name, parameter in module.named_parameters()},
    )


def assert_equals_reference(case: LaidOut, batch: Mapping[str, Tensor]) -> None:
    """Loss, gradients and an SGD update on all ranks are those of whole batches on one device."""
    leaves = {
        name: case.weights[name].clone().requires_grad_(parameter.requires_grad)
        for name, parameter in case.model.parameters.items()
    }
    total, weight = run_reference(case.model, leaves, batch)
    loss = total if weight is None else total / weight
    loss.backward()
    expected = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
        if leaf.requires_grad
    }
    rate = case.plan.training.learning_rate
    updated = {
        name: leaf.detach() - rate * expected[name] if name in expected else leaf.detach()
        for name, leaf in leaves.items()
    }
    for result, gradients, parameters in case.step(batch):
        assert result.loss == pytest.approx(loss.item(), abs=1e-5)
        assert_close(gradients, expected, 1e-4)
        assert_close(parameters, updated, 1e-5)
