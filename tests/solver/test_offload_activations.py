"""Offloaded activations: what they take, what they free, and what fits with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.errors import InputError
from autopar.ir.offload import ACTIVATION_BUFFERS
from autopar.ir.plan import from_json, to_json
from autopar.solver import Cluster
from autopar.solver.hardware.spec import HostLink
from autopar.solver.instance import Instance, make_instance
from autopar.solver.replay import simulate_plan
from autopar.solver.stages import ROUNDED_BYTES
from tests.solver.graphs import block_model
from tests.solver.small import FOUR, TRAINING, instance, plan

GPUS = Cluster("a100-80gb", gpus_per_node=4)
LAYOUTS: tuple[dict[str, int | str], ...] = (
    {},
    {"pp": 2},
    {"pp": 2, "virtual_stages": 2},
    {"tp": 2, "schedule": "layered"},
    {"pp": 2, "schedule": "zero_bubble"},
)


@pytest.mark.parametrize("cluster", [FOUR, GPUS], ids=["cpu", "gpu"])
@pytest.mark.parametrize("pins", LAYOUTS, ids=str)
def test_pinned_offload_takes_time_and_frees_memory(
    cluster: Cluster, pins: dict[str, int | str]
) -> None:
    pins = {"micro_batch_size": 1, "recompute": "none", "loss_chunks": 1, **pins}
    away, here = (plan(cluster, pins | {"offload_activations": n}, batch=16) for n in (1, 0))
    assert from_json(to_json(away)) == away
    assert away.schedule.offloaded_blocks
    assert simulate_plan(away).step_s == pytest.approx(away.prediction.step_s)
    assert "offloaded" in away.explain()
    assert away.certificate.bound_s <= away.prediction.step_s
    assert all(rank.host_bytes > 0 for rank in away.prediction.ranks[:1])
    assert "more on its host" in away.explain()
    assert all(rank.host_bytes == 0 for rank in here.prediction.ranks)
    for rank in away.prediction.ranks:
        assert sum(rank.seconds_by_cause.values()) == pytest.approx(away.prediction.step_s)


def test_copies_that_are_hidden_take_nothing_and_others_what_is_left() -> None:
    """A step is never shorter than all copies of a stage in one direction."""
    pins: dict[str, int | str] = {"pp": 1, "tp": 1, "micro_batch_size": 2}
    pins |= {"schedule": "1f1b", "recompute": "none"}
    pins |= {"loss_chunks": 1, "offload_optimizer": 0}
    steps = []
    for speed in (1e15, 1e6):
        link = HostLink(bytes_per_s=speed, node_bytes_per_s=speed, efficiency=1.0)
        cluster = GPUS.with_hardware(replace(GPUS.hardware, host_link=link), "linked")
        found = instance(cluster, pins | {"offload_activations": 2}, batch=64)
        best = found.search.run(found.candidates).best
        assert best is not None
        steps.append(best.step_s)
        copied_s = best.candidate.num_micro_batches * sum(best.times.copy_s)
        assert best.step_s >= copied_s
        assert best.stager.copy_s().sum() == pytest.approx(sum(best.times.copy_s))
    here = instance(GPUS, pins, batch=64)
    resident = here.search.run(here.candidates).best
    assert resident is not None
    assert steps[0] == pytest.approx(resident.step_s)
    assert steps[1] > 2 * steps[0]


def test_offloading_fits_where_nothing_else_does() -> None:
    """The earliest blocks go, as their backwards come last; buffers stay."""
    pins: dict[str, int | str] = {"pp": 1, "dp_shard": 1, "tp": 1, "dp_replicate": 1}
    pins |= {"micro_batch_size": 8, "schedule": "1f1b", "recompute": "none", "loss_chunks": 1}
    away, here = (deep(GPUS, pins | {"offload_activations": n}) for n in (20, 0))
    solved = [own.search.refiner.solve_anyway(own.candidates[0]) for own in (away, here)]
    peaks = [found.stager.peak_bytes(found.cuts)[0] for found in solved]
    causes = solved[0].stager.bytes_by_cause(0, solved[0].cuts)
    assert peaks[0] < peaks[1]
    largest = solved[0].stager.costs.held_bytes.max()
    assert causes["offload buffers"] == ACTIVATION_BUFFERS * largest
    tight = GPUS.with_memory(peaks[0] + ROUNDED_BYTES)
    fits, nothing = (deep(tight, pins | {"offload_activations": n}) for n in (20, 0))
    found = fits.search.run(fits.candidates)
    assert found.best is not None
    assert found.best.candidate.offloaded_blocks == tuple(range(1, 13))
    assert found.bound_s <= found.best.step_s
    assert nothing.search.run(nothing.candidates).best is None


def deep(cluster: Cluster, pins: dict[str, int | str]) -> Instance:
    model = block_model([("linear", 0), ("relu", 0), ("linear", 0)], num_blocks=12)
    return make_instance(model, cluster, global_batch_size=8, training=TRAINING, pin=pins)


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        ({"recompute": "selective"}, "recompute='selective'"),
        ({"zero_stages": "open"}, "zero_stages='open'"),
        ({"schedule": "layered", "pp": 2}, "one segment"),
    ],
)
def test_pins_that_offloading_does_not_go_with_are_named(
    pins: dict[str, int | str], text: str
) -> None:
    with pytest.raises(InputError, match="offload_activations=1") as caught:
        plan(FOUR, {**pins, "offload_activations": 1})
    assert text in str(caught.value)


@pytest.mark.parametrize("pins", [{"recompute": "full"}, {"zero_stages": "open"}], ids=str)
def test_nothing_is_offloaded_beside_what_it_does_not_go_with(pins: dict[str, int | str]) -> None:
    """However many micro-batches there are: of one, too."""
    pins = pins | {"offload_activations": "open", "dp_shard": 2, "tp": 1}
    found = deep(FOUR, pins).candidates
    assert {c.num_micro_batches for c in found} == {1, 2, 4}
    for candidate in found:
        decides = candidate.recompute == "full" or candidate.zero_open
        assert not (candidate.offload_activations and decides), candidate


def test_open_activations_are_offloaded_where_that_is_faster_than_computing_again() -> None:
    """Over a link that hides its copies; of how many blocks, the search decides."""
    link = HostLink(bytes_per_s=1e15, node_bytes_per_s=1e15, efficiency=1.0)
    fast = GPUS.with_hardware(replace(GPUS.hardware, host_link=link), "fast")
    pins: dict[str, int | str] = {"pp": 1, "dp_shard": 1, "tp": 1, "dp_replicate": 1}
    pins |= {"micro_batch_size": 8, "schedule": "1f1b", "loss_chunks": 1}
    full = deep(fast, pins | {"offload_activations": 20, "recompute": "none"})
    solved = full.search.refiner.solve_anyway(full.candidates[0])
    tight = fast.with_memory(solved.stager.peak_bytes(solved.cuts)[0] + ROUNDED_BYTES)
    found = deep(tight, pins | {"offload_activations": "open"})
    assert sorted(c.offload_activations for c in found.candidates) == [0, 1, 2, 4, 8, 14]
    result = found.search.run(found.candidates)
    assert result.best is not None
    assert len(result.best.candidate.offloaded_blocks) == 12
    assert not result.best.candidate.recomputes
    assert result.bound_s <= result.best.step_s
