"""Measurements that a machine would give whose hardware is known."""

from __future__ import annotations

from dataclasses import replace

from autopar.calibration.estimates import Measured, Overlap
from autopar.calibration.hardware import on, with_values
from autopar.calibration.parameters import ParameterSample, ParameterSizes
from autopar.calibration.samples import (
    CollectiveSample,
    HostSample,
    MessageSample,
    Timing,
    WorkSample,
)
from autopar.calibration.small_model import ModelSample
from autopar.ir.moves import Collective
from autopar.solver.costs.comm import Group
from autopar.solver.costs.products import Product
from autopar.solver.costs.work import Attention, Work
from autopar.solver.hardware import Cluster

PRODUCTS = (
    (1, 8192, 8192, 8192),
    (1, 4096, 4096, 512),
    (1, 2048, 1024, 1024),
    (1, 1024, 1024, 1024),
    (1, 512, 512, 512),
    (1, 640, 512, 256),
    (64, 512, 512, 128),
    (1, 64, 64, 2048),
)
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
COLLECTIVES = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
)


def cluster(name: str, *, nodes: int = 1, **values: float) -> Cluster:
    """Known hardware with other numbers; ``__`` stands for a dot."""
    known = Cluster(name, nodes=nodes)
    dotted = {path.replace("__", "."): value for path, value in values.items()}
    return on(known, with_values(known.hardware, dotted))


def product_samples(truth: Cluster, itemsize: int, shapes=PRODUCTS) -> tuple[WorkSample, ...]:
    """Products as ``truth`` runs them."""
    works = [
        Work(
            products=(
                Product(batch=batch, rows=rows, columns=columns, depth=depth, itemsize=itemsize),
            ),
            num_kernels=1,
        )
        for batch, rows, columns, depth in shapes
    ]
    return tuple(work_sample(truth, work, "products") for work in works)


def work_sample(truth: Cluster, work: Work, kind: str, *, backward: bool = False) -> WorkSample:
    """A kernel as ``truth`` runs it."""
    sample = WorkSample(kind=kind, work=work, timing=_exactly(1.0), backward=backward)
    seconds = sample.predicted_s(truth)
    return WorkSample(kind=kind, work=work, timing=_exactly(seconds), backward=backward)


def link_samples(truth: Cluster) -> tuple[CollectiveSample | MessageSample, ...]:
    """Collectives of 2, 4, … ranks of a node and of one rank of each node, and messages."""
    per_node, nodes = truth.gpus_per_node, truth.nodes
    groups = [Group(size=n, per_node=n, sharing=per_node // n) for n in (2, 4, 8) if n <= per_node]
    if nodes > 1:
        groups.append(Group(size=nodes, per_node=1, sharing=per_node))
        groups.append(Group(size=nodes * per_node, per_node=per_node, sharing=1))
    found: list[CollectiveSample | MessageSample] = []
    for num_bytes in SIZES:
        for group in groups:
            for collective in COLLECTIVES:
                one = CollectiveSample(
                    collective=collective, num_bytes=num_bytes, group=group, timing=_exactly(1.0)
                )
                found.append(
                    CollectiveSample(
                        collective=collective,
                        num_bytes=num_bytes,
                        group=group,
                        timing=_exactly(one.predicted_s(truth)),
                    )
                )
        for crosses in (False, True)[:nodes]:
            message = MessageSample(
                num_bytes=num_bytes, crosses_nodes=crosses, sharing=1, timing=_exactly(1.0)
            )
            found.append(
                MessageSample(
                    num_bytes=num_bytes,
                    crosses_nodes=crosses,
                    sharing=1,
                    timing=_exactly(message.predicted_s(truth)),
                )
            )
    return tuple(found)


def parameter_samples(truth: Cluster) -> tuple[ParameterSample, ...]:
    """Small parameters, of which gradients are taken, too, and large ones, as ``truth`` has them;
    none where the host runs ahead.
    """
    if truth.device != "cpu":
        return ()
    sizes = [ParameterSizes(num=40, rows=8), ParameterSizes(num=3, rows=700)]
    samples = [ParameterSample(what="gradients", sizes=sizes[0], timing=_exactly(1.0))]
    samples += [ParameterSample(what="update", sizes=each, timing=_exactly(1.0)) for each in sizes]
    return tuple(replace(sample, timing=_exactly(sample.predicted_s(truth))) for sample in samples)


def host_sample(truth: Cluster) -> HostSample:
    """Copies between device and host, as ``truth`` has them."""
    sample = HostSample(num_bytes=2**26, timing=_exactly(1.0))
    return replace(sample, timing=_exactly(sample.predicted_s(truth)))


def measured_on(truth: Cluster) -> Measured:
    """All measurements, as ``truth`` would give them without noise."""
    itemsize = {"bf16": 2, "fp32": 4, "float64": 8}
    main = truth.default_precision
    attention = Attention(
        kernel="flash_attention2",
        flops=2 * 64 * 2048 * 2048 * 128,
        heads=64,
        queries=2048,
        head_dim=128,
        itemsize=itemsize[main],
    )
    flash = Work(attention=attention, num_kernels=1)
    works = [Work(bytes=2**power, num_kernels=1) for power in (20, 24, 28)]
    tiny = ModelSample(
        kind="tiny",
        works=((Work(bytes=64, num_kernels=100), False), (Work(bytes=64, num_kernels=150), True)),
        timing=_exactly(1.0),
    )
    chip = truth.hardware.chip
    host_s = tiny.predicted_s(truth) if truth.device == "cpu" else 250 * chip.launch_s
    slowdown = truth.hardware.overlap.slowdown
    return Measured(
        tiny_model=ModelSample(kind="tiny", works=tiny.works, timing=_exactly(host_s)),
        kernel=_exactly(chip.kernel_s),
        models=(),
        elementwise=tuple(work_sample(truth, work, "elementwise") for work in works),
        products=product_samples(truth, itemsize[main]),
        attention=(
            work_sample(truth, flash, "attention"),
            work_sample(truth, flash, "attention", backward=True),
        ),
        others={
            other: product_samples(truth, size, PRODUCTS[:2])
            for other, size in itemsize.items()
            if other != main
        },
        parameters=parameter_samples(truth),
        host=host_sample(truth),
        agreement=_exactly(truth.hardware.runtime.step_s),
        links=link_samples(truth),
        overlap=Overlap(
            compute=_exactly(2.0), collective=_exactly(1.0), both=_exactly(2.0 + slowdown)
        ),
        num_sms=None if truth.device == "cpu" else chip.num_sms,
        usable_bytes=chip.usable_bytes,
        context_bytes=truth.hardware.memory.context_bytes,
    )


def _exactly(seconds: float) -> Timing:
    return Timing(best_s=seconds, median_s=seconds)
