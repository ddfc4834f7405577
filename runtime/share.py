"""What ranks agree on before they have process groups: a text that the first one makes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from autopar.ir.errors import AutoparError, RankFailedError
from autopar.runtime.launch import is_launched, launch_store, timeout_from_environment

_OK, _FAILED = "1", "0"
_shared = itertools.count()
_LINGER_S = 30.0
_POLL_S = 0.05


def num_launched() -> int:
    """Ranks that were launched together with this process, itself included."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def share_text(name: str, make: Callable[[], str]) -> str:
    """The text that ``make`` returns on the first rank, on every rank; every rank calls it.

    Args:
        name: Of what is shared, for errors.

    Raises:
        RankFailedError: ``make`` failed on the first rank (which raises its own error), or took
            longer than the timeout of all waits.
    """
    if num_launched() == 1:
        return make()
    timeout_s = timeout_from_environment()
    store, rank, _ = launch_store(timeout_s)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = dist.PrefixStore(f"shared/{attempt}/{next(_shared)}", store)  # a key is used once
    shared.set_timeout(timedelta(seconds=timeout_s))
    if rank == 0:
        try:
            text = make()
        except BaseException as error:
            shared.set("text", _FAILED + str(error))
            _await_readers(shared, num_launched() - 1)
            raise
        shared.set("text", _OK + text)
        return text
    try:
        found: str = shared.get("text").decode()
        shared.add("readers", 1)
    except dist.DistNetworkError as error:
        raise RankFailedError(
            f"the first rank ended before it made a {name}: {error}", where=f"rank {rank}"
        ) from None
    except dist.DistStoreError as error:
        raise RankFailedError(
            f"the first rank made no {name} within {timeout_s:.0f} s: {error}",
            where=f"rank {rank}",
            hint="set AUTOPAR_TIMEOUT_S higher, or plan beforehand with `autopar plan`",
        ) from None
    if found[:1] == _FAILED:
        raise AutoparError(f"the first rank has no {name}: {found[1:]}")
    return found[1:]


def _await_readers(shared: dist.Store, num_readers: int) -> None:
    """Let the others read why this rank fails: their store may end with it."""
    deadline = time.monotonic() + _LINGER_S
    while shared.add("readers", 0) < num_readers and time.monotonic() < deadline:
        time.sleep(_POLL_S)
