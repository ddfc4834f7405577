"""Which products of a block can compute the gradients of their weights apart, after the others.

The input part of a backward gives gradients of activations, which the stage before waits for. The
weight part gives gradients of parameters, which nobody waits for. Products of matrices have half of
their backward in each. All else, a norm's weight say, is computed in the input part. So is the
whole block that makes the loss: the gradient of its logits is far larger than what others would
keep between the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from autopar.ir.graph import info
from autopar.ir.layout import operands_of
from autopar.ir.recompute import MATRIX_PRODUCTS, op_name

EXPERT_OPS = frozenset({"routed_experts", "expert_slice", "expert_dispatch"})
"""Two products of each expert, as one op: it takes itself apart."""

_PRODUCTS = MATRIX_PRODUCTS | {"einsum"}


def weight_operands(
    graph: fx.Graph, parameters: Collection[fx.Node]
) -> Mapping[fx.Node, tuple[int, ...]]:
    """The nodes whose weights have gradients that can come later, with their weights.

    Args:
        graph: Of a block, global or local.
        parameters: Its placeholders that stand for parameters.

    Returns:
        For each such node the indices of its weights (a bias is one) among ``operands_of``: they
        are computed from parameters alone, and what is on the way to them serves such nodes only.
    """
    derived = _derived(graph, parameters)
    found = {node: weights for node in graph.nodes if (weights := _weights_of(node, derived))}
    while shared := _shared(graph, found, derived.difference(parameters)):
        for node in shared:
            del found[node]
    return found


def _derived(graph: fx.Graph, parameters: Collection[fx.Node]) -> set[fx.Node]:
    """What is computed from parameters and nothing else, and the parameters."""
    derived = set(parameters)
    for node in graph.nodes:
        sources = _sources(node)
        if node.op == "call_function" and sources and derived.issuperset(sources):
            derived.add(node)
    return derived


def _weights_of(node: fx.Node, derived: Collection[fx.Node]) -> tuple[int, ...]:
    if node.op != "call_function" or op_name(node) not in _PRODUCTS | EXPERT_OPS:
        return ()
    operands = operands_of(node)
    learned = [info(operand).tensor.requires_grad for operand in operands]
    weights = tuple(index for index, operand in enumerate(operands) if operand in derived)
    others = [index for index in range(len(operands)) if index not in weights]
    matrices = [i for i in weights if learned[i] and len(info(operands[i]).tensor.shape) > 1]
    if not matrices or not any(learned[i] for i in others):
        return ()
    if op_name(node) in EXPERT_OPS and len(others) > _NUM_ROUTED:
        return ()
    return weights


_NUM_ROUTED = 3
"""Operands of experts that are no weights: tokens, the experts of each, and their shares."""


def _shared(
    graph: fx.Graph, found: Mapping[fx.Node, tuple[int, ...]], derived: Collection[fx.Node]
) -> list[fx.Node]:
    """Those of ``found`` for whose weights something is computed that serves others, too: backward
    would pass it in both parts.
    """
    serves_found: dict[fx.Node, bool] = {}
    for node in reversed(graph.nodes):
        if node in derived:
            serves_found[node] = all(
                user in found or serves_found.get(user, False) for user in node.users
            )
    shared: list[fx.Node] = []
    for node in found:
        todo = [source for source in _sources(node) if source in derived]
        while todo:
            source = todo.pop()
            if not serves_found[source]:
                shared.append(node)
                break
            todo += [other for other in _sources(source) if other in derived]
    return shared


def _sources(node: fx.Node) -> list[fx.Node]:
    """What a node is computed from, axis handles aside."""
    return [operand for operand in node.all_input_nodes if operand.op != "get_attr"]
