"""The main job, end to end: plan a true-size model, then train a small one in parallel.

1. Llama-3-8B is planned for 8 nodes × 8 A100-80GB from its config alone, and the plan explained.
2. A small Llama is planned for 4 ranks of this machine, twice: freely, and as pipeline × tensor.
3. Each plan trains for a few steps under torchrun with gloo, and its losses are held against
   those of the plain model in one process.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from autopar import api

CONFIGS = Path(__file__).parent / "configs"
STEPS = 5
TOLERANCE = 1e-5


def main() -> int:
    """Run the demo; 0 if the losses of all runs agree."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        _say("Llama-3-8B on 64 A100-80GB")
        _autopar(
            *("plan", CONFIGS / "llama-3-8b", "--cluster", "a100-80gb", "--nodes", 8),
            *("--global-batch-size", 512, "--seq-len", 8192, "-o", directory / "8b.json"),
        )
        small = (
            *("plan", CONFIGS / "llama-tiny", "--cluster", "cpu-local", "--gpus-per-node", 4),
            *("--global-batch-size", 16, "--seq-len", 64, "--precision", "fp32"),
        )
        _say("A small Llama on 4 local ranks, freely planned")
        _autopar(*small, "-o", directory / "free.json")
        _say("The same, pinned to pipeline 2 × tensor 2")
        _autopar(*small, "--pp", 2, "--tp", 2, "-o", directory / "pinned.json")
        agree = [_train(directory / name) for name in ("free.json", "pinned.json")]
    return 0 if all(agree) else 1


def _train(path: Path) -> bool:
    plan = api.read_plan(path)
    mesh = plan.mesh
    _say(
        f"Training {STEPS} steps: pipeline {mesh.pp} × data {mesh.dp_replicate * mesh.dp_shard} "
        f"× tensor {mesh.tp}, {plan.schedule.name}, ZeRO {plan.schedule.zero_stage}"
    )
    lines = _autopar("run", path, "--steps", STEPS, capture=True).splitlines()
    parallel = [float(json.loads(line)["loss"]) for line in lines if line.startswith("{")]
    single = _train_in_one_process(plan)
    print(f"{'step':>4}  {'4 ranks':>10}  {'1 process':>10}  difference")
    for step, (ours, expected) in enumerate(zip(parallel, single, strict=True), 1):
        print(f"{step:>4}  {ours:>10.6f}  {expected:>10.6f}  {abs(ours - expected):.1e}")
    worst = max(abs(ours - expected) for ours, expected in zip(parallel, single, strict=True))
    print(f"losses {'agree' if worst <= TOLERANCE else 'DIFFER'} within {TOLERANCE:g}")
    return worst <= TOLERANCE


def _train_in_one_process(plan: api.Plan) -> list[float]:
    """Losses of the plain Hugging Face model under plain PyTorch, on the same data."""
    training = plan.training
    model = api.plan_source(plan).build(device="cpu", seed=training.seed)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        betas=training.betas,
        eps=training.eps,
    )
    losses: list[float] = []
    for batch in itertools.islice(api.synthetic_batches(plan), STEPS):
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        if training.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _autopar(*arguments: object, capture: bool = False) -> str:
    command = [sys.executable, "-m", "autopar", *map(str, arguments)]
    print("$ autopar", *command[3:], flush=True)
    done = subprocess.run(
        command, check=False, text=True, stdout=subprocess.PIPE if capture else None
    )
    if done.returncode:
        sys.exit(done.returncode)
    print(flush=True)
    return done.stdout or ""


def _say(title: str) -> None:
    print(f"\n── {title} " + "─" * max(0, 76 - len(title)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
