"""FLOPs of products are those that torch counts, and shards share them; experts by definition."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.ir.families import Family, family_of
from autopar.ir.graph import info
from autopar.ir.layout import operands_of
from autopar.ir.placement import local_shape
from autopar.ir.rules.core import Option
from autopar.ir.rules.registry import rule_or_replicated
from autopar.solver.costs.saved import own_bytes
from autopar.solver.costs.work import Work, backward_work, forward_work
from autopar.testing.prove import Sample, SampleNode, node_options, sample_node

_aten = torch.ops.aten


def floats(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


PRODUCTS: dict[str, tuple[Any, ...]] = {
    "linear": (_aten.linear.default, floats(2, 3, 8), floats(4, 8)),
    "matmul": (_aten.matmul.default, floats(2, 3, 4, 8), floats(2, 3, 8, 6)),
    "patches": (_aten.conv2d.default, floats(2, 4, 8, 8), floats(6, 4, 4, 4), None, [4, 4]),
    "groups": (_aten.conv1d.default, floats(2, 4, 9), floats(8, 2, 3), None, [1], [0], [1], 2),
    "turned": (_aten.conv_transpose1d.default, floats(2, 4, 5), floats(4, 6, 3)),
    "scores": (_aten.einsum.default, "bqhd,bkhd->bhqk", [floats(2, 3, 4, 6), floats(2, 5, 4, 6)]),
    "dots": (_aten.einsum.default, "...k,nk->...n", [floats(2, 3, 4), floats(6, 4)]),
    "implicit": (_aten.einsum.default, "ij,jk", [floats(2, 3), floats(3, 4)]),
    "tensordot": (_aten.tensordot.default, floats(4, 3, 2), floats(2, 5, 3), [1, 2], [2, 0]),
}


def whole(name: str) -> SampleNode:
    target, *args = PRODUCTS[name]
    return sample_node(Sample(target=target, args=tuple(args)))


def work(sample: SampleNode, option: Option, size: int) -> tuple[Work, Work]:
    """On a rank of ``size`` under an option."""
    node = sample.node
    shapes = [
        local_shape(info(operand).tensor.shape_at(1), (state,), (size,))
        for operand, state in zip(operands_of(node), option.operands, strict=True)
    ]
    results = [
        local_shape(tensor.shape_at(1), (state,), (size,))
        for tensor, state in zip(info(node).tensors, option.results, strict=True)
    ]
    return forward_work(node, shapes, results), backward_work(node, shapes, results)


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_flops_are_those_that_torch_counts(name: str) -> None:
    sample = whole(name)
    target, *args = PRODUCTS[name]
    graded = [a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    graded = [[t.requires_grad_() for t in a] if _is_tensors(a) else a for a in graded]
    assert family_of(sample.node) is Family.PRODUCT
    with FlopCounterMode(display=False) as forward:
        result = target(*graded)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    unsplit = node_options(sample.node, rule_or_replicated(sample.node), 1)[0]
    found = [part.flops for part in work(sample, unsplit, 1)]
    # torch counts the weights' gradient of groups as if there was one
    wanted = 2 * found[0] if name == "groups" else backward.get_total_flops()
    assert found == [forward.get_total_flops(), wanted]


def _is_tensors(value: object) -> bool:
    return isinstance(value, list) and isinstance(value[0], torch.Tensor)


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_two_ranks_share_the_flops_of_a_split_product(name: str) -> None:
    sample = whole(name)
    options = node_options(sample.node, rule_or_replicated(sample.node), 2)
    split = [option for option in options if option.factor is not None]
    assert split
    unsplit = next(option for option in options if option.factor is None)
    total = [part.flops for part in work(sample, unsplit, 2)]
    for option in split:
        assert [2 * part.flops for part in work(sample, option, 2)] == total


EXPERTS, HIDDEN, FEATURES, CHOSEN, TOKENS = 8, 6, 10, 2, 12


def routed() -> SampleNode:
    args = (
        floats(2, TOKENS // 2, HIDDEN),
        torch.zeros(2, TOKENS // 2, CHOSEN, dtype=torch.int64),
        floats(2, TOKENS // 2, CHOSEN),
        floats(EXPERTS, 2 * FEATURES, HIDDEN),
        floats(EXPERTS, HIDDEN, FEATURES),
    )
    settings = {"activation": "silu", "gated": True}
    target = torch.ops.autopar.routed_experts.default
    return sample_node(Sample(target=target, args=args, kwargs=settings))


def test_experts_compute_the_tokens_that_choose_them() -> None:
    """T·k rows of two products forward, twice that backward; a slice or its features share it."""
    sample = routed()
    options = {
        (option.factor, option.helper): option
        for option in node_options(sample.node, rule_or_replicated(sample.node), 2)
    }
    unsplit = options[None, None]
    forward, backward = work(sample, unsplit, 2)
    rows = TOKENS * CHOSEN
    assert forward.flops == rows * (2 * HIDDEN * 2 * FEATURES + 2 * FEATURES * HIDDEN)
    assert backward.flops == 2 * forward.flops
    for option in (options["f", None], options["b0", None], options[None, "expert_slice"]):
        parts = work(sample, option, 2)
        assert [2 * part.flops for part in parts] == [forward.flops, backward.flops]


def test_dispatched_experts_get_tokens_of_all_ranks() -> None:
    """A rank has half of the tokens and half of the experts, and computes half of all rows."""
    node = routed().node
    shapes = [
        (1, TOKENS // 2, HIDDEN),
        (1, TOKENS // 2, CHOSEN),
        (1, TOKENS // 2, CHOSEN),
        (EXPERTS // 2, 2 * FEATURES, HIDDEN),
        (EXPERTS // 2, HIDDEN, FEATURES),
    ]
    alone = forward_work(node, shapes, [shapes[0]])
    together = forward_work(node, shapes, [shapes[0]], dispatch=2)
    assert together.flops == 2 * alone.flops
    assert own_bytes(node, shapes, dispatch=2) == 2 * own_bytes(node, shapes)


def test_few_tokens_of_many_experts_are_fractions() -> None:
    """One token of 2 choices among 8 experts: a quarter of a row for each, 2 rows in all."""
    node = routed().node
    shapes = [
        (1, 1, HIDDEN),
        (1, 1, CHOSEN),
        (1, 1, CHOSEN),
        (EXPERTS, 2 * FEATURES, HIDDEN),
        (EXPERTS, HIDDEN, FEATURES),
    ]
    found = forward_work(node, shapes, [shapes[0]])
    assert found.products[0].rows == sympy.Rational(1, 4)
    assert found.flops == 2 * (2 * HIDDEN * 2 * FEATURES + 2 * FEATURES * HIDDEN)
