"""Steps of an optimizer whose state is on the host are those of one whose state is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from autopar.ir.mesh import Mesh
from autopar.runtime import offloaded_optimizer
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.host_copies import HostCopies
from autopar.runtime.threads import run_mesh
from tests.runtime.cases import Setup, make_batch
from tests.runtime.harness import assert_parity, lowered, make_engine, train_on_threads
from tests.runtime.test_engine import make_engine_once

SETUPS = [
    Setup(
        name=name,
        mesh=mesh,
        zero_stage=zero_stage,
        precision=precision,  # type: ignore[arg-type]
        optimizer="adamw",
        max_grad_norm=0.5,
        schedule=schedule,  # type: ignore[arg-type]
        offload_optimizer=True,
    )
    for name, mesh, zero_stage, precision, schedule in (
        ("gpt2", Mesh(), 0, "bf16", "1f1b"),
        ("llama", Mesh(pp=2), 0, "float64", "1f1b"),
        ("frozen", Mesh(dp_shard=2), 1, "bf16", "layered"),
        ("llama", Mesh(dp_shard=2), 1, "float64", "1f1b"),
        ("gpt2", Mesh(pp=2, dp_shard=2), 2, "bf16", "layered"),
        ("llama", Mesh(dp_shard=2, tp=2), 3, "bf16", "1f1b"),
        ("frozen", Mesh(dp_shard=2), 3, "float64", "1f1b"),
    )
]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch):
    """Tiny models have several buckets, too."""
    monkeypatch.setattr(offloaded_optimizer, "STATE_BUCKET_NUMEL", 2000)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_offloaded_steps_are_bit_for_bit_the_same(setup: Setup):
    """With master weights of their own, in bf16, and without; frozen parameters stay."""
    offloaded = train_on_threads(setup, 2)
    resident = train_on_threads(dataclasses.replace(setup, offload_optimizer=False), 2)
    for one, other in zip(offloaded, resident, strict=True):
        assert [r.loss for r in one.results] == [r.loss for r in other.results]
        assert [r.grad_norm for r in one.results] == [r.grad_norm for r in other.results]
        for name, value in other.parameters.items():
            assert one.parameters[name].equal(value), name
            if name in other.gradients:
                assert one.gradients[name].equal(other.gradients[name]), name


def test_offloaded_training_equals_one_device():
    setup = Setup(
        mesh=Mesh(dp_shard=2, tp=2),
        zero_stage=3,
        precision="float64",
        optimizer="adamw",
        max_grad_norm=0.5,
        offload_optimizer=True,
    )
    for outcome in train_on_threads(setup):
        assert_parity(setup, outcome, 3)


@pytest.mark.parametrize("offloads", [(False, True), (True, False)])
def test_checkpoints_go_from_host_to_device_and_back(offloads: tuple[bool, bool], tmp_path: Path):
    """A plan that offloads goes on from one that does not, and the other way round, and the bits
    are those of one that never stopped.
    """
    base = Setup(
        name="gpt2",
        mesh=Mesh(dp_shard=2),
        zero_stage=3,
        precision="bf16",
        optimizer="adamw",
    )
    other = dataclasses.replace(base, mesh=Mesh(pp=2), zero_stage=0)

    def steps(setup: Setup, numbers: tuple[int, ...], load: Path | None, save: Path | None):
        make_engine_once(setup)

        def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
            engine = make_engine(setup, communicator)
            if load is not None:
                engine.load(load)
            for number in numbers:
                engine.train_step(make_batch("gpt2", seed=number))
            if save is not None:
                engine.save(save)
            return engine.state_dict()

        return run_mesh(setup.mesh, rank)[0]

    first, second = (
        dataclasses.replace(setup, offload_optimizer=offload)
        for setup, offload in zip((base, other), offloads, strict=True)
    )
    written = steps(first, (0, 1), None, tmp_path / "checkpoint")
    read = steps(second, (), tmp_path / "checkpoint", None)
    assert written.keys() == read.keys()
    assert all(written[name].equal(read[name]) for name in written)
    went_on = steps(second, (2,), tmp_path / "checkpoint", None)
    plain = dataclasses.replace(second, offload_optimizer=False)
    expected = steps(plain, (2,), tmp_path / "checkpoint", None)
    assert all(went_on[name].equal(expected[name]) for name in expected)


def test_no_state_is_on_the_device_between_steps(monkeypatch: pytest.MonkeyPatch):
    """All that lives on the host was made there: master weights and both moments."""
    made: set[int] = set()
    empty = HostCopies.empty

    def noted(self: HostCopies, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = empty(self, shape, dtype)
        made.add(tensor.untyped_storage().data_ptr())
        return tensor

    monkeypatch.setattr(HostCopies, "empty", noted)
    setup = Setup(
        mesh=Mesh(dp_shard=2),
        zero_stage=2,
        precision="bf16",
        optimizer="adamw",
        offload_optimizer=True,
    )
    lowered(setup)

    def rank(communicator: Communicator) -> Engine:
        engine = make_engine(setup, communicator)
        engine.train_step(make_batch("llama", seed=0))
        return engine

    for engine in run_mesh(setup.mesh, rank):
        assert engine.optimizer is not None
        for parameter in engine.store.parameters.values():
            tensors = [parameter.data, *engine.optimizer.state[parameter].values()]
            large = [tensor for tensor in tensors if tensor.dim()]
            assert len(large) == 3
            assert {tensor.untyped_storage().data_ptr() for tensor in large} <= made | {0}


def test_an_optimizer_that_keeps_less_or_more_state_is_offloaded_too():
    """State by other names, and numbers beside it."""
    setup = Setup(precision="float64", offload_optimizer=True)
    program, model, plan = lowered(setup)
    parameters: list[dict[str, torch.Tensor]] = []
    for offload in (True, False):
        schedule = dataclasses.replace(plan.schedule, offload_optimizer=offload)

        def rank(communicator: Communicator, schedule=schedule) -> dict[str, torch.Tensor]:
            engine = Engine(
                program,
                model,
                dataclasses.replace(plan, schedule=schedule),
                communicator,
                optimizer=lambda shards: torch.optim.NAdam(shards, lr=1e-2, foreach=True),
            )
            torch.manual_seed(0)
            engine.load_parameters(
                {name: torch.ones(p.shape) / 8 for name, p in model.parameters.items()}
            )
            for step in range(3):
                engine.train_step(make_batch("llama", seed=step))
            return engine.full_parameters()

        parameters += run_mesh(Mesh(), rank)
    assert all(parameters[0][name].equal(parameters[1][name]) for name in parameters[1])
