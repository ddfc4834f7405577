"""Sweeps of layouts: complete, and judged by their numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.estimation import ModelShape
from autopar.solver import Cluster
from benchmarks.papers import hagemann, layout_tables, narayanan, planned
from benchmarks.papers.study import FUSED, Layout, Study, shape_facts
from benchmarks.papers.sweep import PAPER, SHARDED, Space, Sweep, sweep

LAYERS = 4
SHAPE = ModelShape(
    hidden=128, layers=LAYERS, heads=8, kv_heads=8, ffn=256, mlp="swiglu", vocab=512, seq=128
)
CLUSTER = Cluster("a100-80gb", nodes=2)
BATCH = 64
MESHES = [Layout(tp=2, pp=2, dp=4), Layout(tp=8, pp=1, dp=2), Layout(tp=1, pp=4, dp=4)]


@pytest.fixture(scope="module")
def swept() -> Sweep:
    study = Study(shape_facts(SHAPE), CLUSTER, global_batch_size=BATCH)
    few = replace(PAPER, micro_batch_size=(1, 2), recompute=("none", "full"))
    return sweep("Llama 13B", 2048, study, LAYERS, few, replace(SHARDED, micro_batch_size=(1,)))


@pytest.mark.parametrize("space", [PAPER, SHARDED])
def test_a_space_has_all_meshes_that_use_all_gpus(space: Space) -> None:
    layouts = list(space.layouts(num_gpus=16, num_layers=LAYERS, batch=BATCH))
    assert {layout.num_gpus for layout in layouts} == {16}
    meshes = {(layout.tp, layout.pp) for layout in layouts}
    assert meshes == {
        (tp, pp) for tp in space.tp for pp in space.pp if 16 % (tp * pp) == 0 and LAYERS % pp == 0
    }
    assert not any(layout.sequence_parallel for layout in layouts if layout.tp == 1)
    assert {layout.recompute for layout in layouts} == set(space.recompute)
    assert {layout.zero_stage for layout in layouts if layout.dp > 1} == set(space.zero_stage)


def test_nothing_that_fits_is_faster_than_the_best(swept: Sweep) -> None:
    fitting = [found for found in swept.found if found.estimate.fits]
    assert swept.best.seconds == min(found.seconds for found in fitting)
    prices = [swept.price(choose) for choose in layout_tables.PRICES.values()]
    assert min(price for price in prices if price is not None) >= 1.0
    assert swept.price(lambda layout: layout.tp == 1024) is None


def test_layouts_are_estimated_once(swept: Sweep) -> None:
    assert len({found.layout for found in swept.found}) == len(swept.found)


def test_tables_have_a_line_for_each_sweep(swept: Sweep) -> None:
    for text in (
        layout_tables.best_table([swept, swept]),
        layout_tables.price_table([swept, swept]),
        layout_tables.kernel_table([swept, swept]),
        layout_tables.sequence_parallel_table([swept, swept]),
    ):
        lines = text.splitlines()
        assert len(lines) == 4
        assert len({line.count("|") for line in lines}) == 1


def test_findings_are_what_the_sweep_says(swept: Sweep) -> None:
    best = swept.fastest(layout_tables.is_paper)
    assert best is not None
    micro_batch, recompute, pipeline, *_, mfu = hagemann.what_holds([swept, swept])
    assert micro_batch.agrees == (best.layout.micro_batch_size == 1)
    assert recompute.agrees == (best.layout.recompute == "none")
    assert pipeline.agrees == (best.layout.pp >= best.layout.tp)
    assert not mfu.agrees  # so small a model is far from the paper's
    assert mfu.ours == f"{best.mfu:.1%}"


def test_kernels_that_do_less_take_no_longer(swept: Sweep) -> None:
    seconds = list(layout_tables.kernel_seconds(swept).values())
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("layout", MESHES, ids=lambda layout: layout.words)
def test_no_step_is_slower_on_a_faster_part(layout: Layout) -> None:
    facts = shape_facts(SHAPE)

    def seconds(**factors: float) -> float:
        cluster = CLUSTER.scaled(**factors)
        return Study(facts, cluster, global_batch_size=BATCH)(layout).seconds

    today = seconds()
    assert today == Study(facts, CLUSTER, global_batch_size=BATCH)(layout).seconds
    parts = [seconds(**{part: 2}) for part in ("compute", "memory", "node", "network")]
    assert max(parts) <= today * (1 + 1e-9)
    assert seconds(compute=2, memory=2, node=2, network=2) <= min(parts) * (1 + 1e-9)


def test_larger_batches_hide_the_bubble_of_long_pipelines() -> None:
    """What reconciles the two papers: from one batch to a larger, MFU of more stages grows more."""
    shape = replace(SHAPE, layers=30, heads=32, kv_heads=32)
    found = [
        narayanan.meshes_of(
            Study(shape_facts(shape), Cluster("a100-80gb", nodes=8), global_batch_size=batch),
            narayanan.Setting(recompute="none", kernel=FUSED),
        )
        for batch in (8, 64)
    ]
    growth = [found[1][mesh].mfu / found[0][mesh].mfu for mesh in narayanan.MESHES]
    assert growth == sorted(growth)
    assert growth[0] >= 1.0


def test_side_by_side_differ_in_their_mesh_only(swept: Sweep) -> None:
    tensor, pipeline = narayanan.side_by_side(swept, 4).values()
    assert (tensor.layout.tp, tensor.layout.pp) == (4, 1)
    assert replace(tensor.layout, tp=1, pp=4, sequence_parallel=False) == pipeline.layout


def test_recommendations_are_plans() -> None:
    plan = planned.planned(
        shape_facts(SHAPE), Cluster("a100-80gb", gpus_per_node=2), SHAPE.seq, batch=4
    )
    row = planned.row("tiny", 2048, plan)
    assert row[:3] == ("tiny", "2k", "2 A100")
    assert plan.certificate.objective_s == pytest.approx(plan.prediction.step_s)
