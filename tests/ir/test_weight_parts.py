"""Which weights have gradients that can come later, and that they come out the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.deferral import Apart, Deferred, deferring
from autopar.ir.graph import ModelGraph, Role
from autopar.ir.layout import operands_of
from autopar.ir.weight_parts import weight_operands
from tests.zoo import ZOO

SIZE = 8


class Model(nn.Module):
    """What ``forward`` makes of tokens' features and two matrices; its loss is a sum."""

    def __init__(self, forward: Callable[[Tensor, Tensor, Tensor], Tensor], frozen: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SIZE, SIZE)
        self.one = nn.Parameter(torch.randn(SIZE, SIZE))
        self.other = nn.Parameter(torch.randn(SIZE, SIZE))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not frozen or frozen not in name)
        self._forward = forward

    def forward(self, tokens: Tensor) -> Tensor:
        return self._forward(self.embedding(tokens), self.one, self.other).square().sum()


def found(model: ModelGraph) -> dict[str, list[str]]:
    """Ops that are found in all kinds, with the names of what they take for weights."""
    names: dict[str, list[str]] = {}
    for kind in model.kinds.values():
        pairs = zip(kind.placeholders, kind.roles, strict=True)
        parameters = [node for node, role in pairs if role is Role.PARAMETER]
        for node, weights in weight_operands(kind.graph, parameters).items():
            operands = operands_of(node)
            names[node.name] = [operands[index].name for index in weights]
    return names


@pytest.mark.parametrize(
    ("forward", "frozen", "num"),
    [
        (lambda x, one, other: x @ one @ other, "", 2),
        (lambda x, one, other: x @ one.t() @ (2 * other), "", 2),  # computed from it alone
        (lambda x, one, other: x @ (one @ other), "", 1),  # no activation: a weight's weight
        (lambda x, one, other: (x @ one) * other.sum(), "", 1),
        (lambda x, one, other: (x @ one) @ x.mT @ x @ other, "", 2),  # scores have no weights
        (lambda x, one, other: x @ one @ other, "one", 1),
        (lambda x, one, other: x @ one @ other, "embedding", 1),  # nothing before takes gradients
        (lambda x, one, other: x @ (one * x.mean()) @ other, "", 1),  # needs an activation
    ],
)
def test_products_of_activations_with_parameters_are_found(forward, frozen: str, num: int):
    model = capture(Model(forward, frozen), {"tokens": torch.zeros(2, 4, dtype=torch.long)})
    assert len(found(model)) == num, found(model)


@pytest.mark.parametrize(
    ("forward", "num"),
    [
        (lambda x, one, other: x @ (2 * one) + (2 * one).sum() + (x @ other).sum(), 2),
        (lambda x, one, other: _twice(x, 2 * one), 0),
        (lambda x, one, other: _twice(x, one), 1),  # a parameter itself may serve others
    ],
)
def test_what_serves_others_too_does_not_wait(forward, num: int):
    model = capture(Model(forward, ""), {"tokens": torch.zeros(2, 4, dtype=torch.long)})
    assert len(found(model)) == num, found(model)


def _twice(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight + weight.sin().sum()


@pytest.mark.parametrize(
    ("name", "num"), [("llama", 7), ("gpt2", 4), ("mixtral", 6), ("t5", 16), ("vit", 6)]
)
def test_all_matrices_of_layers_wait(name: str, num: int):
    """Of each kind of layer: q, k, v, o and those of the MLP, or the router and the experts."""
    family = ZOO[name]
    model = capture(family.build(), family.inputs(2), loss_fn=family.loss_fn)
    counts = model.multiplicity()
    kinds = [kind for kind in model.kinds.values() if counts[kind.name] > 1]
    waiting = 0
    for kind in kinds:
        pairs = zip(kind.placeholders, kind.roles, strict=True)
        parameters = [node for node, role in pairs if role is Role.PARAMETER]
        waiting += len(weight_operands(kind.graph, parameters))
    assert waiting == num


@pytest.mark.parametrize("name", ["linear", "addmm", "matmul", "einsum", "conv1d"])
def test_parts_give_the_gradients_of_the_whole(name: str):
    torch.manual_seed(0)
    aten = torch.ops.aten
    weight, bias = torch.randn(6, SIZE), torch.randn(6)
    x = torch.randn(3, SIZE)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    op, args, weights = {
        "linear": (aten.linear.default, (x, weight, bias), (1, 2)),
        "addmm": (aten.addmm.default, (bias, x, weight.t()), (0, 2)),
        "matmul": (aten.matmul.default, (x, weight.t()), (1,)),
        "einsum": (aten.einsum.default, ("bi,oi->bo", [x, weight]), (1,)),
        "conv1d": (
            aten.conv1d.default,
            (x[None].mT.contiguous(), weight[..., None], bias),
            (1, 2),
        ),
    }[name]
    up = torch.randn_like(op(*args))
    op(*args).tanh().backward(up)
    expected = [leaf.grad for leaf in leaves]
    assert expected[0] is not None
    assert expected[1] is not None
    for leaf in leaves:
        leaf.grad = None
    deferred = Deferred()
    with deferring(deferred):
        made = Apart(op, weights)(*args)
    made.tanh().backward(up)
    assert len(deferred) == 1
    assert x.grad is not None
    assert torch.equal(x.grad, expected[0])
    assert weight.grad is None
    assert bias.grad is None
    deferred.finish([weight, bias])
    assert len(deferred) == 0
    for leaf, gradient in zip(leaves, expected, strict=True):
        if gradient is None:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("shape", "num_out", "is_plain"),
    [
        ((48, 64), 40, True),
        ((3, 16, 64), 40, True),
        ((1, 16, 64), 1, False),
        ((2, 3, 4, 16), 8, False),
        ((64, 48), 40, False),  # by columns
    ],
)
def test_linear_layers_in_parts_have_the_bits_of_whole_ones(
    shape: tuple[int, ...], num_out: int, is_plain: bool, has_bias: bool, dtype: torch.dtype
):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    if shape == (64, 48):
        x = x.mT
    leaves = [x, torch.randn(num_out, x.shape[-1], dtype=dtype)]
    leaves += [torch.randn(num_out, dtype=dtype)] if has_bias else []
    for leaf in leaves:
        leaf.requires_grad_()
    linear = torch.ops.aten.linear.default
    weights = tuple(range(1, len(leaves)))
    whole = linear(*leaves)
    up = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, leaves, up)
    deferred = Deferred()
    with deferring(deferred):
        made = Apart(linear, weights)(*leaves)
    assert made.grad_fn is not None
    assert made.grad_fn.name().startswith("_Linear") == is_plain
    assert torch.equal(made, whole)
    made.backward(up)
    assert leaves[1].grad is None
    deferred.finish(leaves[1:])
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient)


def test_nothing_waits_where_nothing_takes_it():
    x, weight = torch.randn(3, SIZE, requires_grad=True), torch.randn(6, SIZE, requires_grad=True)
    linear = Apart(torch.ops.aten.linear.default, (1,))
    linear(x, weight).sum().backward()
    assert weight.grad is not None
    deferred = Deferred()
    with deferring(deferred):
        linear(x.detach(), weight).sum().backward()  # no activation takes a gradient
        with torch.no_grad():
            assert not linear(x, weight).requires_grad
    assert str(linear) == "aten.linear.default"
    assert linear.__name__ == "linear"
    assert len(deferred) == 0
