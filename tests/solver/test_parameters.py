"""Seconds of what the runtime does with parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.ir.plan import Prediction, TrainingPlan
from autopar.solver import solve
from autopar.solver.costs.memory import Itemsizes
from autopar.solver.costs.parameters import ParameterCosts
from autopar.solver.hardware import Cluster
from autopar.solver.hardware.spec import Runtime
from tests.solver.graphs import block_model

WIDE = Itemsizes(compute=2, master=4, moments=8, gradient=4, reduce=4)
TRAINING = TrainingPlan(
    precision="fp32",
    optimizer="adamw",
    learning_rate=1e-3,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-8,
    max_grad_norm=1.0,
    seed=0,
)
HOST = Runtime(touch_s=1.0, update_s=10.0, update_element_s=0.1, step_s=0.0)


def costs(name: str, sizes: Itemsizes = WIDE, runtime: Runtime = HOST) -> ParameterCosts:
    return ParameterCosts(replace(Cluster(name).hardware, runtime=runtime), sizes)


@pytest.mark.parametrize("name", ["a100-80gb", "a100-40gb", "h100-80gb"])
def test_a_gpu_pays_for_memory_traffic_only(name: str):
    hardware = Cluster(name).hardware
    own = ParameterCosts(hardware, WIDE)
    bandwidth = hardware.chip.hbm_bytes_per_s * hardware.efficiency.hbm
    assert own.adding_s(5.0, 1e9, num_micro_batches=1) == 0.0
    assert own.adding_s(5.0, 1e9, num_micro_batches=2) == pytest.approx(1e10 / bandwidth)
    assert own.copying_s(5.0, 1e9) == 0.0
    assert own.update_s(5.0, 1e9) == pytest.approx((8 + 16 + 8 + 2) * 1e9 / bandwidth)


def test_products_add_to_gradients_of_16_bits():
    narrow = costs("a100-80gb", replace(WIDE, gradient=2), replace(HOST, touch_s=0.0))
    assert narrow.adding_s(5.0, 1e9, num_micro_batches=8) == 0.0


def test_a_host_that_computes_pays_for_each_parameter():
    cpu = costs("cpu-local")
    assert cpu.adding_s(5.0, 0.0, num_micro_batches=1) == 5.0
    assert cpu.copying_s(5.0, 0.0) == 5.0
    assert cpu.update_s(5.0, 0.0) == 50.0
    free = costs("cpu-local", runtime=replace(HOST, update_element_s=0.0))
    assert cpu.update_s(5.0, 1e3) - free.update_s(5.0, 1e3) == pytest.approx(100.0)


def test_a_host_adds_the_gradients_of_a_single_micro_batch_too():
    cpu = costs("cpu-local")
    once, twice = (cpu.adding_s(1.0, 1e9, num_micro_batches=num) for num in (1, 2))
    assert once == twice > 1.0


def test_many_blocks_cost_what_each_does():
    cpu = costs("cpu-local")
    num, numel = np.array([1.0, 4.0]), np.array([1e6, 0.0])
    assert cpu.update_s(num, numel).tolist() == [cpu.update_s(1.0, 1e6), cpu.update_s(4.0, 0.0)]
    assert cpu.copying_s(num, numel).shape == (2,)


def test_a_plan_has_what_the_runtime_adds_to_a_step():
    pin: dict[str, int | str] = {"micro_batch_size": 4, "recompute": "none"}
    ops = [("linear", 0), ("relu", 0), ("linear", 0), ("add", 0)]
    model = block_model(ops, num_blocks=3)

    def prediction(runtime: Runtime) -> Prediction:
        cluster = Cluster("cpu-local", gpus_per_node=1)
        cluster = cluster.with_hardware(replace(cluster.hardware, runtime=runtime))
        return solve(model, cluster, global_batch_size=8, training=TRAINING, pin=pin).prediction

    free = Runtime(touch_s=0.0, update_s=0.0, update_element_s=0.0, step_s=0.0)
    without, once = prediction(free), prediction(replace(free, step_s=100.0))
    assert once.step_s - without.step_s == pytest.approx(100.0)
    touched, updated = (
        prediction(replace(free, **{name: 1.0})) for name in ("touch_s", "update_s")
    )
    num = updated.step_s - without.step_s
    assert num == pytest.approx(len(model.parameters))
    assert touched.step_s - without.step_s == pytest.approx(2 * num)  # in each micro-batch
    adding = touched.ranks[0].seconds_by_cause["adding gradients"]
    assert adding == pytest.approx(2 * num, rel=0.01)
