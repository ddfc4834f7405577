"""Real models under pinned layouts have the loss and gradients of one device."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.ir.graph import ValueId
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import SegmentPlan
from autopar.passes import lower, plan_moves
from tests.passes.harness import run_program
from tests.passes.layouts import cheapest, choose_layout, megatron, replicated
from tests.passes.reference import Case, assert_same, real_case

MODELS = ("llama", "gpt2", "transformer")
TP2, TP4, DP2_TP2 = Mesh(tp=2), Mesh(tp=4), Mesh(dp_replicate=2, tp=2)


def check(case: Case, layout: Layout, mesh: Mesh) -> None:
    last = len(case.model.blocks) - 1
    program = lower(
        case.model,
        layout,
        mesh=mesh,
        micro_batch_size=case.batch // mesh.batch_ranks,
        segments=[SegmentPlan(stage=0, first_block=0, last_block=last)],
    )
    assert_same(run_program(program, case.model, mesh, case.parameters, case.inputs), case.expected)


def tensor_parallel(case: Case, mesh: Mesh, *, sequence: bool = False) -> Layout:
    pin = megatron(case.model, sequence=sequence)
    return choose_layout(case.model, mesh, batch=case.batch, pin=pin, choose=cheapest)


@pytest.mark.parametrize("mesh", [TP2, TP4, DP2_TP2], ids=["tp2", "tp4", "dp2-tp2"])
@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_models_equal_one_device(name: str, mesh: Mesh):
    case = real_case(name)
    check(case, tensor_parallel(case, mesh), mesh)


@pytest.mark.parametrize("mesh", [TP2, TP4, DP2_TP2], ids=["tp2", "tp4", "dp2-tp2"])
@pytest.mark.parametrize("name", MODELS)
def test_sequence_parallel_models_equal_one_device(name: str, mesh: Mesh):
    case = real_case(name)
    check(case, tensor_parallel(case, mesh, sequence=True), mesh)


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=4), Mesh(dp_shard=2, dp_replicate=2)])
@pytest.mark.parametrize("name", MODELS)
def test_data_parallel_models_equal_one_device(name: str, mesh: Mesh):
    case = real_case(name)
    check(case, tensor_parallel(case, mesh), mesh)


@pytest.mark.parametrize("mesh", [Mesh(), DP2_TP2], ids=["alone", "dp2-tp2"])
@pytest.mark.parametrize("name", MODELS)
def test_replicated_models_equal_one_device(name: str, mesh: Mesh):
    case = real_case(name)
    check(case, replicated(case.model), mesh)


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=4), DP2_TP2], ids=["dp4", "dp2-tp2"])
def test_a_mean_is_a_mean_over_all_ranks(mesh: Mesh):
    case = real_case("regression")
    assert case.model.weight is None
    check(case, tensor_parallel(case, mesh), mesh)


def collectives(case: Case, mesh: Mesh, *, sequence: bool) -> Counter[tuple[str, str]]:
    """Collectives of the layers of a Llama, forward and backward."""
    layout = tensor_parallel(case, mesh, sequence=sequence)
    moves = plan_moves(
        case.model, layout, mesh=mesh, micro_batch_size=case.batch // mesh.batch_ranks
    )
    (layer,) = (kind for kind, count in case.model.multiplicity().items() if count > 1)
    return Counter((move.forward, move.backward) for move in moves if move.kind == layer)


def test_pinned_llama_has_the_collectives_of_megatron():
    found = collectives(real_case("llama"), DP2_TP2, sequence=False)
    assert found == {("all_reduce", "none"): 2, ("none", "all_reduce"): 2}


def test_pinned_llama_has_the_collectives_of_sequence_parallelism():
    found = collectives(real_case("llama"), DP2_TP2, sequence=True)
    assert found == {("all_gather", "reduce_scatter"): 2, ("reduce_scatter", "all_gather"): 2}


def test_moves_know_the_bytes_that_a_rank_holds():
    case = real_case("llama")
    layout = tensor_parallel(case, DP2_TP2, sequence=True)
    moves = plan_moves(case.model, layout, mesh=DP2_TP2, micro_batch_size=2)
    gathered = next(move for move in moves if move.forward == "all_gather")
    sequences, tokens, hidden, item = 2, 16, 64, 8
    assert gathered.bytes == sequences * tokens * hidden * item
    assert (gathered.axis, gathered.source, gathered.target) == ("tp", "S(1)", "R")


def test_one_rank_moves_nothing():
    case = real_case("llama")
    layout = tensor_parallel(case, DP2_TP2)
    assert plan_moves(case.model, layout, mesh=Mesh(), micro_batch_size=4) == ()


def test_parameters_and_values_are_described_as_a_rank_holds_them():
    case = real_case("llama")
    layout = tensor_parallel(case, DP2_TP2)
    program = lower(
        case.model,
        layout,
        mesh=DP2_TP2,
        micro_batch_size=2,
        segments=[SegmentPlan(stage=0, first_block=0, last_block=3)],
    )
    weight = program.parameters["model.layers.0.self_attn.q_proj.weight"]
    assert weight.shape == (32, 64)
    loss = program.values[case.model.loss]
    assert loss.shape == ()
    assert program.values.keys() >= {ValueId(v.role, v.name) for v in program.segments[0].arguments}
    assert [str(state) for state in weight.placement] == ["R", "I", "I", "S(0)"]
