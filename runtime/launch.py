"""Start communication: under ``torchrun``, on what the plan's hardware file names; or on nothing,
to rehearse.
"""

from __future__ import annotations

import functools
import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.ir.errors import ClusterError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.runtime.distributed import DistributedCommunicator

DEFAULT_TIMEOUT_S = 300.0
_TIMEOUT_VARIABLE = "AUTOPAR_TIMEOUT_S"
_connections = itertools.count()
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """True if this process is one of several that ``torchrun`` (or the like) started."""
    return all(variable in os.environ for variable in _LAUNCH_VARIABLES)


def connect(plan: Plan, *, timeout_s: float | None = None) -> DistributedCommunicator:
    """Join the other ranks of ``plan``. A process that nobody launched is a world of one rank.

    An existing default process group is used and left alive by ``close``.

    Args:
        timeout_s: For every wait; by default ``AUTOPAR_TIMEOUT_S`` of the environment, or 300.

    Raises:
        ClusterError: the ranks that run are not those of the plan, or have not its device.
    """
    cluster = plan.cluster
    return connect_ranks(plan.device_mesh(), cluster.backend, cluster.device, timeout_s=timeout_s)


def connect_ranks(
    mesh: Mesh, backend: str, device_type: str, *, timeout_s: float | None = None
) -> DistributedCommunicator:
    """Join the other ranks of ``mesh``, as ``connect`` does those of a plan."""
    if timeout_s is None:
        timeout_s = timeout_from_environment()
    device = _local_device(device_type)
    owns_processes = not dist.is_initialized()
    if owns_processes:
        store = _join(backend, device, mesh, timeout_s)
    else:
        # torch has no public name for it
        store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    if dist.get_world_size() != mesh.num_ranks:
        raise _wrong_number(dist.get_world_size(), mesh)
    return DistributedCommunicator(
        mesh,
        device,
        timeout_s=timeout_s,
        store=store if mesh.num_ranks > 1 else None,
        owns_processes=owns_processes,
    )


def rehearse(mesh: Mesh, rank: int) -> DistributedCommunicator:
    """A rank whose peers do not exist: tensors without memory, collectives that check and do
    nothing.

    Whatever a plan's size, ``rank``'s step can be run: every action, shape and group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=rank, world_size=mesh.num_ranks, store=FakeStore())
    return DistributedCommunicator(
        mesh,
        torch.device("meta"),
        timeout_s=DEFAULT_TIMEOUT_S,
        store=None,
        owns_processes=True,
    )


@functools.cache
def launch_store(timeout_s: float) -> tuple[dist.Store, int, int]:
    """The store of all launched processes, this one's rank, and their number.

    It is kept for as long as the process lives: the first rank may hold it for the others.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store, rank, world_size


def _join(backend: str, device: torch.device, mesh: Mesh, timeout_s: float) -> dist.Store:
    """Make the default process group; returns the store in which failures are reported."""
    timeout = timedelta(seconds=timeout_s)
    if is_launched():
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size != mesh.num_ranks:
            raise _wrong_number(world_size, mesh)
        store, rank, world_size = launch_store(timeout_s)
    elif mesh.num_ranks == 1:
        store, rank, world_size = dist.HashStore(), 0, 1
    else:
        raise ClusterError(
            f"the plan is for {mesh.num_ranks} ranks, but this process runs alone",
            hint=f"torchrun --nproc-per-node {mesh.num_ranks} …",
        )
    # a key is used once: not by the groups of an earlier start, nor of an earlier connection
    name = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_connections)}"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"groups/{name}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        # No device_id: then groups would be split off the world's communicator as they are made,
        # by all of its ranks at once, instead of being connected by their own when first used.
    )
    return dist.PrefixStore(f"failures/{name}", store)


def has_index(device: torch.device) -> bool:
    """True for one of several devices of its type."""
    return str(device) != device.type


def _local_device(device_type: str) -> torch.device:
    """This process's device: on an accelerator the one of its local rank, which becomes the current
    one.
    """
    device = torch.device(device_type)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        if device != torch.empty(0).device:
            raise ClusterError(f"the plan runs on {device_type}, which this machine has not")
        return device
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.accelerator.device_count():
        raise ClusterError(
            f"local rank {index} has no {device_type} device",
            hint=f"this machine has {torch.accelerator.device_count()}",
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


def timeout_from_environment() -> float:
    """Seconds that a wait may take: ``AUTOPAR_TIMEOUT_S`` of the environment, or 300."""
    text = os.environ.get(_TIMEOUT_VARIABLE)
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if timeout_s <= 0:
        raise ClusterError(f"{_TIMEOUT_VARIABLE}={text!r} is no number of seconds")
    return timeout_s


def _wrong_number(world_size: int, mesh: Mesh) -> ClusterError:
    return ClusterError(
        f"the plan is for {mesh.num_ranks} ranks, but {world_size} run",
        hint="start as many processes as the plan has ranks, or plan again for these",
    )
