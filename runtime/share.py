"""What ranks agree on before they have process groups: a text that the first one makes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from autopar.ir.errors import AutoparError, RankFailedError
from autopar.runtime.launch import is_launched, timeout_from_environment

_OK, _FAILED = b"1", b"0"


def num_launched() -> int:
    """Ranks that were launched together with this process, itself included."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def share_text(name: str, make: Callable[[], str]) -> str:
    """The text that ``make`` returns on the first rank, on every rank; every rank calls it.

    Args:
        name: Of what is shared; each name is shared once.

    Raises:
        RankFailedError: ``make`` failed on the first rank (which raises its own error), or took
            longer than the timeout of all waits.
    """
    if num_launched() == 1:
        return make()
    timeout = timedelta(seconds=timeout_from_environment())
    store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = dist.PrefixStore(f"{name}/{attempt}", store)
    shared.set_timeout(timeout)
    if rank == 0:
        try:
            text = make()
        except BaseException as error:
            shared.set("text", _FAILED + str(error).encode())
            raise
        shared.set("text", _OK + text.encode())
        return text
    try:
        found: bytes = shared.get("text")
    except dist.DistStoreError as error:
        raise RankFailedError(
            f"the first rank made no {name} within {timeout.total_seconds():.0f} s: {error}",
            where=f"rank {rank}",
            hint="set AUTOPAR_TIMEOUT_S higher, or plan beforehand with `autopar plan`",
        ) from None
    if found[:1] == _FAILED:
        raise AutoparError(f"the first rank has no {name}: {found[1:].decode()}")
    return found[1:].decode()
