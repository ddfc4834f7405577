"""The ZeRO paper's formulas hold exactly of any model, in the account and in the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.estimation import ModelShape
from autopar.ir.plan import PrecisionName
from autopar.solver import Cluster
from benchmarks.papers import zero
from benchmarks.papers.study import Layout, Study, numerics, shape_facts

UNTIED = ModelShape(
    hidden=64, layers=3, heads=4, kv_heads=2, ffn=96, mlp="swiglu", vocab=256, seq=32
)
TIED = replace(UNTIED, kv_heads=4, mlp="gelu4h")
DP = 16


def _study(shape: ModelShape, micro_batches: int, gradients: PrecisionName = "bf16") -> Study:
    return Study(
        shape_facts(shape),
        Cluster("a100-80gb", nodes=2),
        global_batch_size=DP * micro_batches,
        training=numerics(gradients),
    )


@pytest.mark.parametrize("shape", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(("gradients", "width"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("stage", range(4))
def test_states_have_the_bytes_of_the_formula(
    shape: ModelShape, gradients: PrecisionName, width: int, stage: int
) -> None:
    study = _study(shape, 1, gradients)
    layout = Layout(dp=DP, zero_stage=stage)
    expected = zero.formula_bytes(zero.num_parameters(study), stage, DP, gradient=width)
    assert zero.state_bytes(study(layout)) == pytest.approx(expected, abs=4)  # each cause is an int


def test_groups_of_replicas_shard_among_fewer_ranks() -> None:
    study = _study(UNTIED, 1)
    found = study(Layout(dp=DP, replicas=4, zero_stage=3))
    expected = zero.formula_bytes(zero.num_parameters(study), 3, DP // 4)
    assert zero.state_bytes(found) == pytest.approx(expected, abs=4)


@pytest.mark.parametrize("shape", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("micro_batches", [1, 5])
def test_volumes_are_those_of_data_parallelism(shape: ModelShape, micro_batches: int) -> None:
    study = _study(shape, micro_batches)
    psi = zero.num_parameters(study) * (DP - 1) / DP
    last = float(study.solved(Layout(dp=DP)).stager.costs.numel[-1]) * (DP - 1) / DP

    def sent(layout: Layout) -> float:
        return zero.volume(study.solved(layout)).elements

    assert sent(Layout(dp=DP, zero_stage=0)) == pytest.approx(2 * psi)
    assert sent(Layout(dp=DP, zero_stage=1)) == pytest.approx(2 * psi)
    assert sent(Layout(dp=DP, zero_stage=2)) == pytest.approx((1 + micro_batches) * psi)
    layered = Layout(dp=DP, zero_stage=2, schedule="layered")
    assert sent(layered) == pytest.approx(2 * psi)
    assert sent(replace(layered, zero_stage=3)) == pytest.approx(3 * psi - last)


def test_one_rank_sends_nothing() -> None:
    study = Study(shape_facts(UNTIED), Cluster("a100-80gb", gpus_per_node=1), global_batch_size=2)
    assert zero.volume(study.solved(Layout(dp=1))).elements == 0


def test_claims_that_are_theorems_are_found_to_hold() -> None:
    found = zero.what_holds(_study(TIED, 1), 5)
    assert [finding.agrees for finding in found] == [True, True, True, None, True]
