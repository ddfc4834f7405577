"""The shortest training: bubbles as derived, batches as defined, layouts as searched."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.estimation import ModelShape
from autopar.solver.training_length import TrainingLength
from benchmarks.papers import layered
from benchmarks.papers.layered import METHODS, Run, Space, Study, shortest
from benchmarks.papers.study import shape_facts

LAYERS = 8
SHAPE = ModelShape(
    hidden=128,
    layers=LAYERS,
    heads=8,
    kv_heads=8,
    ffn=512,
    mlp="gelu4h",
    vocab=512,
    seq=128,
)
SPACE = Space(tp=2, pp=(1, 2, 4, 8), micro_batches=(1, 2, 4), fewest_gpus=2, most_gpus=128)


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(
        facts=shape_facts(SHAPE),
        layers=LAYERS,
        space=SPACE,
        length=TrainingLength.at_critical_batch(1000, critical_batch=16),
        gpus_per_node=4,
    )


@pytest.fixture(scope="module")
def runs(study: Study) -> list[Run]:
    return list(study.runs())


@given(pp=st.integers(1, 12), num=st.integers(1, 40))
def test_the_bubble_of_contiguous_stages_is_that_of_the_formula(pp: int, num: int) -> None:
    assert layered.efficiency(pp, 1, num) == pytest.approx(num / (num + pp - 1))


@given(pp=st.integers(1, 8), virtual=st.integers(2, 6), more=st.integers(0, 20))
def test_the_bubble_of_modular_stages_is_divided_by_the_segments(
    pp: int, virtual: int, more: int
) -> None:
    num = pp + more
    expected = 1 / (1 + (pp - 1) / (num * virtual))
    assert layered.efficiency(pp, virtual, num) == pytest.approx(expected)


def test_the_papers_layouts_have_the_papers_efficiencies() -> None:
    assert layered.efficiency(160, 1, 172) == pytest.approx(0.520, abs=5e-4)
    assert layered.efficiency(5, 32, 5) == pytest.approx(0.976, abs=5e-4)


def test_larger_batches_save_at_most_half_of_the_papers_steps() -> None:
    length = layered.LENGTH
    assert length.steps(2420) == pytest.approx(1e5)
    assert length.steps(10**9) == pytest.approx(1e5 / 2, rel=1e-5)


def test_every_method_is_searched(runs: list[Run]) -> None:
    assert {run.method for run in runs} == {method.name for method in METHODS}
    for run in runs:
        layout = run.found.layout
        assert layout.dp * run.num_micro_batches <= 16
        assert SPACE.fewest_gpus <= layout.num_gpus <= SPACE.most_gpus
        assert layout.pp * layout.virtual_stages in (1, layout.pp, LAYERS)
        batch = layout.dp * run.num_micro_batches
        expected = 1000 / 2 * (1 + 16 / batch) * run.found.seconds / 86_400
        assert run.days == pytest.approx(expected)


def test_more_gpus_never_train_longer(runs: list[Run]) -> None:
    for method in METHODS:
        found = [shortest(runs, method.name, limit) for limit in (8, 32, 128)]
        days = [run.days for run in found if run is not None]
        assert days == sorted(days, reverse=True)
        assert all(run is None or run.found.layout.num_gpus <= 8 for run in found[:1])


def test_a_slower_network_never_trains_faster(study: Study, runs: list[Run]) -> None:
    slow = study.runs(node_gbps=25)
    for one, other in zip(runs, slow, strict=True):
        assert one.found.layout == other.found.layout
        assert other.days >= one.days * (1 - 1e-9)


def test_a_higher_stage_of_zero_holds_less_of_the_states(runs: list[Run]) -> None:
    states = ("parameters", "master weights", "optimizer", "gradients")
    groups: dict[tuple[int, int], dict[int, int]] = {}
    for run in runs:
        layout = run.found.layout
        if run.method == layered.MODULAR and layout.dp > 1:
            fullest = max(run.found.estimate.prediction.ranks, key=lambda rank: rank.peak_bytes)
            held = sum(fullest.bytes_by_cause[cause] for cause in states)
            groups.setdefault((layout.pp, layout.dp), {})[layout.zero_stage] = held
    assert groups
    for by_stage in groups.values():
        assert all(by_stage[a] > by_stage[b] for a, b in itertools.pairwise(sorted(by_stage)))


def test_findings_compare_the_shortest_trainings(study: Study, runs: list[Run]) -> None:
    both, *_ = layered.what_holds({25: study.runs(node_gbps=25), 3200: runs})
    base, best = shortest(runs, layered.BASELINE), shortest(runs, layered.MODULAR)
    assert base is not None
    assert best is not None
    assert both.agrees == (base.days / best.days > 1.75)
    assert f"{base.days:.1f} days become {best.days:.1f}" in both.ours
