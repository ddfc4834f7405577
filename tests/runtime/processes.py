"""Start real gloo ranks: ``python -m tests.runtime.worker NAME ARGUMENTS``, as ``torchrun`` would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rank ended. ``after_s`` counts from the moment when the first rank ended."""

    code: int
    output: str
    after_s: float


def run_processes(
    num_ranks: int, *arguments: str, timeout_s: float = 240, wait_s: float = 60
) -> list[Ended]:
    """Run ``arguments`` on all ranks until all end; ranks that outlive ``timeout_s`` are killed.

    Args:
        wait_s: How long ranks may wait for each other (``AUTOPAR_TIMEOUT_S``).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [open(Path(folder) / f"{rank}", "w+") for rank in range(num_ranks)]  # noqa: SIM115
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.worker", *arguments],
                cwd=ROOT,
                env=_environment(rank, num_ranks, port, wait_s),
                stdout=files[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(num_ranks)
        ]
        ended_at = _wait(started, timeout_s)
        first = min(ended_at)
        ended: list[Ended] = []
        for process, at, file in zip(started, ended_at, files, strict=True):
            file.seek(0)
            ended.append(
                Ended(code=process.returncode, output=file.read(), after_s=at - first)
            )
            file.close()
    return ended


def _environment(rank: int, num_ranks: int, port: int, wait_s: float) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "AUTOPAR_TIMEOUT_S": str(wait_s),
    }


def _wait(started: list[subprocess.Popen[bytes]], timeout_s: float) -> list[float]:
    """When each process ended, on the monotonic clock."""
    deadline = time.monotonic() + timeout_s
    ended_at: dict[int, float] = {}
    while len(ended_at) < len(started):
        late = time.monotonic() > deadline
        for index, process in enumerate(started):
            if late and process.poll() is None:
                process.kill()
                process.wait()
            if index not in ended_at and process.poll() is not None:
                ended_at[index] = time.monotonic()
        time.sleep(0.05)
    return [ended_at[index] for index in range(len(started))]
