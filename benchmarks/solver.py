"""Seconds, memory and proved gap of plans of true-size models: `python benchmarks/solver.py`.

Each row is the command `autopar plan … -o plan.json` in a process of its own, cold: no cache, and
imports count. It is held to a bar of seconds, gap and memory. Phases are the seconds that a call of
their functions took, calls of other phases in it apart; CPU seconds are those of the whole process.

    python benchmarks/solver.py gpt2-xl t5-11b    rows whose names start so
    python benchmarks/solver.py --slopes          solving time by GPUs and by layers, capture apart
    python benchmarks/solver.py --oversized       searches that are far too large
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds its own folder only
from autopar.ir.plan import Plan, read_plan
from benchmarks.solver_phases import PHASES
from benchmarks.solver_slopes import print_slopes

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
BAR_BYTES = 3e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan to make, and what it may take. ``model`` is what ``autopar plan`` gets."""

    name: str
    model: str
    gpus: int
    global_batch_size: int
    seq_len: int
    bar_s: float
    bar_gap: float

    def command(self, output: Path) -> list[str]:
        """The arguments of ``autopar``."""
        options = {
            "--cluster": "a100-80gb",
            "--nodes": self.gpus // 8,
            "--global-batch-size": self.global_batch_size,
            "--seq-len": self.seq_len,
            "-o": output,
        }
        return ["plan", self.model, *(str(part) for pair in options.items() for part in pair)]


def _row(name: str, gpus: int, batch: int, seq_len: int, bar_s: float, bar_gap: float) -> Row:
    return Row(
        name=name,
        model=str(CONFIGS / name),
        gpus=gpus,
        global_batch_size=batch,
        seq_len=seq_len,
        bar_s=bar_s,
        bar_gap=bar_gap,
    )


ROWS = (
    _row("gpt2-xl", 8, 512, 1024, 12, 0.001),
    _row("llama-3-8b", 64, 512, 8192, 15, 0.001),
    _row("llama-3-70b", 1024, 2048, 8192, 25, 0.005),
    _row("mixtral-8x22b", 256, 1024, 8192, 30, 0.005),
    _row("t5-11b", 256, 2048, 512, 30, 0.005),
    _row("gemma-3-27b", 256, 1024, 8192, 30, 0.005),
    _row("gpt-1t", 16384, 4096, 2048, 45, 0.01),
)

_MODELS = "benchmarks.solver_models"
OVERSIZED = (
    Row(
        name="MoE of 1,024 experts",
        model=f"{_MODELS}:many_experts",
        gpus=2048,
        global_batch_size=4096,
        seq_len=4096,
        bar_s=120,
        bar_gap=1.0,
    ),
    Row(
        name="1,000 blocks of 5 kinds",
        model=f"{_MODELS}:many_blocks",
        gpus=4096,
        global_batch_size=4096,
        seq_len=4096,
        bar_s=300,
        bar_gap=1.0,
    ),
    _row("llama-3-70b", 100_000, 100_000, 8192, 120, 1.0),
)
"""They have to end with an answer and a bound; how good it is is what they show."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; the status is 1 if a row misses its bar."""
    parser = argparse.ArgumentParser(prog="benchmarks/solver.py")
    parser.add_argument("names", nargs="*", help="rows whose names start so; default: all")
    parser.add_argument("--slopes", action="store_true", help="solving time by GPUs and by layers")
    parser.add_argument("--oversized", action="store_true", help="searches that are far too large")
    arguments = parser.parse_args(argv)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, seed 0")
    if arguments.slopes:
        print_slopes(CONFIGS / "llama-3-8b")
        return 0
    rows = OVERSIZED if arguments.oversized else ROWS
    names = tuple(arguments.names)
    passed = [measure(row) for row in rows if not names or row.name.startswith(names)]
    return 0 if all(passed) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a command took: seconds on the clock and of the CPU, and the peak of memory."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    phases: dict[str, float]


def measure(row: Row) -> bool:
    """Run a row's command, print what it took, and say whether it keeps the bar."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "plan.json"
        taken = run_apart(row.command(output), Path(folder) / "spans.json")
        plan = read_plan(output) if output.exists() else None
    if plan is None:
        print(f"{row.name} on {row.gpus}: FAILED after {taken.wall_s:.1f} s", flush=True)
        return False
    gap = plan.certificate.gap
    kept = taken.wall_s <= row.bar_s and gap <= row.bar_gap and taken.peak_bytes <= BAR_BYTES
    phases = ", ".join(f"{phase} {taken.phases.get(phase, 0.0):.1f}" for phase in PHASES)
    print(
        f"{'pass' if kept else 'MISS'}  {row.name} on {row.gpus} GPUs, {row.global_batch_size} × "
        f"{row.seq_len}: {taken.wall_s:.1f} s (bar {row.bar_s:g}), CPU {taken.cpu_s:.1f} s, "
        f"{taken.peak_bytes / 1e9:.2f} GB, gap {gap:.3%} (bar {row.bar_gap:.1%})\n"
        f"      {phases}\n      {_summary(plan)}",
        flush=True,
    )
    return kept


def run_apart(command: Sequence[str], spans: Path) -> Taken:
    """Run ``autopar`` with these arguments in a new process."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    started = time.perf_counter()
    script = str(Path(__file__).with_name("solver_phases.py"))
    process = os.posix_spawn(
        sys.executable,
        [sys.executable, script, str(spans), *command],
        environment,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, _, used = os.wait4(process, 0)
    return Taken(
        wall_s=time.perf_counter() - started,
        cpu_s=used.ru_utime + used.ru_stime,
        peak_bytes=used.ru_maxrss * 1024,
        phases=json.loads(spans.read_text()) if spans.exists() else {},
    )


def _summary(plan: Plan) -> str:
    mesh, batch, certificate = plan.mesh, plan.batch, plan.certificate
    more = "".join(f", {name} {n}" for name, n in (("cp", mesh.cp), ("ep", mesh.ep)) if n > 1)
    peak = max(rank.peak_bytes for rank in plan.prediction.ranks)
    return (
        f"pp {mesh.pp}, dp {mesh.dp_replicate}·{mesh.dp_shard}{more}, tp {mesh.tp}, micro-batch "
        f"{batch.micro_batch_size} × {batch.num_micro_batches}, ZeRO {plan.schedule.zero_stage}, "
        f"recompute {plan.schedule.recompute}, {plan.schedule.name} × "
        f"{plan.schedule.virtual_stages}: step {plan.prediction.step_s:.4g} s, MFU "
        f"{plan.prediction.mfu:.1%}, {peak / 2**30:.1f} GiB; {certificate.num_candidates} "
        f"candidates, {certificate.num_solved} solved"
    )


if __name__ == "__main__":
    sys.exit(main())
