"""Start real gloo ranks, with the environment that ``torchrun`` gives.

One process imports and prepares (``tests.runtime.worker``) and forks the ranks: four times cheaper
than four processes that each import torch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
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
    num_ranks: int,
    *arguments: str,
    worker_module: str = "tests.runtime.worker",
    timeout_s: float = 240,
    wait_s: float = 60,
) -> list[Ended]:
    """Run ``arguments`` (see the worker) on all ranks until all end.

    Args:
        worker_module: Whose ``main`` forks the ranks.
        wait_s: How long ranks may wait for each other (``AUTOPAR_TIMEOUT_S``).
    """
    with tempfile.TemporaryDirectory() as folder:
        worker = subprocess.Popen(
            [sys.executable, "-m", worker_module, folder, str(num_ranks), *arguments],
            cwd=ROOT,
            env=_environment(num_ranks, wait_s),
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            output, _ = worker.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)  # the worker's own session: it and its ranks
            worker.communicate()
            raise
        assert worker.returncode == 0, output.decode()
        ended = json.loads((Path(folder) / "ended.json").read_text())
        first = min(at for _, at in ended)
        return [
            Ended(code=code, output=(Path(folder) / f"{rank}").read_text(), after_s=at - first)
            for rank, (code, at) in enumerate(ended)
        ]


def _environment(num_ranks: int, wait_s: float) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "AUTOPAR_TIMEOUT_S": str(wait_s),
    }
