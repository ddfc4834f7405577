"""Fits the cost model to public runs, and says how well it predicts a series that it was not fitted
to: `python -m benchmarks.fit DATA`.

DATA is a folder of tables of runs with measured times (docs/reference/rows.md says their columns;
`series`, `outcome`, `step_time_s` and `mem_gb` say what was measured). Every layout is solved once,
under the hardware file that its row names; then steps are predicted under other numbers of the
file. Prints the numbers that fit best beside those of the file, and errors: under the file, under
the fit, and of each series under a fit of all others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from autopar.calibration.hardware import value_at
from autopar.solver import Cluster
from autopar.solver.facts import Floats
from benchmarks.fit.measured import read_measured
from benchmarks.fit.numbers import MEMORY, NUM_FITTED, TIMES, WHOLE, Fitted
from benchmarks.fit.procedure import MemoryFit, TimeFit, fit_memories, fit_times
from benchmarks.fit.runs import Run
from benchmarks.fit.workers import lay_out_all


def main() -> None:
    """Fit, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=__doc__)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--out", type=Path, metavar="NAME.json", help="write what was fitted")
    parser.add_argument("--series", action="store_true", help="print the errors of each series")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    arguments = parser.parse_args()
    started = time.perf_counter()

    def tell(text: str) -> None:
        print(f"\r[{time.perf_counter() - started:4.0f} s] {text:70}", end="", file=sys.stderr)

    print(f"{platform.processor() or platform.machine()}, {arguments.jobs} processes, "
          f"torch {torch.__version__}, nothing random")  # fmt: skip
    measured = read_measured(arguments.data)
    runs = lay_out_all(
        measured,
        jobs=arguments.jobs,
        progress=lambda done: tell(f"{done} of {len(measured)} runs laid out"),
    )
    timed = [run for run in runs if run.measured.step_s is not None]
    times = fit_times(timed, jobs=arguments.jobs, progress=tell)
    tell("memory")
    cluster = Cluster(runs[0].cluster.name)
    memory = fit_memories(runs, cluster)
    tell("done\n")
    print_numbers(cluster, times, memory)
    print_errors(timed, times, by_series=arguments.series)
    print_memory(memory)
    print(f"{time.perf_counter() - started:.0f} s")
    if arguments.out is not None:
        values = {**times.values, **memory.values}
        arguments.out.write_text(json.dumps(values, indent=1) + "\n")


def print_numbers(cluster: Cluster, times: TimeFit, memory: MemoryFit) -> None:
    """The table of fitted numbers."""
    print(f"\n{NUM_FITTED} fitted numbers, beside those of {cluster.name}")
    print(f"  {'':27} {'file':>10} {'fit':>10}  {'without a series':>20}  {'plausible':>20}")
    for number in (*TIMES, *MEMORY):
        values = times.values if number in TIMES else memory.values
        others = "{:.3g} … {:.3g}".format(*times.ranges[number.path]) if number in TIMES else ""
        print(
            f"  {number.path:27} {value_at(cluster.hardware, number.path):10.4g} "
            f"{values[number.path]:10.4g}  {others:>20}  {_range(number):>20}  {number.meaning}"
        )
    for name, meaning in WHOLE:
        print(f"  passes over scores, {name:20} (forward and backward, held): {meaning}")


def _range(number: Fitted) -> str:
    return f"{number.low:g} … {number.high:g}"


def print_errors(runs: Sequence[Run], times: TimeFit, *, by_series: bool) -> None:
    """Mean absolute errors of steps."""
    print("\nmean absolute error of a step: file, fit, left out (fit of all other series)")
    datasets = np.array([run.measured.dataset for run in runs])
    series = np.array([run.measured.series for run in runs])
    for dataset in sorted(set(datasets.tolist())):
        _print_line(dataset, times, datasets == dataset)
        for one in sorted(set(series[datasets == dataset].tolist())) if by_series else ():
            _print_line(f"  {one}", times, series == one)
    everything = np.ones(len(runs), dtype=bool)
    _print_line("all rows", times, everything)
    fitted, left_out = _mean(times.fitted, everything), _mean(times.left_out, everything)
    print(f"leave-one-series-out error / fitted error: {left_out / fitted:.3f}")


def _print_line(name: str, times: TimeFit, mask: np.ndarray) -> None:
    errors = [_mean(found, mask) for found in (times.before, times.fitted, times.left_out)]
    print(f"  {name:34} {mask.sum():5}" + "".join(f" {error:8.4f}" for error in errors))


def _mean(errors: Floats, mask: np.ndarray) -> float:
    return float(np.abs(errors[mask]).mean())


def print_memory(memory: MemoryFit) -> None:
    """Errors of memory."""
    print("\nmemory: file, fit, left out")
    wrong = (memory.wrong_before, memory.wrong_fitted, memory.wrong_left_out)
    if len(memory.wrong_fitted):
        print(
            f"  {'says rightly what runs out of memory':40} {len(memory.wrong_fitted):5}"
            + "".join(f" {1 - found.mean():8.4f}" for found in wrong)
        )
    if len(memory.fitted):
        shown = (memory.before, memory.fitted, memory.left_out)
        print(
            f"  {'mean absolute error of what tools show':40} {len(memory.fitted):5}"
            + "".join(f" {np.abs(found).mean():8.4f}" for found in shown)
        )


if __name__ == "__main__":
    main()
