"""Random models under random well-typed layouts equal one device: the theorem of the calculus."""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import SegmentPlan
from autopar.ir.typecheck import check_kind, check_moved
from autopar.passes import lower
from autopar.passes.pipeline import kind_passes, place
from tests.passes.harness import run_program
from tests.passes.layouts import anything, choose_layout, random_pins
from tests.passes.reference import Case, assert_same, random_case

MESHES = (
    Mesh(tp=2),
    Mesh(tp=3),
    Mesh(tp=4),
    Mesh(dp_shard=3),
    Mesh(dp_shard=2, tp=2),
    Mesh(dp_replicate=3, tp=2),
    Mesh(dp_shard=2, tp=3),
    Mesh(dp_replicate=2, dp_shard=2, tp=2),
    Mesh(cp=2, tp=2),
    Mesh(dp_shard=2, cp=3),
    Mesh(dp_shard=2, ep=2, tp=2),
)
seeds = st.integers(0, 10**6)
meshes = st.sampled_from(MESHES)


def random_layout(case: Case, mesh: Mesh, seed: int) -> Layout:
    rng = random.Random(seed)
    pin = random_pins(case.model, mesh, rng, batch=case.batch)
    return choose_layout(case.model, mesh, batch=case.batch, pin=pin, choose=anything(rng))


@st.composite
def cuts(draw: st.DrawFn, num_blocks: int) -> list[SegmentPlan]:
    """Any runs of blocks, one after the other on stages in order."""
    borders = sorted(draw(st.sets(st.integers(1, num_blocks - 1))))
    firsts, lasts = [0, *borders], [*(border - 1 for border in borders), num_blocks - 1]
    return [
        SegmentPlan(stage=stage, first_block=first, last_block=last)
        for stage, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    ]


@given(model=seeds, layout=seeds, mesh=meshes, steps=st.integers(1, 6))
@example(model=306, layout=2, mesh=Mesh(tp=2), steps=4)  # only a dead op knew of blocks
@example(model=137, layout=0, mesh=Mesh(tp=2), steps=4)  # x - x: gradients are rounding
def test_any_layout_gives_the_loss_and_gradients_of_one_device(
    model: int, layout: int, mesh: Mesh, steps: int
):
    case = random_case(model, layers=1, num_steps=steps)
    program = lower(
        case.model,
        random_layout(case, mesh, layout),
        mesh=mesh,
        micro_batch_size=case.batch // mesh.batch_ranks,
        segments=[SegmentPlan(stage=0, first_block=0, last_block=2)],
    )
    found = run_program(program, case.model, mesh, case.parameters, case.inputs)
    assert_same(found, case.expected)


@given(model=st.integers(0, 9), layout=seeds, mesh=meshes, segments=cuts(5), tied=st.booleans())
def test_any_cut_gives_the_loss_and_gradients_of_one_device(
    model: int, layout: int, mesh: Mesh, segments: list[SegmentPlan], tied: bool
):
    """Every layer also reads the embedding, which therefore skips segments; tied, the head too."""
    case = random_case(model, layers=3, num_steps=2, tied=tied)
    program = lower(
        case.model,
        random_layout(case, mesh, layout),
        mesh=mesh,
        micro_batch_size=case.batch // mesh.batch_ranks,
        segments=segments,
    )
    found = run_program(program, case.model, mesh, case.parameters, case.inputs)
    assert_same(found, case.expected)


@given(model=seeds, layout=seeds, mesh=meshes)
def test_passes_keep_kinds_well_typed_and_have_nothing_left_to_do(
    model: int, layout: int, mesh: Mesh
):
    case = random_case(model, layers=1)
    degrees = mesh.degrees()
    placed = place(case.model, random_layout(case, mesh, layout), mesh=mesh, batch=case.batch)
    for typed in placed.values():
        check_kind(typed.kind, typed.layout, degrees=degrees, batch=case.batch)
        check_moved(typed.kind, typed.layout)
        for rewrite in kind_passes(mesh):
            assert rewrite(typed) is typed
