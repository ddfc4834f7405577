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
from tests.runtime.test_engine import alone, make_engine_once

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


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    """Also where it has more than the model."""
    deep, shallow = alone(Setup(layers=3)), alone(Setup(layers=2))
    deep.save(tmp_path / "deep")
    shallow.save(tmp_path / "shallow")
    with pytest.raises(InputError, match=r"has parameter model\.layers\.2\..*, the model has not"):
        shallow.load(tmp_path / "deep")
    with pytest.raises(InputError, match=r"has no parameter model\.layers\.2\."):
        deep.load(tmp_path / "shallow")


def test_a_damaged_checkpoint_is_refused(tmp_path: Path):
    engine = alone(Setup())
    engine.save(tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot read parameters/"):
        engine.load(tmp_path)
    data.unlink()
    with pytest.raises(InputError, match=r"cannot read parameters/.*No such file"):
        engine.load(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"damaged")
    with pytest.raises(InputError, match="cannot read a checkpoint"):
        engine.load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write a checkpoint"):
        engine.save(tmp_path / "file")
