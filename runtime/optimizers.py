"""Optimizers on local shards, from a plan or from the user."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autopar.ir.plan import TrainingPlan

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of this rank's shards (which keep the number of dims of their parameters)."""


def optimizer_factory(training: TrainingPlan) -> OptimizerFactory:
    """The factory of the plan's optimizer. For ``sgd`` betas and eps have no meaning, momentum is
    0.
    """

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if training.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, lr=training.learning_rate, weight_decay=training.weight_decay
            )
        kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
        return kind(
            parameters,
            lr=training.learning_rate,
            betas=training.betas,
            eps=training.eps,
            weight_decay=training.weight_decay,
        )

    return make
