"""Every layout, ZeRO stage, schedule and recomputation computes what one device computes (ranks are
threads).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from autopar.ir.mesh import Mesh
from autopar.ir.plan import RecomputeName, ScheduleName
from tests.runtime.cases import Setup, initial_parameters, make_batch
from tests.runtime.harness import assert_close, assert_parity, train_on_threads

MESHES = (
    Mesh(dp_shard=2, tp=2),
    Mesh(pp=2, tp=2),
    Mesh(pp=2, dp_shard=2),
    Mesh(dp_shard=4),
    Mesh(dp_replicate=2, dp_shard=2),
    Mesh(dp_shard=2, cp=2),
    Mesh(cp=2, ep=2),
)
MODELS = ("llama", "gpt2", "transformer")

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "layered")
RECOMPUTES: tuple[RecomputeName, ...] = ("none", "full")

GRID = [
    Setup(
        name=MODELS[index % 3],
        mesh=mesh,
        zero_stage=zero_stage,
        schedule=schedule,
        recompute=RECOMPUTES[(index // 2 + index) % 2],
        sequence=index % 4 > 1,
    )
    for index, (mesh, zero_stage, schedule) in enumerate(
        itertools.product(MESHES, range(4), SCHEDULES)
    )
]
"""Every mesh, ZeRO stage and schedule; models, recomputation and sequence parallelism in turn."""


@pytest.mark.parametrize("setup", GRID, ids=str)
def test_fp32_training_equals_one_device(setup: Setup):
    for outcome in train_on_threads(setup):
        assert_parity(setup, outcome, 3)


def _ordered(mesh: Mesh, *axes: str) -> Mesh:
    """With these axes inside the others, the last one fastest."""
    order = tuple(axis for axis in mesh.axis_order if axis not in axes)
    return replace(mesh, axis_order=(*order, *axes))


ORDERED = [
    Setup(mesh=_ordered(Mesh(pp=2, dp_shard=2), "pp"), zero_stage=3),
    Setup(name="gpt2", mesh=_ordered(Mesh(pp=2, tp=2), "tp", "pp"), schedule="zero_bubble"),
    Setup(mesh=_ordered(Mesh(dp_replicate=2, dp_shard=2), "dp_replicate"), zero_stage=2),
    Setup(name="transformer", mesh=_ordered(Mesh(dp_shard=2, tp=2), "dp_shard"), zero_stage=1),
]


@pytest.mark.parametrize("setup", ORDERED, ids=str)
def test_ranks_in_another_order_compute_the_same(setup: Setup):
    for outcome in train_on_threads(setup):
        assert_parity(setup, outcome, 3)


MODULAR = [
    Setup(name=name, layers=4, mesh=mesh, schedule="layered", zero_stage=zero, modular=True)
    for name, mesh, zero in (
        ("llama", Mesh(pp=2), 0),
        ("gpt2", Mesh(pp=2, dp_shard=2), 3),
        ("transformer", Mesh(pp=3), 1),
    )
]


@pytest.mark.parametrize("setup", MODULAR, ids=str)
def test_modular_pipelines_equal_one_device(setup: Setup):
    assert_parity(setup, train_on_threads(setup)[0], 3)


INTERLEAVED = [
    Setup(
        name=name,
        layers=layers,
        mesh=mesh,
        num_micro_batches=num,
        schedule="interleaved",
        zero_stage=zero,
        recompute=RECOMPUTES[recompute],
        modular=True,
    )
    for name, layers, mesh, num, zero, recompute in (
        ("llama", 2, Mesh(pp=2), 4, 0, 0),
        ("llama", 2, Mesh(pp=2, dp_shard=2), 4, 1, 1),
        ("gpt2", 4, Mesh(pp=2, dp_shard=2), 4, 3, 0),
        ("transformer", 4, Mesh(pp=3), 4, 0, 1),  # p does not divide M
    )
]


@pytest.mark.parametrize("setup", INTERLEAVED, ids=str)
def test_interleaved_pipelines_equal_one_device(setup: Setup):
    assert_parity(setup, train_on_threads(setup)[0], 3)


BY_BLOCK_CASES: tuple[tuple[str, int, Mesh, ScheduleName, int, str], ...] = (
    ("llama", 4, Mesh(dp_shard=2), "1f1b", 0, "0=1, 2-3=2"),
    ("gpt2", 2, Mesh(dp_shard=2), "1f1b", 1, "3=2"),  # its matrix is the embedding's, too
    ("gpt2", 2, Mesh(dp_shard=2), "1f1b", 0, "0=1"),
    ("transformer", 2, Mesh(dp_replicate=2, dp_shard=2), "layered", 0, "1=2, 2=1"),
    ("llama", 4, Mesh(pp=2, dp_shard=2), "1f1b", 1, "0=2, 4-5=1"),
    ("llama", 4, Mesh(pp=2, dp_shard=2), "zero_bubble", 0, "0=2, 2=1, 4=1"),
    ("gpt2", 4, Mesh(pp=2, dp_shard=2), "interleaved", 0, "1=1, 2-3=2"),
    ("llama", 2, Mesh(dp_shard=2, cp=2), "1f1b", 0, "1=1"),
)
BY_BLOCK = [
    Setup(
        name=name,
        layers=layers,
        mesh=mesh,
        num_micro_batches=4 if mesh.dp == 1 or mesh.pp > 1 else 2,
        schedule=schedule,
        modular=schedule == "interleaved",
        zero_stage=3,
        recompute=RECOMPUTES[recompute],
        zero_stages=stages,
    )
    for name, layers, mesh, schedule, recompute, stages in BY_BLOCK_CASES
]


@pytest.mark.parametrize("setup", BY_BLOCK, ids=str)
def test_blocks_with_zero_stages_of_their_own_equal_one_device(setup: Setup):
    for outcome in train_on_threads(setup, 2):
        assert_parity(setup, outcome, 2)


FLOAT64 = [
    Setup(
        name=name,
        mesh=mesh,
        zero_stage=zero_stage,
        schedule=SCHEDULES[is_layered],
        precision="float64",
        optimizer="adamw",
        max_grad_norm=0.5,
        num_micro_batches=2,
    )
    for name, mesh, zero_stage, is_layered in (
        ("llama", Mesh(dp_shard=2, tp=2), 3, False),
        ("gpt2", Mesh(pp=2, tp=2), 1, True),
        ("gpt2", Mesh(pp=2, dp_shard=2), 2, False),
        ("transformer", Mesh(dp_replicate=2, dp_shard=2), 3, True),
        ("llama", Mesh(dp_replicate=2, tp=2), 0, False),
    )
]


@pytest.mark.parametrize("setup", FLOAT64, ids=str)
def test_adamw_with_clipping_equals_one_device_in_float64(setup: Setup):
    for outcome in train_on_threads(setup):
        assert_parity(setup, outcome, 3)


BF16 = [
    Setup(
        name=name,
        mesh=mesh,
        zero_stage=zero,
        schedule="layered",
        precision="bf16",
        recompute="full",
    )
    for name, mesh, zero in (
        ("llama", Mesh(dp_shard=2, tp=2), 3),
        ("gpt2", Mesh(pp=2, dp_shard=2), 1),
        ("transformer", Mesh(dp_replicate=2, tp=2), 0),
    )
]


@pytest.mark.parametrize("setup", BF16, ids=str)
def test_bf16_training_is_finite_and_near_fp32(setup: Setup):
    assert_parity(setup, train_on_threads(setup)[0], 3)


def test_ranks_agree_on_results_and_parameters():
    outcomes = train_on_threads(Setup(name="gpt2", mesh=Mesh(pp=2, dp_shard=2), zero_stage=3))
    for outcome in outcomes[1:]:
        assert [r.loss for r in outcome.results] == [r.loss for r in outcomes[0].results]
        assert_close(outcome.parameters, outcomes[0].parameters, 0.0)


def test_more_micro_batches_than_stages_change_nothing():
    setup = Setup(mesh=Mesh(pp=2, dp_shard=1), num_micro_batches=8, zero_stage=2)
    assert_parity(setup, train_on_threads(setup)[0], 3)


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2), Mesh(tp=2)], ids=["dp", "tp"])
def test_num_tokens_counts_valid_tokens_in_bf16_too(mesh: Mesh):
    setup = Setup(name="transformer", mesh=mesh, precision="bf16", num_micro_batches=1)
    (outcome, _) = train_on_threads(setup, 1)
    valid = (make_batch("transformer", seed=0)["targets"] != -100).sum()
    assert outcome.results[0].num_tokens == valid
    assert outcome.results[0].seconds > 0


@pytest.mark.parametrize("zero_stage", range(4))
def test_complete_gradients_are_not_summed_over_data_ranks(zero_stage: int):
    """Positions do not depend on the batch: where they are ``I``, each rank has their gradient."""
    mesh = Mesh(dp_replicate=1 + zero_stage % 2, dp_shard=2)
    setup = Setup(name="transformer", mesh=mesh, zero_stage=zero_stage, complete="positions")
    assert_parity(setup, train_on_threads(setup)[0], 3)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_frozen_parameters_stay_as_they_are(zero_stage: int):
    setup = Setup(name="frozen", mesh=Mesh(pp=2, dp_shard=2), zero_stage=zero_stage)
    outcome = train_on_threads(setup)[0]
    assert_parity(setup, outcome, 3)
    start = initial_parameters("frozen", 2, "fp32")
    for name in ("tokens.weight", "positions.weight", "head.weight"):
        assert name not in outcome.gradients
        torch.testing.assert_close(outcome.parameters[name], start[name], rtol=0, atol=0)
