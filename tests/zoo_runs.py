"""One training step of a zoo model under a plan, on thread ranks, held against one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.graph import ModelGraph
from autopar.ir.plan import Plan
from autopar.passes import lower_plan
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.threads import run_mesh
from tests.zoo import ZOO, Batch, LossFn

LOSS_ERROR = 1e-5
GRADIENT_ERROR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Loss and gradients, by name of the logical parameter."""

    loss: float
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooCase:
    """A captured zoo model with its weights and a global batch, and what one device computes."""

    model: ModelGraph
    parameters: Mapping[str, Tensor]
    batch: Batch
    expected: Outcome


@functools.cache
def zoo_case(name: str, attention: str | None = None, *, batch_size: int = 8) -> ZooCase:
    """The case of a model; made once."""
    entry = ZOO[name]
    module, batch = entry.build(attention), entry.inputs(batch_size)
    return make_case(module, batch, entry.loss(module, batch), loss_fn=entry.loss_fn)


def make_case(
    module: nn.Module, batch: Batch, loss: Tensor, *, loss_fn: LossFn | None = None
) -> ZooCase:
    """The case of a module with its weights, and its eager ``loss`` of a global batch."""
    example = {name: tensor[:2] for name, tensor in batch.items()}
    model = capture(module, example, loss_fn=loss_fn)
    loss.backward()
    named = dict(module.named_parameters(remove_duplicate=False))
    return ZooCase(
        model=model,
        parameters={name: parameter.detach() for name, parameter in named.items()},
        batch=batch,
        expected=Outcome(
            loss=float(loss.detach()),
            gradients={
                name: _gradient(named[name])
                for name, logical in model.parameters.items()
                if logical.requires_grad
            },
        ),
    )


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def train_once(case: ZooCase, plan: Plan) -> Outcome:
    """One step on thread ranks."""
    program = lower_plan(case.model, plan)

    def step(communicator: Communicator) -> Outcome:
        torch.set_num_threads(1)
        engine = Engine(program, case.model, plan, communicator, keep_gradients=True)
        engine.load_parameters(case.parameters)
        result = engine.train_step(case.batch)
        return Outcome(loss=result.loss, gradients=engine.full_gradients())

    return run_mesh(plan.device_mesh(), step)[0]


def worst_error(found: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest ‖Δg‖ / max(‖g‖, 1e-3 · largest ‖g‖) of all parameters, and which has it.

    Raises:
        AssertionError: The losses differ by more than 1e-5.
    """
    tolerance = LOSS_ERROR * max(1.0, abs(expected.loss))
    assert math.isclose(found.loss, expected.loss, abs_tol=tolerance), (found.loss, expected.loss)
    largest = max(float(gradient.norm()) for gradient in expected.gradients.values())
    errors = [
        (float((found.gradients[name] - g).norm()) / max(float(g.norm()), 1e-3 * largest), name)
        for name, g in expected.gradients.items()
        if name in found.gradients or bool(g.any())
    ]
    return max(errors)


def assert_like_one_device(case: ZooCase, plan: Plan) -> None:
    """A step under ``plan`` has the loss and the gradients of one device."""
    error, name = worst_error(train_once(case, plan), case.expected)
    assert error <= GRADIENT_ERROR, f"the gradient of {name} is off by {error:.2e}"
