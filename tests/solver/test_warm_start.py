"""Warm starts: the same answer as a cold search, never more of it, and never without an answer."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.warm_start import NUM_STARTS, warm_candidates
from tests.solver.small import FOUR, TWO_NODES, instance, plan

EIGHT = TWO_NODES.with_nodes(4)


@settings(max_examples=5)
@given(
    old_batch=st.sampled_from([4, 8, 16]),
    cluster=st.sampled_from([FOUR, TWO_NODES, FOUR.with_memory(24_000)]),
    batch=st.sampled_from([4, 8, 12]),
    tp=st.sampled_from([1, 2, 4]),
)
def test_a_warm_search_finds_what_a_cold_one_finds_and_solves_no_more(
    old_batch, cluster, batch, tp
):
    """After a node was lost, or the batch changed, from whatever plan."""
    old = plan(EIGHT, {"tp": tp, "recompute": "none"}, batch=8 * old_batch)
    cold, warm = instance(cluster, batch=batch), instance(cluster, batch=batch)
    first = warm_candidates(old, warm.candidates)
    found = warm.search.run(warm.candidates, first=first)
    expected = cold.search.run(cold.candidates)
    assert found.best is not None
    assert expected.best is not None
    assert found.best.candidate == expected.best.candidate
    assert (found.best.step_s, found.bound_s) == (expected.best.step_s, expected.bound_s)
    assert len(found.solved) <= len(expected.solved)
    assert found.bounds.items() <= expected.bounds.items()


@pytest.mark.parametrize("pin", [{"pp": 2}, {"tp": 2, "zero_stage": 1}, {"schedule": "layered"}])
def test_the_nearest_candidate_is_the_old_plan_itself_where_nothing_changed(pin):
    old = plan(FOUR, pin)
    nearest = warm_candidates(old, instance(FOUR, pin).candidates)
    assert len(nearest) <= NUM_STARTS
    first = nearest[0]
    assert (first.pp, first.tp, first.dp_shard) == (old.mesh.pp, old.mesh.tp, old.mesh.dp_shard)
    assert first.micro_batch_size == old.batch.micro_batch_size
    assert (first.schedule, first.zero_stage) == (old.schedule.name, old.schedule.zero_stage)
    assert first.virtual_stages == old.schedule.virtual_stages


def test_degrees_are_kept_where_gpus_were_lost():
    old = plan(EIGHT, {"tp": 2, "pp": 2}, batch=16)
    nearest = warm_candidates(old, instance(FOUR, batch=16).candidates)[0]
    assert (nearest.tp, nearest.pp, nearest.dp) == (2, 2, 1)


def test_without_time_the_warm_start_is_the_answer_with_an_honest_bound():
    old = plan(FOUR, {"tp": 2, "pp": 2})
    made, full = instance(FOUR), instance(FOUR)
    first = warm_candidates(old, made.candidates)
    found = made.search.run(made.candidates, first=first, stop_at_s=time.perf_counter())
    best = full.search.run(full.candidates).best
    assert found.best is not None
    assert best is not None
    assert len(found.solved) == 1
    assert found.best.step_s <= old.prediction.step_s * (1 + 1e-9)
    assert 0 < found.bound_s <= best.step_s


def test_a_search_without_time_ends_once_something_was_found():
    made = instance(FOUR)
    found = made.search.run(made.candidates, stop_at_s=-math.inf)
    assert found.best is not None
    assert len(found.solved) == 1
    assert found.bound_s <= found.best.step_s
