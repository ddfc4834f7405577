"""A checkpoint of one plan goes on under another as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.ir.errors import InputError
from autopar.ir.mesh import Mesh
from autopar.runtime.communicator import Communicator
from autopar.runtime.threads import run_mesh
from tests.runtime.cases import Setup, expected_of, make_batch
from tests.runtime.harness import make_engine
from tests.runtime.test_engine import make_engine_once

WRITERS = [
    Setup(name="gpt2", mesh=Mesh(pp=2, dp_shard=2), zero_stage=3, precision="float64"),
    Setup(name="gpt2", mesh=Mesh(dp_replicate=2, tp=2), zero_stage=0, precision="float64"),
]
READERS = [
    Setup(
        name="gpt2",
        mesh=Mesh(dp_shard=2, tp=2),
        schedule="layered",
        zero_stage=3,
        precision="float64",
    ),
    Setup(name="gpt2", mesh=Mesh(), precision="float64"),
]


@pytest.mark.parametrize("reader", READERS, ids=str)
@pytest.mark.parametrize("writer", WRITERS, ids=str)
def test_training_goes_on_under_another_plan(writer: Setup, reader: Setup, tmp_path: Path):
    import dataclasses

    writer = dataclasses.replace(writer, optimizer="adamw")
    reader = dataclasses.replace(reader, optimizer="adamw")
    make_engine_once(writer)
    make_engine_once(reader)

    def write(communicator: Communicator) -> list[float]:
        engine = make_engine(writer, communicator)
        losses = [engine.train_step(make_batch("gpt2", seed=step)).loss for step in range(2)]
        engine.save(tmp_path / "checkpoint")
        return losses

    def read(communicator: Communicator) -> list[float]:
        engine = make_engine(reader, communicator)
        engine.load(tmp_path / "checkpoint")
        assert engine.num_steps == 2
        return [engine.train_step(make_batch("gpt2", seed=2)).loss]

    losses = run_mesh(writer.mesh, write)[0] + run_mesh(reader.mesh, read)[0]
    assert losses == pytest.approx(expected_of(writer, 3).losses, abs=1e-9)


def test_a_missing_checkpoint_is_an_error(tmp_path: Path):
    setup = Setup()
    make_engine_once(setup)
    engine = run_mesh(Mesh(), lambda communicator: make_engine(setup, communicator))[0]
    with pytest.raises(InputError, match="cannot read a checkpoint"):
        engine.load(tmp_path / "nothing")
