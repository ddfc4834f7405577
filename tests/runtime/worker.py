"""What the ranks of the process tests do; ``processes.run_processes`` starts it."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import torch

from autopar.ir.errors import RankFailedError
from autopar.ir.mesh import Mesh
from autopar.runtime.launch import connect
from tests.runtime.cases import Setup, expected_of, make_batch, make_plan
from tests.runtime.harness import assert_parity, make_engine, train

TP2_DP2 = Mesh(dp_shard=2, tp=2)
PP2_TP2 = Mesh(pp=2, tp=2)
PP2_DP2 = Mesh(pp=2, dp_shard=2)
DP4 = Mesh(dp_shard=4)
MODELS = ("llama", "gpt2", "transformer")

FP32 = [
    Setup(
        name=MODELS[(index + zero_stage) % 3],
        mesh=mesh,
        zero_stage=zero_stage,
        schedule="layered" if (index + zero_stage) % 2 else "1f1b",
        recompute="full" if (index + zero_stage // 2) % 2 else "none",
    )
    for index, mesh in enumerate((TP2_DP2, PP2_TP2, PP2_DP2, DP4))
    for zero_stage in range(4)
]
"""Every mesh at every ZeRO stage; models, schedules and recomputation in turn."""

FLOAT64 = [
    Setup(
        name=name,
        mesh=mesh,
        zero_stage=zero_stage,
        schedule=schedule,
        precision="float64",
        optimizer="adamw",
        max_grad_norm=0.5,
    )
    for name, mesh, zero_stage, schedule in (
        ("llama", TP2_DP2, 3, "layered"),
        ("gpt2", PP2_DP2, 2, "1f1b"),
        ("transformer", Mesh(dp_replicate=2, dp_shard=2), 1, "layered"),
    )
]
OTHERS = [
    Setup(layers=4, mesh=PP2_DP2, schedule="layered", zero_stage=3, modular=True),
    Setup(mesh=PP2_TP2, precision="bf16", zero_stage=0, sequence=True),
]


def parity() -> None:
    """Train every setup, and hold this rank's outcome against one device."""
    for setup in (*FP32, *FLOAT64, *OTHERS):
        communicator = connect(make_plan(setup))
        try:
            assert_parity(setup, train(setup, communicator, 3), 3)
        except AssertionError as error:
            raise AssertionError(f"{setup}: {error}") from error
        communicator.close()


def checkpoint(folder: str) -> None:
    """Write under one plan, go on under another."""
    writer = Setup(
        name="gpt2", mesh=PP2_DP2, zero_stage=3, precision="float64", optimizer="adamw"
    )
    reader = dataclasses.replace(writer, mesh=TP2_DP2, schedule="layered", zero_stage=1)
    path = Path(folder) / "checkpoint"
    engine = make_engine(writer, connect(make_plan(writer)))
    losses = [engine.train_step(make_batch("gpt2", seed=step)).loss for step in range(2)]
    engine.save(path)
    engine.close()
    engine = make_engine(reader, connect(make_plan(reader)))
    engine.load(path)
    losses.append(engine.train_step(make_batch("gpt2", seed=2)).loss)
    engine.close()
    for found, expected in zip(losses, expected_of(writer, 3).losses, strict=True):
        assert abs(found - expected) < 1e-9


def failing(how: str, rank: str, degrees: str) -> None:
    """After a good step the chosen rank raises, or dies; the others say what they saw and end with code 3."""
    pp, dp, tp = map(int, degrees.split(","))
    setup = Setup(mesh=Mesh(pp=pp, dp_shard=dp, tp=tp), zero_stage=2)
    communicator = connect(make_plan(setup))
    engine = make_engine(setup, communicator)
    engine.train_step(make_batch(setup.name, seed=0))
    if communicator.rank == int(rank):
        target = engine._runners[min(engine._runners)]

        def fail(*arguments: object) -> None:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("broken on purpose")

        target.segment.module.forward = fail
    try:
        engine.train_step(make_batch(setup.name, seed=1))
    except RankFailedError as error:
        sys.stdout.write(f"RankFailedError: {error}\n")
        engine.close()
        sys.stdout.flush()
        os._exit(3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
