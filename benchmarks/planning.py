"""Seconds and memory of planning true-size models: `python benchmarks/planning.py`.

Each model is planned in a process of its own, as the command line would, with the seconds of each
phase and the peak of resident memory. Targets: under 40 s and 3 GB on 2 cores, gap ≤ 1 %.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import sys
import time
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
CASES = (("llama-3-8b", 8), ("llama-3-70b", 64))
GLOBAL_BATCH_SIZE, SEQ_LEN = 512, 8192


def main() -> None:
    """Plan every case and print a line for each."""
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, seed 0")
    context = multiprocessing.get_context("spawn")
    for name, nodes in CASES:
        process = context.Process(target=measure, args=(name, nodes))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


def measure(name: str, nodes: int) -> None:
    """Plan one model and print what it took."""
    clock = [time.perf_counter()]

    def lap() -> float:
        clock.append(time.perf_counter())
        return clock[-1] - clock[-2]

    import torch

    from autopar.capture import capture, open_model
    from autopar.ir.plan import TrainingPlan
    from autopar.passes import plan_moves
    from autopar.solver import Cluster, solve

    seconds = {"imports": lap()}
    source = open_model(CONFIGS / name)
    model = capture(
        source.build(device="meta"),
        source.example_inputs(SEQ_LEN),
        loss_fn=source.loss_fn,
        compute_dtype=torch.bfloat16,
        name=source.name,
    )
    seconds["capture"] = lap()
    cluster = Cluster("a100-80gb", nodes=nodes)
    plan = solve(
        model,
        cluster,
        global_batch_size=GLOBAL_BATCH_SIZE,
        training=TrainingPlan(
            precision="bf16",
            optimizer="adamw",
            learning_rate=3e-4,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
            max_grad_norm=1.0,
            seed=0,
        ),
        describe_moves=plan_moves,
    )
    seconds["solve"] = lap()
    mesh, certificate, prediction = plan.mesh, plan.certificate, plan.prediction
    peak = max(rank.peak_bytes for rank in prediction.ranks)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{name} on {cluster.num_gpus} {cluster.name}, torch {torch.__version__}: "
        + ", ".join(f"{phase} {took:.1f} s" for phase, took in seconds.items())
        + f", total {sum(seconds.values()):.1f} s, {resident / 1e9:.2f} GB resident\n"
        f"  pp {mesh.pp}, dp {mesh.dp_replicate}·{mesh.dp_shard}, tp {mesh.tp}, micro-batch "
        f"{plan.batch.micro_batch_size} × {plan.batch.num_micro_batches}, ZeRO "
        f"{plan.schedule.zero_stage}, recompute {plan.schedule.recompute}, {plan.schedule.name}\n"
        f"  step {prediction.step_s:.3f} s, MFU {prediction.mfu:.1%}, fullest rank "
        f"{peak / 2**30:.2f} of {prediction.usable_bytes / 2**30:.2f} GiB, gap "
        f"{certificate.gap:.2%} ({certificate.num_candidates} candidates, "
        f"{certificate.num_solved} solved)",
        flush=True,
    )


if __name__ == "__main__":
    main()
