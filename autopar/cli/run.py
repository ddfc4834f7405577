"""``autopar run``: train the model of a plan, starting the ranks if nobody else has."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from autopar import api
from autopar.cli import STARTED_BY_US
from autopar.cli.start_ranks import start_ranks
from autopar.ir.errors import InputError
from autopar.ir.plan import ClusterRef, Plan, read_plan
from autopar.runtime import StepResult


def run(arguments: argparse.Namespace) -> int:
    """Train for some steps; the first rank prints one JSON line for each."""
    if arguments.steps < 1:
        raise InputError(f"--steps is {arguments.steps}; it must be at least 1")
    plan = read_plan(arguments.plan)
    # whatever can fail, fails before ranks are started
    api.plan_source(plan)
    batches = _batches(plan, arguments.data)
    if arguments.load is not None and not arguments.load.is_dir():
        raise InputError("there is no checkpoint to go on from", where=str(arguments.load))
    if arguments.save is not None:
        _make_directory(arguments.save)
    if "RANK" not in os.environ:
        _start_ranks(plan, arguments)
        return 0
    with api.compile_plan(plan) as compiled:
        if arguments.load is not None:
            compiled.load(arguments.load)
            for _ in range(compiled.num_steps):
                next(batches)  # those before the checkpoint
        for _ in range(arguments.steps):
            result = compiled.train_step(next(batches))
            if compiled.rank == 0:
                print(json.dumps(step_line(compiled.num_steps, result, plan)), flush=True)
        if arguments.save is not None:
            compiled.save(arguments.save)
    return 0


def step_line(step: int, result: StepResult, plan: Plan) -> dict[str, object]:
    """What is printed of a step."""
    line: dict[str, object] = {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
        "seconds": round(result.seconds, 6),
        "tokens_per_s": round(result.num_tokens / result.seconds, 1),
    }
    if plan.training.precision == "fp16":
        line |= {"loss_scale": result.loss_scale, "skipped": result.skipped}
    return line


def _start_ranks(plan: Plan, arguments: argparse.Namespace) -> None:
    command = ["-m", "autopar", "run", str(arguments.plan), "--steps", str(arguments.steps)]
    for name in ("data", "save", "load"):
        if getattr(arguments, name) is not None:
            command += [f"--{name}", str(getattr(arguments, name))]
    if plan.cluster.nodes > 1:
        raise InputError(
            f"the plan is for {plan.cluster.nodes} nodes; ranks are started here on one node only",
            where=str(arguments.plan),
            hint=_torchrun(plan.cluster, " ".join(command)),
        )
    start_ranks(plan.device_mesh().num_ranks, [sys.executable, *command])


def _torchrun(cluster: ClusterRef, command: str) -> str:
    """How to start ranks on several nodes. Those of several groups are told which node they are:
    ranks are numbered in the order of groups.
    """
    if not cluster.groups:
        return (
            f"on every node: torchrun --nnodes {cluster.nodes} --nproc-per-node "
            f"{cluster.gpus_per_node} --rdzv-backend c10d --rdzv-endpoint HOST:PORT {command}"
        )
    nodes, first = [], 0
    for group in cluster.groups:
        last = first + group.nodes - 1
        ranks = f"{first} to {last}" if last > first else f"{first}"
        nodes.append(f"{ranks} on {group.name} with --nproc-per-node {group.gpus_per_node}")
        first += group.nodes
    return (
        f"on every node: torchrun --nnodes {cluster.nodes} --node-rank N --master-addr HOST "
        f"--master-port PORT {command}, where N is {', '.join(nodes)}"
    )


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot save there: {error.strerror or error}", where=str(path)) from None


def _batches(plan: Plan, data: Path | None) -> Iterator[dict[str, Tensor]]:
    """Global batches, the same on every rank; a data file is read round and round."""
    return api.synthetic_batches(plan) if data is None else _from_tokens(plan, data)


def _from_tokens(plan: Plan, path: Path) -> Iterator[dict[str, Tensor]]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"cannot read tokens: {error}", where=str(path)) from None
    if not isinstance(tokens, np.ndarray):
        raise InputError("several arrays; tokens are one, in a .npy file", where=str(path))
    seq_len = plan.model.seq_len
    inputs = api.plan_source(plan).example_inputs(seq_len)
    if seq_len is None or "input_ids" not in inputs or inputs.keys() - {"input_ids", "labels"}:
        raise InputError(
            f"the model takes {', '.join(inputs)}; a file of tokens gives input_ids and labels",
            hint="leave --data out, or train with autopar.compile",
        )
    if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
        raise InputError(
            f"tokens are {tokens.ndim}-d {tokens.dtype}; they must be integers, 1-d or 2-d",
            where=str(path),
        )
    if tokens.ndim == 2 and tokens.shape[1] != seq_len:
        raise InputError(
            f"sequences have {tokens.shape[1]} tokens; the plan is for {seq_len}", where=str(path)
        )
    sequences = tokens.reshape(-1)[: tokens.size // seq_len * seq_len].reshape(-1, seq_len)
    if len(sequences) == 0:
        raise InputError(f"fewer tokens than one sequence of {seq_len}", where=str(path))
    vocabulary = api.vocabulary_size(plan)
    if (
        STARTED_BY_US not in os.environ  # who started us has read the whole file for this
        and vocabulary is not None
        and not 0 <= int(sequences.min()) <= int(sequences.max()) < vocabulary
    ):
        raise InputError(f"token ids lie outside the vocabulary of {vocabulary}", where=str(path))
    return _cycle(sequences, plan.batch.global_batch_size, tuple(inputs))


def _cycle(
    sequences: np.ndarray, batch_size: int, names: tuple[str, ...]
) -> Iterator[dict[str, Tensor]]:
    start = 0
    while True:
        rows = np.arange(start, start + batch_size) % len(sequences)
        ids = torch.from_numpy(np.asarray(sequences[rows], dtype=np.int64))
        yield {name: ids.clone() for name in names}
        start = (start + batch_size) % len(sequences)
