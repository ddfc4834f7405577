"""Numbers of a hardware file from measurements, each with the text of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from autopar.calibration.fit import Free, fit
from autopar.calibration.hardware import on, value_at, with_values
from autopar.calibration.parameters import ParameterSample
from autopar.calibration.samples import (
    CollectiveSample,
    HostSample,
    MessageSample,
    Sample,
    Timing,
    WorkSample,
    agreement,
)
from autopar.calibration.small_model import ModelSample
from autopar.ir.graph import evaluate
from autopar.solver.hardware import Cluster
from autopar.solver.hardware.spec import Efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Compute alone, a collective alone, and both at once."""

    compute: Timing
    collective: Timing
    both: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that was measured.

    Attributes:
        tiny_model: Training a model that takes the host longer than the device.
        kernel: The device's floor.
        models: Training models whose memory-bound kernels count.
        elementwise, products, attention: In the dtype that the hardware trains in.
        others: Products in other dtypes, by precision.
        parameters: What the runtime does with parameters; none where the host runs ahead.
        host: Copies between device and host.
        agreement: What ranks agree on once a step.
        links: Collectives and messages, inside and between nodes; empty for one rank.
        overlap: None for one rank.
        num_sms: None where the device does not say.
        usable_bytes: Of a rank.
        context_bytes: What is gone before the first tensor.
    """

    tiny_model: ModelSample
    kernel: Timing
    models: tuple[ModelSample, ...]
    elementwise: tuple[WorkSample, ...]
    products: tuple[WorkSample, ...]
    attention: tuple[WorkSample, ...]
    others: Mapping[str, tuple[WorkSample, ...]]
    parameters: tuple[ParameterSample, ...]
    host: HostSample
    agreement: Timing
    links: tuple[CollectiveSample | MessageSample, ...]
    overlap: Overlap | None
    num_sms: int | None
    usable_bytes: int
    context_bytes: int

    def samples(self) -> tuple[Sample, ...]:
        """All that the cost model has an opinion about."""
        samples: list[Sample] = [*self.elementwise, *self.products, *self.attention]
        for others in self.others.values():
            samples += others
        return (*samples, *self.models, *self.parameters, self.host, *self.links)


@dataclass(slots=True)
class Estimates:
    """Numbers that were found so far, and the cluster with them.

    Attributes:
        cluster: What starts as the base.
        sources: What was measured, by dotted path, of every number that is not the base's.
    """

    cluster: Cluster
    sources: dict[str, str] = field(default_factory=dict)

    def value(self, path: str) -> float:
        return value_at(self.cluster.hardware, path)

    def set(self, values: Mapping[str, float], source: str) -> None:
        self.cluster = on(self.cluster, with_values(self.cluster.hardware, values))
        self.sources.update(dict.fromkeys(values, source))

    def fit(self, samples: Sequence[Sample], free: Sequence[Free], what: str) -> None:
        """Fit ``free`` to ``samples``; the source says how well that went."""
        if not samples:
            return
        hardware = fit(self.cluster, samples, free)
        found = agreement(samples, on(self.cluster, hardware))
        num = sum(one.num_samples for one in found)
        error = sum(one.error * one.num_samples for one in found) / num
        source = f"fit: {num} timings of {what}, mean error {error:.0%}"
        self.set({one.path: value_at(hardware, one.path) for one in free}, source)


_PRODUCT_SHARES = tuple(
    f"efficiency.{field.name}"
    for field in fields(Efficiency)
    if field.name in ("tile_256x128", "tile_128x128", "tile_64x64", "aligned_8", "unaligned")
)


def estimate(base: Cluster, measured: Measured) -> Estimates:
    """The numbers of ``base`` that ``measured`` says something about, as that says them.

    The order matters: each fit is made under what the earlier ones found.
    """
    found = Estimates(base)
    _compute(found, measured)
    _runtime(found, measured)
    _host_link(found, measured.host)
    _communication(found, measured)
    found.set({"chip.usable_bytes": measured.usable_bytes}, "measurement: free memory, by rank")
    found.set(
        {"memory.context_bytes": measured.context_bytes},
        "measurement: memory taken before the first tensor",
    )
    return found


def _compute(found: Estimates, measured: Measured) -> None:
    precision, is_cpu = found.cluster.default_precision, found.cluster.device == "cpu"
    if measured.num_sms is not None:
        found.set({"chip.num_sms": measured.num_sms}, "measurement: what the device reports")
    found.set({"chip.launch_s": 0.0}, "")
    found.set(
        {"chip.kernel_s": measured.kernel.compute_s},
        f"measurement: tiny kernels in a row, {_spread(measured.kernel)}",
    )
    fastest = max(evaluate(s.work.bytes, 1) / s.timing.compute_s for s in measured.elementwise)
    _raise_peak(found, "chip.hbm_bytes_per_s", fastest, "elementwise kernel", is_cpu=is_cpu)
    found.fit(
        measured.elementwise,
        [Free(path="efficiency.hbm", low=0.01, high=1.0)],
        f"elementwise kernels in {precision}",
    )
    fastest = max(evaluate(s.work.flops, 1) / s.timing.compute_s for s in measured.products)
    peak = f"chip.peak_flops.{precision}"
    _raise_peak(found, peak, fastest, f"product in {precision}", is_cpu=is_cpu)
    found.fit(
        measured.products,
        [
            *(Free(path=path, low=0.01, high=1.0) for path in _PRODUCT_SHARES),
            Free(path="efficiency.tile_ramp", low=0.0, high=2048.0, scale=100.0),
        ],
        f"products in {precision}",
    )
    for name in ("forward", "backward"):
        those = [s for s in measured.attention if s.backward == (name == "backward")]
        free = [Free(path=f"efficiency.flash_{name}", low=0.001, high=1.0)]
        found.fit(those, free, f"causal attention {name} in {precision}")
    for other, samples in measured.others.items():
        free = [Free(path=f"chip.peak_flops.{other}", low=1e6, high=1e18)]
        found.fit(samples, free, f"products in {other}, under the shares of {precision}")
    _launch(found, measured.tiny_model)
    if measured.models:
        share = Free(path="efficiency.hbm", low=0.01, high=1.0)
        found.fit(measured.models, [share], "small models in training, by their memory traffic")
        _launch(found, measured.tiny_model)


def _launch(found: Estimates, model: ModelSample) -> None:
    """The host's share of a tiny model: all of its time, unless the host is what computes."""
    host_s = model.timing.compute_s
    if found.cluster.device == "cpu":
        found.set({"chip.launch_s": 0.0}, "")
        host_s -= model.predicted_s(found.cluster)
    found.set(
        {"chip.launch_s": max(host_s, 1e-9) / model.num_kernels},
        f"measurement: training a tiny model, host time by kernel of {model.num_kernels}, "
        + _spread(model.timing),
    )


