"""Optimizers on local shards, from a plan or from the user."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autopar.ir.errors import InputError
from autopar.ir.plan import TrainingPlan

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of this rank's shards (which keep the number of dims of their parameters).

It has to update every element by itself: norms and factors of a shard are not those of a parameter.
"""


_FUSED_DEVICES = ("cpu", "cuda")


def optimizer_factory(training: TrainingPlan) -> OptimizerFactory:
    """The factory of the plan's optimizer: one kernel for each parameter (on a CPU) or for all.
    For ``sgd`` betas and eps have no meaning, momentum is 0.
    """

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        is_fused = all(parameter.device.type in _FUSED_DEVICES for parameter in parameters)
        if training.optimizer == "sgd":
            return torch.optim.SGD(
                parameters,
                lr=training.learning_rate,
                weight_decay=training.weight_decay,
                fused=is_fused,
            )
        kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
        return kind(
            parameters,
            lr=training.learning_rate,
            betas=training.betas,
            eps=training.eps,
            weight_decay=training.weight_decay,
            fused=is_fused,
        )

    return make


_WHOLE_TENSORS = ("Adafactor", "LBFGS", "Muon")
"""Optimizers of torch whose update of an element depends on others."""


def require_elementwise(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, if it can work on shards.

    Raises:
        InputError: it is known to need whole tensors.
    """
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _WHOLE_TENSORS:
            raise InputError(
                f"{kind.__name__} works on whole parameters, but ranks hold shards of them",
                hint="use an optimizer that updates every element by itself, such as AdamW",
            )
    return optimizer
