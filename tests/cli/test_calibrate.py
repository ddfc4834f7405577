"""``autopar calibrate``, with real ranks, and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import cli
from autopar.calibration import procedure
from autopar.calibration.compute import Compute
from autopar.cli import calibrate as command
from autopar.ir.errors import ClusterError
from autopar.solver.hardware import Cluster
from tests.cli.helpers import assert_refused, run


@pytest.mark.ranks
@pytest.mark.slow
def test_a_quick_calibration_writes_hardware_that_plans_take(config: Path, tmp_path: Path):
    """Slow: starts 2 processes that measure for some seconds."""
    path = tmp_path / "mine.toml"
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "calibrate", "-o", path, "--ranks", "2", "--quick"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"wrote {path}" in done.stdout
    cluster = Cluster(path)
    assert (cluster.name, cluster.gpus_per_node, cluster.device) == ("mine", 2, "cpu")
    sources = cluster.hardware.sources
    measured = {path for path, said in sources.items() if not said.startswith("not measured here")}
    assert {"chip.launch_s", "efficiency.hbm", "node_link.latency_s"} < measured
    assert {"overlap.slowdown", "chip.usable_bytes", "chip.peak_flops.bf16"} < measured
    assert sources["network.latency_s"].startswith("not measured here, from cpu-local: ")
    assert "2 ranks of " in sources["chip.launch_s"]


def test_a_file_that_cannot_be_written_is_refused_at_once(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(command, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    missing = tmp_path / "missing" / "mine.toml"
    assert_refused(run(capfd, "calibrate", "-o", missing), "cannot write the hardware file")
    assert_refused(run(capfd, "calibrate", "-o", tmp_path / "mine"), "ends in .toml")
    ranks = ("--ranks", 0)
    assert_refused(run(capfd, "calibrate", "-o", tmp_path / "m.toml", *ranks), "--ranks is 0")


def test_a_base_of_another_kind_of_device_is_refused(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("RANK", "0")
    done = run(capfd, "calibrate", "-o", tmp_path / "m.toml", "--hardware", "a100-80gb")
    assert_refused(done, "a100-80gb describes cuda devices; this machine computes on cpu")


def test_ranks_are_started_as_many_as_the_base_has(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    started: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(command, "start_ranks", lambda num, line: started.append((num, line)))
    path = tmp_path / "m.toml"
    assert cli.main(["calibrate", "-o", str(path), "--quick"]) == 0
    ((num, line),) = started
    assert num == Cluster("cpu-local").gpus_per_node
    assert line[1:] == [
        *("-m", "autopar", "calibrate", "-o", str(path), "--hardware", "cpu-local", "--quick")
    ]
    assert not path.exists()


def test_an_error_of_a_measurement_names_the_rank(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def broken(self: Compute) -> None:
        raise MemoryError("no memory is left")

    monkeypatch.setattr(Compute, "kernel", broken)
    done = run(capfd, "calibrate", "-o", tmp_path / "m.toml")
    assert_refused(done, "measuring failed: MemoryError: no memory is left", "rank 0")


def test_more_ranks_than_cores_is_a_warning(tmp_path: Path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise ClusterError("enough was seen")

    monkeypatch.setattr(procedure, "num_cores", lambda: 2)
    monkeypatch.setattr(procedure, "connect_ranks", refuse)
    for ranks, warns in ((2, False), (3, True)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        request = procedure.Request(output=tmp_path / "m.toml", base="cpu-local")
        with pytest.raises(ClusterError, match="enough was seen"):
            procedure.calibrate(request)
        assert ("3 ranks share 2 cores" in caplog.text) is warns
