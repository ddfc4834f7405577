"""The prover catches wrong rules: each of these looks plausible and would train a wrong model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx

from autopar.ir import functional
from autopar.ir.graph import TensorInfo, info
from autopar.ir.layout import operands_of
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATED, sharded
from autopar.ir.rules.core import Option, Rule
from autopar.ir.rules.registry import register, rule_of, unregister
from autopar.ir.rules.text import parse_rule
from autopar.testing.prove import Sample, prove, sample_node

_aten = torch.ops.aten
I, R, P = INVARIANT, REPLICATED, PARTIAL  # noqa: E741


def floats(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def written(text: str, **marks: object) -> Callable[[fx.Node], Rule]:
    """A rule function from a text."""

    def rule(node: fx.Node) -> Rule:
        return parse_rule(text, _operands(node), info(node).tensors, **marks)  # type: ignore[arg-type]

    return rule


def changed(**fields: object) -> Callable[[fx.Node], Rule]:
    """The op's own rule with other fields."""

    def rule(node: fx.Node) -> Rule:
        own = rule_of(node)
        assert own is not None
        return replace(own, **fields)  # type: ignore[arg-type]

    return rule


def _operands(node: fx.Node) -> list[TensorInfo]:
    return [info(operand).tensor for operand in operands_of(node)]


X, W, B = floats(4, 8), floats(12, 8), floats(12)
LINEAR = Sample(target=_aten.linear.default, args=(X, W, B))
ADD = Sample(target=_aten.add.Tensor, args=(X, floats(4, 8)))
MUL = Sample(target=_aten.mul.Tensor, args=(X, floats(8)))
ATTENTION = Sample(
    target=_aten.scaled_dot_product_attention.default,
    args=(floats(2, 4, 6, 2), floats(2, 4, 6, 2), floats(2, 4, 6, 2), None, 0.0, True),
)
LOSS = Sample(
    target=functional.token_loss, args=(floats(6, 8), torch.tensor([0, 3, -100, 7, 5, 1]))
)

EXPERTS = Sample(
    target=torch.ops.autopar.routed_experts.default,
    args=(
        floats(2, 4, 3),
        torch.tensor([[[0], [1], [0], [1]], [[1], [1], [1], [0]]]),
        floats(2, 4, 1),
        floats(2, 4, 3),
        floats(2, 3, 4),
    ),
    kwargs={"activation": "silu", "gated": False, "capacity_factor": 0.5},
)

WRONG: dict[str, tuple[Sample, Callable[[fx.Node], Rule]]] = {
    "a softmax row is split": (
        Sample(target=_aten.softmax.int, args=(X, -1)),
        written("b k -> b k"),
    ),
    "a maximum is a sum": (
        Sample(target=_aten.amax.default, args=(X, [1])),
        written("b k -> b"),
    ),
    "a variance is a sum": (
        Sample(target=_aten.var.correction, args=(X, [1])),
        written("b k -> b"),
    ),
    "a mean does not divide by the global count": (
        Sample(target=_aten.mean.dim, args=(X, [1])),
        changed(helpers={}),
    ),
    "a bias is added on every rank": (LINEAR, changed(additive=frozenset())),
    "a weight is partial beside a whole bias": (LINEAR, changed(linear=(frozenset({1}),))),
    "partial plus replicated": (ADD, changed(linear=(frozenset({0}),))),
    "partial plus constant": (
        Sample(target=_aten.add.Tensor, args=(X, 1.0)),
        changed(linear=(frozenset({0}),)),
    ),
    "partial times partial": (MUL, changed(linear=(frozenset({0, 1}),))),
    "partial times invariant": (
        MUL,
        changed(extra=(Option(operands=(P, I), results=(P,)),)),
    ),
    "an operand without the factor is invariant": (
        MUL,
        changed(extra=(Option(operands=(sharded(0), I), results=(sharded(0),)),)),
    ),
    "an exponential is linear": (
        Sample(target=_aten.exp.default, args=(X,)),
        changed(linear=(frozenset({0}),)),
    ),
    "a contraction is complete": (
        Sample(target=_aten.sum.dim_IntList, args=(X, [0])),
        changed(extra=(Option(operands=(sharded(0),), results=(I,)),)),
    ),
    "norm features are split": (
        Sample(target=_aten.layer_norm.default, args=(X, [8], floats(8), floats(8))),
        changed(unsplittable=frozenset()),
    ),
    "causal queries are split as others": (
        ATTENTION,
        changed(unsplittable=frozenset({"d", "e", "t"}), helpers={}),
    ),
    "keys are split": (ATTENTION, changed(unsplittable=frozenset({"d", "e", "s"}))),
    "heads are inside of their features": (
        Sample(target=_aten.reshape.default, args=(floats(4, 8), [4, 2, 4])),
        written("b (d h) -> b h d"),
    ),
    "blocks are taken for one": (
        Sample(target=_aten.split_with_sizes.default, args=(floats(4, 12), [4, 4, 4], 1)),
        changed(
            extra=(Option(operands=(sharded(1),), results=(sharded(1),) * 3),),
        ),
    ),
    "the loss of a split vocabulary is replicated": (
        LOSS,
        changed(
            extra=(Option(operands=(sharded(1), R), results=(R, R), helper="vocab_token_loss"),)
        ),
    ),
    "experts take the tokens of others": (
        EXPERTS,
        changed(
            extra=(Option(operands=(R, R, R, sharded(0), sharded(0)), results=(P,)),),
        ),
    ),
    "a sequence is split that shares a capacity": (EXPERTS, changed(unsplittable=frozenset())),
    "a mean of shards counts invalid tokens alike": (
        Sample(
            target=_aten.cross_entropy_loss.default,
            args=(floats(4, 3), torch.tensor([0, 1, -100, 2]), None, 1, -100),
        ),
        changed(helpers=dict.fromkeys(("b", "c"), "mean_loss")),
    ),
    "overlapping patches are split": (
        Sample(
            target=_aten.conv1d.default,
            args=(floats(2, 3, 8), floats(4, 3, 4), None, [2], [1]),
        ),
        written("b c (y q), n c _ -> b n y"),
    ),
    "the last of several writers is each rank's own": (
        Sample(
            target=_aten.index_copy.default,
            args=(floats(4, 3), 0, torch.tensor([1, 1]), floats(2, 3)),
        ),
        changed(unsplittable=frozenset()),
    ),
    "the vocabulary is split without a helper": (
        Sample(target=_aten.embedding.default, args=(W, torch.tensor([0, 1, 2, 1]))),
        changed(extra=(Option(operands=(sharded(0), R), results=(P,)),)),
    ),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_the_prover_catches(what: str) -> None:
    sample, function = WRONG[what]
    prove(sample, 2)  # the op's own rule is right
    rule = function(sample_node(sample).node)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        prove(sample, 2, rule)


def test_a_registered_wrong_rule_is_caught() -> None:
    target = _aten.softmax.int
    before = rule_of(sample_node(Sample(target=target, args=(X, -1))).node)
    assert before is not None
    own = written("b k -> b k")
    register(target)(own)
    try:
        with pytest.raises(AssertionError, match=r"softmax.*S\(1\)"):
            prove(Sample(target=target, args=(X, -1)), 2)
    finally:
        unregister(target)
