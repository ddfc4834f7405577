"""The search: bounds hold for everything that is simulated, and memory and pins behave."""

import dataclasses
import itertools
import math
from importlib import resources

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.ir.errors import InfeasibleError, InputError, PlanFormatError
from autopar.ir.plan import Plan, from_json, to_json
from autopar.solver import Cluster, solve
from autopar.solver.bounds import StageTimes
from autopar.solver.candidates import Candidate, Divisible
from autopar.solver.costs.memory import itemsizes
from autopar.solver.layout.model_facts import model_facts
from autopar.solver.pins import Pins
from autopar.solver.runs import all_runs
from autopar.solver.schedule_bounds import scalar_bound_s
from autopar.solver.search import Search
from autopar.solver.solved import simulate_cuts
from autopar.solver.space import candidates
from tests.models import (
    next_token_loss,
    tiny_gpt2,
    tiny_llama,
    tiny_transformer,
    token_batch,
)
from tests.solver.small import MODEL as SMALL
from tests.solver.small import TRAINING

HARDWARE = (resources.files("autopar.solver.hardware") / "cpu-local.toml").read_text()
DIVISIBLE = Divisible(num_blocks=len(SMALL.blocks))


def new_search(cluster: Cluster) -> Search:
    return Search(model_facts(SMALL), cluster, itemsizes(TRAINING))


def cluster_with(tmp_path, usable_bytes: int) -> Cluster:
    text = HARDWARE.replace("2_147_483_648", str(usable_bytes))
    path = tmp_path / f"m{usable_bytes}.toml"
    path.write_text(text)
    return Cluster(path)


def plan(cluster: Cluster, pin: Pins | None = None, *, batch: int = 8) -> Plan:
    return solve(SMALL, cluster, global_batch_size=batch, training=TRAINING, pin=pin)


def test_no_simulated_candidate_is_below_its_bound():
    cluster = Cluster("cpu-local")
    search = new_search(cluster)
    found = candidates(cluster, global_batch_size=8, model=DIVISIBLE, pin={})
    steps = {}
    for candidate in found:
        solved = search.refiner.solve(candidate)
        bound = search.refiner.stages(candidate)
        assert search.refiner.scalar(candidate) <= bound * (1 + 1e-9)
        if solved is not None:
            steps[candidate] = solved.step_s
            assert bound <= solved.step_s * (1 + 1e-9), str(candidate)
            for stage, held in enumerate(solved.simulation.peak_held_bytes):
                contents = solved.stager.contents(stage, solved.cuts)
                assert held <= contents.activation_bytes + contents.recompute_bytes + 1
    result = new_search(cluster).run(found)
    assert result.best is not None
    assert result.bound_s <= min(steps.values()) * (1 + 1e-9)
    assert result.best.step_s == pytest.approx(min(steps.values()), rel=0.05)


@pytest.mark.parametrize("schedule", ["1f1b", "layered"])
def test_no_simulated_virtual_stages_are_below_their_bound(schedule):
    """Of whatever cuts, not only those that are chosen; and the account of memory has at least
    what the simulator holds.
    """
    cluster = Cluster("cpu-local")
    search = new_search(cluster)
    pin: Pins = {"virtual_stages": 2, "schedule": schedule}
    for candidate in candidates(cluster, global_batch_size=8, model=DIVISIBLE, pin=pin):
        setting = search.pricer.setting(candidate)
        solution = setting.solution(candidate.recompute)
        stager = search.pricer.layout_stager(candidate, setting, solution)
        bound, num = search.refiner.stages(candidate), candidate.pp * candidate.virtual_stages
        assert search.refiner.scalar(candidate) <= bound * (1 + 1e-9)
        for inner in itertools.combinations(range(1, len(SMALL.blocks)), num - 1):
            cuts = (0, *inner, len(SMALL.blocks))
            solved = simulate_cuts(candidate, setting, solution, stager, cuts)
            assert bound <= solved.step_s * (1 + 1e-9), f"{candidate} {cuts}"
            for stage, held in enumerate(solved.simulation.peak_held_bytes):
                assert held <= stager.contents(stage, cuts).activation_bytes + 1


