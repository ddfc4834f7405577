"""Random numbers are those of their logical position, however the model is laid out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.axis_group import AxisGroup
from autopar.ir.mesh import Mesh
from autopar.ir.moves import take_shard
from autopar.ir.placement import State, parse_state
from autopar.ir.random_ops import dropout
from autopar.ir.randomness import Drawing, draw, drawing
from autopar.passes.verify_shapes import ShapeGroup
from tests.runtime.cases import Setup
from tests.runtime.harness import assert_parity, train_on_threads
from tests.runtime.laid_out import assert_equals_reference, laid_out

LAYOUTS = [
    Setup(mesh=Mesh()),
    Setup(mesh=Mesh(), num_micro_batches=8, recompute="full"),
    Setup(mesh=Mesh(tp=2), recompute="full"),
    Setup(mesh=Mesh(tp=4), num_micro_batches=1),
    Setup(mesh=Mesh(tp=2), sequence=True, num_micro_batches=4),
    Setup(mesh=Mesh(dp_shard=2), zero_stage=3, recompute="full", num_micro_batches=4),
    Setup(mesh=Mesh(dp_replicate=4), num_micro_batches=1),
    Setup(mesh=Mesh(pp=2), schedule="layered", recompute="full"),
    Setup(mesh=Mesh(pp=4), num_micro_batches=4),
    Setup(mesh=Mesh(pp=2, dp_shard=2, tp=2), zero_stage=2, sequence=True),
    Setup(mesh=Mesh(cp=2, tp=2), recompute="full"),
]


@pytest.mark.parametrize("setup", LAYOUTS, ids=str)
def test_dropout_training_equals_one_device(setup: Setup) -> None:
    """Loss, gradients and parameters after two steps are those of ``run_reference``, which draws
    for whole batches; attention has dropout too.
    """
    setup = replace(setup, name="dropout")
    assert_parity(setup, train_on_threads(setup, 2)[0], 2)


class Unlike(nn.Module):
    """Random numbers that no tensor lends its shape to: the layer is dropped for some sequences,
    noise is the same for all, and integers choose rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        keep = (torch.rand(x.shape[0], 1, 1, device=x.device) < 0.5).to(x.dtype)
        noise = torch.randn(x.shape[1], 8, device=x.device)
        chosen = self.table(torch.randint(5, (x.shape[0], x.shape[1]), device=x.device))
        return x + keep * self.linear(x) + 0.1 * noise + chosen


class Depth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Unlike() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


@pytest.mark.parametrize(
    "setup",
    [
        Setup(mesh=Mesh(tp=2)),
        Setup(mesh=Mesh(pp=2), recompute="full"),
        Setup(mesh=Mesh(dp_shard=2), zero_stage=3, recompute="full"),
    ],
    ids=str,
)
def test_numbers_without_a_tensor_have_a_place_too(setup: Setup) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(4, 6, 8, generator=generator) for name in ("x", "y")}
    torch.manual_seed(0)
    case = laid_out(Depth(), batch, setup, micro_batch_size=1)
    assert_equals_reference(case, batch)


NOW = Drawing(seed=3, step=5, sequences=(8, 9, 2, 3), block=1)
SHAPE = (1, 12, 4)


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator)


def drawn(
    now: Drawing = NOW,
    op: str = "op",
    shape: Sequence[int] = SHAPE,
    batch_dim: int | None = 0,
    shards: Sequence[tuple[AxisGroup, str]] = (),
) -> Tensor:
    with drawing(now):
        return draw(
            uniform,
            op=op,
            shape=shape,
            batch_dim=batch_dim,
            shards=shards,
            device=torch.device("cpu"),
        )


def test_the_numbers_of_a_sequence_do_not_depend_on_its_neighbours() -> None:
    whole = drawn()
    assert whole.shape == (4, 12, 4)
    for row, sequence in enumerate(NOW.sequences):
        alone = drawn(replace(NOW, sequences=(sequence,)))
        torch.testing.assert_close(alone[0], whole[row], rtol=0, atol=0)


@pytest.mark.parametrize(
    "other",
    [
        {"now": replace(NOW, seed=4)},
        {"now": replace(NOW, step=6)},
        {"now": replace(NOW, block=2)},
        {"now": replace(NOW, sequences=(0, 1, 4, 5))},
        {"op": "op_1"},
    ],
)
def test_numbers_differ_by_all_that_they_are_drawn_for(other: dict[str, Any]) -> None:
    assert not (drawn() == drawn(**other)).any()


def test_no_two_numbers_of_a_batch_are_alike() -> None:
    whole = drawn()
    assert whole.unique().numel() == whole.numel()


SHARDINGS = [
    (shape, states)
    for shape, several in {
        SHAPE: "0 1 2 1,2:1 0,1:1 0/0 0/1 1/1 2/0",  # b s h
        SHAPE[1:]: "0 1 0,1:1 0/0 0/1 1/0",  # (b s) h
    }.items()
    for states in several.split()
]
"""Shapes of a sequence, and how they are sharded: states on one axis, or on two."""


@pytest.mark.parametrize(("shape", "states"), SHARDINGS)
def test_ranks_draw_their_shards_of_the_logical_tensor(shape: tuple[int, ...], states: str) -> None:
    texts = [f"S({text})" for text in states.split("/")]
    parsed = [parse_state(text) for text in texts]
    whole = drawn(shape=shape)
    for at in itertools.product(range(2), repeat=len(parsed)):
        groups = [ShapeGroup(f"axis{axis}", 2, rank) for axis, rank in enumerate(at)]
        found = drawn(shape=shape, shards=list(zip(groups, texts, strict=True)))
        torch.testing.assert_close(found, shard(whole, parsed, at), rtol=0, atol=0)


def shard(whole: Tensor, states: Sequence[State], at: Sequence[int]) -> Tensor:
    for state, rank in zip(states, at, strict=True):
        whole = take_shard(whole, state, rank, 2)
    return whole


def test_what_has_no_batch_is_drawn_once_for_all_sequences() -> None:
    one = drawn(shape=(12, 4), batch_dim=None)
    other = drawn(replace(NOW, sequences=(7,)), shape=(12, 4), batch_dim=None)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_dropout_keeps_the_expected_share_and_scales_it() -> None:
    now = replace(NOW, sequences=tuple(range(64)))
    with drawing(now):
        found = dropout(
            torch.ones(64, 32, 32), 0.25, op="op", shape=(1, 32, 32), batch_dim=0, shards=()
        )
    kept = found != 0
    assert abs(kept.float().mean() - 0.75) < 0.01
    torch.testing.assert_close(found[kept], torch.full_like(found[kept], 4 / 3))
