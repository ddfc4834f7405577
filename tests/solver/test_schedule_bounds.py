"""Bounds with the exact costs of a layout, held against the simulator at chosen cuts: of drawn
costs that no model need have, in even and wild proportions. No plan is searched for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.plan import ScheduleName
from autopar.solver import Cluster
from autopar.solver.bounds import exact_times
from autopar.solver.candidates import Candidate
from autopar.solver.instance import Instance, make_instance
from autopar.solver.runs import rounds_of
from autopar.solver.schedule_bounds import scalar_bound_s, stage_bounds
from autopar.solver.solved import simulate_cuts
from autopar.solver.stages import Stager
from autopar.solver.virtual_cuts import compute_bound_s, cut_bounds_s
from autopar.solver.windows import make_windows
from tests.solver.drawn import FACTORS, changed
from tests.solver.graphs import block_model
from tests.solver.small import TRAINING

Value = TypeVar("Value")
Draw = Callable[[st.SearchStrategy[Value]], Value]
Cuts = tuple[int, ...]

_SHARE = 1 + 1e-9
SIZES = (3, 6, 10)
"""Blocks between the first and the last one."""


@functools.lru_cache
def instance(num_blocks: int) -> Instance:
    model = block_model([("linear", 0), ("relu", 0)], num_blocks=num_blocks)
    cluster = Cluster("cpu-local")
    pin = {"pp": 1, "tp": 1}
    return make_instance(model, cluster, global_batch_size=16, training=TRAINING, pin=pin)


@st.composite
def staged(draw: Draw[Any]) -> tuple[Stager, Cuts]:
    """A stager whose blocks cost anything, and cuts."""
    facts = instance(draw(st.sampled_from(SIZES)))
    num = len(facts.facts.model.blocks)
    schedule: ScheduleName = draw(st.sampled_from(["zero_bubble", "zero_bubble", "1f1b"]))
    pp = draw(st.integers(2, min(num, 6)))
    virtual = draw(st.integers(1, min(3, num // pp))) if schedule == "zero_bubble" else 1
    dp = draw(st.sampled_from([1, 2, 4]))
    zero = draw(st.integers(1, 3)) if dp > 1 and draw(st.booleans()) else 0
    candidate = Candidate(
        pp=pp,
        dp_replicate=1 if zero else dp,
        dp_shard=dp if zero else 1,
        tp=1,
        micro_batch_size=1,
        num_micro_batches=draw(st.sampled_from([1, 2, 3, 5, 8, 13, 30])),
        zero_stage=zero,
        recompute=draw(st.sampled_from(["none", "full"])),
        schedule=schedule,
        virtual_stages=virtual,
        extra_in_flight=draw(st.sampled_from([0, 0, 1, 5])),
    )
    nodes = draw(st.sampled_from([n for n in (1, 2, 3) if pp * dp % n == 0]))
    cluster = Cluster("a100-80gb", nodes=nodes, gpus_per_node=pp * dp // nodes)
    cluster = cluster.scaled(
        node=draw(st.sampled_from(FACTORS)), network=draw(st.sampled_from(FACTORS))
    )
    cluster = changed(
        cluster.with_memory(2**60),
        slowdown=draw(st.sampled_from([0.0, 0.2, 1.0])),
        latency=draw(st.sampled_from([0.0, 1.0, 100.0])),
        launch=0,
    )
    values = draw(st.sampled_from([(1.0,), (0.5, 0.7, 1.0), (0.0, 0.01, 1.0, 5.0)]))
    scale = 10.0 ** draw(st.integers(-4, -1))

    def drawn(most: float) -> Any:
        return most * np.array(draw(st.lists(st.sampled_from(values), min_size=num, max_size=num)))

    weight = drawn(scale)
    weight[-1] = 0.0
    forward, inputs, numel = drawn(scale), drawn(scale), drawn(10.0 ** draw(st.integers(3, 9)))
    sent = drawn(10.0 ** draw(st.integers(2, 8)))
    sent[0] = 0.0
    setting = facts.search.pricer.setting(facts.candidates[0])
    costs = dataclasses.replace(
        setting.costs(setting.solution("none")),
        forward_s=forward,
        backward_s=inputs + weight,
        input_s=inputs,
        weight_s=weight,
        numel=numel,
        shared_numel=numel,
        sent_bytes=sent,
    )
    places = st.lists(
        st.integers(1, num - 1), min_size=pp * virtual - 1, max_size=pp * virtual - 1, unique=True
    )
    cuts = (0, *sorted(draw(places)), num)
    return Stager(cluster, candidate, costs, facts.search.pricer.sizes), cuts


def simulated_s(stager: Stager, cuts: Cuts) -> float:
    found = instance(SIZES[0])
    setting = found.search.pricer.setting(found.candidates[0])
    solution = setting.solution("none")
    return simulate_cuts(stager.candidate, setting, solution, stager, cuts).step_s


@given(case=staged())
def test_no_bound_is_above_the_simulator(case: tuple[Stager, Cuts]) -> None:
    stager, cuts = case
    step_s, times = simulated_s(stager, cuts), exact_times(stager)
    assert scalar_bound_s(stager.candidate, times) <= step_s * _SHARE
    if stager.candidate.virtual_stages > 1:
        bound_s = cut_bounds_s(stager, times, [cuts])[0]
        assert compute_bound_s(stager, times, [cuts]) <= bound_s * _SHARE
        assert bound_s <= step_s * _SHARE
        return
    bounds = stage_bounds(stager, times)
    assert bounds(make_windows(cuts, cuts)).max() <= step_s * _SHARE
    borders = bounds.reach.borders(step_s * _SHARE)
    assert borders is not None
    assert all(
        low <= cut <= high for low, cut, high in zip(borders[0], cuts, borders[1], strict=True)
    )


@given(case=staged(), schedule=st.sampled_from([None, "layered", "interleaved"]))
def test_what_fits_is_not_ruled_out(
    case: tuple[Stager, Cuts], schedule: ScheduleName | None
) -> None:
    """With as much memory as the fullest stage needs, and with less."""
    stager, cuts = case
    if schedule is not None and stager.candidate.virtual_stages > 1:
        candidate = dataclasses.replace(stager.candidate, schedule=schedule, extra_in_flight=0)
        stager = dataclasses.replace(stager, candidate=candidate)
    needed = max(stager.peak_bytes(cuts))
    exactly = dataclasses.replace(stager, cluster=stager.cluster.with_memory(needed))
    assert exactly.fits(cuts)
    assert exactly.may_fit()
    assert exactly.least_cuts_fit(rounds_of([cuts], stager.candidate.pp)).all()
    context = max(memory.context_bytes for memory in stager.sites.memory)
    nothing = dataclasses.replace(stager, cluster=stager.cluster.with_memory(context))
    assert not (stager.costs.numel.any() and nothing.may_fit())


@pytest.mark.parametrize("pp", [2, 3, 6])
@pytest.mark.parametrize("schedule", ["zero_bubble", "1f1b"])
def test_bounds_of_stages_that_are_alike_are_the_step(pp: int, schedule: ScheduleName) -> None:
    """Of blocks that take as long, without messages and communication: at any numbers."""
    found = instance(10)
    setting = found.search.pricer.setting(found.candidates[0])
    num = len(found.facts.model.blocks)
    nothing, one = np.zeros(num), np.ones(num)
    for num_micro_batches, weight, forward in itertools.product((1, 4, 9, 24), (0, 1, 2), (1, 3)):
        costs = dataclasses.replace(
            setting.costs(setting.solution("none")),
            forward_s=forward * one,
            backward_s=(2 + weight) * one,
            input_s=2 * one,
            weight_s=weight * one,
            numel=nothing,
            shared_numel=nothing,
            sent_bytes=nothing,
        )
        candidate = Candidate(
            pp=pp,
            dp_replicate=1,
            dp_shard=1,
            tp=1,
            micro_batch_size=1,
            num_micro_batches=num_micro_batches,
            zero_stage=0,
            recompute="none",
            schedule=schedule,
        )
        cluster = changed(Cluster("a100-80gb", gpus_per_node=pp).with_memory(2**60), latency=0)
        stager = Stager(cluster, candidate, costs, found.search.pricer.sizes)
        cuts = tuple(range(0, num + 1, num // pp))
        bound = stage_bounds(stager, exact_times(stager))(make_windows(cuts, cuts)).max()
        assert bound == pytest.approx(simulated_s(stager, cuts), rel=1e-3)
