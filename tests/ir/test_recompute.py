"""Which nodes and blocks a plan computes again."""

from __future__ import annotations

import functools

import pytest

from autopar.capture import capture
from autopar.ir.graph import BlockKind, ModelGraph
from autopar.ir.kernels import AttentionKernel
from autopar.ir.plan import RecomputeName
from autopar.ir.recompute import recomputed_blocks, recomputed_nodes
from tests.models import tiny_gpt2, tiny_llama


@functools.cache
def graph_of(
    name: str, layers: int = 2, *, eager: bool = False, dropout: float = 0.0
) -> ModelGraph:
    if name == "llama":
        module, batch = tiny_llama(layers)
    else:
        module, batch = tiny_gpt2(layers, dropout=dropout)
    if eager:
        module.set_attn_implementation("eager")  # type: ignore[operator]
    return capture(module, batch)


def layer(model: ModelGraph) -> BlockKind:
    """The kind that repeats."""
    counts = model.multiplicity()
    return model.kinds[max(counts, key=counts.__getitem__)]


def names(
    kind: BlockKind, recompute: RecomputeName, attention: AttentionKernel = "flash_attention2"
) -> set[str]:
    nodes = recomputed_nodes(kind.graph, recompute, attention)
    return {str(node.target).removeprefix("aten.").partition(".")[0] for node in nodes}


def all_names(kind: BlockKind) -> set[str]:
    calls = (node for node in kind.graph.nodes if node.op == "call_function")
    return {str(node.target).removeprefix("aten.").partition(".")[0] for node in calls}


def test_selective_repeats_an_op_of_attention_and_nothing_else() -> None:
    assert names(layer(graph_of("llama")), "selective") == {"scaled_dot_product_attention"}


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_selective_finds_attention_that_is_written_as_ops(model: str) -> None:
    kind = layer(graph_of(model, eager=True, dropout=0.1 if model == "gpt2" else 0.0))
    nodes = recomputed_nodes(kind.graph, "selective", "eager")
    found = [node for node in kind.graph.nodes if node in nodes]
    assert "matmul" in str(found[0].target)
    assert "matmul" in str(found[-1].target)
    assert "softmax" in names(kind, "selective")
    assert "linear" not in names(kind, "selective")
    # nothing of the norms and of the feed-forward network, which stand before and after
    assert not names(kind, "selective") & {"layer_norm", "gelu", "silu", "rsqrt", "pow", "linear"}


def test_selective_leaves_a_softmax_without_scores_alone() -> None:
    """A router's softmax has a linear before it, and no product of its weights after it."""
    model = graph_of("gpt2")
    last = model.kinds[model.blocks[-1].kind]
    assert not recomputed_nodes(last.graph, "selective", "eager")


def test_selective_op_keeps_products_and_fused_attention() -> None:
    kind = layer(graph_of("llama"))
    kept = all_names(kind) - names(kind, "selective_op")
    assert kept == {"linear", "scaled_dot_product_attention"}


@pytest.mark.parametrize("attention", ["eager", "fused_softmax"])
def test_selective_op_repeats_attention_that_is_not_fused(attention: AttentionKernel) -> None:
    kind = layer(graph_of("llama"))
    assert all_names(kind) - names(kind, "selective_op", attention) == {"linear"}


def test_selective_op_repeats_attention_with_dropout() -> None:
    kind = layer(graph_of("gpt2", dropout=0.1))
    assert "scaled_dot_product_attention" in names(kind, "selective_op")


@pytest.mark.parametrize("recompute", ["none", "full", "selective_layer"])
def test_other_modes_repeat_no_single_nodes(recompute: RecomputeName) -> None:
    kind = layer(graph_of("llama"))
    assert not recomputed_nodes(kind.graph, recompute, "flash_attention2")


def test_blocks_that_are_repeated_as_a_whole() -> None:
    model = graph_of("llama", 5)
    last = len(model.blocks) - 1
    layers = [b.index for b in model.blocks if b.kind == layer(model).name]
    assert recomputed_blocks(model, "full") == set(range(last))
    assert recomputed_blocks(model, "selective_layer") == {layers[1], layers[3]}
    assert recomputed_blocks(model, "blocks", [0, last]) == {0}
    assert recomputed_blocks(model, "none") == recomputed_blocks(model, "selective_op") == set()
