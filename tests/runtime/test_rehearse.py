"""One step of every role of a large plan runs on tensors without memory, over collectives that do
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from autopar.ir.mesh import Mesh
from autopar.runtime.distributed import DistributedCommunicator
from autopar.runtime.engine import Engine
from autopar.runtime.launch import rehearse
from tests.runtime.cases import GLOBAL_BATCH, Setup
from tests.runtime.harness import lowered


@contextmanager
def rehearsed(mesh: Mesh, rank: int) -> Iterator[DistributedCommunicator]:
    communicator = rehearse(mesh, rank)
    try:
        yield communicator
    finally:
        communicator.close()


SETUPS = [
    Setup(mesh=Mesh(pp=4, dp_replicate=2, dp_shard=2, tp=2), schedule="layered", zero_stage=3),
    Setup(name="gpt2", mesh=Mesh(pp=2, dp_shard=4, tp=4), zero_stage=2, recompute="full"),
    Setup(mesh=Mesh(pp=2, dp_replicate=4, tp=2), zero_stage=0, precision="bf16", optimizer="adamw"),
    Setup(layers=6, mesh=Mesh(pp=4, tp=2), schedule="layered", zero_stage=1, modular=True),
    Setup(
        mesh=Mesh(pp=4, dp_shard=2, tp=2), schedule="zero_bubble", zero_stage=3, recompute="full"
    ),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_every_rank_role_runs_on_meta_tensors(setup: Setup):
    program, model, plan = lowered(setup)
    mesh = setup.mesh
    batch = {
        name: torch.empty(info.shape_at(GLOBAL_BATCH), dtype=info.dtype, device="meta")
        for name, info in model.inputs.items()
    }
    last = {"dp": mesh.dp - 1, "tp": mesh.tp - 1}
    for rank in (mesh.rank_at(pp=stage, **last) for stage in range(mesh.pp)):
        with rehearsed(mesh, rank) as communicator:
            engine = Engine(program, model, plan, communicator)
            for _ in range(2):
                engine.train_step(batch)
            assert all(parameter.is_meta for parameter in engine.store.parameters.values())
            assert engine.num_steps == 2
