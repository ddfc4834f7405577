"""Batches for a plan's model when the user brings none."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.api.planning import plan_source
from autopar.ir.plan import Plan


def synthetic_batches(plan: Plan) -> Iterator[dict[str, Tensor]]:
    """Global batches of random inputs without end, drawn from the plan's seed.

    Token ids are below the vocabulary and classes below their number, labels of tokens are equal
    to the ids, floats are normal. Where nothing says what is valid, integers are 0 or 1.
    """
    source = plan_source(plan)
    inputs = source.example_inputs(plan.model.seq_len)
    bounds = {name: source.integer_bound(name) or 2 for name in inputs}
    generator = torch.Generator().manual_seed(plan.training.seed)
    while True:
        batch: dict[str, Tensor] = {}
        for name, example in inputs.items():
            shape = (plan.batch.global_batch_size, *example.shape[1:])
            dtype = example.dtype
            if (
                name == "labels"
                and "input_ids" in batch
                and batch["input_ids"].shape == shape
                and bounds["labels"] == bounds["input_ids"]
            ):
                batch[name] = batch["input_ids"].clone()
            elif dtype.is_floating_point:
                batch[name] = torch.randn(shape, generator=generator, dtype=dtype)
            else:
                batch[name] = torch.randint(bounds[name], shape, generator=generator, dtype=dtype)
        yield batch


def vocabulary_size(plan: Plan) -> int | None:
    """Number of token ids that the plan's model knows; None when its config does not say."""
    return plan_source(plan).integer_bound("input_ids")
