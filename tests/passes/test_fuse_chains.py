"""Chains of small ops become one call: with the same numbers, and nothing kept in between."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, fx

from autopar.ir.fused_chain import COMPILER, FusedChain
from autopar.ir.mesh import Mesh
from autopar.ir.plan import SegmentPlan
from autopar.ir.program import Program
from autopar.passes import lower
from tests.passes.harness import run_program
from tests.passes.layouts import cheapest, choose_layout, megatron
from tests.passes.reference import Case, assert_same, real_case

NORMS, ALL = "flash_attention2 + fused norms", "flash_attention2 + fused pointwise"
TP2, DP2_TP2 = Mesh(tp=2), Mesh(dp_replicate=2, tp=2)


def lowered(case: Case, mesh: Mesh, kernels: str, *, sequence: bool = True) -> Program:
    pin = megatron(case.model, sequence=sequence)
    layout = choose_layout(case.model, mesh, batch=case.batch, pin=pin, choose=cheapest)
    return lower(
        case.model,
        layout,
        mesh=mesh,
        micro_batch_size=case.batch // mesh.batch_ranks,
        segments=[SegmentPlan(stage=0, first_block=0, last_block=len(case.model.blocks) - 1)],
        kernels=kernels,
    )


def chains(program: Program) -> list[FusedChain]:
    nodes = [node for module in program.kinds.values() for node in module.graph.nodes]
    return [node.target for node in nodes if isinstance(node.target, FusedChain)]


@pytest.mark.parametrize("kernels", [NORMS, ALL])
@pytest.mark.parametrize("mesh", [TP2, DP2_TP2], ids=["tp2", "dp2-tp2"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "transformer"])
def test_fused_models_equal_one_device(name: str, mesh: Mesh, kernels: str) -> None:
    case = real_case(name)
    program = lowered(case, mesh, kernels)
    assert bool(chains(program)) == (kernels == ALL or name == "llama")
    assert_same(run_program(program, case.model, mesh, case.parameters, case.inputs), case.expected)


def test_without_fused_kernels_nothing_is_fused() -> None:
    assert not chains(lowered(real_case("llama"), TP2, "flash_attention2"))


def norm() -> FusedChain:
    """An RMS norm with a mask beside it, which has no gradient."""
    graph = fx.Graph()
    rows, weight = graph.placeholder("rows"), graph.placeholder("weight")
    squares = graph.call_function(torch.ops.aten.pow.Tensor_Scalar, (rows, 2))
    mean = graph.call_function(torch.ops.aten.mean.dim, (squares, [-1], True))
    inverse = graph.call_function(torch.ops.aten.rsqrt.default, (mean,))
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (rows, inverse))
    positive = graph.call_function(torch.ops.aten.gt.Scalar, (scaled, 0))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (scaled, weight)), positive))
    return FusedChain(fx.GraphModule({}, graph), is_linear=False)


def arguments() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(8, generator=generator, dtype=torch.float64)
    return rows.requires_grad_(), weight.requires_grad_()


def gradients(chain: FusedChain, *, trained: tuple[bool, bool] = (True, True)) -> list[Tensor]:
    given = [own.requires_grad_(moves) for own, moves in zip(arguments(), trained, strict=True)]
    made, positive = chain(*given)
    assert not positive.requires_grad
    wanted = [own for own in given if own.requires_grad]
    return [made.detach(), positive, *torch.autograd.grad(made.sin().sum(), wanted)]


def test_a_chain_keeps_what_it_reads_and_no_more() -> None:
    rows, weight = arguments()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm()(rows, weight)
    assert [own.data_ptr() for own in kept] == [rows.data_ptr(), weight.data_ptr()]


def test_gradients_of_a_chain_are_right() -> None:
    assert torch.autograd.gradcheck(lambda *given: norm()(*given)[0], arguments())


def test_only_wanted_gradients_are_computed() -> None:
    chain = norm()
    whole = gradients(chain)
    assert torch.equal(gradients(chain, trained=(False, True))[2], whole[3])
    assert torch.equal(gradients(chain, trained=(True, False))[2], whole[2])


def test_a_linear_chain_keeps_nothing() -> None:
    graph = fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    total = graph.call_function(torch.ops.aten.add.Tensor, (one, other))
    graph.output((graph.call_function(torch.ops.aten.sub.Tensor, (total, one)),))
    chain = FusedChain(fx.GraphModule({}, graph), is_linear=True)
    rows, weight = arguments()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        (made,) = chain(rows, weight)
    assert not kept
    made.sum().backward()
    assert rows.grad is not None
    assert weight.grad is not None
    assert torch.equal(rows.grad, torch.zeros_like(rows))
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))


@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch compiles for CPUs with g++")
def test_compiled_kernels_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: it compiles a kernel forward and one backward."""
    expected = gradients(norm())
    monkeypatch.setenv(COMPILER, "inductor")
    for found, wanted in zip(gradients(norm()), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