def _runtime(found: Estimates, measured: Measured) -> None:
    """What the runtime adds to a step, where the host computes: elsewhere it runs ahead."""
    if found.cluster.device != "cpu":
        return
    for what, free in (
        ("gradients", [Free(path="runtime.touch_s", low=1e-9, high=1.0)]),
        (
            "update",
            [
                Free(path="runtime.update_s", low=1e-9, high=1.0),
                Free(path="runtime.update_element_s", low=0.0, high=1.0, scale=1e-9),
            ],
        ),
    ):
        those = [sample for sample in measured.parameters if sample.what == what]
        found.fit(those, free, f"{what} of parameters in the runtime")
    found.set(
        {"runtime.step_s": measured.agreement.median_s},
        "measurement: an all-reduce of five numbers, median",
    )


def _host_link(found: Estimates, sample: HostSample) -> None:
    """Of all ranks of a node at once: fewer are taken to be no faster."""
    speed, ranks = sample.num_bytes / sample.measured_s, found.cluster.gpus_per_node
    found.set(
        {
            "host_link.bytes_per_s": speed,
            "host_link.node_bytes_per_s": speed * ranks,
            "host_link.efficiency": 1.0,
        },
        f"measurement: copies of {sample.num_bytes >> 20} MiB, all ranks of a node at once",
    )


