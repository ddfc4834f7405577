"""ZeRO stages of single blocks: what a single stage's memory buys, and what is proved of it."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from autopar.ir.zero_stages import ZERO_STAGES, block_zero_stages
from autopar.solver.pins import Pins
from autopar.solver.replay import simulate_plan
from autopar.solver.solved import simulate_cuts
from autopar.solver.turns import turn_s
from autopar.solver.zero_choice import with_stages_chosen
from tests.solver.small import FOUR, MODEL, instance, plan

SINGLE: Pins = {"pp": 1, "tp": 1, "dp_shard": 4, "schedule": "1f1b", "micro_batch_size": 1}
OPEN: Pins = {**SINGLE, "zero_stages": "open"}
CUTS = (0, len(MODEL.blocks))


def needed(zero_stage: int, batch: int, schedule: str = "1f1b") -> int:
    """Bytes of the fullest rank with one ZeRO stage for all blocks."""
    pin = {**SINGLE, "zero_stage": zero_stage, "recompute": "none", "schedule": schedule}
    return plan(pin=pin, batch=batch).prediction.fullest.peak_bytes


@pytest.mark.parametrize(("batch", "share"), [(16, 0.2), (16, 0.6), (64, 0.2)])
def test_memory_between_two_stages_is_used_by_blocks_of_both(batch: int, share: float) -> None:
    lowest, highest = (needed(zero_stage, batch) for zero_stage in (1, 3))
    assert highest < lowest
    tight = FOUR.with_memory(int(highest + share * (lowest - highest)))
    pin = {**OPEN, "recompute": "none"}
    found = plan(tight, pin, batch=batch)
    equal = plan(tight, {**pin, "zero_stages": "equal"}, batch=batch)
    stages = block_zero_stages(found)
    assert len(set(stages)) > 1
    assert set(stages) <= set(ZERO_STAGES)
    assert equal.schedule.zero_stages == {}
    assert found.prediction.step_s < equal.prediction.step_s
    assert found.certificate.bound_s <= found.prediction.step_s
    assert found.prediction.fullest.peak_bytes <= tight.usable_bytes
    assert simulate_plan(found).step_s == pytest.approx(found.prediction.step_s, rel=1e-12)
    for name, stage in found.schedule.zero_stages.items():
        assert f"{stage} of blocks {name}" in found.explain()
    assert "gathered once: " in found.explain()
    assert "of communication less" in found.explain()


def test_pinned_stages_of_blocks_give_the_step_that_was_chosen() -> None:
    lowest, highest = (needed(zero_stage, 16) for zero_stage in (1, 3))
    tight, pin = FOUR.with_memory((highest + lowest) // 2), {**OPEN, "recompute": "none"}
    found = plan(tight, pin, batch=16)
    text = ", ".join(f"{name}={stage}" for name, stage in found.schedule.zero_stages.items())
    again = plan(
        tight,
        {**pin, "zero_stage": found.schedule.zero_stage, "zero_stages": text},
        batch=16,
    )
    assert again.schedule.zero_stages == found.schedule.zero_stages
    assert again.prediction.step_s == pytest.approx(found.prediction.step_s, rel=1e-12)


def test_with_memory_for_all_nothing_is_gathered_or_reduced_twice() -> None:
    found = plan(pin=OPEN, batch=64)
    assert found.schedule.zero_stage == 1
    assert found.schedule.zero_stages == {}


@pytest.mark.parametrize("pp", [1, 2])
def test_they_are_open_where_that_is_pinned(pp: int) -> None:
    opened, closed = (
        instance(pin={"pp": pp, **pin}).candidates for pin in ({"zero_stages": "open"}, {})
    )
    assert {c.zero_open for c in opened if c.zero_stage} == {True}
    assert not any(c.zero_open for c in closed)
    assert {c.zero_stage for c in opened} == {0, 3}


@pytest.mark.parametrize("share", [0.15, 0.4, 0.65, 0.9])
@pytest.mark.parametrize("schedule", ["1f1b", "layered"])
def test_no_choice_of_stages_is_faster_than_what_is_proved(share: float, schedule: str) -> None:
    """All of them, one by one, and whatever is computed again."""
    pin = {**OPEN, "schedule": schedule, "loss_chunks": 1}
    lowest, highest = (needed(zero_stage, 16, schedule) for zero_stage in (1, 3))
    made = instance(FOUR.with_memory(int(highest + share * (lowest - highest))), pin, batch=16)
    (candidate,) = (c for c in made.candidates if c.recompute == "blocks")
    search = made.search
    setting = search.pricer.setting(candidate)
    solution = setting.solution("blocks")
    bound = max(search.refiner.scalar(candidate), search.refiner.stages(candidate))
    solved = search.refiner.solve(candidate)
    assert solved is not None
    assert bound <= solved.step_s
    choice = search.pricer.chunk_choice(candidate, setting, solution)
    own = [stager.candidate for stager in with_stages_chosen(choice, CUTS)]
    assert len(set(own)) == len(own)
    fastest = np.inf
    for stages in itertools.product(ZERO_STAGES, repeat=len(MODEL.blocks)):
        decided = dataclasses.replace(candidate, zero_stages=stages, zero_open=False)
        whole = dataclasses.replace(choice.whole, candidate=decided)
        chosen = dataclasses.replace(choice, whole=whole).within(CUTS)
        if chosen is not None:
            found = simulate_cuts(chosen.candidate, setting, solution, chosen, CUTS)
            fastest = min(fastest, found.step_s)
    assert bound <= fastest * (1 + 1e-9)
    assert solved.step_s <= fastest * 1.1


def test_a_turn_waits_for_blocks_that_are_gathered_again_only() -> None:
    seconds = {
        "gather": np.full(6, 3.0),
        "reduce": np.full(6, 2.0),
        "forward": np.full(6, 0.1),
        "backward": np.full(6, 0.2),
    }
    every = turn_s((3, 3, 3, 3), slowdown=0.0, **seconds)
    # reductions of 0 … 3, gathers of 1 and 0 for backwards, and of 1, 2 and 3 for forwards
    assert every == pytest.approx(4 * 2 + 5 * 3 - 3 * 0.2 - 3 * 0.1)
    assert turn_s((1, 1, 1, 1), slowdown=0.0, **seconds) == 0.0
    assert turn_s((3, 1, 1, 1), slowdown=0.0, **seconds) == 0.0
    assert 0.0 < turn_s((2, 2, 2, 3), slowdown=0.0, **seconds) < every
