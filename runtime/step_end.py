"""The end of a step: all ranks agree on loss, weight and norm; gradients are divided, clipped and
given to the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph, ValueId
from autopar.ir.mesh import LAYOUT_AXES
from autopar.ir.placement import StateKind
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.communicator import WORLD_AXIS, Communicator
from autopar.runtime.loss_scaler import LossScaler
from autopar.runtime.parameter_store import ParameterStore
from autopar.runtime.step_state import StepInputs, StepState

_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a step comes to over all ranks: Σ loss, Σ weight, and the squared norm of Σ gradients
    (times the square of the loss's seed).
    """

    loss: float
    weight: float
    squares: float

    @property
    def mean_loss(self) -> float:
        return self.loss / self.weight


def agree(
    step: StepState,
    inputs: StepInputs,
    program: Program,
    model: ModelGraph,
    plan: Plan,
    communicator: Communicator,
    store: ParameterStore | None,
) -> Totals:
    """The totals of a step, the same on all ranks; every rank calls it.

    Args:
        store: Whose gradients' norm is wanted; None: there are none.

    Raises:
        InputError: The batch has no valid token, or ranks were given different global batches: on
            every rank alike.
    """
    device = communicator.device
    terms = [
        _own_term([loss * share for loss, share in step.losses], model.loss, program, communicator),
        _own_term(step.weights, model.weight, program, communicator),
        torch.zeros((), dtype=torch.float64, device=device)
        if store is None
        else store.squared_norm(),
        *torch.tensor(
            [inputs.checksum, inputs.checksum**2], dtype=torch.float64, device=device
        ).unbind(),
    ]
    totals = communicator.group(WORLD_AXIS).all_reduce(torch.stack(terms))
    if totals.is_meta:
        return Totals(loss=0.0, weight=1.0, squares=1.0)
    loss, weight, squares, first, second = totals.tolist()
    # Σc² · n = (Σc)² holds for equal c only; both sums are exact, and each product rounded once
    if communicator.mesh.num_ranks * second != first * first:
        raise InputError(
            "ranks were given different global batches",
            hint="give every rank the same batch, or its own share with local=True",
        )
    if model.weight is None:
        whole = plan.batch.micro_batch_size * communicator.mesh.batch_ranks
        weight = plan.batch.global_batch_size / whole  # a shorter or smaller one counts less
    if weight == 0:
        raise InputError("the batch has no valid token: its loss is not defined")
    return Totals(loss=loss, weight=weight, squares=squares)


def _own_term(
    found: list[Tensor], value: ValueId | None, program: Program, communicator: Communicator
) -> Tensor:
    """This rank's term of a sum, float64: zero where another rank counts the value."""
    zero = torch.zeros((), dtype=torch.float64, device=communicator.device)
    if value is None or not found:
        return zero
    at = communicator.mesh.coordinates(communicator.rank)
    placement = program.values[value].placement
    for axis, placed in zip(LAYOUT_AXES, placement, strict=True):
        if placed.kind is not StateKind.PARTIAL and at[axis] != 0:
            return zero
    return torch.stack(found).double().sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What an update did. ``grad_norm`` is that of the mean loss, before clipping."""

    grad_norm: float
    skipped: bool


def update(
    totals: Totals,
    store: ParameterStore,
    scaler: LossScaler,
    step: Callable[[], None],
    *,
    max_grad_norm: float | None,
    keeps_gradients: bool,
) -> Updated:
    """Divide the gradients by the weight and the scale of the loss, clip them, and ``step``."""
    divisor = totals.weight * scaler.seed
    grad_norm = totals.squares**0.5 / divisor
    taken = scaler.accepts(is_finite=math.isfinite(totals.squares))
    if taken:
        store.scale_gradients(1 / divisor)
        if keeps_gradients:
            store.keep_gradients()
        factor = 1.0 if max_grad_norm is None else max_grad_norm / (grad_norm + _CLIP_EPS)
        if not factor >= 1:  # also where the norm is not a number, as torch has it
            store.scale_gradients(factor)
        step()
    store.drop_gradients()
    return Updated(grad_norm=grad_norm, skipped=not taken)
