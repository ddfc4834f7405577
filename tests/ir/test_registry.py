"""Every op of the models that must work has a rule; an op without one is replicated."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.capture import capture
from autopar.ir.rules.core import Rule
from autopar.ir.rules.registry import (
    has_rule,
    register,
    replicated_rule,
    rule_of,
    rule_or_replicated,
    unregister,
)
from autopar.ir.typecheck import is_op, kind_options
from autopar.testing.prove import Sample, prove, sample_node
from tests.models import LossFn, tiny_gpt2, tiny_llama, tiny_transformer
from tests.strategies import KindBuilder

_aten = torch.ops.aten
Made = tuple[nn.Module, Mapping[str, Tensor], LossFn | None]

MODELS: dict[str, Callable[[], Made]] = {
    "llama": lambda: (*tiny_llama(1), None),
    "llama eager": lambda: (*tiny_llama(1, attn_implementation="eager"), None),
    "gpt2": lambda: (*tiny_gpt2(1, dropout=0.1), None),
    "gpt2 eager": lambda: (*tiny_gpt2(1, dropout=0.1, attn_implementation="eager"), None),
    "hand-written": lambda: tiny_transformer(1),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_op_of_the_models_has_a_rule(name: str) -> None:
    model, inputs, loss_fn = MODELS[name]()
    graph = capture(model, dict(inputs), loss_fn=loss_fn)
    without = {
        str(node.target)
        for kind in graph.kinds.values()
        for node in kind.graph.nodes
        if is_op(node) and not has_rule(node)
    }
    assert not without


def test_an_op_without_a_rule_is_replicated() -> None:
    sample = Sample(target=_aten.cummax.default, args=(torch.randn(4, 4, dtype=torch.float64), 0))
    node = sample_node(sample).node
    assert rule_of(node) is None
    assert rule_or_replicated(node) == replicated_rule(node)
    assert prove(sample, 2) == 2  # all I, and all R


def test_a_registered_rule_is_found_until_it_is_forgotten() -> None:
    def rule(node: fx.Node) -> Rule:
        return replicated_rule(node)

    build = KindBuilder()
    x = build.placeholder("x", (4, 4))
    node = build.call(_aten.cummax.default, x, 0)
    register(_aten.cummax)(rule)  # the packet: all its overloads
    try:
        assert has_rule(node)
    finally:
        unregister(_aten.cummax)
    assert not has_rule(node)


def test_grouped_heads_of_one_key_head_are_split_where_queries_are_projected() -> None:
    """More ranks than key heads: the groups of query heads are split, keys and values are whole."""
    build = KindBuilder()
    weight = build.placeholder("weight", (32, 8))
    x = build.placeholder("x", (3, 4, 8))
    key = build.placeholder("key", (3, 2, 4, 4))
    query = build.call(_aten.linear.default, x, weight)
    query = build.call(_aten.reshape.default, query, [3, 4, 8, 4])
    query = build.call(_aten.transpose.int, query, 1, 2)
    attended = build.call(
        _aten.scaled_dot_product_attention.default, query, key, key, enable_gqa=True
    )
    kind = build.build("attention", [attended])
    options = kind_options(kind, axis="tp", axis_size=4, batch=1)
    texts = {name: {str(option) for option in found} for name, found in options.items()}
    assert "R, S(0, 1:1) -> S(2, 1:1)" in texts["linear_default"]
    assert "S(2, 1:1) -> S(2, 1:1)" in texts["reshape_default"]
    attention = texts["scaled_dot_product_attention_default"]
    assert "S(1, 1:1), R, R -> S(1, 1:1)" in attention
    assert not any(text.startswith("S(1), S(1)") for text in attention)  # 2 heads over 4 ranks
