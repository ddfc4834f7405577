"""``autopar sweep``: a table, CSV, and a plot."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from autopar.cli.sweep import values_of
from autopar.ir.errors import InputError
from autopar.solver import Cluster
from tests.cli.helpers import assert_refused, run

PINS = ("--tp", 1, "--recompute", "none")


def test_a_sweep_is_printed_written_and_drawn(
    capfd: pytest.CaptureFixture[str], config: Path, tmp_path: Path
):
    table, plot = tmp_path / "sweep.csv", tmp_path / "sweep.svg"
    command = ("sweep", config, "--cluster", "cpu-local", "--gpus-per-node", 2, *PINS)
    done = run(capfd, *command, "--over", "batch", "--values", "4:8", "-o", table, "--plot", plot)
    assert (done.status, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()] == ["batch", "4", "8"]
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["global_batch_size"]) for row in rows] == [4, 8]
    assert plot.read_text().startswith("<svg")
    done = run(capfd, *command, "--over", "gpus", "--values", "1,2", "--json")
    assert [point["num_gpus"] for point in json.loads(done.out)] == [1, 2]


def test_where_nothing_fits_the_status_says_so(capfd: pytest.CaptureFixture[str], config: Path):
    flags = ("--cluster", "cpu-local", "--gpus-per-node", 2, "--over", "batch", "--values", "3,5")
    done = run(capfd, "sweep", config, *flags, "--dp-replicate", 1, "--dp-shard", 2, *PINS)
    assert_refused(done, "does not divide the global batch of 3")


def test_ranges_are_gpu_counts_and_doublings():
    cluster = Cluster("a100-80gb")
    assert values_of("gpus", "2:24", cluster) == [2, 4, 8, 16, 24]
    assert values_of("batch", "3:25", cluster) == [3, 6, 12, 24]
    assert values_of("length", "8:8", cluster) == [8]
    assert values_of("batch", "8,4", cluster) == [8, 4]
    for text in ("", "a", "8:", "8:4", "0:4", "1,b"):
        with pytest.raises(InputError, match="--values is"):
            values_of("batch", text, cluster)
