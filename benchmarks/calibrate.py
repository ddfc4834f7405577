"""Predicted beside measured steps on this machine: `python benchmarks/calibrate.py`.

In each round the machine is calibrated for each number of ranks, the demo's model is planned on it
under some layouts and freely, and each plan trains for some steps with gloo. The first steps are
left out; of the rest the fastest and the median are printed. Target: the median within 20 % of what
was predicted. A shared machine's pace changes from minute to minute, and calibrations with it: what
counts is the median of the rounds. The last column says how many cores something else took
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from autopar import api

CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "llama-tiny"
GLOBAL_BATCH_SIZE, SEQ_LEN, WARM_UP = 16, 64, 4
LAYOUTS: tuple[tuple[int, Mapping[str, int | str]], ...] = (
    (4, {}),
    (4, {"pp": 2, "tp": 2, "dp_shard": 1, "dp_replicate": 1}),
    (4, {"dp_replicate": 4, "dp_shard": 1, "tp": 1, "pp": 1, "zero_stage": 0}),
    (4, {"dp_shard": 4, "dp_replicate": 1, "tp": 1, "pp": 1, "zero_stage": 1}),
    (4, {"dp_shard": 4, "dp_replicate": 1, "tp": 1, "pp": 1, "zero_stage": 3}),
    (4, {"tp": 4, "pp": 1, "dp_replicate": 1, "dp_shard": 1}),
    (4, {"tp": 2, "dp_replicate": 2, "dp_shard": 1, "pp": 1, "zero_stage": 0}),
    (2, {}),
    (2, {"pp": 2, "tp": 1, "dp_replicate": 1, "dp_shard": 1}),
    (2, {"tp": 2, "pp": 1, "dp_replicate": 1, "dp_shard": 1}),
    (2, {"dp_replicate": 2, "dp_shard": 1, "tp": 1, "pp": 1, "zero_stage": 0}),
    (2, {"dp_shard": 2, "dp_replicate": 1, "tp": 1, "pp": 1, "zero_stage": 3}),
    (1, {"micro_batch_size": 4}),
)


def main() -> None:
    """Calibrate, plan and train, and print a line for each layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, help="layouts of so many ranks only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--quick", action="store_true", help="calibrate quickly")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"torch {torch.__version__}, {CONFIG.name}, seed 0, milliseconds", flush=True)
    print(f"{'layout':<44} predicted  fastest   median  predicted / fastest  / median  other cores")
    ratios: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(arguments.rounds):
            for num_ranks in sorted({ranks for ranks, _ in LAYOUTS}, reverse=True):
                if arguments.ranks in (None, num_ranks):
                    hardware = _calibrate(Path(scratch), num_ranks, quick=arguments.quick)
                    for ranks, pin in LAYOUTS:
                        if ranks == num_ranks:
                            found = _line(hardware, num_ranks, pin, arguments.steps)
                            ratios.setdefault(f"{num_ranks} ranks {pin}", []).append(found)
    for index, name in enumerate(("fastest", "median")):
        middle = [statistics.median(pair[index] for pair in own) for own in ratios.values()]
        worst = max(max(ratio, 1 / ratio) for ratio in middle)
        print(f"{len(middle)} layouts, beside the {name}, median of {arguments.rounds} rounds: ")
        print(f"  {' '.join(f'{ratio:.2f}' for ratio in middle)}; worst {worst:.2f}, ", end="")
        print(f"within 20 %: {sum(1 / 1.2 <= ratio <= 1.2 for ratio in middle)}")


def _calibrate(folder: Path, num_ranks: int, *, quick: bool) -> Path:
    path = folder / f"cpu-{num_ranks}.toml"
    _autopar("calibrate", "-o", path, "--ranks", num_ranks, *(["--quick"] if quick else []))
    return path


def _line(
    hardware: Path, num_ranks: int, pin: Mapping[str, int | str], steps: int
) -> tuple[float, float]:
    """Print the line of a layout; what was predicted over the fastest step and over the median."""
    plan = api.plan(
        CONFIG,
        api.Cluster(hardware, gpus_per_node=num_ranks),
        global_batch_size=GLOBAL_BATCH_SIZE,
        seq_len=SEQ_LEN,
        precision="fp32",
        pin=pin,
    )
    path = hardware.with_suffix(".json")
    plan.save(path)
    before, started = _others_s(), time.perf_counter()
    lines = _autopar("run", path, "--steps", WARM_UP + steps).splitlines()
    others = (_others_s() - before) / (time.perf_counter() - started)
    seconds = [float(json.loads(line)["seconds"]) for line in lines if line.startswith("{")]
    fastest, median = min(seconds[WARM_UP:]), statistics.median(seconds[WARM_UP:])
    mesh, batch = plan.mesh, plan.batch
    layout = f"pp {mesh.pp} dp {mesh.dp_replicate}·{mesh.dp_shard} tp {mesh.tp}, "
    layout += f"ZeRO {plan.schedule.zero_stage}, {plan.schedule.name}, "
    layout += f"{batch.num_micro_batches} × {batch.micro_batch_size}"
    predicted = plan.prediction.step_s
    print(
        f"{layout:<44} {predicted * 1e3:>9.1f} {fastest * 1e3:>8.1f} {median * 1e3:>8.1f} "
        f"{predicted / fastest:>19.2f} {predicted / median:>9.2f} {others:>12.2f}",
        flush=True,
    )
    return predicted / fastest, predicted / median


def _others_s() -> float:
    """CPU seconds of all processes but this one and those that it has waited for; Linux only."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return -own
    ticks = [int(field) for field in fields]
    idle = ticks[3] + ticks[4]
    return (sum(ticks[:8]) - idle) / os.sysconf("SC_CLK_TCK") - own


def _autopar(*arguments: object) -> str:
    command = [sys.executable, "-m", "autopar", *map(str, arguments)]
    done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    main()
