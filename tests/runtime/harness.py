"""Run a setup on ranks and hold it against one device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from autopar.ir.graph import ModelGraph
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import lower_plan
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.results import StepResult
from autopar.runtime.threads import run_mesh
from tests.runtime.cases import (
    Expected,
    Setup,
    expected_of,
    initial_parameters,
    make_batch,
    make_model,
    make_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rank saw in some steps."""

    results: tuple[StepResult, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    num_gathers: Mapping[int, int]
    num_reductions: Mapping[int, int]


@functools.cache
def lowered(setup: Setup) -> tuple[Program, ModelGraph, Plan]:
    """The setup's program, model and plan; thread ranks share them."""
    model, plan = make_model(setup.name, setup.layers, setup.precision), make_plan(setup)
    return lower_plan(model, plan), model, plan


def make_engine(setup: Setup, communicator: Communicator) -> Engine:
    """An engine with the module's weights loaded."""
    program, model, plan = lowered(setup)
    engine = Engine(program, model, plan, communicator, keep_gradients=True)
    engine.load_parameters(initial_parameters(setup.name, setup.layers, setup.precision))
    return engine


def train(setup: Setup, communicator: Communicator, num_steps: int) -> Outcome:
    """Some steps on one rank."""
    torch.set_num_threads(1)
    engine = make_engine(setup, communicator)
    results: list[StepResult] = []
    gradients: dict[str, Tensor] = {}
    for step in range(num_steps):
        results.append(engine.train_step(make_batch(setup.name, seed=step)))
        if step == 0:
            gradients = engine.full_gradients()
    return Outcome(
        results=tuple(results),
        gradients=gradients,
        parameters=engine.full_parameters(),
        num_gathers=dict(engine.store.num_gathers),
        num_reductions=dict(engine.store.num_reductions),
    )


def train_on_threads(setup: Setup, num_steps: int = 3) -> list[Outcome]:
    """Some steps on thread ranks."""
    lowered(setup)  # once, not on every thread
    initial_parameters(setup.name, setup.layers, setup.precision)
    return run_mesh(setup.mesh, lambda communicator: train(setup, communicator, num_steps))


def assert_parity(setup: Setup, outcome: Outcome, num_steps: int) -> None:
    """The outcome equals one device's, as closely as the setup's precision and optimizer allow."""
    expected = expected_of(setup, num_steps)
    losses = [result.loss for result in outcome.results]
    tolerance = {"fp32": 1e-5, "float64": 1e-9, "bf16": 5e-2, "fp16": 1e-2}[setup.precision]
    assert losses == pytest.approx(expected.losses, abs=tolerance, rel=tolerance)
    norms = [result.grad_norm for result in outcome.results]
    assert norms == pytest.approx(expected.grad_norms, rel=10 * tolerance)
    if setup.precision in ("bf16", "fp16"):
        assert all(parameter.isfinite().all() for parameter in outcome.parameters.values())
        return
    assert_close_gradients(outcome.gradients, expected, setup)
    if setup.optimizer == "sgd":
        # 1e-6 is far below the updates (1e-2) and above the rounding of the parameters themselves
        assert_close(outcome.parameters, expected.parameters, 1e-6)
    else:
        for name, value in outcome.parameters.items():
            difference = (value - expected.parameters[name]).abs().max()
            assert difference < 1e-9, f"{name} differs by {difference}"


def assert_close_gradients(
    gradients: Mapping[str, Tensor], expected: Expected, setup: Setup
) -> None:
    assert_close(gradients, expected.gradients, 1e-4 if setup.precision == "fp32" else 1e-10)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float) -> None:
    """‖Δ‖ ≤ bound · max(‖x‖, 1e-3 · the largest ‖x‖)."""
    assert found.keys() == expected.keys()
    largest = max(tensor.norm() for tensor in expected.values())
    for name, tensor in expected.items():
        error = (found[name] - tensor).norm()
        limit = bound * max(tensor.norm(), 1e-3 * largest)
        assert error <= limit, f"{name}: ‖Δ‖ {error:.3e} > {limit:.3e}"