_REACHED = 0.8
"""The share of a GPU's peak that its fastest kernels reach."""


def _raise_peak(found: Estimates, path: str, fastest: float, what: str, *, is_cpu: bool) -> None:
    """A CPU's peak is the fastest that was seen, a GPU's what its datasheet says, if not less: then
    so much that the fastest reached four fifths of it, as kernels do.
    """
    if is_cpu or fastest > found.value(path):
        peak = fastest if is_cpu else fastest / _REACHED
        found.set({path: peak}, f"measurement: the fastest {what}")


def _communication(found: Estimates, measured: Measured) -> None:
    inside = [sample for sample in measured.links if not _crosses(sample)]
    in_step = found.value("node_link.in_step")
    if inside:
        found.cluster = on(
            found.cluster, with_values(found.cluster.hardware, {"node_link.in_step": 1.0})
        )
        rings = [s for s in inside if _name_of(s) == "all_reduce"]
        sizes = {s.group.size for s in rings if isinstance(s, CollectiveSample)}
        scale = min(sample.timing.median_s for sample in rings) / 4
        free = [
            Free(path="node_link.bytes_per_s", low=1e5, high=1e13),
            Free(path="node_link.latency_s", low=1e-8, high=1.0),
            Free(path="node_link.latency_per_rank_s", low=0.0, high=1.0, scale=scale),
        ]
        if len(sizes) > 1:
            free.append(Free(path="node_link.lost_per_rank", low=0.0, high=1.5))
        ranks = ", ".join(map(str, sorted(sizes)))
        found.fit(rings, free, f"all-reduces of {ranks} ranks in a node")
        for name in ("all_gather", "reduce_scatter", "all_to_all", "message"):
            those = [sample for sample in inside if _name_of(sample) == name]
            pace = [
                Free(path=f"node_link.{name}.{field}", low=0.001, high=1000.0)
                for field in ("latency", "bandwidth")
            ]
            found.fit(those, pace, f"{name.replace('_', '-')} in a node, beside all-reduce")
        if found.cluster.device == "cpu":
            found.set(
                {"node_link.in_step": 1.0},
                "measurement: ranks that share cores were measured sharing them",
            )
        else:
            restored = with_values(found.cluster.hardware, {"node_link.in_step": in_step})
            found.cluster = on(found.cluster, restored)
    outside = [sample for sample in measured.links if _crosses(sample)]
    if outside:
        free = [
            Free(path="network.efficiency", low=0.01, high=1.0),
            Free(path="network.latency_s", low=1e-8, high=1.0),
        ]
        found.fit(outside, free, "collectives and messages between nodes")
        if found.value("network.efficiency") > 0.99:  # faster than the base's links
            rate = Free(path="network.node_bytes_per_s", low=1e5, high=1e14)
            found.fit(outside, [rate, *free], "collectives and messages between nodes")
    if measured.overlap is not None:
        found.set(
            {"overlap.slowdown": slowdown(measured.overlap)},
            "measurement: products beside an all-reduce of all ranks",
        )


def slowdown(overlap: Overlap) -> float:
    """Seconds by which a second of overlap lengthens compute that outlasts the collective: at most
    1, which is as if nothing overlapped.
    """
    longer = overlap.both.compute_s - overlap.compute.compute_s
    return min(max(longer / overlap.collective.median_s, 0.0), 1.0)


def _name_of(sample: CollectiveSample | MessageSample) -> str:
    return "message" if isinstance(sample, MessageSample) else sample.collective.value


def _crosses(sample: CollectiveSample | MessageSample) -> bool:
    if isinstance(sample, MessageSample):
        return sample.crosses_nodes
    return sample.group.num_nodes > 1


def _spread(timing: Timing) -> str:
    counts = "median" if timing.is_shared else "fastest"
    spread = timing.median_s / timing.best_s
    return f"{counts} of some; the median is {spread:.2f} times as long as the fastest"
