"""Layouts drawn from the whole space, pinned: none is faster than what a plan's certificate proves.

    python -m benchmarks.pinned_grid                     200 layouts of true-size models
    python -m benchmarks.pinned_grid llama-3-8b -n 50    50 of some of them

Each model is planned freely. Then candidates are drawn from its space, with recomputation, cuts and
sequence parallelism pinned now and then, and each is planned with all its decisions pinned. A step
below the certificate's ``bound_s`` is a violation, and so are a rank above its memory, and a plan
whose numbers another simulation does not give again. The status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds its own folder only
from autopar.api.planning import capture_request
from autopar.api.request import open_request
from autopar.ir.plan import Plan
from autopar.solver import Cluster
from autopar.solver.candidates import Candidate
from autopar.solver.instance import Instance, make_instance
from autopar.solver.pins import Pins
from autopar.solver.replay import simulate_plan
from autopar.solver.solve import make_plan, solve_instance
from benchmarks.solver import ROWS, Row

SEED = 0
NUM_LAYOUTS = 200
TRIES = 8
"""Layouts that are drawn for each one that fits, at the most."""

_ROUNDING = 1e-9
_DECISIONS = (
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "ep",
    "tp",
    "micro_batch_size",
    "zero_stage",
    "schedule",
    "virtual_stages",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A pinned layout beside a certificate. ``step_s`` is None where it does not fit.

    Attributes:
        violation: What is wrong; empty if nothing is.
    """

    pin: Pins
    step_s: float | None
    violation: str


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each model, and every violation; the status is 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pinned_grid")
    parser.add_argument("names", nargs="*", help="models whose names start so; default: all")
    parser.add_argument("-n", type=int, default=NUM_LAYOUTS, help="layouts that fit")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args(argv)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"seed {arguments.seed}"
    )
    names = tuple(arguments.names)
    rows = [row for row in ROWS if not names or row.name.startswith(names)]
    total, wrong = 0, 0
    for number, row in enumerate(rows):
        wanted = (arguments.n - total) // (len(rows) - number)
        found = measure(row, wanted, arguments.seed)
        total += sum(pinned.step_s is not None for pinned in found)
        wrong += sum(bool(pinned.violation) for pinned in found)
    print(f"{total} layouts that fit, {wrong} violations")
    return 1 if wrong else 0


def measure(row: Row, wanted: int, seed: int) -> list[Pinned]:
    """Plan a model freely and with so many layouts pinned that fit; print what comes of it."""
    started = time.perf_counter()
    instance = open_instance(row)
    free = solve_instance(instance)
    found: list[Pinned] = []
    steps: list[float] = []
    drawn = pinned_layouts(instance, free, seed)
    while len(steps) < wanted and len(found) < TRIES * wanted:
        pinned = next(drawn)
        found.append(pinned)
        if pinned.violation:
            print(f"  VIOLATION {dict(pinned.pin)}: {pinned.violation}", flush=True)
        if pinned.step_s is not None:
            steps.append(pinned.step_s)
    certificate = free.certificate
    print(
        f"{row.name} on {row.gpus}: {len(steps)} of {len(found)} layouts fit; bound "
        f"{certificate.bound_s:.6g} s, plan {certificate.objective_s:.6g} s, fastest pinned "
        f"{min(steps, default=math.nan):.6g} s; {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    return found


def open_instance(row: Row) -> Instance:
    """What is searched for a row of ``benchmarks/solver.py``."""
    cluster = Cluster("a100-80gb", nodes=row.gpus // 8)
    request = open_request(
        row.model, cluster, {"global_batch_size": row.global_batch_size, "seq_len": row.seq_len}
    )
    return make_instance(
        capture_request(request),
        cluster,
        global_batch_size=request.global_batch_size,
        training=request.training,
    )


def pinned_layouts(instance: Instance, free: Plan, seed: int) -> Iterator[Pinned]:
    """Layouts of an instance, drawn without end, beside the certificate of its free plan."""
    draw = random.Random(seed)
    while True:
        pin = draw_pin(draw, instance.candidates)
        pinned = instance.on(instance.cluster, pin=pin)
        result = pinned.search.run(pinned.candidates)
        if result.best is None:
            yield Pinned(pin=pin, step_s=None, violation="")
            continue
        plan = make_plan(pinned, result, solve_s=0.0)
        yield Pinned(pin=pin, step_s=plan.prediction.step_s, violation=violation(plan, free))


def draw_pin(draw: random.Random, candidates: Sequence[Candidate]) -> Pins:
    """All decisions of a candidate: every mesh and micro-batch is as likely as its schedules and
    ZeRO stages are many.
    """
    chosen = draw.choice(candidates)
    pin: dict[str, int | str] = {name: getattr(chosen, name) for name in _DECISIONS}
    recompute = draw.choice((None, None, "none", "full"))
    if recompute is not None:
        pin["recompute"] = recompute
    if chosen.virtual_stages == 1 and draw.random() < 0.25:
        pin["cuts"] = "even"
    if chosen.tp > 1 and draw.random() < 0.5:
        pin["sequence_parallel"] = draw.choice((0, 1))
    return pin


def violation(plan: Plan, free: Plan) -> str:
    """What is wrong with a pinned plan beside the free one; empty if nothing is."""
    step_s, bound_s = plan.prediction.step_s, free.certificate.bound_s
    if step_s < bound_s * (1 - _ROUNDING):
        return f"step {step_s:.9g} s is below the bound {bound_s:.9g} s"
    for rank in plan.prediction.ranks:
        if rank.peak_bytes > plan.prediction.usable_bytes:
            return f"stage {rank.stage} fills {rank.peak_bytes} bytes"
    again_s = simulate_plan(plan).step_s
    if abs(again_s - step_s) > _ROUNDING * step_s:
        return f"step {step_s:.9g} s is {again_s:.9g} s when simulated again"
    return ""


if __name__ == "__main__":
    sys.exit(main())
