"""What the ranks of the process tests do; ``processes.run_processes`` starts it.

``python -m tests.runtime.worker FOLDER NUM_RANKS NAME ARGUMENTS`` prepares once, forks the ranks,
and writes how each ended: exit code and time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.errors import RankFailedError
from autopar.ir.experts import expert_dispatch, routed_experts
from autopar.ir.mesh import Mesh
from autopar.ir.plan import ScheduleName
from autopar.runtime.distributed_group import DistributedGroup
from autopar.runtime.launch import connect
from tests.runtime.cases import Setup, expected_of, make_batch, make_plan
from tests.runtime.harness import assert_parity, lowered, make_engine, train

TP2_DP2 = Mesh(dp_shard=2, tp=2)
PP2_TP2 = Mesh(pp=2, tp=2)
PP2_DP2 = Mesh(pp=2, dp_shard=2)
DP4 = Mesh(dp_shard=4)
MODELS = ("llama", "gpt2", "transformer")

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "layered")
FP32 = [
    Setup(
        name=MODELS[(index + zero_stage) % 3],
        mesh=mesh,
        zero_stage=zero_stage,
        schedule=SCHEDULES[(index + zero_stage) % 2],
        recompute="full" if (index + zero_stage // 2) % 2 else "none",
    )
    for index, mesh in enumerate((TP2_DP2, PP2_TP2, PP2_DP2, DP4))
    for zero_stage in range(4)
]
"""Every mesh at every ZeRO stage; models, schedules and recomputation in turn: each mesh has every
pair of schedule and recomputation, and every model.
"""
DATA_PARALLEL = [
    dataclasses.replace(
        setup,
        name=MODELS[(MODELS.index(setup.name) + 1) % 3],
        schedule=SCHEDULES[setup.schedule == "1f1b"],
        recompute="none" if setup.recompute == "full" else "full",
    )
    for setup in FP32
    if setup.mesh == DP4
]
"""Pure data parallelism with the other schedule, too: there ZeRO has most to do."""

FLOAT64 = [
    Setup(
        name=name,
        mesh=mesh,
        zero_stage=zero_stage,
        schedule=SCHEDULES[is_layered],
        precision="float64",
        optimizer="adamw",
        max_grad_norm=0.5,
    )
    for name, mesh, zero_stage, is_layered in (
        ("llama", TP2_DP2, 3, True),
        ("gpt2", PP2_DP2, 2, False),
        ("transformer", Mesh(dp_replicate=2, dp_shard=2), 1, True),
    )
]
OTHERS = [
    Setup(layers=4, mesh=PP2_DP2, schedule="layered", zero_stage=3, modular=True),
    Setup(mesh=PP2_TP2, precision="bf16", zero_stage=0, sequence=True),
    Setup(name="dropout", mesh=TP2_DP2, zero_stage=3, recompute="full"),
    Setup(mesh=PP2_DP2, precision="fp16", zero_stage=2),
    Setup(mesh=DP4, precision="bf16", zero_stage=1, gradient_dtype="bf16", reduce_dtype="bf16"),
    # stages that make different numbers of groups, and a parameter of the first and the last
    Setup(name="gpt2", layers=4, mesh=Mesh(pp=4)),
    Setup(
        mesh=PP2_DP2, zero_stage=3, precision="float64", optimizer="adamw", offload_optimizer=True
    ),
    Setup(mesh=Mesh(dp_shard=2, cp=2), zero_stage=3),
    Setup(mesh=PP2_DP2, layers=4, zero_stage=3, zero_stages="0=1, 2=2, 5=1"),
    Setup(name="gpt2", mesh=Mesh(cp=2, ep=2), zero_stage=2, schedule="layered"),
]


WRITER = Setup(name="gpt2", mesh=PP2_DP2, zero_stage=3, precision="float64", optimizer="adamw")
READER = dataclasses.replace(WRITER, mesh=TP2_DP2, schedule="layered", zero_stage=1)


def parity() -> None:
    """Train every setup, and hold this rank's outcome against one device."""
    for setup in (*FP32, *DATA_PARALLEL, *FLOAT64, *OTHERS):
        communicator = connect(make_plan(setup))
        try:
            assert_parity(setup, train(setup, communicator, 3), 3)
        except AssertionError as error:
            raise AssertionError(f"{setup}: {error}") from error
        communicator.close()


