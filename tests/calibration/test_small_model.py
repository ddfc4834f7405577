"""The small model that is timed is the one whose work is costed."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.calibration.effort import effort_for
from autopar.calibration.samples import Timing
from autopar.calibration.small_model import ModelSize, sample_of, training_of
from autopar.ir.graph import evaluate

SIZE = ModelSize(sequences=3, length=8, hidden=16, inner=24, heads=2, layers=2, vocabulary=32)


def test_the_products_that_run_are_those_of_the_sample():
    train = training_of(SIZE, torch.device("cpu"), torch.float32)
    with FlopCounterMode(display=False) as counter:
        train()
    counts = counter.get_flop_counts()["Global"]
    run = sum(count for op, count in counts.items() if "attention" not in str(op))
    sample = sample_of(SIZE, torch.float32, Timing(best_s=1.0, median_s=1.0), "model")
    assert run == sum(
        evaluate(product.flops, 1) for work, _ in sample.works for product in work.products
    )
    assert sum(work.attention is not None for work, _ in sample.works) == 2 * SIZE.layers
    assert sample.num_kernels > 2 * 20 * SIZE.layers


def test_every_device_has_an_effort():
    for device in ("cpu", "cuda"):
        whole, quick = (effort_for(device, quick=quick) for quick in (False, True))
        assert len(quick.products) < len(whole.products)
        assert len(quick.message_bytes) < len(whole.message_bytes)
