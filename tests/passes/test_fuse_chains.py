"""Chains of small ops become one call: with the same numbers, and nothing kept in between."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autopar.ir.fused_chain import COMPILER, FusedChain
from autopar.ir.graph import BlockKind, NodeInfo, Role, TensorInfo, set_info
from autopar.ir.kernels import parse_kernels
from autopar.ir.mesh import Mesh
from autopar.ir.plan import SegmentPlan
from autopar.ir.program import Program
from autopar.passes import lower
from autopar.passes.fuse_chains import fuse_chains
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
    return FusedChain(fx.GraphModule({}, graph), is_linear=False, learned=[True, False])


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
    chain = FusedChain(fx.GraphModule({}, graph), is_linear=True, learned=[True])
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


def strided() -> FusedChain:
    """A view between two functions: its backward views gradients."""
    graph = fx.Graph()
    sine = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("rows"),))
    view = graph.call_function(torch.ops.aten.view.default, (sine, [3, 2, 4]))
    graph.output((graph.call_function(torch.ops.aten.cos.default, (view,)),))
    return FusedChain(fx.GraphModule({}, graph), is_linear=False, learned=[True])


@pytest.mark.parametrize("compiler", ["none", "aot_eager"])
def test_gradients_have_any_strides(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks share a chain, and get their gradients from messages or from the next block; so many
    strides as here are more than one function may be compiled for.
    """
    monkeypatch.setenv(COMPILER, compiler)
    chain, rows = strided(), arguments()[0]
    contiguous = torch.randn(3, 2, 4, dtype=torch.float64)
    given = [contiguous, contiguous.permute(2, 1, 0).contiguous().permute(2, 1, 0)]
    given += [contiguous.repeat_interleave(n, 0)[::n] for n in range(2, 11)]
    for number, gradient in enumerate(given, 1):
        kept = rows.detach().repeat_interleave(number, 0)[::number].requires_grad_()
        (found,) = torch.autograd.grad(chain(kept), kept, gradient)
        expected = torch.autograd.grad(rows.sin().view(3, 2, 4).cos(), rows, gradient)[0]
        torch.testing.assert_close(found, expected)


def add(graph: fx.Graph, op: OpOverload, shape: tuple[int, ...], *args: object) -> fx.Node:
    return described(graph.call_function(op, args), shape)  # type: ignore[arg-type]


def described(node: fx.Node, shape: tuple[int, ...], *, learned: bool = True) -> fx.Node:
    tensor = TensorInfo(shape=shape, dtype=torch.float64, requires_grad=learned)
    set_info(node, NodeInfo(tensors=(tensor,)))
    return node


def fused(graph: fx.Graph) -> tuple[fx.GraphModule, list[FusedChain]]:
    kind = BlockKind(name="block", graph=graph, roles=(Role.ACTIVATION,) * 2)
    found = fuse_chains(kind, parse_kernels(ALL), Mesh()).graph
    targets = [node.target for node in found.nodes if isinstance(node.target, FusedChain)]
    return fx.GraphModule({}, found), targets


def test_of_chains_that_read_each_other_one_is_fused() -> None:
    aten, graph = torch.ops.aten, fx.Graph()
    x, y = (described(graph.placeholder(name), (2, 4)) for name in ("x", "y"))
    twice, thrice = (add(graph, aten.mul.Tensor, (2, 4), *pair) for pair in ((x, 2), (y, 3)))
    sine = add(graph, aten.sin.default, (2, 4), twice)
    cosine = add(graph, aten.cos.default, (2, 4), thrice)
    views = [add(graph, aten.view.default, (2, 4), node, [2, 4]) for node in (sine, cosine)]
    one = add(graph, aten.mul.Tensor, (2, 4), twice, views[1])
    other = add(graph, aten.mul.Tensor, (2, 4), thrice, views[0])
    graph.output((one, other))
    module, found = fused(graph)
    assert len(found) == 1
    x_value, y_value = torch.randn(2, 2, 4, dtype=torch.float64).unbind()
    expected = 2 * x_value * (3 * y_value).cos(), 3 * y_value * (2 * x_value).sin()
    for result, wanted in zip(module(x_value, y_value), expected, strict=True):
        torch.testing.assert_close(result, wanted)


def test_what_no_gradient_flows_through_asks_for_none() -> None:
    """A mask of floats that a chain makes beside what it is multiplied with."""
    aten, graph = torch.ops.aten, fx.Graph()
    rows = described(graph.placeholder("rows"), (2, 4))
    kept = described(graph.placeholder("kept"), (2, 4), learned=False)
    mask = described(graph.call_function(aten.rsub.Scalar, (kept, 1)), (2, 4), learned=False)
    graph.output((add(graph, aten.mul.Tensor, (2, 4), rows, mask), mask))
    module, found = fused(graph)
    assert len(found) == 1
    given = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    masked, made = module(given, torch.eye(2, 4, dtype=torch.float64))
    assert not made.requires_grad
    masked.sum().backward()
    assert given.grad is not None
    assert torch.equal(given.grad, 1 - torch.eye(2, 4, dtype=torch.float64))


@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch compiles for CPUs with g++")
def test_compiled_kernels_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: it compiles a kernel forward and one backward."""
    expected = gradients(norm())
    monkeypatch.setenv(COMPILER, "inductor")
    for found, wanted in zip(gradients(norm()), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