def checkpoint(folder: str) -> None:
    """Write under one plan, go on under another."""
    path = Path(folder) / "checkpoint"
    engine = make_engine(WRITER, connect(make_plan(WRITER)))
    losses = [engine.train_step(make_batch("gpt2", seed=step)).loss for step in range(2)]
    engine.save(path)
    engine.close()
    engine = make_engine(READER, connect(make_plan(READER)))
    engine.load(path)
    losses.append(engine.train_step(make_batch("gpt2", seed=2)).loss)
    engine.close()
    for found, expected in zip(losses, expected_of(WRITER, 3).losses, strict=True):
        assert abs(found - expected) < 1e-9


def failing(how: str, rank: str, degrees: str) -> None:
    """After a good step the chosen rank raises, or dies; those that see it end with code 3."""
    setup = failing_setup(degrees)
    communicator = connect(make_plan(setup))
    engine = make_engine(setup, communicator)
    engine.train_step(make_batch(setup.name, seed=0))
    if communicator.rank == int(rank):
        runners = engine._trainer.form.runners
        first = runners[min(runners)]

        def fail(*arguments: object) -> None:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("broken on purpose")

        next(first.segment.module.children()).forward = fail
    try:
        engine.train_step(make_batch(setup.name, seed=1))
    except RankFailedError as error:
        sys.stdout.write(f"RankFailedError: {error}\n")
        engine.close()
        sys.stdout.flush()
        os._exit(3)


def failing_setup(degrees: str) -> Setup:
    """Stages, data and tensor ranks as in ``2,2,1``."""
    pp, dp, tp = map(int, degrees.split(","))
    return Setup(name="transformer", mesh=Mesh(pp=pp, dp_shard=dp, tp=tp), zero_stage=2)


def dispatch(folder: str) -> None:
    """Experts of two ranks, first with tokens for all of them, then with none for rank 1."""
    rank, size = int(os.environ["RANK"]), 2
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    axis = DistributedGroup(name="ep", rank=rank, size=size, handle=dist.group.WORLD)
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
        return made.requires_grad_()

    hidden, weights, up, down = floats(4, 3, 5), floats(4, 3, 2), floats(4, 6, 5), floats(4, 5, 6)
    for num_chosen in (4, 2):
        ids = torch.randint(0, num_chosen, (4, 3, 2), generator=generator)
        whole = routed_experts(hidden, ids, weights, up, down, activation="silu", gated=False)
        expected = torch.autograd.grad(whole.square().sum(), (hidden, weights, up, down))
        shards = [t.detach().chunk(size)[rank] for t in (hidden, weights, up, down)]
        local = [shard.requires_grad_() for shard in shards]
        tokens, of_tokens, first, second = local
        found = expert_dispatch(
            tokens,
            ids.chunk(size)[rank],
            of_tokens,
            first,
            second,
            None,
            None,
            axis,
            activation="silu",
            gated=False,
            transposed=False,
            capacity_factor=None,
        )
        gradients = torch.autograd.grad(found.square().sum(), local)
        torch.testing.assert_close(found, whole.chunk(size)[rank])
        for gradient, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, wanted.chunk(size)[rank])
    dist.destroy_process_group()


def prepare(name: str, arguments: list[str]) -> None:
    """What all ranks would do alike: capture and lower. No backward runs before the fork."""
    if name == "dispatch":
        return
    if name == "failing":
        setups = [failing_setup(arguments[-1])]
    else:
        setups = (
            [*FP32, *DATA_PARALLEL, *FLOAT64, *OTHERS] if name == "parity" else [WRITER, READER]
        )
    for setup in setups:
        lowered(setup)


Ranks = Callable[..., None]
"""What a rank does with the arguments of the command line."""


def fork_rank(rank: int, folder: Path, work: Ranks, arguments: list[str]) -> int:
    """A rank in a process of its own, whose output goes to a file; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    file = os.open(folder / f"{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 1
    try:
        work(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def fork_ranks(folder: Path, num_ranks: int, work: Ranks, arguments: list[str]) -> None:
    """Fork all ranks, wait for them, and write how each ended."""
    pids = [fork_rank(rank, folder, work, arguments) for rank in range(num_ranks)]
    ended: dict[int, tuple[int, float]] = {}
    while len(ended) < num_ranks:
        pid, status = os.wait()
        ended[pid] = (os.waitstatus_to_exitcode(status), time.monotonic())
    (folder / "ended.json").write_text(json.dumps([ended[pid] for pid in pids]))


def main(folder: Path, num_ranks: int, name: str, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    prepare(name, arguments)
    fork_ranks(folder, num_ranks, globals()[name], arguments)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
