"""Dynamic loss scaling for fp16, whose gradients would vanish below 6e-8 and overflow above 65504.

The loss is multiplied before backward, and gradients are divided before they are used. Where they
are not finite the step is skipped and the scale halved; after many good steps it is doubled. All
ranks see the same norm of all gradients, so that they decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.ir.functional import token_loss
from autopar.ir.graph import ModelGraph, info
from autopar.ir.layout import operands_of
from autopar.ir.plan import BatchPlan

INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000  # as torch.amp.GradScaler has it
_SMALLEST, _LARGEST = 2.0**-24, 2.0**40

_SCALE, _GOOD_STEPS = "loss_scale", "loss_scale_good_steps"


class LossScaler:
    """The scale of the loss, by which everything has to be divided that follows from gradients.

    Args:
        is_active: False keeps the scale at 1.
        num_terms: Terms that the loss of a step sums up. The scale is that of their mean: a sum is
            seeded with the scale over this number, rounded to a power of two.
    """

    def __init__(self, *, is_active: bool, num_terms: int) -> None:
        self.is_active = is_active
        self.scale = INITIAL_SCALE if is_active else 1.0
        self._num_terms = 2.0 ** math.floor(math.log2(max(1, num_terms))) if is_active else 1.0
        self._good_steps = 0

    @property
    def seed(self) -> float:
        """The gradient of the loss with which backward starts."""
        return self.scale / self._num_terms

    def accepts(self, *, is_finite: bool) -> bool:
        """Whether the step is taken; adapts the scale for the next one."""
        if not self.is_active:
            return True
        if not is_finite:
            self.scale, self._good_steps = max(self.scale / 2, _SMALLEST), 0
            return False
        self._good_steps += 1
        if self._good_steps == _GROWTH_INTERVAL:
            self.scale, self._good_steps = min(self.scale * 2, _LARGEST), 0
        return True

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint; empty where it is not active."""
        if not self.is_active:
            return {}
        return {_SCALE: torch.tensor(self.scale), _GOOD_STEPS: torch.tensor(self._good_steps)}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint; one of another precision has nothing to say."""
        if self.is_active and _SCALE in state:
            self.scale = state[_SCALE]
            self._good_steps = int(state[_GOOD_STEPS])


def num_loss_terms(model: ModelGraph, batch: BatchPlan) -> int:
    """Terms that the loss of a step sums up, at most: tokens, or losses of micro-batches.

    Where the graph does not show its targets it counts sequences: the scale finds its way.
    """
    if model.weight is None:
        return batch.num_micro_batches
    block = model.blocks[model.producer(model.weight)[0]]
    for node in model.kind_of(block).graph.nodes:
        if node.target is token_loss:
            targets = operands_of(node)[1]
            return math.prod(info(targets).tensor.shape_at(batch.global_batch_size))
    return batch.global_batch_size