def test_1f1b_over_virtual_stages_is_interleaved():
    cluster = Cluster("cpu-local")
    for pinned, name in (("1f1b", "interleaved"), ("layered", "layered")):
        pin: dict[str, int | str] = {"virtual_stages": 2, "pp": 2, "schedule": pinned}
        found = plan(cluster, pin)
        assert (found.schedule.name, found.schedule.virtual_stages) == (name, 2)
        holders = [stage for stage, _ in itertools.groupby(s.stage for s in found.segments)]
        assert holders == [0, 1, 0, 1]
        assert "2 virtual stages" in found.explain()
        on_stage_1 = {b for s in found.segments if s.stage for b in (s.first_block, s.last_block)}
        assert 0 not in on_stage_1


def test_a_virtual_stage_on_a_wrong_stage_is_refused():
    pin: dict[str, int | str] = {"virtual_stages": 2, "pp": 2, "schedule": "interleaved"}
    found = plan(Cluster("cpu-local"), pin)
    segments = sorted(found.segments, key=lambda segment: segment.first_block)
    swapped = [dataclasses.replace(s, stage=1 - s.stage) for s in segments]
    with pytest.raises(PlanFormatError, match="stage c mod 2"):
        from_json(to_json(dataclasses.replace(found, segments=tuple(swapped))))
    one = dataclasses.replace(found.schedule, virtual_stages=1)
    with pytest.raises(PlanFormatError, match="interleaved with virtual_stages 1"):
        from_json(to_json(dataclasses.replace(found, schedule=one)))


def test_the_scalar_bound_holds_for_a_slow_first_block():
    """Of two blocks on two stages, the first twice as slow: 1F1B takes 4 with two micro-batches."""
    candidate = Candidate(
        pp=2,
        dp_replicate=1,
        dp_shard=1,
        tp=1,
        micro_batch_size=1,
        num_micro_batches=2,
        zero_stage=0,
        recompute="none",
        schedule="1f1b",
    )
    half = np.array([1.0, 0.5])
    times = StageTimes(
        both=2 * half, forward=half, backward=half, input=half, early=2 * half, weight=0 * half
    )
    assert scalar_bound_s(candidate, times) == 4


def test_matrix_of_bytes_equals_bytes_by_cause():
    cluster = Cluster("cpu-local")
    search = new_search(cluster)
    pins: tuple[Pins, ...] = (
        {"recompute": "full"},
        {"recompute": "blocks"},
        {"zero_stage": 3, "zero_stages": "0=1, 2=2", "schedule": "1f1b", "recompute": "full"},
        {"offload_activations": 1, "recompute": "blocks"},
    )
    for candidate in itertools.chain.from_iterable(
        candidates(
            cluster,
            global_batch_size=8,
            model=DIVISIBLE,
            pin={**pin, "virtual_stages": 1},
        )
        for pin in pins
    ):
        setting = search.pricer.setting(candidate)
        stager = search.pricer.stager(candidate, setting.least)
        for stage in range(candidate.pp):
            matrix = stager.run_peaks(all_runs(len(SMALL.blocks), stage))
            last_stage = stage == candidate.pp - 1
            for first in range(len(SMALL.blocks)):
                for end in range(first + 1, len(SMALL.blocks) + 1):
                    if last_stage != (end == len(SMALL.blocks)) or (stage == 0) != (first == 0):
                        continue
                    cuts = [first] * (stage + 1) + [end] * (candidate.pp - stage)
                    causes = stager.bytes_by_cause(stage, cuts)
                    total = sum(causes.values())
                    assert math.isclose(matrix[first, end], total, rel_tol=1e-6, abs_tol=32), (
                        str(candidate),
                        first,
                        end,
                    )


