"""``autopar sweep``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from autopar import api
from autopar.api.arguments import SweepArguments, only
from autopar.cli.plan import cluster_of, given_of, show
from autopar.ir.errors import InputError
from autopar.solver.ranges import gpu_counts


def run(arguments: argparse.Namespace) -> int:
    """Plan at each value; print a table or JSON, write CSV and a plot. 1 if nothing fits."""
    for path, what in ((arguments.output, "table"), (arguments.plot, "plot")):
        if path is not None:
            api.check_writable(path, what)
    cluster = cluster_of(arguments)
    found = api.sweep(
        arguments.model,
        cluster,
        arguments.over,
        values_of(arguments.over, arguments.values, cluster),
        **only(SweepArguments, given_of(arguments)),
    )
    if sys.stderr.isatty():
        show("")
    if arguments.output is not None:
        api.write_text(arguments.output, found.csv(), "table")
    if arguments.json:
        print(json.dumps([dataclasses.asdict(point) for point in found.points], indent=1))
    else:
        print(found.table())
    if all(point.step_s is None for point in found.points):
        return 1
    if arguments.plot is not None:
        api.write_text(arguments.plot, found.plot(), "plot")
    return 0


def values_of(over: str, text: str, cluster: api.Cluster) -> list[int]:
    """Values that are listed, or a range: of GPUs those that make sense, of others doublings.

    Raises:
        InputError: It is neither.
    """
    low, colon, high = text.partition(":")
    try:
        if not colon:
            return [int(value) for value in text.split(",")]
        first, last = int(low), int(high)
    except ValueError:
        first, last = 1, 0
    if not 1 <= first <= last:
        raise InputError(
            f"--values is {text!r}", hint="numbers as 8,16,32 or from the least to the most as 8:64"
        )
    if over == "gpus":
        return list(gpu_counts(cluster, first, last))
    return [first * 2**power for power in range((last // first).bit_length())]
