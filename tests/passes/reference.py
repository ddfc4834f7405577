"""Models with values, what one device makes of them, and how close a program has to come."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.capture import capture, run_reference
from autopar.ir.graph import ModelGraph
from tests.models import tiny_gpt2, tiny_llama, tiny_transformer
from tests.passes.harness import Outcome
from tests.passes.random_models import random_model, random_values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A model graph in float64, whole parameters, a global micro-batch, and what one device makes
    of them.
    """

    model: ModelGraph
    parameters: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    expected: Outcome

    @property
    def batch(self) -> int:
        return next(iter(self.inputs.values())).shape[0]


@functools.cache
def real_case(name: str) -> Case:
    """``llama``, ``gpt2`` or ``transformer`` with 2 layers, or ``regression``; 4 sequences."""
    if name == "regression":
        return _regression()
    loss_fn = None
    if name == "transformer":
        module, inputs, loss_fn = tiny_transformer()
    else:
        module, inputs = tiny_llama() if name == "llama" else tiny_gpt2()
    module = module.double()
    model = capture(module, inputs, loss_fn=loss_fn, compute_dtype=torch.float64)
    named = dict(module.named_parameters(remove_duplicate=False))
    parameters = {name: named[name].detach() for name in model.parameters}
    doubled = {key: torch.cat([value, value.flip(0, 1)]) for key, value in inputs.items()}
    return _case(model, parameters, doubled)


def _regression() -> Case:
    """Two linear layers whose loss is a mean over everything, and so has no weight."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    inputs = {"input": torch.randn(4, 8).double(), "target": torch.randn(4, 4).double()}
    model = capture(
        module,
        inputs,
        loss_fn=lambda output, batch: (output - batch["target"]).square().mean(),
        compute_dtype=torch.float64,
    )
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    return _case(model, parameters, inputs)


@functools.lru_cache(maxsize=64)
def random_case(seed: int, *, layers: int = 2, num_steps: int = 4, tied: bool = True) -> Case:
    """A random model; the same for the same arguments."""
    model = random_model(seed, layers=layers, num_steps=num_steps, tied=tied)
    return _case(model, *random_values(model, seed))


def _case(
    model: ModelGraph, parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Case:
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    loss, weight = run_reference(model, leaves, inputs)
    loss.backward()
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }
    expected = Outcome(loss=loss.detach(), weight=weight, gradients=gradients)
    return Case(model=model, parameters=parameters, inputs=inputs, expected=expected)


def assert_same(found: Outcome, expected: Outcome, *, tolerance: float = 1e-9) -> None:
    """Loss, weight and gradients agree.

    ‖Δg‖ ≤ tolerance · max(‖g‖, 1e-3 · the largest ‖g‖, 1e-3): the last for models whose parts
    cancel, so that all gradients are zero up to rounding.
    """
    torch.testing.assert_close(found.loss, expected.loss, rtol=tolerance, atol=tolerance)
    assert found.weight == expected.weight
    norms = {name: float(gradient.norm()) for name, gradient in expected.gradients.items()}
    floor = 1e-3 * max(1.0, *norms.values())
    assert found.gradients.keys() <= norms.keys()
    for name, gradient in expected.gradients.items():
        if name not in found.gradients:
            assert not gradient.any(), f"{name} has no gradient"
            continue
        error = float((found.gradients[name] - gradient).norm())
        bound = tolerance * max(norms[name], floor)
        assert error <= bound, f"{name}: ‖Δg‖ = {error:.2e} > {bound:.2e}"