def test_more_memory_never_costs_more_and_is_never_exceeded(tmp_path):
    steps = []
    for usable in (2_000, 8_000, 16_000, 32_000, 64_000, 2**31):
        try:
            found = plan(cluster_with(tmp_path, usable), batch=16)
        except InfeasibleError:
            steps.append(math.inf)
            continue
        assert all(rank.peak_bytes <= usable for rank in found.prediction.ranks)
        steps.append(found.prediction.step_s * (1 - found.certificate.gap))
    assert math.isfinite(steps[-1])
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(steps))


def test_a_pinned_optimum_is_returned():
    cluster = Cluster("cpu-local")
    free = plan(cluster)
    pin = {
        "tp": free.mesh.tp,
        "pp": free.mesh.pp,
        "micro_batch_size": free.batch.micro_batch_size,
        "zero_stage": free.schedule.zero_stage,
        "recompute": free.schedule.recompute,
        "schedule": free.schedule.name,
    }
    pinned = plan(cluster, pin)
    assert (pinned.mesh, pinned.batch, pinned.schedule) == (free.mesh, free.batch, free.schedule)
    assert pinned.layout == free.layout
    assert pinned.prediction == free.prediction


def test_same_input_gives_the_same_plan():
    first, second = (plan(Cluster("cpu-local")) for _ in range(2))
    timeless = [
        dataclasses.replace(p, certificate=dataclasses.replace(p.certificate, solve_s=0.0))
        for p in (first, second)
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"tp": 3}, "tp=3"),
        ({"tp": 8}, "tp=8"),
        ({"pp": 2, "tp": 4}, "needs 8 GPUs"),
        ({"micro_batch_size": 9}, "micro_batch_size=9"),
        ({"micro_batch_size": 3, "dp_replicate": 4}, "at most 2 of the 8 sequences"),
        ({"dp_shard": 2, "zero_stage": 0}, "zero_stage=0"),
        ({"dp_shard": 1, "zero_stage": 2}, "zero_stage=2"),
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"zero_stages": "0=4"}, "'0=4' is no ZeRO stage of blocks"),
        ({"zero_stages": "layer=1"}, "no blocks 'layer'"),
        ({"zero_stage": 0, "zero_stages": "0=1"}, "zero_stage=0 and zero_stages='0=1'"),
        ({"recompute": "some"}, "recompute='some'"),
        ({"schedule": 3}, "schedule=3"),
        ({"ep": 2}, "no routed experts"),
        ({"virtual_stages": 0}, "virtual_stages=0"),
        ({"virtual_stages": 2, "pp": 1}, "nothing to interleave"),
        ({"virtual_stages": 8, "pp": 2}, "pp=2 × virtual_stages=8 is pinned, but the model has"),
        ({"virtual_stages": 8}, "virtual_stages=8 is pinned, but the model has"),
        ({"schedule": "interleaved", "pp": 1}, "needs several virtual stages"),
        ({"schedule": "interleaved", "virtual_stages": 1}, "needs several virtual stages"),
        ({"depth": 2}, "depth"),
        ({"tp": True}, "tp=True"),
        ({"tp": 4, "zero_stage": 1}, "zero_stage=1"),
    ],
)
def test_a_pin_that_cannot_hold_is_named(pin, said):
    with pytest.raises(InputError, match=said):
        plan(Cluster("cpu-local"), pin)


def test_a_pinned_micro_batch_may_leave_a_shorter_last_one():
    found = plan(Cluster("cpu-local"), {"micro_batch_size": 3, "pp": 2, "tp": 2})
    assert (found.batch.micro_batch_size, found.batch.num_micro_batches) == (3, 3)
    assert found.batch.last_size(batch_ranks=1) == 2
    assert "the last micro-batch of 2" in found.explain()
    assert from_json(to_json(found)) == found
    full = plan(Cluster("cpu-local"), {"micro_batch_size": 3, "pp": 2, "tp": 2}, batch=9)
    assert found.prediction.step_s == pytest.approx(full.prediction.step_s)  # counted as full


def test_data_ranks_divide_the_batch():
    found = plan(Cluster("cpu-local"), {"micro_batch_size": 2}, batch=6)
    assert 6 % found.device_mesh().batch_ranks == 0
    with pytest.raises(InputError, match="4 does not divide the global batch of 6"):
        plan(Cluster("cpu-local"), {"dp_replicate": 4}, batch=6)


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(InputError, match="pp=32"):
        solve(
            SMALL,
            Cluster("cpu-local", nodes=8),
            global_batch_size=32,
            training=TRAINING,
            pin={"pp": 32},
        )


