"""Calibrate: measure on all ranks that run, fit, and write the hardware file on the first."""

from __future__ import annotations

import functools
import logging
import os
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from autopar.calibration import machine
from autopar.calibration.clock import Clock, num_cores, overlap_clock
from autopar.calibration.communication import Communication
from autopar.calibration.compute import Compute
from autopar.calibration.document import render, write_document
from autopar.calibration.effort import Effort, effort_for
from autopar.calibration.estimates import Estimates, Measured, Overlap, estimate
from autopar.calibration.samples import (
    Agreement,
    CollectiveSample,
    MessageSample,
    Timing,
    WorkSample,
    agreement,
)
from autopar.calibration.small_model import sample_of
from autopar.calibration.sweeps import merged
from autopar.ir.errors import AutoparError, ClusterError, RankFailedError
from autopar.ir.mesh import Mesh
from autopar.ir.precision import DTYPES
from autopar.runtime.communicator import WORLD_AXIS
from autopar.runtime.distributed import DistributedCommunicator
from autopar.runtime.distributed_group import DistributedGroup
from autopar.runtime.launch import connect_ranks
from autopar.solver.hardware import Cluster, read_hardware
from autopar.solver.hardware.spec import Precision

_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32", "float64")
_log = logging.getLogger("autopar")
Progress = Callable[[str], None]

default_hardware = machine.default_hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to calibrate.

    Attributes:
        output: The hardware file to write.
        base: Known hardware, or a file, for what cannot be measured.
        quick: Whether to measure less.
        effort: What to measure; default: by device.
    """

    output: Path
    base: str
    quick: bool = False
    effort: Effort | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of it.

    Attributes:
        base, cluster: Before and after.
        sources: Of each measured number, by dotted path.
        agreement: How well the cost model now says what was measured.
        seconds: What it took.
    """

    base: Cluster
    cluster: Cluster
    sources: dict[str, str]
    agreement: tuple[Agreement, ...]
    seconds: float


