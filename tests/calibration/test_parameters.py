"""What is timed of parameters is what the runtime does with them, and costs what plans say."""

from __future__ import annotations

import torch

from autopar.calibration.parameters import Parameters, ParameterSample, ParameterSizes
from autopar.calibration.samples import Timing
from tests.calibration.synthetic import cluster

SIZES = ParameterSizes(num=3, rows=4)
CPU = torch.device("cpu")
TIMING = Timing(best_s=1.0, median_s=1.0)


def test_gradients_add_up_until_an_update():
    parameters = Parameters(SIZES, CPU)
    before = [value.detach().clone() for value in parameters.unit.parameters.values()]
    for _ in range(3):
        parameters.take_gradients()
    for leaf in parameters.unit.tensors.values():
        assert leaf.grad is None
    for work in parameters.unit.start_reduce(is_last=True):
        work.wait()
    assert parameters.unit.gradient is not None
    assert parameters.unit.gradient.sum() == 3 * SIZES.numel
    parameters.update()
    after = list(parameters.unit.parameters.values())
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert parameters.unit.gradient is None


def test_updates_cost_by_parameter_and_by_element():
    truth = cluster("cpu-local", runtime__update_s=1.0, runtime__update_element_s=0.0)
    hardware = truth.hardware
    bandwidth = hardware.chip.hbm_bytes_per_s * hardware.efficiency.hbm
    sample = ParameterSample(what="update", sizes=SIZES, timing=TIMING)
    assert sample.predicted_s(truth) == 3 * 1.0 + 48 * 36 / bandwidth
    slow = cluster("cpu-local", runtime__update_s=0.0, runtime__update_element_s=1.0)
    assert sample.predicted_s(slow) == 48 * (36 / bandwidth + 1.0)


def test_a_gradient_costs_the_host_time_by_parameter():
    sample = ParameterSample(what="gradients", sizes=SIZES, timing=TIMING)
    times = [sample.predicted_s(cluster("cpu-local", runtime__touch_s=s)) for s in (0.0, 2.0)]
    assert times[1] - times[0] == 6.0
    assert 0.0 < times[0] < 1e-3
