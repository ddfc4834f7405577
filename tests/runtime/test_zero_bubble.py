"""Backwards in two parts give the gradients of whole ones, bit by bit (ranks are threads)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from tests.runtime.cases import Setup
from tests.runtime.harness import assert_parity, train_on_threads

SETUPS = [
    Setup(name="llama", mesh=Mesh(pp=2)),
    Setup(name="llama", mesh=Mesh(pp=2, tp=2)),
    Setup(name="llama", mesh=Mesh(pp=2, tp=2), sequence=True, zero_stage=0),
    Setup(name="gpt2", mesh=Mesh(pp=2)),  # tied over the stages
    Setup(name="gpt2", mesh=Mesh(pp=2, tp=2)),
    Setup(name="dropout", mesh=Mesh(pp=2)),
    Setup(name="frozen", mesh=Mesh(pp=2)),
    Setup(name="transformer", mesh=Mesh(pp=3)),
    Setup(name="llama", mesh=Mesh(pp=2, dp_shard=2), zero_stage=1),
    Setup(name="llama", mesh=Mesh(pp=2, dp_shard=2), zero_stage=2),
    Setup(name="gpt2", mesh=Mesh(pp=2, dp_shard=2), zero_stage=3),
    Setup(name="dropout", mesh=Mesh(pp=2, tp=2), kernels="eager"),
    Setup(name="llama", mesh=Mesh(pp=2, cp=2)),
]


def with_schedule(setup: Setup, schedule: str) -> Setup:
    return dataclasses.replace(setup, layers=3, num_micro_batches=4, schedule=schedule)  # type: ignore[arg-type]


@functools.cache
def gradients_of(setup: Setup) -> list[Mapping[str, Tensor]]:
    return [outcome.gradients for outcome in train_on_threads(setup, num_steps=1)]


@pytest.mark.parametrize("recompute", ["none", "selective_op", "full"])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_gradients_are_those_of_1f1b(setup: Setup, recompute: str):
    setup = dataclasses.replace(setup, recompute=recompute)  # type: ignore[arg-type]
    whole = gradients_of(with_schedule(setup, "1f1b"))
    parts = gradients_of(with_schedule(setup, "zero_bubble"))
    for one, other in zip(whole, parts, strict=True):
        assert one.keys() == other.keys()
        for name, expected in one.items():
            assert torch.equal(other[name], expected), name
