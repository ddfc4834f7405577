"""``autopar calibrate``: measure this machine, starting the ranks if nobody else has."""

from __future__ import annotations

import argparse
import os
import sys

from autopar.calibration import Request, calibrate, check_output, default_hardware
from autopar.calibration.hardware import value_at
from autopar.calibration.procedure import Report
from autopar.cli.start_ranks import start_ranks
from autopar.ir.errors import InputError
from autopar.solver.hardware import read_hardware


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the hardware file, and print what came of it."""
    if arguments.ranks is not None and arguments.ranks < 1:
        raise InputError(f"--ranks is {arguments.ranks}; it must be at least 1")
    base = arguments.hardware or default_hardware()
    hardware, _ = read_hardware(base)
    if "RANK" not in os.environ:
        check_output(arguments.output)
        command = ["-m", "autopar", "calibrate", "-o", str(arguments.output), "--hardware", base]
        if arguments.quick:
            command.append("--quick")
        ranks = hardware.gpus_per_node if arguments.ranks is None else arguments.ranks
        start_ranks(ranks, [sys.executable, *command])
        return 0
    report = calibrate(
        Request(output=arguments.output, base=base, quick=arguments.quick),
        _show if sys.stderr.isatty() else None,
    )
    if report is not None:
        if sys.stderr.isatty():
            _show("")
        _print(report, str(arguments.output))
    return 0


def _show(text: str) -> None:
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _print(report: Report, path: str) -> None:
    print(f"{'measured':<30} {'before':>11} {'now':>11}")
    for name in report.sources:
        before, now = (value_at(c.hardware, name) for c in (report.base, report.cluster))
        print(f"{name:<30} {before:>11.4g} {now:>11.4g}")
    print(f"\n{'cost model beside timings':<30} {'timings':>11} {'error':>11} {'noise':>11}")
    for one in report.agreement:
        print(f"{one.kind:<30} {one.num_samples:>11} {one.error:>11.1%} {one.noise:>11.1%}")
    print(f"\nwrote {path} in {report.seconds:.0f} s")
