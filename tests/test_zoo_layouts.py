"""Any well-typed layout of any model of the zoo has the numbers of one device.

Everything is drawn: model and attention, mesh of up to 8 ranks, states of every tensor on every
axis, stage cuts, ZeRO stage, recomputation, kernels, schedule, number of micro-batches. `make
stress` draws for long.
"""

from __future__ import annotations

import itertools
import random
from typing import get_args

import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from autopar.ir.graph import ModelGraph
from autopar.ir.kernels import RUNNABLE
from autopar.ir.mesh import Mesh
from autopar.ir.plan import BatchPlan, Plan, RecomputeName, ScheduleName, SchedulePlan, SegmentPlan
from tests.passes.layouts import anything, choose_layout, random_pins
from tests.plans import bare_plan
from tests.zoo import ZOO
from tests.zoo_runs import assert_like_one_device, zoo_case

BATCH = 8
MODELS = [(model.name, attention) for model in ZOO.values() for attention in model.attentions]
MESHES = [
    Mesh(tp=2),
    Mesh(tp=4),
    Mesh(cp=2),
    Mesh(ep=2),
    Mesh(dp_shard=2),
    Mesh(dp_replicate=2, tp=2),
    Mesh(dp_shard=2, cp=2),
    Mesh(ep=2, tp=2),
    Mesh(cp=2, tp=2),
    Mesh(pp=2, tp=2),
    Mesh(pp=2, cp=2),
    Mesh(pp=2, dp_shard=2),
    Mesh(pp=3, ep=2),
    Mesh(dp_replicate=2, dp_shard=2),
    Mesh(pp=2, dp_shard=2, tp=2),
    Mesh(dp_shard=2, cp=2, tp=2),
    Mesh(dp_replicate=2, ep=2, tp=2),
]
SCHEDULES: list[ScheduleName] = list(get_args(ScheduleName))
RECOMPUTES: list[RecomputeName] = list(get_args(RecomputeName))


@pytest.mark.timeout(1200)  # it captures every family, and may wait for a busy machine
@settings(max_examples=settings().max_examples * 2 // 5)  # a step takes seconds
@given(
    model=st.sampled_from(MODELS),
    mesh=st.sampled_from(MESHES),
    seed=st.integers(0, 10**6),
    num_micro_batches=st.sampled_from([1, 2]),
    zero_stage=st.integers(0, 3),
    recompute=st.sampled_from(RECOMPUTES),
    schedule=st.sampled_from(SCHEDULES),
    kernels=st.sampled_from([*RUNNABLE, *(f"{name} + fused pointwise" for name in RUNNABLE)]),
)
def test_any_layout_has_the_numbers_of_one_device(
    model: tuple[str, str],
    mesh: Mesh,
    seed: int,
    num_micro_batches: int,
    zero_stage: int,
    recompute: RecomputeName,
    schedule: ScheduleName,
    kernels: str,
) -> None:
    case = zoo_case(*model, batch_size=BATCH)
    micro_batch_size, rest = divmod(BATCH, mesh.batch_ranks * num_micro_batches)
    assume(rest == 0 and mesh.pp <= len(case.model.blocks))
    if mesh.dp_shard * mesh.cp * mesh.ep == 1:
        zero_stage = 0
    if schedule == "interleaved" and (mesh.pp == 1 or 2 * mesh.pp > len(case.model.blocks)):
        schedule = "1f1b"
    plan = random_plan(
        case.model,
        mesh,
        random.Random(seed),
        batch=BatchPlan(
            global_batch_size=BATCH,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
        ),
        schedule=SchedulePlan(
            name=schedule,
            recompute=recompute,
            zero_stage=zero_stage,
            kernels=kernels,
            virtual_stages=2 if schedule == "interleaved" else 1,
        ),
    )
    note(f"{model}, {mesh}, {plan.batch}, {plan.schedule}, {plan.segments}")
    assert_like_one_device(case, plan)


def random_plan(
    model: ModelGraph,
    mesh: Mesh,
    rng: random.Random,
    *,
    batch: BatchPlan,
    schedule: SchedulePlan,
) -> Plan:
    """A plan with any layout and any cuts."""
    size = batch.micro_batch_size * mesh.batch_ranks
    pins = random_pins(model, mesh, rng, batch=size, trained=True)
    layout = choose_layout(model, mesh, batch=size, pin=pins, choose=anything(rng))
    return bare_plan(
        model,
        layout,
        mesh=mesh,
        batch=batch,
        schedule=schedule,
        segments=random_cuts(len(model.blocks), mesh.pp, schedule, rng),
    )


def random_cuts(
    num_blocks: int, pp: int, schedule: SchedulePlan, rng: random.Random
) -> list[SegmentPlan]:
    """Virtual stages that start at random blocks; each of several segments, but in layered
    pipelines.
    """
    starts = [0, *sorted(rng.sample(range(1, num_blocks), pp * schedule.virtual_stages - 1))]
    found: list[SegmentPlan] = []
    for number, (first, end) in enumerate(zip(starts, [*starts[1:], num_blocks], strict=True)):
        one = schedule.name == "layered" and pp > 1
        inner = [] if one else [b for b in range(first + 1, end) if rng.random() < 0.5]
        bounds = [first, *inner, end]
        found += [
            SegmentPlan(stage=number % pp, first_block=a, last_block=b - 1)
            for a, b in itertools.pairwise(bounds)
        ]
    return found
