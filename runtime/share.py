"""What ranks agree on before they have process groups: a text that the first one makes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from autopar.ir.errors import AutoparError, RankFailedError
from autopar.runtime.launch import is_launched, launch_store, timeout_from_environment

_OK, _FAILED = "1", "0"
_shared = itertools.count()


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
            raise
        shared.set("text", _OK + text)
        return text
    try:
        found: str = shared.get("text").decode()
    except dist.DistStoreError as error:
        raise RankFailedError(
            f"the first rank made no {name} within {timeout_s:.0f} s: {error}",
            where=f"rank {rank}",
            hint="set AUTOPAR_TIMEOUT_S higher, or plan beforehand with `autopar plan`",
        ) from None
    if found[:1] == _FAILED:
        raise AutoparError(f"the first rank has no {name}: {found[1:]}")
    return found[1:]
