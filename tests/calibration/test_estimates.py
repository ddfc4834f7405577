"""Numbers from measurements: those of the machine that made them."""

from __future__ import annotations

import pytest

from autopar.calibration.estimates import Overlap, estimate, slowdown
from autopar.calibration.hardware import on, with_values
from autopar.calibration.samples import Timing, agreement
from autopar.solver.hardware import Cluster
from tests.calibration.synthetic import cluster, measured_on

OTHER_GPU = {
    "chip__launch_s": 2e-5,
    "chip__kernel_s": 1e-6,
    "chip__usable_bytes": 2**35,
    "chip__num_sms": 120,
    "efficiency__hbm": 0.6,
    "efficiency__tile_256x128": 0.7,
    "efficiency__flash_forward": 0.3,
    "efficiency__flash_backward": 0.2,
    "chip__peak_flops__fp32": 50e12,
    "memory__context_bytes": 2**30,
    "node_link__bytes_per_s": 400e9,
    "node_link__latency_s": 1e-5,
    "network__efficiency": 0.3,
    "network__latency_s": 5e-5,
    "host_link__bytes_per_s": 7e9,
    "overlap__slowdown": 0.4,
    "node_link__all_to_all__latency": 3.0,
    "node_link__message__bandwidth": 0.5,
}
OTHER_CPU = {
    "chip__launch_s": 9e-6,
    "chip__hbm_bytes_per_s": 2e9,
    "chip__peak_flops__fp32": 1e9,
    "chip__peak_flops__bf16": 5e9,
    "node_link__bytes_per_s": 3e8,
    "node_link__latency_s": 1e-3,
    "node_link__in_step": 1.0,
    "host_link__bytes_per_s": 9e9,
    "overlap__slowdown": 0.9,
    "node_link__all_gather__latency": 0.5,
    "node_link__reduce_scatter__latency": 2.0,
    "node_link__reduce_scatter__bandwidth": 0.3,
    "node_link__all_to_all__latency": 0.2,
    "node_link__message__latency": 0.1,
    "node_link__message__bandwidth": 2.0,
    "runtime__touch_s": 7e-5,
    "runtime__update_s": 1e-4,
    "runtime__update_element_s": 3e-8,
    "runtime__step_s": 5e-3,
}


@pytest.mark.parametrize(
    ("base", "nodes", "other"), [("a100-80gb", 2, OTHER_GPU), ("cpu-local", 1, OTHER_CPU)]
)
def test_the_cost_model_says_what_was_measured(base: str, nodes: int, other: dict[str, float]):
    truth = cluster(base, nodes=nodes, **other)
    idle = on(truth, with_values(truth.hardware, {"node_link.in_step": 1.0}))
    measured = measured_on(idle)
    start = Cluster(base, nodes=nodes)
    before = max(one.error for one in agreement(measured.samples(), start))
    found = estimate(start, measured)
    assert before > 0.2
    # links are measured without a training step beside them, which GPUs are told apart
    alone = on(found.cluster, with_values(found.cluster.hardware, {"node_link.in_step": 1.0}))
    assert max(one.error for one in agreement(measured.samples(), alone)) < 0.03
    assert found.value("node_link.in_step") == truth.hardware.node_link.in_step
    assert found.value("chip.launch_s") == pytest.approx(other["chip__launch_s"], 0.02)
    assert found.value("overlap.slowdown") == pytest.approx(other["overlap__slowdown"])
    link, ranks = truth.hardware.host_link, truth.gpus_per_node
    assert found.cluster.hardware.host_link.rank_bytes_per_s(ranks) == pytest.approx(
        link.rank_bytes_per_s(ranks)
    )
    for name, value in other.items():
        if name.startswith(("runtime", "node_link__all_", "node_link__reduce", "node_link__mess")):
            assert found.value(name.replace("__", ".")) == pytest.approx(value, 0.05), name


def test_a_host_that_runs_ahead_adds_nothing_to_a_step():
    truth = cluster("a100-80gb", runtime__step_s=1.0)
    found = estimate(Cluster("a100-80gb"), measured_on(truth))
    assert not [path for path in found.sources if path.startswith("runtime")]
    assert found.value("runtime.step_s") == 0.0


def test_slowdown_is_what_a_second_of_communication_takes_from_compute():
    half, one, two = (Timing(best_s=s, median_s=s) for s in (0.5, 1.0, 2.0))
    late = Timing(best_s=1.0, median_s=4.0)
    assert slowdown(Overlap(compute=one, collective=one, both=two)) == 1.0
    assert slowdown(Overlap(compute=one, collective=late, both=two)) == 0.25
    assert slowdown(Overlap(compute=one, collective=one, both=half)) == 0.0
    assert slowdown(Overlap(compute=one, collective=half, both=late)) == 0.0
    assert slowdown(Overlap(compute=half, collective=half, both=two)) == 1.0  # no more than that


def test_a_gpu_that_is_slower_than_its_datasheet_keeps_its_peak():
    truth = cluster("a100-80gb", efficiency__tile_256x128=0.4, efficiency__tile_128x128=0.4)
    found = estimate(Cluster("a100-80gb"), measured_on(truth))
    assert found.value("chip.peak_flops.bf16") == 312e12
    assert "chip.peak_flops.bf16" not in found.sources


def test_a_gpu_that_is_faster_than_its_base_gets_another_peak():
    truth = cluster("a100-80gb", chip__peak_flops__bf16=900e12)
    found = estimate(Cluster("a100-80gb"), measured_on(truth))
    assert found.value("chip.peak_flops.bf16") > 312e12
    quiet = measured_on(truth).products
    assert agreement(quiet, found.cluster)[0].error < 0.02


def test_a_network_that_is_faster_than_its_base_gets_another_bandwidth():
    truth = cluster(
        "a100-80gb",
        nodes=2,
        network__node_bytes_per_s=900e9,
        network__efficiency=0.9,
        node_link__in_step=1.0,
    )
    found = estimate(Cluster("a100-80gb", nodes=2), measured_on(truth))
    assert found.value("network.node_bytes_per_s") * found.value(
        "network.efficiency"
    ) == pytest.approx(810e9, 0.05)


def test_one_rank_says_nothing_of_links():
    truth = cluster("cpu-local")
    measured = measured_on(truth)
    alone = type(measured)(
        **{
            name: getattr(measured, name)
            for name in type(measured).__dataclass_fields__
            if name not in ("links", "overlap")
        },
        links=(),
        overlap=None,
    )
    sources = estimate(Cluster("cpu-local"), alone).sources
    assert not [path for path in sources if path.startswith(("node_link", "network", "overlap"))]
    assert "chip.peak_flops.fp32" in sources