@pytest.mark.parametrize(
    "pin",
    [
        {"tp": 2, "pp": 2},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 4, "zero_stage": 3},
        {"pp": 4},
        {"dp_replicate": 4},
        {"tp": 1, "pp": 1, "dp_replicate": 1, "dp_shard": 2},
        {"cp": 1, "ep": 1, "virtual_stages": 1, "tp": 4},
        {"schedule": "layered", "pp": 2, "recompute": "full"},
        {"schedule": "interleaved", "virtual_stages": 2, "pp": 2},
        {"schedule": "layered", "virtual_stages": 2},
        {"virtual_stages": 2, "zero_stage": 1, "recompute": "full"},
    ],
)
def test_pins_hold(pin):
    found = plan(Cluster("cpu-local"), pin)
    decided = {
        **dataclasses.asdict(found.mesh),
        "micro_batch_size": found.batch.micro_batch_size,
        "zero_stage": found.schedule.zero_stage,
        "recompute": found.schedule.recompute,
        "schedule": found.schedule.name,
        "virtual_stages": found.schedule.virtual_stages,
    }
    assert all(decided.get(name, 1) == value for name, value in pin.items())
    assert (found.schedule.zero_stage == 0) == (found.mesh.dp_shard == 1)
    assert from_json(to_json(found)) == found


RESIDENT = {"offload_optimizer": 0, "offload_activations": 0}
"""Nothing is offloaded, even if nothing fits then."""


def test_what_does_not_fit_is_explained(tmp_path):
    with pytest.raises(InfeasibleError) as caught:
        plan(cluster_with(tmp_path, 2_000))
    assert "too much" in str(caught.value)
    assert "stage" in str(caught.value)
    with pytest.raises(InfeasibleError, match=r"leave micro_batch_size=16 open"):
        plan(cluster_with(tmp_path, 30_000), {"micro_batch_size": 16, **RESIDENT}, batch=64)


def test_prediction_is_consistent():
    found = plan(Cluster("cpu-local"), {"pp": 2}, batch=16)
    prediction = found.prediction
    for rank in prediction.ranks:
        assert sum(rank.bytes_by_cause.values()) == rank.peak_bytes
        assert sum(rank.seconds_by_cause.values()) == pytest.approx(prediction.step_s, rel=0.02)
    assert sum(rank.num_ranks for rank in prediction.ranks) == 4
    assert 0 < prediction.mfu < 1
    certificate = found.certificate
    assert certificate.gap == pytest.approx(1 - certificate.bound_s / certificate.objective_s)
    assert certificate.objective_s == prediction.step_s