def calibrate(request: Request, progress: Progress | None = None) -> Report | None:
    """Measure on all ranks that were launched; every rank calls it. A process that nobody launched
    measures itself alone.

    Returns:
        On the first rank what came of it, otherwise None.

    Raises:
        ClusterError: The base is not of this machine's kind of device.
        InputError: The file cannot be written.
        RankFailedError: A rank failed.
    """
    started = time.perf_counter()
    hardware, text = read_hardware(request.base)
    if hardware.device != machine.device_type():
        raise ClusterError(
            f"{request.base} describes {hardware.device} devices; "
            f"this machine computes on {machine.device_type()}",
            hint="--hardware with a file of this kind of device",
        )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    if hardware.device == "cpu" and per_node > num_cores() and os.environ.get("RANK", "0") == "0":
        _log.warning(
            "%d ranks share %d cores: the file will describe ranks that share them",
            per_node,
            num_cores(),
        )
    base = Cluster(request.base, nodes=max(1, ranks // per_node), gpus_per_node=per_node)
    communicator = connect_ranks(Mesh(dp_shard=ranks), base.backend, base.device)
    try:
        measured = _measure(request, base, communicator, progress)
    except Exception as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        communicator.report_failure(message)
        communicator.close()
        if isinstance(error, AutoparError):
            raise
        raise RankFailedError(
            f"measuring failed: {type(error).__name__}: {message}",
            where=f"rank {communicator.rank}",
        ) from error
    is_first = communicator.rank == 0
    communicator.close()
    if not is_first:
        return None
    found = estimate(base, measured)
    write_document(request.output, _document(request, found, text))
    return Report(
        base=base,
        cluster=Cluster(request.output, nodes=base.nodes),
        sources=found.sources,
        agreement=agreement(measured.samples(), found.cluster),
        seconds=time.perf_counter() - started,
    )


def _measure(
    request: Request,
    base: Cluster,
    communicator: DistributedCommunicator,
    progress: Progress | None,
) -> Measured:
    def say(what: str, *, sweep: str = "") -> None:
        if progress is not None and communicator.rank == 0:
            progress(f"measuring {what}{sweep}")

    world, device = communicator.group(WORLD_AXIS), communicator.device
    assert isinstance(world, DistributedGroup)
    effort = request.effort or effort_for(device.type, quick=request.quick)
    talk = Communication(world, device, effort, per_node=base.gpus_per_node)
    work = Compute.on(device, effort, talk)
    beside = _Beside.on(talk, base, device) if world.size > 1 else None
    usable, context = _memory(base, talk)
    sweeps: list[Measured] = []
    for number in range(effort.sweeps):
        sweep = f", sweep {number + 1} of {effort.sweeps}" if effort.sweeps > 1 else ""
        say_in_sweep = functools.partial(say, sweep=sweep)
        sweeps.append(
            _sweep(talk, work, beside, base.default_precision, (usable, context), say_in_sweep)
        )
    return merged(sweeps)


def _sweep(
    talk: Communication,
    work: Compute,
    beside: _Beside | None,
    precision: Precision,
    memory: tuple[int, int],
    say: Progress,
) -> Measured:
    """All measurements once; ``memory`` are usable bytes and those of the context."""
    say("launches")
    kernel, tiny = work.kernel(), work.tiny_model()
    say("elementwise kernels")
    elementwise = tuple(work.elementwise(precision))
    say("products")
    products = tuple(work.products(precision))
    others: dict[str, tuple[WorkSample, ...]] = {
        other: tuple(work.other_products(other)) for other in _PRECISIONS if other != precision
    }
    say("attention")
    attention = tuple(work.attention(precision))
    say("small models")
    models = tuple(
        sample_of(size, DTYPES[precision], timing, "small models in training")
        for size, timing in work.models(precision)
    )
    parameters = tuple(work.parameters())
    say("copies")
    host = work.host_copies()
    say("communication")
    links: list[CollectiveSample | MessageSample] = []
    if talk.world.size > 1:
        links += [*talk.collectives(), *talk.messages()]
    return Measured(
        tiny_model=sample_of(work.effort.tiny_model, torch.float32, tiny, "tiny model"),
        kernel=kernel,
        models=models,
        elementwise=elementwise,
        products=products,
        attention=attention,
        others=others,
        parameters=parameters,
        host=host,
        agreement=talk.agreement(),
        links=tuple(links),
        overlap=None if beside is None else beside.measure(),
        num_sms=machine.num_sms(),
        usable_bytes=memory[0],
        context_bytes=memory[1],
    )


@dataclass(frozen=True, slots=True)
class _Beside:
    """Products that take about twice as long as the collective beside them."""

    talk: Communication
    clock: Clock
    products: Callable[[], None]

    @classmethod
    def on(cls, talk: Communication, base: Cluster, device: torch.device) -> _Beside:
        size = 256 if device.type == "cpu" else 4096
        left = torch.randn(size, size, device=device).to(DTYPES[base.default_precision])

        def products(num: int) -> Callable[[], None]:
            def call() -> None:
                for _ in range(num):
                    torch.mm(left, left)

            return call

        clock = overlap_clock(device, ranks=base.gpus_per_node)
        one, collective, _ = talk.beside(products(1), clock)
        num = min(10_000, max(1, round(2 * collective.median_s / one.best_s)))
        return cls(talk, clock, products(num))

    def measure(self) -> Overlap:
        compute, collective, both = self.talk.beside(self.products, self.clock)
        return Overlap(compute=compute, collective=collective, both=both)


def _memory(base: Cluster, talk: Communication) -> tuple[int, int]:
    """Usable bytes of a rank, and those that are gone before its first tensor."""
    if base.device == "cpu":
        usable, context = float(machine.host_memory() // base.gpus_per_node), 0.0
    else:
        usable, context = map(float, machine.device_memory())
    agreed = talk.agree(Timing(best_s=usable, median_s=context))
    return int(agreed.best_s), int(agreed.median_s)


def _document(request: Request, found: Estimates, text: bytes) -> str:
    name, ranks = machine.device_name(), found.cluster.gpus_per_node
    where = f"{ranks} ranks of {name}"
    if found.cluster.device == "cpu":
        where += f" on {num_cores()} cores"
    when = f"{datetime.now(UTC).date().isoformat()}, {where}, torch {torch.__version__}"
    return render(
        tomllib.loads(text.decode()),
        found.cluster.hardware,
        found.sources,
        base_name=Path(request.base).stem,
        gpus_per_node=ranks,
        when=when,
        heading=f"Measured by autopar calibrate: {when}.",
    )
