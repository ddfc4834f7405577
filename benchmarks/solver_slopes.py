"""How solving time grows with GPUs, and with layers of the same kind; capture apart."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from autopar.capture import capture
from autopar.capture.sources import open_settings
from autopar.ir.plan import TrainingPlan
from autopar.solver import Cluster, solve

GPUS = (8, 32, 128, 512, 2048, 8192, 16384)
LAYERS = (8, 16, 32, 64, 128, 160)
NODES = 8
"""Nodes for the models of all depths."""

SEQUENCES_PER_GPU, SEQ_LEN = 8, 8192


def print_slopes(config: Path) -> None:
    """Print the solving times of a model by GPUs, and by layers; each in a process of its own."""
    settings = json.loads((config / "config.json").read_text())
    print(f"{config.name}, {SEQUENCES_PER_GPU} sequences of {SEQ_LEN} tokens for each GPU")
    by_gpus = [solving_seconds(settings, gpus // 8) for gpus in GPUS]
    _print_table("GPUs", GPUS, by_gpus)
    logs = math.log2(GPUS[-1]) / math.log2(GPUS[0])
    print(f"with the logarithm it would be {logs:.2f}×, in proportion {GPUS[-1] / GPUS[0]:.0f}×\n")
    print(f"{config.name} of so many layers on {8 * NODES} GPUs")
    by_layers = [
        solving_seconds({**settings, "num_hidden_layers": layers}, NODES) for layers in LAYERS
    ]
    _print_table("layers", LAYERS, by_layers)
    print(f"in proportion it would be {LAYERS[-1] / LAYERS[0]:.0f}×")


def solving_seconds(settings: Mapping[str, object], nodes: int) -> tuple[float, float, float, str]:
    """Seconds of capture, of solving on the clock and of the CPU, and the plan in words."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_solve, (dict(settings), nodes))


def _solve(settings: dict[str, object], nodes: int) -> tuple[float, float, float, str]:
    started = time.perf_counter()
    source = open_settings(settings, name="model")
    model = capture(
        source.build(device="meta"),
        source.example_inputs(SEQ_LEN),
        compute_dtype=torch.bfloat16,
        name=source.name,
    )
    captured, cpu = time.perf_counter(), time.process_time()
    cluster = Cluster("a100-80gb", nodes=nodes)
    plan = solve(
        model,
        cluster,
        global_batch_size=SEQUENCES_PER_GPU * cluster.num_gpus,
        training=_TRAINING,
    )
    mesh = plan.mesh
    return (
        captured - started,
        time.perf_counter() - captured,
        time.process_time() - cpu,
        f"pp {mesh.pp}, dp {mesh.dp_replicate}·{mesh.dp_shard}, tp {mesh.tp}, micro-batch "
        f"{plan.batch.micro_batch_size} × {plan.batch.num_micro_batches}, gap "
        f"{plan.certificate.gap:.3%}, {plan.certificate.num_candidates} candidates",
    )


_TRAINING = TrainingPlan(
    precision="bf16",
    optimizer="adamw",
    learning_rate=3e-4,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-8,
    max_grad_norm=1.0,
    seed=0,
)


def _print_table(
    name: str, sizes: Sequence[int], rows: Sequence[tuple[float, float, float, str]]
) -> None:
    for size, (capture_s, wall_s, cpu_s, plan) in zip(sizes, rows, strict=True):
        print(
            f"  {size:6} {name}: capture {capture_s:5.1f} s, solving {wall_s:5.1f} s, "
            f"CPU {cpu_s:5.1f} s; {plan}"
        )
    growth = rows[-1][2] / rows[0][2]
    print(f"  CPU seconds of the last are {growth:.2f} times those of the first", flush=True)
