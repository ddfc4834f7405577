"""Start the ranks of one node as ``torchrun --standalone`` does, with one message if one fails."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autopar.cli import STARTED_BY_US
from autopar.ir.errors import RankFailedError


def start_ranks(num_ranks: int, command: Sequence[str]) -> None:
    """Run ``command`` in ``num_ranks`` processes and wait for all of them.

    Their output is this process's output.

    Raises:
        RankFailedError: A rank failed: the message of the one that failed first.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[STARTED_BY_US] = "1"
    _silence("torch.distributed.elastic")  # it tells at length what the error says
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            raise RankFailedError(_first_message(error)) from None
        except SignalException as caught:
            raise KeyboardInterrupt from caught
        finally:
            del os.environ[STARTED_BY_US]  # what this process says, it says itself


def _silence(name: str) -> None:
    logger = logging.getLogger(name)
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


def _first_message(error: ChildFailedError) -> str:
    """What the failure says that the others follow from."""
    rank, failure = min(error.failures.items(), key=_order)
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()}"
    message = failure.error_file_data.get("message")
    return str(message or f"rank {rank} ended with status {failure.exitcode}; see its output")


def _order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int, int]:
    """A rank that was killed cannot tell, the others can but do not know why; SIGTERM is what the
    launcher sends to all when one has failed.
    """
    rank, failure = item
    is_ended_by_launcher = failure.exitcode == -signal.SIGTERM
    return is_ended_by_launcher, failure.exitcode > 0, failure.timestamp, rank
