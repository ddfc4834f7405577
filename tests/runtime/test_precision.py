"""Gradients are accumulated and summed in fp32 unless said otherwise; fp16 scales its loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.ir.plan import PrecisionName
from autopar.passes import lower_plan
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.results import StepResult
from autopar.runtime.threads import run_mesh
from tests.runtime.cases import Setup
from tests.runtime.harness import assert_parity, train_on_threads
from tests.runtime.laid_out import LaidOut, laid_out


class Product(nn.Module):
    """Loss Σ w x over a micro-batch: the gradient of w is Σ x."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), value))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


SMALL_TERMS = {"x": torch.tensor([1.0] + [2.0**-9] * 512)[:, None]}
"""Beside 1 a term of 2⁻⁹ is half of the last bit of bf16: added one by one, they are lost."""


def sum_of_terms(
    precision: PrecisionName, zero_stage: int, gradient_dtype: PrecisionName | None = None
) -> float:
    """The accumulated gradient of 513 micro-batches; twice that on two ranks, which share it."""
    mesh = Mesh(dp_shard=2) if zero_stage else Mesh()
    batch = {name: torch.cat([x] * mesh.dp) for name, x in SMALL_TERMS.items()}
    setup = Setup(
        precision=precision,
        mesh=mesh,
        zero_stage=zero_stage,
        gradient_dtype=gradient_dtype,
        reduce_dtype="fp32",
    )
    case = laid_out(Product(), batch, setup, micro_batch_size=1)
    engine = case.engines(batch)[0]
    return engine.store.kept_gradients["w"].item() * 513 / mesh.dp


@pytest.mark.parametrize(
    ("precision", "zero_stage"),
    [("bf16", 0), ("bf16", 1), ("bf16", 2), ("bf16", 3), ("fp16", 2), ("fp32", 0)],
)
def test_512_gradients_of_a_512th_add_up_to_one(precision: PrecisionName, zero_stage: int) -> None:
    assert sum_of_terms(precision, zero_stage) == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_they_are_lost_where_gradients_are_accumulated_in_bf16(zero_stage: int) -> None:
    found = sum_of_terms("bf16", zero_stage, gradient_dtype="bf16")
    assert found == pytest.approx(1.0, abs=1e-2)


def test_gradients_can_be_sent_in_bf16() -> None:
    """1 + 2⁻⁹ has no place in bf16: it is rounded once when it is sent, and not before."""
    batch = {"x": torch.tensor([1.0, 2.0**-9, 1.0, 2.0**-9])[:, None]}

    def gradient(reduce_dtype: PrecisionName) -> float:
        setup = Setup(mesh=Mesh(dp_replicate=2), precision="bf16", reduce_dtype=reduce_dtype)
        case = laid_out(Product(), batch, setup, micro_batch_size=1)
        return case.engines(batch)[0].store.kept_gradients["w"].item()

    assert gradient("fp32") == 1 + 2.0**-9  # two micro-batches: half of the sum of two ranks
    assert gradient("bf16") == 1.0


FP16 = [
    Setup(
        name="llama",
        mesh=Mesh(dp_shard=2, tp=2),
        zero_stage=3,
        precision="fp16",
        recompute="full",
    ),
    Setup(name="gpt2", mesh=Mesh(pp=2, dp_shard=2), zero_stage=2, precision="fp16"),
]


@pytest.mark.parametrize("setup", FP16, ids=str)
def test_fp16_training_is_near_fp32(setup: Setup) -> None:
    (outcome, *others) = train_on_threads(setup)
    assert_parity(setup, outcome, 3)
    assert not any(result.skipped for result in outcome.results)
    assert all(other.results[0].loss == outcome.results[0].loss for other in others)


def test_a_tiny_gradient_survives_fp16() -> None:
    """1e-9 underflows in fp16; scaled by 2¹⁶ over the number of micro-batches it does not."""

    class Faint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * x * 1e-4).float().sum() * 1e-5

    batch = {"x": torch.ones(2, 1)}
    case = laid_out(Faint(), batch, Setup(precision="fp16"), micro_batch_size=1)
    (engine,) = case.engines(batch)
    assert engine.store.kept_gradients["w"].item() == pytest.approx(1e-9, rel=1e-2)


def overflowing(mesh: Mesh) -> tuple[LaidOut, dict[str, Tensor], dict[str, Tensor]]:
    """A case, a batch whose gradient fits fp16, and one whose gradient does not when scaled."""
    good = {"x": torch.full((4, 1), 0.5)}
    bad = {"x": torch.cat([torch.full((3, 1), 0.5), torch.full((1, 1), 6e4)])}
    setup = Setup(precision="fp16", mesh=mesh, zero_stage=1 if mesh.dp_shard > 1 else 0)
    return laid_out(Product(), good, setup, micro_batch_size=1), good, bad


def steps(case: LaidOut, *batches: Mapping[str, Tensor]) -> list[list[StepResult]]:
    program = lower_plan(case.model, case.plan)

    def rank(communicator: Communicator) -> list[StepResult]:
        engine = Engine(program, case.model, case.plan, communicator)
        engine.load_parameters(case.weights)
        return [engine.train_step(batch) for batch in batches]

    return run_mesh(case.plan.device_mesh(), rank)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp_replicate=2), Mesh(dp_shard=2)], ids=str)
def test_all_ranks_skip_a_step_that_overflows_on_one(mesh: Mesh) -> None:
    case, good, bad = overflowing(mesh)
    for first, second, third in steps(case, good, bad, good):
        assert (first.skipped, second.skipped, third.skipped) == (False, True, False)
        assert (first.loss_scale, second.loss_scale, third.loss_scale) == (2**16, 2**16, 2**15)
        # a good step subtracts 0.1 times its gradient, the bad one nothing
        gradient = 0.5 * mesh.dp  # a micro-batch has a row of each rank
        assert third.loss == pytest.approx(gradient * (1 - 0.1 * gradient), rel=1e-3)


def test_the_loss_scale_grows_after_good_steps_and_is_in_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.runtime.loss_scaler._GROWTH_INTERVAL", 3)
    case, good, bad = overflowing(Mesh())
    (engine,) = case.engines(bad, good, good)
    assert engine.loss_scaler.scale == 2**15
    engine.save(tmp_path / "checkpoint")
    assert engine.state_dict()["loss_scale"] == 2**15
    (other,) = case.engines()
    other.load(tmp_path / "checkpoint")
    assert other.num_steps == 3
    assert other.train_step(good).loss_scale == 2**15
    assert other.loss_scaler.scale == 2**16  # the third good step


def test_other_precisions_go_on_from_fp16_checkpoints(tmp_path: Path) -> None:
    case, good, _ = overflowing(Mesh())
    case.engines(good)[0].save(tmp_path / "checkpoint")
    wide = laid_out(Product(), good, Setup(precision="fp32"), micro_batch_size=1)
    (engine,) = wide.engines()
    engine.load(tmp_path / "checkpoint")
    assert engine.train_step(good).loss_scale == 1
