"""The loss in chunks as a decision: chosen where memory is short, pinned, refused, and costed."""

from __future__ import annotations

import itertools
import math

import pytest

from autopar.ir.errors import InputError
from autopar.ir.plan import from_json, to_json
from autopar.solver import Cluster, solve
from autopar.solver.instance import Instance, make_instance
from autopar.solver.loss_chunks import NUMBERS
from tests.runtime.cases import make_model
from tests.solver.small import MODEL, TRAINING

GPU = Cluster("a100-80gb", gpus_per_node=1)


def llama(cluster: Cluster = GPU, **pin: int | str) -> Instance:
    """A tiny Llama in which the logits are what is kept most."""
    model = make_model("llama", 2, "fp32")
    pins = {"micro_batch_size": 8, **pin}
    return make_instance(model, cluster, global_batch_size=8, training=TRAINING, pin=pins)


def test_chunks_cost_no_less_time_and_ever_less_memory() -> None:
    instance = llama()
    search, candidate = instance.search, instance.candidates[0]
    setting = search.pricer.setting(candidate)
    solution = setting.solution("none")
    choice = search.pricer.chunk_choice(candidate, setting, solution)
    found = [choice.stager(number) for number in (1, *NUMBERS[:3])]
    for one, other in itertools.pairwise(found):
        assert one is not None
        assert other is not None
        both = [s.costs.forward_s[-1] + s.costs.backward_s[-1] for s in (one, other)]
        assert both[0] <= both[1]
        peaks = [s.costs.held_bytes[-1] + s.costs.temporary_bytes[-1] for s in (one, other)]
        assert peaks[0] > peaks[1]
        assert (other.costs.forward_s[:-1] == one.costs.forward_s[:-1]).all()
        for name in ("held_bytes", "temporary_bytes"):
            floor = getattr(setting.least, name)[-1]
            assert floor <= getattr(other.costs, name)[-1]
    assert choice.stager(3) is None  # of 8 sequences of 16 positions


def test_the_loss_is_whole_where_memory_is_enough() -> None:
    instance = llama()
    best = instance.search.run(instance.candidates).best
    assert best is not None
    assert best.candidate.loss_chunks == 1
    assert not best.candidate.recomputed_blocks


def test_the_loss_is_in_chunks_where_memory_is_short_and_that_beats_recomputing() -> None:
    roomy = llama()
    best = roomy.search.run(roomy.candidates).best
    assert best is not None
    peak = max(best.stager.peak_bytes(best.cuts))
    tight = GPU.with_memory(peak - 2**17)
    found = llama(tight)
    chosen = found.search.run(found.candidates)
    assert chosen.best is not None
    assert chosen.best.candidate.loss_chunks > 1
    assert max(chosen.best.stager.peak_bytes(chosen.best.cuts)) <= tight.usable_bytes
    whole = llama(tight, loss_chunks=1)
    other = whole.search.run(whole.candidates)
    step_s = math.inf if other.best is None else other.best.step_s
    assert chosen.best.step_s < step_s
    assert chosen.bound_s <= chosen.best.step_s


@pytest.mark.parametrize(
    "pins",
    [{}, {"pp": 2}, {"tp": 2, "sequence_parallel": 1}, {"pp": 2, "virtual_stages": 2}],
    ids=str,
)
def test_pinned_chunks_are_in_the_plan(pins: dict[str, int]) -> None:
    model, cluster = make_model("llama", 2, "fp32"), Cluster("cpu-local", gpus_per_node=2)
    pin = {"loss_chunks": 4, "micro_batch_size": 2, **pins}
    plan = solve(model, cluster, global_batch_size=8, training=TRAINING, pin=pin)
    assert from_json(to_json(plan)).schedule.loss_chunks == 4
    assert "loss in 4 chunks" in plan.explain()
    whole = solve(
        model, cluster, global_batch_size=8, training=TRAINING, pin=pin | {"loss_chunks": 1}
    )
    assert whole.prediction.step_s <= plan.prediction.step_s * (1 + 1e-9)


def test_chunks_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match=r"no mesh .* loss_chunks=5 pinned"):
        llama(loss_chunks=5)
    with pytest.raises(InputError, match="loss_chunks=0 is pinned; it must be"):
        llama(loss_chunks=0)


def test_any_sum_can_be_in_chunks() -> None:
    """The rules say it, not names of ops: this loss sums up what the last block is given."""
    pin = {"loss_chunks": 2, "micro_batch_size": 2}
    plan = solve(MODEL, Cluster("cpu-local"), global_batch_size=4, training=TRAINING, pin=pin)
    assert plan.schedule.loss_chunks == 2
