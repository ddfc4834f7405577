"""Batches for a plan's model when the user brings none."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.api.planning import plan_source
from autopar.ir.plan import Plan


def synthetic_batch(plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
    """One global batch of random inputs: token ids below the vocabulary, labels equal to the ids,
    normal floats.
    """
    inputs = plan_source(plan).example_inputs(plan.model.seq_len)
    vocabulary = vocabulary_size(plan) or 2
    batch: dict[str, Tensor] = {}
    for name, example in inputs.items():
        shape = (plan.batch.global_batch_size, *example.shape[1:])
        if name == "labels" and "input_ids" in batch:
            batch[name] = batch["input_ids"].clone()
        elif example.dtype.is_floating_point:
            batch[name] = torch.randn(shape, generator=generator, dtype=example.dtype)
        else:
            batch[name] = torch.randint(vocabulary, shape, generator=generator, dtype=example.dtype)
    return batch


def vocabulary_size(plan: Plan) -> int | None:
    """Number of token ids that the plan's model knows; None when its config does not say."""
    config = getattr(plan_source(plan), "config", None)
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) else None
