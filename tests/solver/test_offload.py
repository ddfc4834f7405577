"""Offloaded optimizer state: what it takes, what it frees, and when it is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.errors import InfeasibleError
from autopar.ir.offload import STATE_BUCKET_NUMEL, STATE_BUCKETS
from autopar.ir.plan import from_json, to_json
from autopar.solver import Cluster
from autopar.solver.costs.memory import (
    Elements,
    Itemsizes,
    Segments,
    StageContents,
    rank_bytes,
)
from autopar.solver.costs.parameters import ParameterCosts
from autopar.solver.hardware.spec import HostLink, Memory
from autopar.solver.infeasible import infeasible_error
from autopar.solver.stages import ROUNDED_BYTES
from tests.solver.small import FOUR, instance, plan

WIDE = Itemsizes(compute=2, master=4, moments=8, gradient=4, reduce=4)
FP32 = Itemsizes(compute=4, master=0, moments=8, gradient=4, reduce=4)
NUMEL = 2.0**30


def contents(zero_stage: int, activation_bytes: float) -> StageContents:
    every, none = Elements(all=NUMEL, experts=0.0), Elements(all=0.0, experts=0.0)
    segments, no_segments = (Segments(number=num, largest=num * NUMEL / 64) for num in (8, 0))
    return StageContents(
        parameters=every,
        kept=every if zero_stage <= 2 else none,
        summed=every if zero_stage <= 1 else none,
        segment_numel=NUMEL / 8,
        block_updated=NUMEL / 32,
        regathered=segments if zero_stage == 3 else no_segments,
        scattered=segments if zero_stage >= 2 else no_segments,
        overlap=False,
        activation_bytes=activation_bytes,
        recompute_bytes=0.0,
        temporary_bytes=0.0,
        message_bytes=0.0,
    )


def causes(
    sizes: Itemsizes, zero_stage: int, *, offload: bool, activation_bytes: float = 2.0**40
) -> dict[str, int]:
    return rank_bytes(
        contents(zero_stage, activation_bytes),
        sizes=sizes,
        is_sharded=zero_stage > 0,
        num_shards=4 if zero_stage else 1,
        ep=1,
        layered=False,
        offload_optimizer=offload,
        memory=Memory(context_bytes=0, fragmentation=0, overlap_fragmentation=0, reserve=0),
    )


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("sizes", [WIDE, FP32])
def test_what_is_offloaded_is_not_on_the_device(sizes: Itemsizes, zero_stage: int) -> None:
    """But for the shard, in the dtype of compute, from which ZeRO 1 and 2 gather."""
    updated = NUMEL / (4 if zero_stage else 1)
    resident, offloaded = (causes(sizes, zero_stage, offload=offload) for offload in (False, True))
    shard = sizes.compute * updated if zero_stage in (1, 2) else 0
    assert resident["master weights"] == (sizes.master * updated or shard)
    assert offloaded["master weights"] == shard
    assert resident["optimizer"] == 8 * updated
    assert offloaded["optimizer"] == offloaded["state buffers"] == 0
    same = set(resident) - {"master weights", "optimizer"}
    assert {name: resident[name] for name in same} == {name: offloaded[name] for name in same}


def test_buckets_on_the_device_take_the_place_of_what_is_free_by_then() -> None:
    bucket = STATE_BUCKETS * (STATE_BUCKET_NUMEL + NUMEL / 32) * (4 + 8)
    nothing = causes(WIDE, 0, offload=True, activation_bytes=0.0)
    free = nothing["gradient buffers"]
    assert nothing["state buffers"] == bucket - free
    half = causes(WIDE, 0, offload=True, activation_bytes=(bucket - free) / 2)
    assert half["state buffers"] == (bucket - free) / 2


def test_a_gpu_copies_while_it_steps_and_a_host_does_not() -> None:
    gpu, cpu = (Cluster(name).hardware for name in ("a100-80gb", "cpu-local"))
    for hardware in (gpu, cpu):
        costs = ParameterCosts(hardware, WIDE)
        copied_s = NUMEL * 12 / hardware.host_link.rank_bytes_per_s(4)
        update_s = costs.update_s(10.0, NUMEL)
        assert costs.offload_s(NUMEL, ranks=4) == pytest.approx(copied_s)
        wanted = update_s + 2 * copied_s if hardware is cpu else max(update_s, copied_s)
        assert costs.offloaded_update_s(10.0, NUMEL, ranks=4) == pytest.approx(wanted)


def test_ranks_of_a_node_share_what_they_share() -> None:
    link = HostLink(bytes_per_s=10.0, node_bytes_per_s=40.0, efficiency=0.5)
    assert [link.rank_bytes_per_s(ranks) for ranks in (1, 4, 8)] == [5.0, 5.0, 2.5]


@pytest.mark.parametrize(
    "pins", [{}, {"pp": 2}, {"pp": 2, "virtual_stages": 2}, {"tp": 2}], ids=str
)
def test_pinned_offload_takes_time_and_frees_memory(pins: dict[str, int]) -> None:
    """The account on arrays, by which plans are searched, is that of the plan."""
    base: dict[str, int | str] = {"zero_stage": 0, "dp_shard": 1, "recompute": "none", **pins}
    offloaded = plan(pin=base | {"offload_optimizer": 1})
    resident = plan(pin=base | {"offload_optimizer": 0})
    assert from_json(to_json(offloaded)).schedule.offload_optimizer
    assert not resident.schedule.offload_optimizer
    assert offloaded.prediction.step_s > resident.prediction.step_s
    assert "optimizer state offloaded" in offloaded.explain()
    for one in offloaded.prediction.ranks:
        assert one.seconds_by_cause["copies of optimizer state"] > 0
        assert one.bytes_by_cause["optimizer"] == 0
        assert sum(one.seconds_by_cause.values()) == pytest.approx(offloaded.prediction.step_s)
    for other in resident.prediction.ranks:
        assert other.seconds_by_cause["copies of optimizer state"] == 0
        assert other.bytes_by_cause["optimizer"] > 0


def test_offloading_fits_where_nothing_else_does() -> None:
    base: dict[str, int | str] = {
        "dp_replicate": 4,
        "zero_stage": 0,
        "recompute": "none",
        "micro_batch_size": 2,
        "loss_chunks": 1,
        "schedule": "1f1b",
    }
    resident, offloaded = (instance(pin=base | {"offload_optimizer": n}) for n in (0, 1))
    (one,), (other,) = resident.candidates, offloaded.candidates
    assert other == replace(one, offload_optimizer=True)
    peaks = [
        solved.stager.peak_bytes(solved.cuts)[0]
        for solved in (
            resident.search.refiner.solve_anyway(one),
            offloaded.search.refiner.solve_anyway(other),
        )
    ]
    tight = FOUR.with_memory(peaks[1] + ROUNDED_BYTES)
    assert peaks[1] + ROUNDED_BYTES < peaks[0]
    nothing, found = (instance(tight, base | {"offload_optimizer": n}) for n in (0, 1))
    assert nothing.search.run(nothing.candidates).best is None
    chosen = found.search.run(found.candidates)
    assert chosen.best is not None
    assert chosen.best.candidate == other
    assert chosen.bound_s <= chosen.best.step_s
    assert "leave offload_optimizer=0 open: offload_optimizer=1" in str(infeasible_error(nothing))
    left_open = instance(tight, base | {"offload_optimizer": "open"})
    assert left_open.candidates == (one, other)
    decided = left_open.search.run(left_open.candidates)
    assert decided.best is not None
    assert decided.best.candidate == other
    assert decided.bound_s == chosen.bound_s


def test_what_fits_in_no_other_way_is_offloaded() -> None:
    """State if that is enough, and activations, too, otherwise: plans have the pins that they were
    asked for with, and are refused where offloading is pinned off.
    """
    pins: dict[str, int | str] = {
        "dp_replicate": 4,
        "zero_stage": 0,
        "recompute": "none",
        "loss_chunks": 1,
        "schedule": "1f1b",
    }
    roomy = plan(pin=pins)
    assert not roomy.schedule.offload_optimizer
    needed = plan(pin=pins | {"offload_optimizer": 1}).prediction.fullest.peak_bytes
    tight = FOUR.with_memory(needed)
    found = plan(tight, pins, what_if=True)
    assert found.schedule.offload_optimizer
    assert found.search is not None
    assert sum(found.search.fates.values()) == found.certificate.num_candidates
    assert found.pins == pins
    assert found.certificate.bound_s <= found.prediction.step_s
    with pytest.raises(InfeasibleError):
        plan(tight, pins | {"offload_optimizer": 0, "offload_activations": 0})
    with pytest.raises(InfeasibleError):
        plan(FOUR.with_memory(needed // 4), pins)


def test_open_offloading_is_chosen_where_recomputing_takes_longer() -> None:
    """A host link that is fast enough, and memory for all but the state."""
    link = HostLink(bytes_per_s=1e15, node_bytes_per_s=1e15, efficiency=1.0)
    one = Cluster("cpu-local", gpus_per_node=1)
    fast = one.with_hardware(replace(one.hardware, host_link=link), "fast")
    pins: dict[str, int | str] = {"micro_batch_size": 2, "schedule": "1f1b", "loss_chunks": 1}
    roomy = instance(fast, pins | {"recompute": "none"})
    solved = roomy.search.refiner.solve_anyway(roomy.candidates[0])
    tight = fast.with_memory(solved.stager.peak_bytes(solved.cuts)[0] - ROUNDED_BYTES)
    values: tuple[int | str, ...] = ("open", 0, 1)
    plans = {value: plan(tight, pins | {"offload_optimizer": value}) for value in values}
    steps = {value: found.prediction.step_s for value, found in plans.items()}
    assert steps["open"] == steps[1] < steps[0]
    assert plans["open"].schedule.offload_optimizer
    assert plans[0].schedule.recomputed_blocks or plans[0].schedule.recomputed_by_op
    assert not plan(fast, pins | {"offload_optimizer": "open"}).schedule.offload_optimizer
