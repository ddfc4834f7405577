"""Candidates are what docs/concepts/problem.md says is searched: no more, no less, none twice."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.errors import InputError
from autopar.solver import Cluster
from autopar.solver.candidates import Divisible
from autopar.solver.pins import Pins, check_pins
from autopar.solver.space import candidates

DECISIONS = (
    *("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp"),
    *("micro_batch_size", "num_micro_batches", "zero_stage", "schedule", "virtual_stages"),
)


def searched(nodes: int, inside: int, batch: int, model: Divisible):
    """``DECISIONS`` of all candidates, as the page states them."""
    gpus, found = nodes * inside, set()
    degrees = [degree for degree in range(1, gpus + 1) if gpus % degree == 0]
    for pp, tp, cp, ep in itertools.product(degrees, repeat=4):
        if gpus % (pp * tp * cp * ep) or tp > inside or pp > model.num_blocks:
            continue
        if cp > 1 and (not model.seq_len or model.seq_len < 32_768 or model.seq_len % cp):
            continue
        if ep > 1 and (not model.num_experts or model.num_experts % ep):
            continue
        dp = gpus // (pp * tp * cp * ep)
        if batch % (dp * ep):
            continue
        share = batch // (dp * ep)
        orders = [("1f1b", 1), ("layered", 1)]
        orders += [
            (name, virtual)
            for virtual in (2, 3, 4, 8)
            if pp > 1 and pp * virtual <= model.num_blocks
            for name in ("interleaved", "layered")
        ]
        orders += [("zero_bubble", virtual) for _, virtual in orders[1::2] if pp > 1]
        for size, shard, (name, virtual) in itertools.product(range(1, share + 1), {1, dp}, orders):
            num = share // size
            if share % size or (num == 1 and (name == "layered" or virtual > 1)):
                continue
            if virtual > 1 and name != "layered" and num < pp:
                continue
            zeros: tuple[int, ...] = (1, 2, 3) if shard > 1 else (0,)
            if shard == dp == 1 and cp * ep > 1:
                zeros = (0, 1, 2, 3)
            for zero in zeros:
                found.add((pp, dp // shard, shard, cp, ep, tp, size, num, zero, name, virtual))
    return found


@given(
    nodes=st.integers(1, 4),
    inside=st.integers(1, 9),
    batch=st.integers(1, 24),
    num_blocks=st.integers(1, 17),
    seq_len=st.sampled_from([None, 2048, 32_768, 49_152]),
    num_experts=st.sampled_from([0, 0, 4, 6]),
)
def test_candidates_are_those_that_the_docs_state(
    nodes, inside, batch, num_blocks, seq_len, num_experts
):
    model = Divisible(num_blocks=num_blocks, seq_len=seq_len, num_experts=num_experts)
    cluster = Cluster("cpu-local", nodes=nodes, gpus_per_node=inside)
    expected = searched(nodes, inside, batch, model)
    try:
        found = candidates(cluster, global_batch_size=batch, model=model, pin={})
    except InputError:
        assert not expected
        return
    made = [tuple(getattr(one, name) for name in DECISIONS) for one in found]
    assert set(made) == expected
    assert len(made) == len(expected)
    assert {one.recompute for one in found} == {"blocks"}
    assert {one.cuts for one in found} == {"balanced"}
    assert not any(one.zero_open for one in found)


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"pp": 2, "virtual_stages": 2, "extra_in_flight": 1}, "interleaved 1F1B has no more"),
        ({"pp": 1, "extra_in_flight": 1}, "one stage waits for no others"),
    ],
)
def test_more_in_flight_that_cannot_be_is_refused(pin: Pins, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_pins(pin, Cluster("cpu-local", gpus_per_node=4), 8)


@pytest.mark.parametrize(
    ("batch", "pin", "hint"),
    [
        (8, {"loss_chunks": 3}, "leave loss_chunks=3 open"),
        (8, {"loss_chunks": 3, "micro_batch_size": 2}, "leave loss_chunks=3 open"),
        (
            8,
            {"loss_chunks": 8, "tp": 1, "micro_batch_size": 2},
            "leave loss_chunks=8 open; or leave micro_batch_size=2 open",
        ),
    ],
)
def test_pins_that_leave_nothing_are_named_if_one_is_in_the_way(batch, pin, hint):
    cluster = Cluster("cpu-local", gpus_per_node=1)
    model = Divisible(num_blocks=4, seq_len=100)
    with pytest.raises(InputError) as raised:
        candidates(cluster, global_batch_size=batch, model=model, pin=pin)
    assert raised.value.hint == hint
    for text in hint.split("; or "):
        name = text.removeprefix("leave ").partition("=")[0]
        fewer = {other: value for other, value in pin.items() if other != name}
        assert candidates(cluster, global_batch_size=batch, model=model, pin=fewer)


def test_a_batch_that_no_mesh_divides_is_told_with_the_pin_in_the_way():
    cluster, model = Cluster("cpu-local", gpus_per_node=10), Divisible(num_blocks=1)
    pin = {"tp": 1, "sequence_parallel": 1, "cp": 1}
    with pytest.raises(InputError, match="divide a global batch of 7") as raised:
        candidates(cluster, global_batch_size=7, model=model, pin=pin | {"pp": 1, "ep": 1})
    assert raised.value.hint == "leave tp=1 open"
