"""Unequal shares of the batch: which there are, what they cost, and what plans say of them."""

import dataclasses

import pytest

from autopar.ir.errors import InputError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import from_json, to_json
from autopar.ir.schedules import make_schedule
from autopar.solver import Cluster
from autopar.solver.replay import simulate_plan
from autopar.solver.shares import data_ranks, unequal_shares
from autopar.solver.simulate import SegmentTimes, Work, simulate, simulate_together
from tests.solver.small import instance, plan

SLOW = Cluster("cpu-local", nodes=2, gpus_per_node=2)
CHIP = SLOW.hardware.chip
FASTER = SLOW.scaled(compute=3, memory=3).hardware
FAST = SLOW.with_hardware(
    dataclasses.replace(
        FASTER,
        name="fast",
        chip=dataclasses.replace(
            FASTER.chip, launch_s=CHIP.launch_s / 3, kernel_s=CHIP.kernel_s / 3
        ),
    )
)
MIXED = Cluster.of_groups([SLOW, FAST], SLOW.hardware.network)
PIN: dict[str, int | str] = {"pp": 1, "tp": 1, "dp_replicate": 8, "micro_batch_size": 1}


def test_shares_divide_the_batch_and_the_most_balanced_come_first():
    mesh = Mesh(dp_replicate=8)
    found = unequal_shares(MIXED, mesh, 64, 1)
    assert found[0] == (4, 12)  # three times as fast
    assert all(4 * slow + 4 * fast == 64 and slow != fast for slow, fast in found)
    assert unequal_shares(MIXED, mesh, 64, 2)[0] == (2, 6)
    assert unequal_shares(MIXED, mesh, 66, 1) == ()
    assert unequal_shares(SLOW, Mesh(dp_replicate=4), 64, 1) == ()
    assert unequal_shares(MIXED, Mesh(pp=2, dp_replicate=4), 64, 1) == ()


def test_data_ranks_are_those_of_whole_groups():
    odd = Cluster.of_groups([SLOW, SLOW.with_nodes(1)], SLOW.hardware.network)
    assert data_ranks(odd, Mesh(dp_shard=3, tp=2)) == (2, 1)
    assert data_ranks(odd, Mesh(dp_shard=2, tp=3)) == ()
    assert data_ranks(odd, Mesh(dp_shard=2, tp=2)) == ()  # some GPUs are not used


def test_faster_nodes_take_more_of_the_batch():
    found = plan(MIXED, PIN, batch=64)
    equal = plan(MIXED, {**PIN, "shares": "equal"}, batch=64)
    assert equal.batch.shares == ()
    slow, fast = found.batch.shares
    assert slow.data_ranks == fast.data_ranks == 4
    assert slow.num_micro_batches < fast.num_micro_batches == found.batch.num_micro_batches
    assert found.prediction.step_s < equal.prediction.step_s
    assert found.certificate.bound_s <= found.prediction.step_s
    assert from_json(to_json(found)) == found
    assert simulate_plan(found).step_s == found.prediction.step_s
    told = found.explain()
    assert (
        f"4 data ranks × {slow.num_micro_batches}, 4 data ranks × {fast.num_micro_batches}" in told
    )
    assert [rank.num_ranks for rank in found.prediction.ranks] == [4, 4]
    busiest = found.prediction.critical
    assert busiest.seconds_by_cause["compute"] == max(
        rank.seconds_by_cause["compute"] for rank in found.prediction.ranks
    )


def test_the_share_of_each_group_costs_what_it_costs_alone():
    """But for waiting: without data axes to reduce over, and with as many micro-batches."""
    made = instance(MIXED, PIN, batch=64)
    candidate = next(found for found in made.candidates if found.shares == (4, 12))
    solved = made.search.refiner.solve(candidate)
    assert solved is not None
    steps = [own.simulation.busy_s[0] for own in solved.beside]
    assert solved.step_s >= max(steps)
    assert made.search.refiner.stages(candidate) <= solved.step_s
    for own, number in zip(solved.beside, (4, 12), strict=True):
        assert own.candidate.num_micro_batches == number
        both = own.stager.costs.forward_s + own.stager.backward_s()
        assert own.simulation.busy_s[0] >= number * both.sum()


def test_only_what_ranks_share_once_a_step_has_unequal_shares():
    found = [c for c in instance(MIXED, {"pp": 1}, batch=64).candidates if c.shares]
    assert {c.zero_stage for c in found if c.schedule == "1f1b"} == {0, 1}
    assert {c.zero_stage for c in found if c.schedule == "layered"} == {0, 1, 2, 3}
    wide = {"pp": 2, "tp": 1}
    assert not any(c.shares for c in instance(MIXED, wide, batch=64).candidates)


def test_collectives_begin_when_all_have_come():
    """Two ranks with 1 and 3 micro-batches: the first waits with its reduction for the other."""

    def work(num: int, forward_s: float) -> Work:
        times = SegmentTimes(
            forward_s=(forward_s,),
            backward_s=(forward_s,),
            gather_s=(0.5,),
            reduce_s=(1.0,),
            send_s=(0.0,),
            held_bytes=(1,),
        )
        schedule = make_schedule("1f1b", [0], num, zero_stage=1)
        return Work(schedule=schedule, times=times, optimizer_s=(0.25,))

    short, long = work(1, 1.0), work(3, 2.0)
    found = simulate_together([short, long])
    assert [simulation.step_s for simulation in found] == [0.5 + 12 + 1 + 0.25] * 2
    assert found[0].exposed_s == (0.5 + 10 + 1,)
    alone = simulate(long.schedule, long.times, optimizer_s=long.optimizer_s)
    assert alone.step_s == found[1].step_s
    assert simulate_together([long, short])[0].step_s == alone.step_s


def test_a_pin_keeps_shares_equal():
    with pytest.raises(InputError, match="shares='uneven' is pinned"):
        instance(MIXED, {"shares": "uneven"})
    assert not any(c.shares for c in instance(MIXED, {"shares": "equal"}, batch=64).candidates)
