"""Data ranks with unequal shares of the batch train as one device does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import run_reference
from autopar.ir.errors import InputError, PlanFormatError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import BatchPlan, Plan, SharePlan, from_json, to_json
from autopar.passes import lower_plan
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.micro_batches import NOBODY, own_rows, run_of, sequences
from autopar.runtime.results import StepResult
from autopar.runtime.threads import run_mesh
from autopar.solver import Cluster, solve
from tests.runtime.cases import GLOBAL_BATCH, Setup, initial_parameters, make_batch, make_model
from tests.runtime.cases import make_plan as equal_plan
from tests.runtime.harness import assert_close
from tests.runtime.laid_out import LaidOut, assert_equals_reference, laid_out


def with_shares(plan: Plan, size: int, *numbers: int) -> Plan:
    """Data ranks with so many micro-batches of ``size`` sequences each."""
    batch = BatchPlan(
        global_batch_size=size * plan.mesh.ep * sum(numbers),
        micro_batch_size=size,
        num_micro_batches=max(numbers),
        shares=tuple(SharePlan(data_ranks=1, num_micro_batches=number) for number in numbers),
    )
    return replace(plan, batch=batch)


SHARES = [
    (Setup(mesh=Mesh(dp_replicate=2)), 1, (3, 5)),
    (Setup(mesh=Mesh(dp_shard=3), zero_stage=1, recompute="full"), 1, (1, 2, 5)),
    (Setup(mesh=Mesh(dp_shard=2), zero_stage=2), 2, (3, 1)),
    (Setup(mesh=Mesh(dp_shard=2), zero_stage=3), 2, (1, 3)),
    (Setup(mesh=Mesh(dp_shard=2, tp=2), zero_stage=3, schedule="layered"), 2, (1, 3)),
    (Setup(mesh=Mesh(dp_replicate=2, tp=2), sequence=True), 2, (1, 3)),
    (Setup(mesh=Mesh(pp=2, dp_shard=2), zero_stage=1), 1, (2, 6)),
    (Setup(mesh=Mesh(pp=2, dp_shard=2), zero_stage=1, schedule="zero_bubble"), 1, (2, 6)),
]


@pytest.mark.parametrize(("setup", "size", "numbers"), SHARES, ids=str)
def test_unequal_shares_change_nothing(setup: Setup, size: int, numbers: tuple[int, ...]) -> None:
    model = make_model(setup.name, setup.layers, setup.precision)
    plan = with_shares(equal_plan(replace(setup, num_micro_batches=1)), size, *numbers)
    assert plan.batch.global_batch_size == GLOBAL_BATCH
    assert from_json(to_json(plan)) == plan
    program = lower_plan(model, plan)
    weights = initial_parameters(setup.name, setup.layers, setup.precision)
    batch = make_batch(setup.name, seed=0)

    def run(communicator: Communicator) -> tuple[StepResult, StepResult, Mapping[str, Tensor]]:
        engine = Engine(program, model, plan, communicator, keep_gradients=True)
        engine.load_parameters(weights)
        part = setup.mesh.batch_coordinate(communicator.rank)
        rows = run_of(plan.batch, setup.mesh, part)
        own = {name: tensor[rows] for name, tensor in batch.items()}
        result, gradients = engine.train_step(batch), engine.full_gradients()
        engine.load_parameters(weights)
        return result, engine.train_step(own, local=True), gradients

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    total, weight = run_reference(model, leaves, batch)
    assert weight is not None
    (total / weight).backward()
    expected = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for result, again, gradients in run_mesh(setup.mesh, run):
        assert result.loss == pytest.approx((total / weight).item(), abs=1e-5)
        assert again.loss == pytest.approx((total / weight).item(), abs=1e-5)
        assert_close(gradients, expected, 1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_loss_that_is_a_mean_over_sequences_counts_each_once(dropout: float) -> None:
    """Its micro-batches have no weight of their own; masks are those of the sequences."""

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.layer(x), dropout).square()

    torch.manual_seed(0)
    module, batch = Squares(), {"x": torch.randn(8, 4)}
    setup = Setup(mesh=Mesh(dp_replicate=2))
    case = laid_out(module, batch, setup, micro_batch_size=2, loss_fn=lambda out, _: out.mean())
    assert case.model.weight is None
    assert_equals_reference(replace(case, plan=with_shares(case.plan, 2, 1, 3)), batch)


def test_rows_are_those_of_the_shares() -> None:
    mesh, batch = (
        Mesh(dp_replicate=2, ep=2),
        BatchPlan(
            global_batch_size=16,
            micro_batch_size=2,
            num_micro_batches=3,
            shares=(
                SharePlan(data_ranks=1, num_micro_batches=1),
                SharePlan(data_ranks=1, num_micro_batches=3),
            ),
        ),
    )
    runs = [run_of(batch, mesh, part) for part in range(4)]
    assert [(run.start, run.stop) for run in runs] == [(0, 2), (2, 4), (4, 10), (10, 16)]
    assert own_rows(batch, mesh, 3, 2) == slice(4, 6)
    assert own_rows(batch, mesh, 0, 1) == slice(2, 2)
    assert sequences(batch, mesh, 1) == (NOBODY,) * 4 + (6, 7, 12, 13)


@pytest.mark.parametrize("numbers", [(1, 1), (4,), (1, 2, 1)])
def test_shares_that_are_not_those_of_the_plan_are_refused(numbers: tuple[int, ...]) -> None:
    plan = with_shares(equal_plan(Setup(mesh=Mesh(dp_replicate=2), num_micro_batches=1)), 2, 1, 3)
    shares = tuple(SharePlan(data_ranks=1, num_micro_batches=number) for number in numbers)
    wrong = replace(plan, batch=replace(plan.batch, shares=shares))
    with pytest.raises(PlanFormatError, match="share"):
        from_json(to_json(wrong))


def test_data_ranks_that_need_each_other_in_a_micro_batch_are_refused() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found = self.layer(x)
            return found - found.cumsum(0)

    case = laid_out(
        Mixes(),
        {"x": torch.randn(8, 4)},
        Setup(mesh=Mesh(dp_replicate=2)),
        micro_batch_size=2,
        loss_fn=lambda out, _: out.square().mean(),
    )
    with pytest.raises(InputError, match="need each other"):
        lower_plan(case.model, with_shares(case.plan, 2, 1, 3))


def test_what_is_planned_for_a_mixed_cluster_trains_as_one_device_does() -> None:
    """From the cluster to the step: the planner gives the faster ranks more of the batch."""
    slow = Cluster("cpu-local", gpus_per_node=1)
    chip = replace(slow.hardware.chip, launch_s=1e-9, kernel_s=1e-9)
    slow = slow.with_hardware(replace(slow.hardware, chip=chip))
    cluster = Cluster.of_groups(
        [slow, slow.scaled(compute=3, memory=3)], replace(slow.hardware.network, latency_s=0.0)
    )
    model = make_model("llama", 2, "fp32")
    training = equal_plan(Setup()).training
    pin = {"pp": 1, "tp": 1, "micro_batch_size": 1}
    plan = solve(model, cluster, global_batch_size=8, training=training, pin=pin)
    slower, faster = plan.batch.shares
    assert slower.num_micro_batches < faster.num_micro_batches
    weights, batch = initial_parameters("llama", 2, "fp32"), make_batch("llama", seed=0)
    assert_equals_reference(LaidOut(model=model, plan=plan, weights=weights), batch)