class Renamed(nn.Module):
    """The plain transformer of ``tests.models``, under other names."""

    def __init__(self, names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, module in {
            f"{names}_z": nn.Embedding(32, 16),
            f"{names}_y": nn.ModuleList(nn.Linear(16, 16) for _ in range(3)),
            f"{names}_a": nn.Linear(16, 32),
        }.items():
            setattr(self, name, module)
        self.parts = [f"{names}_z", f"{names}_y", f"{names}_a"]

    def forward(self, tokens):
        embed, layers, head = (getattr(self, name) for name in self.parts)
        x = embed(tokens)
        for layer in layers:
            x = x + F.gelu(layer(x))
        return head(x)


@pytest.mark.parametrize("pin", [{"tp": 4}, {"tp": 2, "pp": 2}])
def test_renaming_everything_gives_the_same_plan(pin):
    plans = []
    for names in ("q_proj", "zz"):
        batch = token_batch(vocab=32)
        inputs = {"tokens": batch["input_ids"], "targets": batch["labels"]}
        model = capture(Renamed(names), inputs, loss_fn=next_token_loss)
        plans.append(
            solve(model, Cluster("cpu-local"), global_batch_size=8, training=TRAINING, pin=pin)
        )
    one, other = plans
    assert (one.mesh, one.batch, one.schedule, one.layout, one.segments) == (
        other.mesh,
        other.batch,
        other.schedule,
        other.layout,
        other.segments,
    )
    placed = [[p.placement for p in found.parameters.values()] for found in plans]
    assert sorted(placed[0]) == sorted(placed[1])
    assert one.prediction == other.prediction


@pytest.mark.parametrize("pin", [{"tp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}, {"pp": 2}, {"tp": 1}])
@pytest.mark.parametrize("name", ["gpt2", "transformer"])
def test_plans_of_whole_models_type_check(name, pin):
    """``solve`` holds its layout to the type checker; dropout, tied and fused weights included."""
    if name == "gpt2":
        module, inputs = tiny_gpt2(dropout=0.1)
        model = capture(module, inputs)
    else:
        module, inputs, loss_fn = tiny_transformer()
        model = capture(module, inputs, loss_fn=loss_fn)
    found = solve(model, Cluster("cpu-local"), global_batch_size=8, training=TRAINING, pin=pin)
    tensor = {state.split("(")[0] for p in found.parameters.values() for state in p.placement[1:]}
    assert ("S" in tensor) == (found.mesh.tp > 1)


def test_tensor_parallel_llama_is_sharded_as_by_hand():
    """No template says so: columns then rows in attention and MLP, sequence-sharded between."""
    module, inputs = tiny_llama()
    found = solve(
        capture(module, inputs),
        Cluster("cpu-local"),
        global_batch_size=8,
        training=TRAINING,
        pin={"tp": 2, "pp": 1},
    )
    tensor = {
        name.split("layers.0.")[1]: parameter.placement[1]
        for name, parameter in found.parameters.items()
        if "layers.0." in name
    }
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    assert {tensor[f"{name}.weight"] for name in (*columns, "mlp.gate_proj", "mlp.up_proj")} == {
        "S(0)"
    }
    assert {tensor[f"{name}.weight"] for name in ("self_attn.o_proj", "mlp.down_proj")} == {"S(1)"}


def test_bounds_are_arrays_without_holes():
    search = new_search(Cluster("cpu-local"))
    candidate = candidates(
        Cluster("cpu-local"), global_batch_size=8, model=DIVISIBLE, pin={"pp": 2}
    )[0]
    times = search.pricer.setting(candidate).least_times(candidate.recompute)
    assert np.isfinite(times.both).all()
    assert (times.both > 0).all()


def test_a_single_stage_and_tensor_rank_leave_no_gap():
    """There are neither cuts nor layouts: what is solved is the best."""
    pin: dict[str, int | str] = {"pp": 1, "tp": 1, "schedule": "1f1b"}
    found = plan(Cluster("cpu-local", gpus_per_node=4), pin)
    assert found.schedule.recompute == "none"
    assert found.certificate.status == "optimal"
    tensor = plan(Cluster("cpu-local", gpus_per_node=4), {**pin, "tp": 2})
    assert tensor.certificate.bound_s <= tensor.prediction.step_s


def test_a_limit_leaves_no_order_of_work_without_a_solved_candidate(monkeypatch):
    """Unless it is bounded by what was found; and what is proved stays true."""
    cluster = Cluster("cpu-local")
    found = candidates(cluster, global_batch_size=8, model=DIVISIBLE, pin={"pp": 2})
    whole = new_search(cluster).run(found)
    assert whole.best is not None
    monkeypatch.setattr("autopar.solver.search.MAX_SOLVED", 1)
    search = new_search(cluster)
    limited = search.run(found)
    assert limited.best is not None
    assert limited.bound_s <= whole.best.step_s <= limited.best.step_s
    solved = [(one.candidate.schedule, one.candidate.virtual_stages) for one in limited.solved]
    assert len(solved) == len(set(solved)) > 1
    left = {
        (candidate.schedule, candidate.virtual_stages)
        for bound, _, candidate in limited.left
        if bound < limited.best.step_s
    }
    assert left <= set(solved)
